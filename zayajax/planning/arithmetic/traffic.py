"""What a training step sends, by arithmetic: the messages that tracing it would list.

Shape letters: B rows of this GPU, S their positions here, T = B S tokens, D embed, H query heads,
N key-value heads, J = H + N, K head width, L layers, A micro-batches, P GPUs of a node.
"""

import dataclasses
import math
from collections.abc import Iterator

from zayajax.attention import ring
from zayajax.layout import GPU, NODE
from zayajax.machine import Machine
from zayajax.optim import table
from zayajax.planning.arithmetic.inventory import Parameter, itemsize
from zayajax.planning.arithmetic.share import Share, share
from zayajax.planning.fabric import seconds
from zayajax.settings import Config

SPAN = {GPU: "node", NODE: "rail"}


@dataclasses.dataclass(frozen=True)
class Message:
    """One collective of a step, and how often it is sent."""

    part: str  # exchange, halo, kv, ring, weights in, weights out, deal
    op: str  # of `fabric.OPS`
    bytes: float  # as `fabric.seconds` counts them
    span: str  # node, rail
    group: int
    times: int

    def seconds(self, machine: Machine) -> float:
        return self.times * seconds(machine, self.op, self.bytes, self.span, self.group)


def messages(config: Config, found: list[Parameter], at: Share | None = None) -> list[Message]:
    """All of a step but sums of a few numbers (metrics, norms): those cost their latency.

    Routing is even: the exchange takes its smallest capacity. Of fewer than some thousand tokens a
    GPU chance alone often takes a larger one.
    """
    at = at or share(config)
    sent = [*_exchange(config, at), *_rows(config, at), *_weights(config, found)]
    sent += _deal(config, found)
    return [m for m in sent if m.group > 1 and m.times and m.bytes]


def _exchange(config: Config, at: Share) -> Iterator[Message]:
    m, P = config.model, at.group
    turns = m.layers * config.train.micro_batches
    full = config.train.remat == "full"
    slots = at.slots * m.hidden * itemsize(config.train.compute_dtype)
    span = "node" if P == config.mesh.gpus else "partial"
    # Tokens and results; in the backward pass tokens again, and the gradients of both. What was
    # sent forward is kept unless all is recomputed.
    yield Message("exchange", "all_to_all", slots, span, P, turns * (7 if full else 5))
    counts = P * at.experts * 4
    yield Message("exchange", "all_to_all", counts, span, P, turns * (1 + full))
    yield Message("exchange", "all_reduce", 4, span, P, turns * (1 + full))


