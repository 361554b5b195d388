"""From the text that `data.corpus` names to tokenised documents on disk, in two splits.

Documents are tokenised in small batches and appended to a file, then read through np.memmap, so
that a corpus may be larger than memory. A cache folder is absent or complete: it is written under
another name and renamed. Its name is a hash of its manifest, so another corpus, tokenizer or
version of a source file gets a folder of its own; any of them may be deleted between runs.
"""

import array
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from zayajax.data import sources
from zayajax.data.tokenizer import Tokenizer
from zayajax.errors import UserError
from zayajax.settings import DataConfig

FORMAT = 1

# Bytes of text and documents encoded at once: enough for the tokenizer's threads.
BATCH_BYTES, BATCH_DOCUMENTS = 1 << 20, 1024


@dataclasses.dataclass(frozen=True)
class Documents:
    """A random-access collection of token ids.

    tokens: ids of all documents, flat, any integer dtype.  starts, lengths: int64 [documents].
    fingerprint: equal for equal documents in equal order.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    fingerprint: str
    read_names: Callable[[], Sequence[str]]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        """The ids of document i, int32 [lengths[i]]."""
        return self.read(i, 0, self.lengths[i])

    def read(self, i: int, start: int, length: int) -> np.ndarray:
        """`length` ids of document i from id `start` on, int32: no more than these are read."""
        at = self.starts[i] + start
        return self.tokens[at : at + length].astype(np.int32)

    @property
    def names(self) -> list[str]:
        """Where each document comes from: a relative path, or `file:line`; read anew each time."""
        return list(self.read_names())

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]]) -> "Documents":
        """Documents in memory, named by their number."""
        arrays = [np.asarray(d, np.int32) for d in documents]
        lengths = np.array([len(a) for a in arrays], np.int64)
        tokens = np.concatenate([np.empty(0, np.int32), *arrays])
        digest = hashlib.sha256(lengths.tobytes() + tokens.tobytes()).hexdigest()
        names = [str(i) for i in range(len(arrays))]
        return cls(tokens, np.cumsum(lengths) - lengths, lengths, digest, lambda: names)


@dataclasses.dataclass(frozen=True)
class Corpus:
    train: Documents
    held_out: Documents
    fingerprint: str  # of the token ids, the documents' edges and the tokenizer
    skipped: dict[str, int]  # files and lines left out: {"empty": ..., "not text": ...}


def open_corpus(config: DataConfig, tokenizer: Tokenizer, vocab: int, cache: Path) -> Corpus:
    """The corpus of a config, tokenised now or found in the folder `cache`.

    A document is held out if a hash of its name says so: documents that are added leave the others
    where they are. Of two or more documents at least one is in each split, unless
    `config.held_out` is 0. A single document is cut in two, on a line edge where one is near.

    Peak memory is a batch of documents, and some 40 bytes for each document. Processes may share
    `cache`; each that finds no folder there tokenises by itself, so let one process open a large
    corpus first.

    Raises UserError, before any device work, where the corpus is missing, unreadable, empty, or has
    a token outside 0 .. vocab - 1 (the size of the model's vocabulary).
    """
    source = sources.find(config.corpus, config.text_field)
    root, inner = Path(source.described["path"]), Path(cache).resolve()
    if inner.is_relative_to(root) and not sources.hidden(inner.relative_to(root)):
        raise UserError(
            f"data.corpus: the tokenised corpus, in {cache}, would become part of the corpus "
            f"{root}; choose a run's folder outside of it"
        )
    manifest = {"format": FORMAT, "tokenizer": tokenizer.fingerprint} | source.described
    key = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    folder = Path(cache) / f"corpus-{key[:16]}"
    corpus = _open(folder, manifest, config, vocab)
    if corpus is None:
        try:
            _remove(folder)
            with _written_whole(folder) as temporary:
                _write(temporary, manifest, source, config, tokenizer, vocab)
        except OSError as error:
            raise UserError(f"{folder}: cannot write the tokenised corpus ({error})") from None
        corpus = _open(folder, manifest, config, vocab)
        assert corpus is not None, f"{folder} was just written"
    return corpus


def _open(folder: Path, manifest: dict, config: DataConfig, vocab: int) -> Corpus | None:
    """The corpus kept in a folder; None where there is none, or not a whole one that fits."""
    try:
        stored = json.loads((folder / "manifest.json").read_text())
        result = stored.pop("result")
        if stored != manifest or result["cut"] not in (None, config.held_out):
            return None
        tokens = np.memmap(folder / "tokens.bin", result["dtype"], mode="r").view(np.ndarray)
        offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        hashes = np.load(folder / "hashes.npy", mmap_mode="r")
        whole = len(offsets) == len(hashes) + 1 and offsets[-1] == len(tokens)
        if not whole or (folder / "names.jsonl").stat().st_size != result["name_bytes"]:
            return None
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None  # absent, or damaged in some way: written anew
    _check_vocab(result["largest_in"], result["largest"], vocab)

    def documents(split: str, chosen: np.ndarray) -> Documents:
        described = f"{result['fingerprint']} {split} ".encode() + chosen.tobytes()
        return Documents(
            tokens,
            offsets[chosen],
            offsets[chosen + 1] - offsets[chosen],
            hashlib.sha256(described).hexdigest(),
            lambda: _names(folder, chosen),
        )

    held_out = _held_out(hashes, config.held_out, cut=result["cut"] is not None)
    return Corpus(
        documents("train", np.flatnonzero(~held_out)),
        documents("held out", np.flatnonzero(held_out)),
        result["fingerprint"],
        result["skipped"],
    )


def _held_out(hashes: np.ndarray, fraction: float, cut: bool) -> np.ndarray:
    """Which documents are held out, bool [documents], by their hashes, uint64 [documents]."""
    if fraction == 0 or len(hashes) < 2:
        return np.zeros(len(hashes), bool)
    if cut:
        return np.array([False, True])  # the head and the tail of a single document
    held_out = hashes < np.uint64(fraction * 2**64)
    if not held_out.any():
        held_out[np.argmin(hashes)] = True
    if held_out.all():
        held_out[np.argmax(hashes)] = False
    return held_out


def _names(folder: Path, chosen: np.ndarray) -> list[str]:
    with open(folder / "names.jsonl") as file:
        wanted = set(chosen.tolist())
        return [json.loads(line) for i, line in enumerate(file) if i in wanted]


def _write(
    folder: Path,
    manifest: dict,
    source: sources.Source,
    config: DataConfig,
    tokenizer: Tokenizer,
    vocab: int,
):
    """tokens.bin, offsets.npy, hashes.npy, names.jsonl, and manifest.json."""
    dtype = np.dtype(np.min_scalar_type(max(tokenizer.vocab, 1) - 1))
    offsets, hashes = array.array("q", [0]), array.array("Q")
    digest = hashlib.sha256(f"{tokenizer.fingerprint} {dtype}".encode())
    largest, largest_in = -1, ""
    texts, cut = _cut_single(source.texts(), config.held_out)
    with open(folder / "tokens.bin", "wb") as tokens, open(folder / "names.jsonl", "w") as names:
        for batch in _batches(texts):
            encoded = tokenizer.documents([text for _, text in batch])
            for (name, _), ids in zip(batch, encoded, strict=True):
                if ids.size and int(ids.max()) > largest:
                    largest, largest_in = int(ids.max()), name
                    _check_vocab(name, largest, vocab)
                data = ids.astype(dtype).tobytes()
                tokens.write(data)
                digest.update(data)
                names.write(json.dumps(name) + "\n")
                offsets.append(offsets[-1] + ids.size)
                # Names from the file system may not be valid UTF-8
                hashed = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
                hashes.append(int.from_bytes(hashed[:8], "little"))
        name_bytes = names.tell()
    skipped = dict(source.skipped)
    if offsets[-1] == 0:
        left_out = ", ".join(f"{n} {what}" for what, n in skipped.items() if n)
        raise UserError(
            f"data.corpus: {config.corpus} holds no text"
            + (f" (left out: {left_out})" if left_out else "")
        )
    digest.update(offsets.tobytes())
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    np.save(folder / "hashes.npy", np.array(hashes, np.uint64))
    result = {
        "cut": cut,
        "dtype": dtype.name,
        "fingerprint": digest.hexdigest(),
        "largest": largest,
        "largest_in": largest_in,
        "name_bytes": name_bytes,
        "skipped": skipped,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest | {"result": result}, indent=1))


def _batches(texts: Iterator[sources.Text]) -> Iterator[list[sources.Text]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text[1])
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _cut_single(
    texts: Iterator[sources.Text], held_out: float
) -> tuple[Iterator[sources.Text], float | None]:
    """A single text in two, and at what fraction; several texts as they are, and None."""
    first = list(itertools.islice(texts, 2))
    if len(first) != 1:
        return itertools.chain(first, texts), None
    (name, text) = first[0]
    edge = _edge(text, held_out)
    parts = [(f"{name} (head)", text[:edge]), (f"{name} (tail)", text[edge:])]
    return iter(parts if 0 < edge < len(text) else first), held_out


def _edge(text: str, held_out: float) -> int:
    """Where a tail of about `held_out` of the text begins: after a line, unless none is near."""
    size = round(len(text) * held_out)
    if held_out > 0:
        size = min(max(size, 1), len(text) - 1)
    target = len(text) - size
    lines = (text.rfind("\n", 0, target) + 1, text.find("\n", target) + 1)
    near = [e for e in lines if abs(e - target) <= size / 2 and 0 < e < len(text)]
    return min(near, key=lambda e: abs(e - target), default=target)


def _check_vocab(name: str, largest: int, vocab: int):
    if largest >= vocab:
        raise UserError(
            f"data.corpus: {name} has token {largest}, but model.vocab is {vocab}; raise "
            f"model.vocab to the tokenizer's size or choose another data.tokenizer"
        )


def _remove(folder: Path):
    """Deletes a folder, if it is there, so that no one sees a part of it."""
    unseen = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, unseen)
        shutil.rmtree(unseen)


@contextlib.contextmanager
def _written_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` at the end; a killed process leaves *.tmp."""
    temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        with contextlib.suppress(OSError):  # another process was faster, with the same result
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
