"""Random packed batches, small configs, and how close is close."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from zayajax import config
from zayajax.mesh import by_path, map_params
from zayajax.model.common import Balance
from zayajax.model.zaya import Decoder
from zayajax.settings import Config, ModelConfig

SMALL = dict(
    vocab=48,
    layers=3,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    experts=8,
    expert_hidden=8,
    router_hidden=8,
)


def small_model(**changes) -> ModelConfig:
    return ModelConfig(**SMALL | changes)


def small_config(**changes) -> Config:
    """A config whose keys are written `section__key=value`; float32 unless told."""
    tree = {
        "model": dict(SMALL),
        "data": {"corpus": "none"},
        # Adam divides by the size of a gradient: a small eps would turn rounding into an update.
        "optim": {"horizon": 10, "learning_rate": 1e-2, "eps": 1e-3},
        "train": {"steps": 3, "batch": 16, "sequence": 12, "compute_dtype": "float32"},
        "mesh": {"nodes": 1, "gpus": 1},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    return config.build(tree)


def random_batch(seed: int, B: int, S: int, vocab: int, left: bool = False, longest: int = 0):
    """Documents of random lengths, those of one token too; padding at the end, or on the left."""
    rng = np.random.default_rng(seed)
    batch = {n: np.zeros((B, S), np.int32) for n in ("targets", "segments", "positions")}
    batch["tokens"] = rng.integers(0, vocab, (B, S), dtype=np.int32)
    batch["weights"] = np.zeros((B, S), np.float32)
    for b in range(B):
        lengths, room = [], S - int(rng.integers(0, S // 3 + 1))
        while room:
            lengths.append(min(room, int(rng.choice([1, rng.integers(1, max(longest or S, 2))]))))
            room -= lengths[-1]
        start = S - sum(lengths) if left else 0
        for segment, n in enumerate(lengths, 1):
            batch["segments"][b, start : start + n] = segment
            batch["positions"][b, start : start + n] = np.arange(n)
            batch["targets"][b, start : start + n - 1] = batch["tokens"][b, start + 1 : start + n]
            batch["weights"][b, start : start + n - 1] = 1
            start += n
    return batch


def documents(segments_BS):
    """(row, slice) of each document."""
    for b, segments in enumerate(segments_BS):
        for segment in range(1, segments.max() + 1):
            (where,) = np.nonzero(segments == segment)
            yield b, slice(where[0], where[-1] + 1)


def assert_close(got, want, tol=1e-5):
    """Errors relative to the largest element of each tensor; a NaN is never close."""
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        where = jax.tree_util.keystr(path)
        assert g.shape == w.shape, where
        if w.size:
            error, size = np.abs(g - w).max(), np.abs(w).max()
            assert error <= tol * size, f"{where}: {error} of {size}"


def normal(seed: int, shape, dtype="float32"):
    """From numpy: to compile JAX's generator takes 2 seconds a shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def random_model(cfg: ModelConfig, seed: int = 0, dtype="float32", spread: float = 0.2):
    """A decoder as after some training: no bias is 0, no scale is 1, the routers are decided.

    With `spread` 0 all vectors have the values that they start with.

    Matrices, and what is not annotated `keep`, in `dtype`.
    """
    rng = np.random.default_rng(seed)
    model = _abstract(cfg)
    starts = {id(v): _start(path) for path, v in by_path(model).items()}

    def fill(v):
        start, keep = starts[id(v)], v.get_metadata().get("keep")
        x = rng.normal(size=v.shape)
        if isinstance(v, Balance):
            x = 0.05 * spread * x
        elif start is not None:
            x = start + spread * x
        else:
            x *= 1.5 * math.prod(v.shape[-len(v.axes) : -1]) ** -0.5
        return v.replace(jnp.asarray(x, v.dtype if keep else dtype))

    return map_params(fill, model)


@cache
def _abstract(cfg: ModelConfig):
    return jax.eval_shape(partial(Decoder, cfg), jax.random.key(0))


def _start(path: str) -> float | None:
    """What a scale or a bias starts with; None for a matrix."""
    if path.endswith("bias"):
        return 0.0
    scales = ("scale", "norm", "norm_attn", "norm_moe", "norm_out", "gamma", "temp")
    return 1.0 if path.endswith(scales) else None


def arrays_in(jaxpr):
    """Shape and dtype of everything a program makes, inner programs included."""
    for eqn in jaxpr.eqns:
        yield from ((v.aval.shape, v.aval.dtype, eqn) for v in eqn.outvars)
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
            if is_program(x):
                yield from arrays_in(getattr(x, "jaxpr", x))


def is_program(x) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")
