"""transformers' ZAYA checkpoints in and out, in both of their layouts.

The names are in `names`, the config in `configuration`, the files in `files`, the comparison with
a reference in `compare`.
"""

import dataclasses
import fnmatch
import json
import shutil
from collections import Counter, defaultdict
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zayajax.errors import UserError
from zayajax.hf import configuration, files
from zayajax.hf.compare import Check, compare, read_reference
from zayajax.hf.names import LAYOUTS, Tensor, sizes, tensors
from zayajax.mesh import by_path, is_param, stored_specs
from zayajax.model.zaya import Decoder
from zayajax.settings import DTYPES, ModelConfig

__all__ = ["Check", "check", "config", "dtype", "keep_companions", "load", "save"]

CHUNK = 2**28  # bytes of one parameter that are on the host at a time, if a layer is not more
KEPT = "dtypes.json"  # of a source's tensors, where the source itself is not kept
# What travels beside the weights.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "*.jinja",
    "generation_config.json",
)


def config(path) -> ModelConfig:
    """The shape of the model in a checkpoint's folder; UserError where it is not understood."""
    return configuration.read(path).cfg


def dtype(path) -> str:
    """ "float32" or "bfloat16": the one in which `load` keeps every digit of the matrices."""
    with files.Weights(path) as weights:
        kinds = {info.dtype.name for name, info in weights.info.items() if "embed" in name}
    return "bfloat16" if kinds == {"bfloat16"} else "float32"


def load(path, dtype="bfloat16", skip: str = "identity", mesh: Mesh | None = None) -> Decoder:
    """A checkpoint's model, its arrays on the device or, with a `mesh`, as they are stored there.

    Args:
      path: a folder with `config.json` and safetensors, native or legacy.
      dtype: of the matrices, "float32" or "bfloat16". What the model keeps in float32 (norms,
        scales, the router) is float32 in any case.
      skip: what a skipped token adds, "identity" or, as in transformers, "zero".
      mesh: with axes node and gpu.

    Peak of host memory: `CHUNK` bytes or one layer of the largest parameter, whichever is more,
    and one tensor as it lies in the file; each process reads only what its devices hold.

    UserError, before anything is loaded, if a tensor is missing, unknown or of another shape.
    """
    dtype = _dtype(dtype)
    if skip not in ("identity", "zero"):
        raise UserError(f"skip must be 'identity' or 'zero', and is {skip!r}")
    found = configuration.read(path)
    cfg = dataclasses.replace(found.cfg, skip=skip)
    with files.Weights(path) as weights:
        plan = cover(weights, cfg, found.layout)
        places = defaultdict(list)
        for tensor in plan:
            places[tensor.path].append(tensor)
        model = jax.eval_shape(lambda: Decoder(cfg, jax.random.key(0)))
        named = by_path(model)
        specs = by_path(stored_specs(model, mesh)) if mesh else {}
        leaves = []
        for name, v in named.items():
            kept = np.dtype(np.float32) if v.get_metadata().get("keep") else dtype
            read = partial(_read, weights, places[name], sizes(cfg), kept)
            sharding = NamedSharding(mesh, specs[name].get_value()) if mesh else None
            leaves.append(v.replace(_fill(v.shape, kept, read, sharding)))
    return jax.tree.unflatten(jax.tree.structure(model, is_leaf=is_param), leaves)


