"""What a jitted function sends, read from its traced program.

No device is needed: an `AbstractMesh` of any size traces in seconds on a laptop. Nothing adds a
collective after tracing where all of them are written inside `jax.shard_map`, so the list is exact.
Compiled text would be no witness: XLA for CPU rewrites bfloat16 and reduce-scatter.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from zayajax.layout import GPU, NODE, WORLD
from zayajax.planning.traced.program import Line, Op, inside, line

# Name an axis, but send nothing.
SILENT = {"axis_index", "axis_size", "pvary", "pcast", "preduced", "vary_unreduced_cast"}
SILENT |= {"reduced_vary_cast"}
# How the model sends activations inside its loops, by scope. Weights and gradients have no business
# there: another operation is theirs, such as the sum of a shared weight's gradient in its use.
ACTIVATIONS = {
    "exchange": {"all_to_all", "ragged_all_to_all", "all_gather"},
    "bucket": {"pmax"},
    "combine": {"psum"},
    "halo": {"all_gather", "reduce_scatter"},
    "kv": {"all_gather", "reduce_scatter"},
    "ring": {"ppermute"},
    "tree": {"pmax", "psum", "all_gather"},
}


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
    axes: tuple[str, ...] = ()  # of the mesh, as the equation names them
    group: int = 1  # devices that take part in one
    even: bool = True  # runs where routing is even: in each conditional the branch that sends least
    place: tuple[int, ...] = ()  # of the equation: its line, and its number there


def collectives(fn, *args, **kwargs) -> list[Collective]:
    """Those of a jitted function called with these (abstract) arguments, in program order.

    Every branch of a conditional is listed, though only one of them runs: `branch` tells which.
    """
    return list(sent(line(fn.trace(*args, **kwargs).jaxpr)))


def weights_in_loops(found: list[Collective]) -> list[Collective]:
    """Collectives inside a loop that are none on activations: with zero = 1 there must be none."""

    def on_activations(c):
        return any(c.op in ACTIVATIONS.get(scope, ()) for scope in c.path.split("/"))

    return [c for c in found if c.in_loop and not on_activations(c)]


def sent(program: Line) -> Iterator[Collective]:
    """The collectives of a line and of the lines inside it."""
    for i, op in enumerate(program.ops):
        if axes := mesh_axes(op.eqn):
            yield from _listed(op, i, axes)
        parts = [list(sent(inner)) for inner in inside(op, i)]
        if op.name == "cond":
            likely = least(parts)
            for b, part in enumerate(parts):
                yield from (
                    part if b == likely else (dataclasses.replace(c, even=False) for c in part)
                )
        else:
            for part in parts:
                yield from part


def least(branches: Sequence[Sequence[Collective]]) -> int | None:
    """Which of a conditional's branches sends least, of those that send at all: the smallest
    capacity of an exchange, enough for even routing."""
    sizes = {
        i: sum(c.bytes * (c.times or 1) for c in part if c.even)
        for i, part in enumerate(branches)
        if part
    }
    return min(sizes, key=sizes.get) if sizes else None


def _listed(op: Op, index: int, axes: tuple[str, ...]) -> Iterator[Collective]:
    eqn, here = op.eqn, op.around
    name = base_name(eqn.primitive.name)
    span, group = _group(eqn, axes, here.sizes)
    moved: dict[str, list[int]] = {}  # dtype -> bytes in, bytes out
    # The others of a ragged exchange are where its rows go to, offsets and sizes.
    going = eqn.invars[:1] if name == "ragged_all_to_all" else eqn.invars
    for side, variables in enumerate((going, eqn.outvars)):
        for v in variables:
            size = math.prod(v.aval.shape) * v.aval.dtype.itemsize
            moved.setdefault(str(v.aval.dtype), [0, 0])[side] += size
    for dtype, sides in moved.items():
        yield Collective(
            op=name,
            scope=here.path.rpartition("/")[2],
            path=here.path,
            dtype=dtype,
            bytes=max(sides),
            span=span,
            times=here.times,
            in_loop=here.in_loop,
            branch=here.branch,
            axes=axes,
            group=group,
            place=(*here.place, index),
        )


def base_name(primitive: str) -> str:
    """Without what only its types or its schedule differ in: psum_invariant, all_gather_start."""
    return re.sub("_(invariant|reduced|start)", "", primitive.removeprefix("unreduced_"))


def mesh_axes(eqn) -> tuple[str, ...]:
    """The mesh axes that an equation names; those of a reduction in place are numbers."""
    if eqn.primitive.name in SILENT or eqn.primitive.name.endswith("_done"):
        return ()
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    found = found if isinstance(found, (tuple, list)) else (found,)
    return tuple(a for a in found if isinstance(a, str))


def _group(eqn, axes: tuple[str, ...], sizes) -> tuple[str, int]:
    """(span, devices) of the groups of one equation."""
    n = math.prod(sizes.get(a, 1) for a in axes)
    parts, pairs = eqn.params.get("axis_index_groups"), eqn.params.get("perm")
    if not set(axes) <= {*WORLD}:
        return "partial" if parts is not None else "+".join(axes), n
    if pairs is not None:
        parts = components(pairs)
    # The place of each device in the node and along the rail, by its index over the axes.
    counts = [sizes[a] for a in axes]
    rest = [a for a in WORLD if a not in axes]

    def device(index: int):
        at = dict.fromkeys(rest, 0)  # groups are alike for all others
        for a, count in zip(reversed(axes), reversed(counts), strict=True):
            index, at[a] = divmod(index, count)
        return at[NODE], at[GPU]

    groups = [[device(i) for i in part] for part in (parts if parts is not None else [range(n)])]
    return span_of(groups, sizes[NODE], sizes[GPU]), max(map(len, groups), default=1)


def components(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """What pairs of (source, destination) tie together, directly or by others."""
    leader: dict[int, int] = {}

    def lead(i):
        while leader.setdefault(i, i) != i:
            leader[i] = i = leader[leader[i]]
        return i

    for a, b in pairs:
        leader[lead(a)] = lead(b)
    found: dict[int, list[int]] = {}
    for i in leader:
        found.setdefault(lead(i), []).append(i)
    return list(found.values())


def span_of(groups: Iterable[Iterable[tuple[int, int]]], nodes: int, gpus: int) -> str:
    """What groups of devices (node, gpu) are: each a whole node, a whole rail (the same GPU of all
    nodes), or the world, else partial; `one` where none has two devices."""
    kinds = set()
    for group in groups:
        group = set(group)
        ns, gs = {n for n, _ in group}, {g for _, g in group}
        if len(group) == 1:
            continue
        if len(group) != len(ns) * len(gs):
            kinds.add("partial")
        elif len(group) == nodes * gpus:
            kinds.add("world" if nodes > 1 and gpus > 1 else "rail" if nodes > 1 else "node")
        elif len(group) == gpus and len(ns) == 1:
            kinds.add("node")
        elif len(group) == nodes and len(gs) == 1:
            kinds.add("rail")
        else:
            kinds.add("partial")
    return "partial" if len(kinds) > 1 else kinds.pop() if kinds else "one"