def _rows(config: Config, at: Share) -> Iterator[Message]:
    """Of rows that are spread: ends of chunks, keys and values."""
    if not at.spread:
        return
    m, mesh, c = config.model, config.mesh, itemsize(config.train.compute_dtype)
    remat, L, A = config.train.remat, config.model.layers, config.train.micro_batches
    J = m.heads + m.kv_heads
    again = L * A * (1 if remat == "none" else 2)
    tails = at.rows * at.chunks * m.halo * (J * m.head_dim + m.kv_heads * m.head_dim // 2) * c
    yield from levels("halo", "all_gather", tails, at.spread, mesh, again)
    # Documents and places of all keys are the same in all layers.
    documents = at.rows * at.chunks * m.halo * 4
    yield from levels("halo", "all_gather", documents, at.spread, mesh, A)
    yield from levels("kv", "all_gather", 2 * 4 * at.tokens, at.spread, mesh, A)
    yield from levels("halo", "reduce_scatter", tails, at.spread, mesh, L * A)
    kv = at.tokens * 2 * m.kv_heads * m.head_dim * c
    if mesh.attention == "gather":
        yield from levels("kv", "all_gather", kv, at.spread, mesh, again)
        yield from levels("kv", "reduce_scatter", kv, at.spread, mesh, L * A)
        return
    # Past every rank of the inner axis, one hop along the outer one, and so on. Forward (twice
    # where its result is not kept) keys and values; backward the same, and their gradients, which
    # then go home, if they are not there.
    inner, outer = (*(mesh.ranks((a,)) for a in at.spread), 1)[:2]
    forward = L * A * (2 if remat == "full" else 1)
    turns = {at.spread[0]: (outer * (inner - 1), len(ring.hops(outer % inner, inner)))}
    if outer > 1:
        turns[at.spread[1]] = outer - 1, 1
    for axis, (count, home) in turns.items():
        times = (forward + 2 * L * A) * count + home * L * A
        yield Message("ring", "permute", kv, SPAN[axis], mesh.ranks((axis,)), times)


def levels(part, op, own, axes, mesh, times) -> Iterator[Message]:
    """One message a mesh axis, the last axis first, of what all GPUs along them have together."""
    for axis in reversed(axes):
        own *= mesh.ranks((axis,))
        yield Message(part, op, own, SPAN[axis], mesh.ranks((axis,)), times)


def _weights(config: Config, found: list[Parameter]) -> Iterator[Message]:
    train, mesh, L = config.train, config.mesh, config.model.layers
    A, reduced = train.micro_batches, itemsize(train.reduce_dtype)
    summed: dict[tuple, float] = {}  # what is whole on every GPU is summed together
    for p in found:
        times, layers = 1, 1
        if p.in_layer:
            layers, times = L, L * A
        # Inside the loop the backward pass gathers once more what it does not keep.
        gathers = times * (2 if p.in_layer and train.remat != "none" else 1)
        own, used = p.local / layers, p.bytes(train.compute_dtype)
        yield from levels("weights in", "all_gather", own * used, p.gathered, mesh, gathers)
        yield from levels("weights out", "reduce_scatter", own * reduced, p.gathered, mesh, times)
        for axis in p.repeated:
            own_part = p.local if axis == NODE else p.whole
            key = axis, times, layers, p.stored_over
            summed[key] = summed.get(key, 0) + own_part / layers * reduced
    for (axis, times, *_), size in summed.items():
        group = mesh.ranks((axis,))
        yield Message("weights out", "all_reduce", size, SPAN[axis], group, times)


def _deal(config: Config, found: list[Parameter]) -> Iterator[Message]:
    """Muon's matrices to the GPU that works on each, and back, in bfloat16."""
    if config.optim.matrices != "muon":
        return
    mesh, stacks = config.mesh, {}
    for p in found:
        if p.group == table.MATRICES:
            count, rows, columns, axes = muon_stack(p, mesh)
            key = rows, columns, axes
            stacks[key] = stacks.get(key, 0) + count
    for (rows, columns, axes), count in stacks.items():
        part = rows * columns * 2 / mesh.ranks(axes)
        for axis in axes:
            n = mesh.ranks((axis,))
            count = math.ceil(count / n)
            # n parts of each n-th of the matrices, filled up to a multiple of n.
            yield Message("deal", "all_to_all", n * count * part, SPAN[axis], n, 2)
            part *= n


def muon_stack(p: Parameter, mesh) -> tuple[int, int, int, tuple[str, ...]]:
    """(matrices here, rows, columns, mesh axes that split them) as Muon has a parameter; rows are
    the side that a mesh splits."""
    rule = table.matrix(p.path)
    count, rows, columns = table.stack_shape(rule, p.shape)
    left, right = (len(side.split()) for side in rule.split("|"))
    matrix, before = p.stored[-left - right :], p.stored[: -left - right]
    axes = tuple(a for dim in matrix for a in dim)
    if any(matrix[left:]):
        rows, columns = columns, rows
    return count // mesh.ranks(tuple(a for dim in before for a in dim)), rows, columns, axes


def by_part(sent: list[Message], machine: Machine) -> dict[str, float]:
    """Seconds of each part of what a step sends."""
    found: dict[str, float] = {}
    for m in sent:
        found[m.part] = found.get(m.part, 0.0) + m.seconds(machine)
    return found
