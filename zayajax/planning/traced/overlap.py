"""How much of a collective's time the dependencies of its program allow to hide.

On one line of a program (see `program`), whatever comes neither before nor after a collective in
the graph of dependencies may run beside it. That is a bound, not a forecast: it needs a scheduler
that finds the order, and collectives that take nothing from the products beside them. Lines are
scheduled one by one: XLA moves nothing into or out of a loop's turn or a conditional's branch,
which are single pieces of work on the line around them.

A computation's time is its roofline: the longer of its FLOPs, at the rate that large bfloat16
products reach, and its bytes from and to HBM, where elementwise chains are fused as in `memory`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from zayajax.machine import Machine
from zayajax.planning.traced.memory import fused, is_view
from zayajax.planning.traced.program import Line, Op, Value, inside
from zayajax.planning.traced.trace import Collective, least

WIRES = ("node", "network")


def wire(c: Collective) -> str:
    """What a collective travels on. Two wires are busy at once, and each hides behind the same."""
    return "network" if c.span in ("rail", "world") else "node"


def hidden(
    program: Line,
    found: Sequence[Collective],
    seconds: Callable[[Collective], float],
    machine: Machine,
) -> list[float]:
    """Of each collective of `found`, the seconds of one that may pass behind computation.

    Every computation hides at most its own length on each wire, so the sum over a step is a bound
    too. A collective in a branch that even routing does not take is worked out for itself.

    Args:
      program: the step.
      found: its collectives, as `trace.sent` gives them.
      seconds: how long one takes.
      machine: whose rates computations have.
    """
    work = _Work(machine, found, seconds)
    work.line(program)
    share = {}  # several rows of one equation, of different types, share what it hides
    for c in found:
        share[c.place] = share.get(c.place, 0) + seconds(c)
    return [
        work.hidden.get(c.place, 0) * seconds(c) / share[c.place] if share[c.place] else 0.0
        for c in found
    ]


@dataclasses.dataclass(frozen=True)
class Length:
    """Of a line or an equation: how long it computes, and what of that hides nothing yet."""

    seconds: float
    free: Mapping[str, float]  # by wire

    def __mul__(self, times: int) -> "Length":
        return Length(self.seconds * times, {w: s * times for w, s in self.free.items()})


NOTHING = Length(0.0, dict.fromkeys(WIRES, 0.0))


class _Work:
    def __init__(self, machine: Machine, found, seconds):
        self.machine, self.found, self.seconds = machine, {}, seconds
        for c in found:
            self.found.setdefault(c.place, []).append(c)
        self.hidden: dict[tuple[int, ...], float] = {}

    def line(self, program: Line) -> Length:
        """Hides the collectives of a line and of all lines inside it."""
        lengths = self._lengths(program)
        before = _before(program)
        places = [_place(op, i) for i, op in enumerate(program.ops)]
        at = {i: self.found[place] for i, place in enumerate(places) if place in self.found}
        free = dict.fromkeys(WIRES, 0.0)
        for name in WIRES:
            here = [i for i, cs in at.items() if wire(cs[0]) == name]
            rooms: dict[int, float] = {}
            for i, length in enumerate(lengths):
                if i not in at and length.free[name]:
                    beside = sum(
                        1 << n
                        for n, c in enumerate(here)
                        if not before[i] >> c & 1 and not before[c] >> i & 1
                    )
                    rooms[beside] = rooms.get(beside, 0.0) + length.free[name]
            needs = [sum(map(self.seconds, at[i])) for i in here]
            taken = share_out(needs, rooms)
            self.hidden |= {places[i]: s for i, s in zip(here, taken, strict=True)}
            free[name] = sum(x.free[name] for x in lengths) - sum(taken)
        return Length(sum(x.seconds for x in lengths), free)

    def _lengths(self, program: Line) -> list[Length]:
        never = fused(program)
        reads: dict[Value, int] = {}
        for v, op in never.items():
            parts = [reads.get(x, x.bytes) for x in op.values]
            cut = op.name in ("slice", "dynamic_slice", "split")
            reads[v] = v.bytes if cut else sum(parts)
        lengths = []
        for i, op in enumerate(program.ops):
            inner = [self.line(x) for x in inside(op, i)]
            if op.name == "scan":
                lengths.append(inner[0] * op.eqn.params["length"])
            elif op.name == "cond":
                lengths.append(inner[self._likely(op, i, inner)])
            elif inner and not _is_kernel(op):
                lengths.append(max(inner, key=lambda x: x.seconds))
            elif _place(op, i) in self.found or is_view(op) or set(op.outs) <= {*never}:
                lengths.append(NOTHING)
            else:
                read = sum(reads.get(v, v.bytes) for v in {*op.values})
                seconds = self._roofline(op, read)
                lengths.append(Length(seconds, dict.fromkeys(WIRES, seconds)))
        return lengths

    def _likely(self, op: Op, index: int, inner: Sequence[Length]) -> int:
        """Of the branches, the one of even routing; where none sends, the longest."""
        place = (*op.around.place, index)
        parts = [
            [c for p, cs in self.found.items() if p[: len(place) + 1] == (*place, b) for c in cs]
            for b in range(len(inner))
        ]
        taken = [b for b, part in enumerate(parts) if any(c.even for c in part)]
        likely = taken[0] if taken else least(parts)
        return max(range(len(inner)), key=lambda b: inner[b].seconds) if likely is None else likely

    def _roofline(self, op: Op, read: int) -> float:
        moved = _touched(op)
        if moved is None:
            moved = read + sum(v.bytes for v in op.outs)
        return max(flops(op) / self.machine.reached_bf16, moved / self.machine.hbm_reached)


def _place(op: Op, index: int) -> tuple[int, ...]:
    return (*op.around.place, index)


def _before(program: Line) -> list[int]:
    """For each equation a set, as bits, of all those that it needs."""
    maker: dict[Value, int] = {}
    before = []
    for i, op in enumerate(program.ops):
        needs = 0
        for v in op.values:
            if (n := maker.get(v)) is not None:
                needs |= before[n] | 1 << n
        before.append(needs)
        maker |= dict.fromkeys(op.outs, i)
    return before


def share_out(needs: Sequence[float], rooms: Mapping[int, float]) -> list[float]:
    """How much of each need is met when all together get the most.

    Args:
      needs: one a collective.
      rooms: how much there is for whom: bit n of the key tells whether need n may have of it.

    A maximum flow, by augmenting paths, the first needs first.
    """
    tiny = 1e-9 * min(sum(needs), sum(rooms.values()))  # of rounding
    left = {room: much for room, much in rooms.items() if much > tiny}
    given: list[dict[int, float]] = [{} for _ in needs]
    met = []
    for n, need in enumerate(needs):
        want = need
        while want > tiny and (path := _path(n, given, left, tiny)):
            amount = min(want, left[path[-1][1]])
            for (_, room), (other, _) in itertools.pairwise(path):
                amount = min(amount, given[other][room])
            for (who, room), after in zip(path, [*path[1:], None], strict=True):
                given[who][room] = given[who].get(room, 0.0) + amount
                if after:  # it had this room, and finds another
                    given[after[0]][room] -= amount
            left[path[-1][1]] -= amount
            want -= amount
        met.append(need - want if want > tiny else need)
    return met


def _path(start: int, given, left, tiny: float) -> list[tuple[int, int]]:
    """Steps (need, room) from a need to a room with something left: each need on the way gives up
    its part of the room before it. Empty where there is none."""
    came: dict[int, tuple[int, int | None]] = {}  # room -> the need that wants it, the room it left
    queue: list[tuple[int, int | None]] = [(start, None)]
    asked = {start}
    for need, source in queue:
        for room in left:
            if room >> need & 1 and room not in came:
                came[room] = need, source
                if left[room] > tiny:
                    path = [(need, room)]
                    while source is not None:
                        need, before = came[source]
                        path.append((need, source))
                        source = before
                    return path[::-1]
                for other, shares in enumerate(given):
                    if other not in asked and shares.get(room, 0) > tiny:
                        asked.add(other)
                        queue.append((other, room))
    return []


def flops(op: Op) -> float:
    """Multiplications and additions of one equation; 0 where its bytes decide."""
    params, out = op.eqn.params, math.prod(getattr(op.outs[0].aval, "shape", ())) if op.outs else 0
    shapes = [v.aval.shape for v in op.eqn.invars]
    if op.name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * out * math.prod(shapes[0][d] for d in contracted)
    if op.name == "ragged_dot_general":
        dims = params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = dims.dot_dimension_numbers
        inner = math.prod(shapes[0][d] for d in contracted)
        # Groups of the contracted rows: each of the products has only its own.
        groups = shapes[2][-1] if set(dims.lhs_ragged_dimensions) & set(contracted) else 1
        return 2.0 * out * inner / groups
    if op.name == "conv_general_dilated":
        features = shapes[1][params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * out * math.prod(shapes[1]) / features
    if _is_kernel(op) and (estimate := params.get("cost_estimate")):
        return float(estimate.flops)
    return 0.0


def _is_kernel(op: Op) -> bool:
    return op.name == "pallas_call"


def _touched(op: Op) -> int | None:
    """Bytes of what reads or writes only a part of an operand; None of anything else."""
    if op.name in ("gather", "dynamic_slice"):
        return 2 * op.outs[0].bytes
    if op.name == "dynamic_update_slice":
        return 2 * _bytes(op.ins[1])
    if op.name.startswith("scatter"):
        return 3 * _bytes(op.ins[2])
    return None


def _bytes(v: Value | None) -> int:
    return v.bytes if v is not None else 0
