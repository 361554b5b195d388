"""Attention over a row that many GPUs share: a ring of hops, a gather of keys, a tree of results.

Rows of 4 k to 16 M tokens, one at a time, one layer. Forward, the queries are spread as the keys
are: a ring passes the keys of each GPU past all others, R - 1 hops of one link each on
point-to-point fabric, and a gather brings all of them by all links. In decoding there is one query,
on every GPU: a ring would pass the keys past it just so, and a tree merges partial results, whose
size is free of the row's length (arXiv 2408.04093).

Shape letters: S tokens of a row, R ranks, U = S / R keys of one, H query heads, N key-value heads,
K head width, c bytes of the compute dtype.
"""

from collections.abc import Iterator

from zayajax.attention.tree import ONE_MESSAGE_BYTES
from zayajax.layout import LAYOUTS
from zayajax.machine import Machine
from zayajax.planning.arithmetic.inventory import itemsize
from zayajax.planning.arithmetic.roofline import rate
from zayajax.planning.arithmetic.traffic import SPAN, levels
from zayajax.planning.fabric import seconds
from zayajax.settings import Config
from zayajax.tables import Column, Table, duration, size

LENGTHS = tuple(4096 * 4**i for i in range(7))  # 4 k to 16 M


def table(config: Config, machine: Machine) -> Table:
    """A row for each length, over one node and over all, forward and in decoding."""
    rows = [
        row
        for layout in ("context", "context-wide")
        for length in LENGTHS
        for row in _rows(config, machine, layout, length)
    ]
    columns = (
        Column("where", "over", left=True),
        Column("step", "step", left=True),
        Column("tokens", "tokens", "{:,}".format),
        Column("arithmetic_seconds", "arithmetic", duration),
        Column("ring_seconds", "ring", duration),
        Column("ring_hidden", "hidden", "{:.0%}".format),
        Column("ring_switched_seconds", "switched", duration),
        Column("ring_bytes", "keeps", size),
        Column("collective", "or", left=True),
        Column("collective_seconds", "takes", duration),
        Column("collective_switched_seconds", "switched", duration),
        Column("collective_bytes", "keeps", size),
    )
    return Table(f"attention over a spread row, one layer ({machine.name})", columns, rows, NOTES)


NOTES = (
    "Of a layer without a window, one row. Arithmetic: causal attention of a GPU's queries at the "
    "rate measured for XLA's blocks (a kernel is faster, and hides less); in decoding, its keys "
    "and values read once. Hidden: of the ring's hops, behind the block of keys that is there; a "
    "gather, whose result attention waits for, and a tree, whose merge waits for all, hide "
    "nothing. Switched: the same links ending in one. Keeps: keys and values beside a GPU's own; "
    "of a tree, partial results. Backward, a ring makes twice as many hops and one home, a gather "
    "one more and a reduce-scatter.",
)


def _rows(config: Config, machine: Machine, layout: str, S: int) -> Iterator[dict]:
    m, mesh = config.model, config.mesh
    axes = tuple(a for a in LAYOUTS[layout].sequence if mesh.ranks((a,)) > 1)
    R = mesh.ranks(axes)
    if R == 1 or (layout == "context-wide" and mesh.nodes == 1):
        return  # no row is spread; and over one node is said already
    c, kv = itemsize(config.train.compute_dtype), 2 * m.kv_heads * m.head_dim
    own = S / R * kv * c
    where = "a node" if layout == "context" else f"{mesh.nodes} nodes"
    base = {"where": where, "ranks": R, "tokens": S}
    fabrics = (("", machine), ("_switched", machine.switched()))
    if S % (2 * R) == 0 and S // (2 * R) >= m.halo:  # else there are too few for two chunks each
        flops = 2 * 2 * m.heads * m.head_dim * S * (S + 1) / 2 / R
        work = flops / rate(machine, "attention")
        row = base | {"step": "forward", "collective": "gather", "arithmetic_seconds": work}
        for key, fabric in fabrics:
            hops = ring_hops(fabric, own, axes, mesh)
            row[f"ring{key}_seconds"] = sum(hops)
            row[f"collective{key}_seconds"] = gather(fabric, own, axes, mesh)
            if not key:
                row["ring_hidden"] = _hidden(hops, work / R)
        yield row | {"ring_bytes": 2 * own, "collective_bytes": S * kv * c}
    work = own / machine.hbm_reached
    row = base | {"step": "decode", "collective": "tree", "arithmetic_seconds": work}
    for key, fabric in fabrics:
        hops = ring_hops(fabric, own, axes, mesh)
        row[f"ring{key}_seconds"] = sum(hops)
        row[f"collective{key}_seconds"] = tree(fabric, m.heads, m.head_dim, axes, mesh)
        if not key:
            row["ring_hidden"] = _hidden(hops, work)
    # One level is merged before the next begins.
    most = max(mesh.ranks((a,)) for a in axes)
    yield row | {"ring_bytes": 2 * own, "collective_bytes": most * 4 * m.heads * (m.head_dim + 1)}


def ring_hops(machine: Machine, own: float, axes, mesh) -> list[float]:
    """Seconds of each hop of `own` bytes past all ranks: round the first axis, one hop along the
    second, and so on."""
    inner, outer = (*(mesh.ranks((a,)) for a in axes), 1)[:2]
    round_ = [_hop(machine, own, axes[0], mesh)] * (inner - 1)
    if outer == 1:
        return round_
    step = _hop(machine, own, axes[1], mesh)
    return round_ + (outer - 1) * [step, *round_]


def _hop(machine: Machine, own: float, axis: str, mesh) -> float:
    return seconds(machine, "permute", own, SPAN[axis], mesh.ranks((axis,)))


def _hidden(hops: list[float], block: float) -> float:
    """The part of all hops that is behind the arithmetic of one rank's block each."""
    return sum(min(hop, block) for hop in hops) / sum(hops)


def gather(machine: Machine, own: float, axes, mesh) -> float:
    """Seconds to bring the `own` bytes of every rank to each: a message an axis, the last first."""
    return sum(m.seconds(machine) for m in levels("kv", "all_gather", own, axes, mesh, 1))


def tree(machine: Machine, H: int, K: int, axes, mesh) -> float:
    """Seconds to merge the partial results of one query: as `attention.tree` does, one gather a
    level while that is small, else a maximum and a sum."""
    total = 0.0
    for axis in axes:
        n, result = mesh.ranks((axis,)), 4 * H * (K + 1)
        if n * result <= ONE_MESSAGE_BYTES:
            total += seconds(machine, "all_gather", n * result, SPAN[axis], n)
        else:
            total += seconds(machine, "all_reduce", 4 * H, SPAN[axis], n)
            total += seconds(machine, "all_reduce", result, SPAN[axis], n)
    return total
