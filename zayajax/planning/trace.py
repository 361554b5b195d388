"""What a jitted function sends, read from its traced program.

No device is needed: an `AbstractMesh` of any size traces in seconds on a laptop. Nothing adds a
collective after tracing where all of them are written inside `jax.shard_map`, so the list is exact.
Compiled text would be no witness: XLA for CPU rewrites bfloat16 and reduce-scatter.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import jax

from zayajax.layout import GPU, NODE

SPANS = {frozenset([GPU]): "node", frozenset([NODE]): "rail", frozenset([NODE, GPU]): "world"}
# Name an axis, but send nothing.
SILENT = {"axis_index", "axis_size", "pvary", "pcast", "preduced", "vary_unreduced_cast"}
# What the model sends inside its loops; weights and gradients have no business there.
ACTIVATIONS = {"exchange", "bucket", "combine", "halo", "kv", "ring", "tree"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One equation of the program, as each device sees it."""

    op: str  # all_gather, reduce_scatter, all_to_all, psum, ...
    scope: str  # the innermost `jax.named_scope`
    path: str  # all of them, outermost first, joined by "/"
    dtype: str  # an equation with operands of several types is listed once for each
    bytes: int  # each time, on each device: what goes in or comes out, whichever is larger
    span: str  # node: inside each node; rail: one GPU of each node; world; partial; or the axes
    times: int | None  # lengths of the loops around it, multiplied; None inside a `while`
    in_loop: bool
    branch: tuple[int, ...] = ()  # of each conditional around it, outermost first


def collectives(fn, *args, **kwargs) -> list[Collective]:
    """Those of a jitted function called with these (abstract) arguments, in program order.

    Every branch of a conditional is listed, though only one of them runs: `branch` tells which.
    """
    return list(_walk(fn.trace(*args, **kwargs).jaxpr.jaxpr, _TOP))


def weights_in_loops(found: list[Collective]) -> list[Collective]:
    """Collectives inside a loop that are none on activations: with zero = 1 there must be none."""
    return [c for c in found if c.in_loop and not ACTIVATIONS & set(c.path.split("/"))]


_TOP = Collective(op="", scope="", path="", dtype="", bytes=0, span="", times=1, in_loop=False)
_TRANSFORMS = {"jvp", "transpose", "vmap", "remat", "rematted_computation", "checkpoint", "jit"}


def _walk(jaxpr, outer: Collective) -> Iterator[Collective]:
    """`outer` carries what is known from the programs around this one."""
    for eqn in jaxpr.eqns:
        here = dataclasses.replace(outer, path=_path(outer.path, eqn))
        if axes := _axes(eqn):
            yield from _listed(eqn, axes, here)
        for inner, change in _inner(eqn, here):
            yield from _walk(inner, dataclasses.replace(here, **change))


def _listed(eqn, axes, here: Collective) -> Iterator[Collective]:
    op = re.sub("_(invariant|reduced)$", "", eqn.primitive.name)
    op = {"unreduced_psum": "psum", "unreduced_reduce_scatter": "reduce_scatter"}.get(op, op)
    span = SPANS.get(frozenset(axes), "+".join(axes))
    if eqn.params.get("axis_index_groups") is not None:
        span = "partial"
    moved: dict[str, list[int]] = {}  # dtype -> bytes in, bytes out
    # The others of a ragged exchange are where its rows go to, offsets and sizes.
    sent = eqn.invars[:1] if op == "ragged_all_to_all" else eqn.invars
    for side, variables in enumerate((sent, eqn.outvars)):
        for v in variables:
            size = math.prod(v.aval.shape) * v.aval.dtype.itemsize
            moved.setdefault(str(v.aval.dtype), [0, 0])[side] += size
    for dtype, sides in moved.items():
        scope = here.path.rpartition("/")[2]
        yield dataclasses.replace(
            here, op=op, scope=scope, dtype=dtype, bytes=max(sides), span=span
        )


def _axes(eqn) -> tuple[str, ...]:
    """The mesh axes that an equation names; those of a reduction in place are numbers."""
    if eqn.primitive.name in SILENT:
        return ()
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    found = found if isinstance(found, (tuple, list)) else (found,)
    return tuple(a for a in found if isinstance(a, str))


def _path(outer: str, eqn) -> str:
    """Inner programs restart the stack of names; transforms wrap it: transpose(jvp(moe))."""
    words = re.findall(r"[^/()]+", str(eqn.source_info.name_stack))
    names = [w for w in words if w not in _TRANSFORMS]
    return "/".join(filter(None, (outer, *names)))


def _inner(eqn, here: Collective):
    """The programs inside an equation, with what each changes of `here`."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        for i, branch in enumerate(params["branches"]):
            yield branch.jaxpr, {"branch": (*here.branch, i)}
        return
    change = {}
    if name == "scan":
        times = here.times and here.times * params["length"]
        change = {"in_loop": True, "times": times}
    elif name == "while":
        change = {"in_loop": True, "times": None}
    for x in jax.tree.leaves(list(params.values()), is_leaf=is_program):
        if is_program(x):
            yield getattr(x, "jaxpr", x), change


def is_program(x) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")