def save(
    model: Decoder,
    path,
    layout: str = "native",
    source=None,
    dtype: str | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes `config.json` and the weights, tensor by tensor, for transformers to read.

    Args:
      path: a folder, made if need be, without weights in it.
      layout: "native" (transformers itself) or "legacy" (ZAYA1-base and `*-legacy`).
      source: the checkpoint that the model came from, or any folder with its tokenizer. Tokenizer,
        chat template, generation config and the config keys that mean nothing here travel along.
      dtype: "float32" or "bfloat16"; by default that of the model's matrices. Where the source's
        matrices are in the same one, each tensor has the dtype that it has there, so that an
        import and an export give the same bytes. Else balancing biases are float32: rounded, they
        would route differently.
      shard_bytes: largest size of a file.

    Peak of host memory: `CHUNK` bytes, one layer of the largest parameter or the embedding,
    whichever is most, and once more one tensor as it goes to the file.
    """
    if layout not in LAYOUTS:
        raise UserError(f"the layout must be one of {', '.join(LAYOUTS)}, and is {layout!r}")
    path, cfg, leaves = Path(path), model.cfg, by_path(model)
    if not all(v[...].is_fully_addressable for v in leaves.values()):
        raise UserError("a model that is spread over several processes cannot be exported")
    plan = tensors(cfg, layout)
    of = _dtype(dtype or leaves["embed"][...].dtype)
    source = Path(source) if source is not None else None
    if source and not source.is_dir():
        raise UserError(f"{source}: is not a folder that a tokenizer could come from")
    # A tokenizer's folder may hold another model, or none.
    there = configuration.read(source) if source and configuration.is_zaya(source) else None
    dtypes = _dtypes(source, there, of) if there else {}
    raw = configuration.write(cfg, layout, of.name, there)

    def dtype_of(t: Tensor) -> np.dtype:
        default = np.dtype(np.float32) if t.path.endswith("balance_bias") else of
        return dtypes.get((t.path, t.index[:1]), default)

    places, lengths = {t.name: t for t in plan}, sizes(cfg)

    @lru_cache(maxsize=1)  # tensors come parameter by parameter, layer by layer
    def host(name: str, layer: int | None) -> np.ndarray:
        x = leaves[name][...]
        return np.asarray(x if layer is None else _layer(x, layer))

    def read(name: str) -> np.ndarray:
        t = places[name]
        if not t.index or leaves[t.path][...].nbytes <= CHUNK:
            return t.axes.give(host(t.path, None)[t.index], lengths)
        return t.axes.give(host(t.path, t.index[0])[t.index[1:]], lengths)

    try:
        path.mkdir(parents=True, exist_ok=True)
        if old := sorted(path.glob("*.safetensors*")):
            raise UserError(f"{path}: already holds weights ({old[0].name}); give another folder")
        new = (files.New(t.name, t.shape, dtype_of(t)) for t in plan)
        files.write(path, new, read, shard_bytes)
        if source:
            _copy_companions(source, path)
        # Last: a folder without it is no checkpoint.
        (path / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error})") from None


def check(path, reference=None) -> Check:
    """Looks at a checkpoint: exact cover of names, shapes, finite numbers.

    With a `reference`, an `expected.npz` of what transformers computes, also at what the model
    makes of it, in float32. UserError if the checkpoint or the reference cannot be read; numbers
    that differ are in the result, whose `passed` is then false.
    """
    wanted = read_reference(reference) if reference is not None else None
    found = configuration.read(path)
    with files.Weights(path) as weights:
        plan = cover(weights, found.cfg, found.layout)
        bad = tuple(t.name for t in plan if not np.isfinite(weights.read(t.name)).all())
        dtypes = Counter(info.dtype.name for info in weights.info.values())
    return Check(
        layout=found.layout,
        tensors=len(plan),
        parameters=sum(int(np.prod(t.shape, dtype=np.int64)) for t in plan),
        dtypes=dict(dtypes),
        not_finite=bad,
        comparison=wanted and compare(load(path, "float32", skip="zero"), wanted),
    )


def cover(weights: files.Weights, cfg: ModelConfig, layout: str) -> list[Tensor]:
    """The tensors of that model, all of which are in the files, and no others. Else UserError."""
    plan = tensors(cfg, layout)
    wanted = {t.name: t.shape for t in plan}
    found = weights.info
    missing = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in wanted]
    other = [
        f"{name} (is {list(found[name].shape)}, must be {list(shape)})"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    kinds = {"missing": missing, "unknown": unknown, "of another shape": other}
    faults = [f"{len(n)} {kind}: {_some(n)}" for kind, n in kinds.items() if n]
    if faults:
        raise UserError(
            f"{weights.folder}: these tensors do not fit the config ({layout} layout), "
            f"nothing was loaded: {'; '.join(faults)}"
        )
    return plan


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _dtype(dtype) -> np.dtype:
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in DTYPES:
        raise UserError(f"the dtype must be one of {', '.join(DTYPES)}, and is {name!r}")
    return np.dtype(jnp.dtype(name))


def _read(weights, places: list[Tensor], lengths: dict, dtype, index: tuple[slice, ...]):
    """The part `index` of one of our parameters, in `dtype`, one tensor of the files at a time."""
    out = np.empty([s.stop - s.start for s in index], dtype)
    for t in places:
        depth = len(t.index)
        if not all(s.start <= i < s.stop for i, s in zip(t.index, index, strict=False)):
            continue
        cut = dict(zip(t.axes.here, index[depth:], strict=True))
        alone = set(t.axes.alone)
        whole = slice(None)
        there = [cut.get(a[0], whole) if len(a) == 1 else whole for a in t.axes.there]
        now = lengths | {a: s.stop - s.start for a, s in cut.items() if a in alone}
        x = t.axes.bring(weights.read(t.name, there), now)
        x = x[tuple(whole if a in alone else s for a, s in cut.items())]
        place = tuple(i - s.start for i, s in zip(t.index, index, strict=False))
        if x.dtype == out.dtype:
            files.bits(out)[place] = files.bits(x)
        else:
            out[place] = x
    return out


def _fill(shape: tuple[int, ...], dtype: np.dtype, read, sharding):
    """A device array; if it is large, a few layers (or rows of the vocabulary) at a time.

    On the device there is one copy of it: each part is written into the donated array.
    """
    row = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    n = max(1, CHUNK // max(row, 1))

    def put(start, stop):
        part = (stop - start, *shape[1:])

        def shard(index):
            first, *rest = (slice(*s.indices(d)[:2]) for s, d in zip(index, part, strict=True))
            return read((slice(start + first.start, start + first.stop), *rest))

        if sharding is None:
            return jnp.asarray(shard((slice(None),) * len(part)))
        return jax.make_array_from_callback(part, sharding, shard)

    if n >= shape[0]:
        return put(0, shape[0])
    out = jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)()
    write = jax.jit(_write_part, donate_argnums=0, out_shardings=sharding)
    for start in range(0, shape[0], n):
        out = write(out, put(start, min(start + n, shape[0])), start)
        # Else the host would read ahead of the device, and hold what it has read.
        jax.block_until_ready(out)
    return out


def _write_part(out, part, start):
    return jax.lax.dynamic_update_slice_in_dim(out, part, start, axis=0)


@jax.jit
def _layer(x, i):
    return jax.lax.dynamic_index_in_dim(x, i, axis=0, keepdims=False)


def keep_companions(source, destination) -> None:
    """What an export needs from the checkpoint at `source` besides the weights, in a folder that
    `save` takes for its `source`: tokenizer, config, the dtype of each tensor."""
    source, destination = Path(source), Path(destination)
    found = configuration.read(source)
    with files.Weights(source) as weights:
        cover(weights, found.cfg, found.layout)
        dtypes = {name: info.dtype.name for name, info in weights.info.items()}
    destination.mkdir(parents=True, exist_ok=True)
    _copy_companions(source, destination)
    shutil.copyfile(source / "config.json", destination / "config.json")
    (destination / KEPT).write_text(json.dumps(dtypes, indent=2) + "\n")


def _dtypes(source: Path, there: configuration.Read, of: np.dtype) -> dict:
    """The dtype of each tensor of the source, by parameter and layer; empty if its matrices are
    not `of`."""
    if (source / KEPT).exists():
        names = json.loads((source / KEPT).read_text())
    elif any((source / name).exists() for name in (files.SINGLE, files.INDEX)):
        with files.Weights(source) as weights:
            cover(weights, there.cfg, there.layout)
            names = {name: info.dtype.name for name, info in weights.info.items()}
    else:
        return {}
    plan = tensors(there.cfg, there.layout)
    found = {(t.path, t.index[:1]): np.dtype(jnp.dtype(names[t.name])) for t in plan}
    return found if found["embed", ()] == of else {}


def _copy_companions(source: Path, path: Path):
    if source.resolve() == path.resolve():
        return
    for file in sorted(source.iterdir()):
        if any(fnmatch.fnmatch(file.name, pattern) for pattern in COMPANIONS):
            copy = shutil.copytree if file.is_dir() else shutil.copyfile
            copy(file, path / file.name)
