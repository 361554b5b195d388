"""How long a collective takes on a machine, and what bandwidth that is.

n GPUs take part, S is the message in bytes. A GPU sends `bus_factor` x S bytes, over the wires that
its group has (`carried`), in one step or two (STEPS). A step has a latency and a rate by each of
two protocols, and the library takes the better one. All constants are the machine's.

What is assumed, where nothing is published:

* Between nodes latency grows with the logarithm of their number, as trees do; rings, which large
  messages take, grow linearly, but then it hardly counts: 8, 16, 32 and 64 MI325X have the same
  bus bandwidth within 2 % at 4 GiB and above. Nothing is known beyond 64 GPUs.
* A collective of the world runs as one ring for each GPU of a node, each with a NIC of its own.
* A broadcast is cut in pieces that follow each other, so that all wires carry some.
* No other traffic. Traffic that changes rail is not modelled: `node` neighbours are on one rail.
"""

import math

from zayajax.machine import Machine
from zayajax.tables import Column, Table, duration, rate, size as written

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "permute")
# One after the other: a reduction to all is a scatter and a gather.
STEPS = {"all_reduce": 2}
SIZES = tuple(2**k for k in range(10, 35))  # 1 KiB to 16 GiB


def seconds(machine: Machine, op: str, size: float, span: str, group: int) -> float:
    """One collective alone on the fabric.

    Args:
      op: one of OPS; a permute is a cyclic shift by one.
      size: bytes of the message as rccl-tests counts it: what is reduced, the whole of what is
        gathered or scattered, what one GPU sends to all, what is broadcast or passed on.
      span: where the group lies: partial (some GPUs of each node), node, rail (one GPU of each
        node), world (all GPUs of all nodes).
      group: GPUs that take part in one.
    """
    if group == 1:
        return 0.0
    if span == "world" and group <= machine.gpus:
        span = "node"
    if span == "partial" and group > machine.gpus:  # parts of several nodes
        span = "world"
    nodes = {"rail": group, "world": group / machine.gpus}.get(span)
    wire = machine.across if nodes else machine.inside
    steps = STEPS.get(op, 1)
    waits = steps * (math.log2(nodes) if nodes and op != "permute" else 1)
    load = carried(machine, op, size, span, group)
    if not nodes and op in ("all_to_all", "permute"):
        load /= machine.pairwise
    ways = [
        wire.short_latency * waits + load / wire.short_rate,
        wire.latency * waits + load / wire.rate,
    ]
    if op == "all_reduce" and not nodes and machine.reduced_rate:
        # Each GPU sends its message once, and the sums of its share.
        load = size * (1 + 1 / group) / machine.links
        ways.append(machine.reduced_latency + load / machine.reduced_rate)
    return min(ways)


def carried(machine: Machine, op: str, size: float, span: str, group: int) -> float:
    """Bytes that the busiest wire carries: a link of the node, or a NIC."""
    sent = size * bus_factor(op, group)
    if span == "rail":
        return sent
    if span == "world":
        if op == "permute":  # the last GPU of a node sends to the first of the next
            return sent
        if op == "all_to_all":  # what a GPU has for other nodes leaves by its own NIC
            return size * (group - machine.gpus) / group
        return sent / machine.gpus
    if not machine.point_to_point:
        return sent / machine.links
    return sent if op == "permute" else sent / (group - 1)


def bus_factor(op: str, group: int) -> float:
    """Of message over time to bus bandwidth, as rccl-tests counts it: bytes that a GPU sends, of
    one that it has to."""
    share = (group - 1) / group
    return {"all_reduce": 2 * share, "broadcast": 1, "permute": 1}.get(op, share)


def bus_bandwidth(machine: Machine, op: str, size: float, span: str, group: int) -> float:
    """Bytes a second that each GPU sends; the arguments are those of `seconds`."""
    return size * bus_factor(op, group) / seconds(machine, op, size, span, group)


def groups(machine: Machine) -> list[tuple[str, int]]:
    """(span, GPUs) of the groups that are listed: parts of a node, and 1 to 128 nodes."""
    nodes = [2**k for k in range(1, 8)]
    parts = [2**k for k in range(1, machine.gpus.bit_length()) if 2**k < machine.gpus]
    return [
        *(("partial", n) for n in parts),
        ("node", machine.gpus),
        *(("rail", n) for n in nodes),
        *(("world", n * machine.gpus) for n in nodes),
    ]


def collective_table(machine: Machine) -> Table:
    """The time of each operation for each group and size.

    Rows: {"op", "span", "group_size", "bytes", "seconds", "bus_bandwidth"}, in bytes and bytes a
    second. To be read, a line for each operation and group, and some of the sizes as columns.
    """
    rows = [
        {
            "op": op,
            "span": span,
            "group_size": n,
            "bytes": size,
            "seconds": seconds(machine, op, size, span, n),
            "bus_bandwidth": bus_bandwidth(machine, op, size, span, n),
        }
        for op in OPS
        for span, n in groups(machine)
        for size in SIZES
    ]
    inside, across, reduced = machine.inside, machine.across, machine.reduced_rate
    kind = "point-to-point" if machine.point_to_point else "switched"
    sources = dict.fromkeys(x.source for wire in (inside, across) for x in wire.numbers())
    sources |= dict.fromkeys(x.source for x in (machine.pairwise, reduced) if x is not None)
    return _BySize(
        f"{machine.name}: {machine.gpus} GPUs a node, {kind}; modelled, each collective alone",
        [
            Column("op", "operation", left=True),
            Column("span", "span", left=True),
            Column("group_size", "GPUs", str),
            Column(SIZES[0], f"time, {written(SIZES[0])}", duration),
            *(Column(s, written(s), rate) for s in SHOWN_SIZES),
        ],
        rows,
        (
            "Bus bandwidth as rccl-tests counts it: what each GPU sends, a second.",
            "Assumed: between nodes latency grows with the logarithm of their number.",
            *(f"Source: {source}." for source in sources),
        ),
    )


SHOWN_SIZES = tuple(2**k for k in (16, 20, 24, 28, 32))
SHOWN_NODES = (2, 16, 128)


class _BySize(Table):
    """Sizes become columns where it is read."""

    def cells(self) -> list[list[str]]:
        lines: dict[tuple, dict[int, dict]] = {}
        for row in self.rows:
            line = lines.setdefault((row["op"], row["span"], row["group_size"]), {})
            line[row["bytes"]] = row
        gpus = next(n for _, span, n in lines if span == "node")
        shown = {("rail", n) for n in SHOWN_NODES} | {("world", n * gpus) for n in SHOWN_NODES}
        return [
            [
                op,
                span,
                str(n),
                duration(by_size[SIZES[0]]["seconds"]),
                *(rate(by_size[s]["bus_bandwidth"]) for s in SHOWN_SIZES),
            ]
            for (op, span, n), by_size in lines.items()
            if span in ("partial", "node") or (span, n) in shown
        ]
