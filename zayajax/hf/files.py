"""Safetensors files, read slice by slice and written tensor by tensor.

The format: the length of the header (8 bytes, little-endian), the header (JSON: dtype, shape and
place of each tensor), the bytes. A large checkpoint has several such files and an index.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from zayajax.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def bits(x: np.ndarray) -> np.ndarray:
    """The array as integers of its width: numpy moves those faster than the narrow floats."""
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


class Info(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype


class Weights:
    """The tensors of a checkpoint's folder; a context manager. Nothing but headers is in memory.

    `info` has shape and dtype of each. UserError names the file that is missing, cut short, or
    not what the index says.
    """

    def __init__(self, folder):
        self.folder, self.info, self._file = Path(folder), {}, {}
        self._stack = ExitStack()
        try:
            for name in _files(self.folder):
                self._open(self.folder / name)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, path: Path):
        try:
            file = self._stack.enter_context(safe_open(path, framework="numpy"))
            parts = {name: file.get_slice(name) for name in file.keys()}
        except FileNotFoundError:
            raise UserError(f"{path}: does not exist, and the index names it") from None
        except (SafetensorError, OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{path}: is no whole safetensors file ({error}); download it again"
            ) from None
        for name, part in parts.items():
            if name in self.info:
                raise UserError(f"{path}: {name} is in {self._file[name][0].name} too")
            if part.get_dtype() not in DTYPES:
                raise UserError(
                    f"{path}: {name} is stored as {part.get_dtype()}, and only "
                    f"{', '.join(DTYPES)} can be read"
                )
            self.info[name] = Info(tuple(part.get_shape()), DTYPES[part.get_dtype()])
            self._file[name] = path, file

    def read(self, name: str, cut: Sequence[slice] = ()) -> np.ndarray:
        """A tensor, or the part of it that `cut` selects: only that is read."""
        path, file = self._file[name]
        try:
            cut = tuple(cut) or (slice(None),) * len(self.info[name].shape)
            return file.get_slice(name)[cut]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: {name} cannot be read ({error})") from None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()


def _files(folder: Path) -> list[str]:
    single, index = folder / SINGLE, folder / INDEX
    if not index.exists():
        if not single.exists():
            raise UserError(f"{folder}: holds neither {SINGLE} nor {INDEX}")
        return [SINGLE]
    if single.exists():
        raise UserError(f"{folder}: holds both {SINGLE} and {INDEX}; remove the one that is stale")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: cannot be read as an index ({error!r})") from None
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise UserError(f"{index}: names files outside its folder")
    return names


class New(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write(folder: Path, tensors: Iterable[New], read: Callable[[str], np.ndarray], limit: int):
    """Writes tensors one by one: memory holds one of them at a time.

    `read` gives a tensor by its name. A file that would grow past `limit` bytes ends there, and
    several files get an index. They appear under their names only once all are whole.
    """
    parts: list[list[New]] = [[]]
    for tensor in tensors:
        if parts[-1] and sum(t.bytes for t in parts[-1]) + tensor.bytes > limit:
            parts.append([])
        parts[-1].append(tensor)
    names = [SINGLE]
    if (n := len(parts)) > 1:
        names = [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    unfinished = [folder / (name + ".part") for name in names]
    try:
        for path, part in zip(unfinished, parts, strict=True):
            _write_one(path, part, read)
        for path, name in zip(unfinished, names, strict=True):
            path.rename(folder / name)
    finally:
        for path in unfinished:
            path.unlink(missing_ok=True)
    if n > 1:
        where = {t.name: name for name, part in zip(names, parts, strict=True) for t in part}
        size = sum(t.bytes for part in parts for t in part)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_one(path: Path, tensors: list[New], read: Callable[[str], np.ndarray]):
    # Wide dtypes first, as the library does: every tensor is then aligned to its own width.
    tensors = sorted(tensors, key=lambda t: -t.dtype.itemsize)
    header: dict = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    at = 0
    for t in tensors:
        place = [at, at + t.bytes]
        header[t.name] = {"dtype": CODES[t.dtype], "shape": list(t.shape), "data_offsets": place}
        at += t.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            x = read(t.name)
            if x.shape != t.shape:
                raise ValueError(f"{t.name} is {x.shape}, and must be {t.shape}")
            x = np.ascontiguousarray(bits(x if x.dtype == t.dtype else x.astype(t.dtype)))
            file.write(x.reshape(-1).view(np.uint8).data)
