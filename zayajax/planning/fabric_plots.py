"""The fabric drawn: modelled against published, bandwidth by group size, the links of a node."""

import itertools
import math

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from zayajax.machine import H100, MI300X, Machine, named
from zayajax.planning.fabric import bus_bandwidth
from zayajax.planning.published import CURVES, Curve
from zayajax.tables import size as written

# Okabe and Ito's, and four that go with them.
INK, MUTED, GRID, PAPER = "#111827", "#6b7280", "#d9dce1", "#ffffff"
LINKS, RAIL = "#0072b2", "#d55e00"
SERIES = (LINKS, RAIL, "#009e73", "#cc79a7", "#b8860b", "#7e6bc4", MUTED, INK)
LARGE = 16 * 2**30  # bytes: where latency no longer counts
SHOWN = (
    ("MI300X", 8),
    ("MI300X", 16),
    ("MI355X", 8),
    ("MI355X", 16),
    ("MI350X", 8),
    ("MI325X", 64),
    ("H100", 8),
    ("H200", 8),
)


def published(curves: tuple[Curve, ...] = CURVES) -> Figure:
    """Bus bandwidth of an all-reduce by size: published points on modelled lines."""
    figure, ax = _axes(8.6, 4.6)
    sizes = [2 ** (k / 4) for k in range(64, 137)]
    shown = {(c.machine, c.group): c for c in curves if c.op == "all_reduce"}
    for key, colour in zip(SHOWN, SERIES, strict=True):
        curve = shown[key]
        line = [_modelled(curve, s) / 1e9 for s in sizes]
        style = "--" if colour == INK else "-"  # the last lies on the one before
        ax.plot(sizes, line, style, color=colour, lw=1.2, label=curve.label().partition(",")[0])
        points = [(s, x / 1e9) for s, x in curve.bandwidths() if s >= sizes[0]]
        ax.plot(*zip(*points, strict=True), "o", color=colour, ms=4)
    ax.set_xscale("log", base=2)
    ax.set_xticks([2.0**k for k in range(16, 36, 2)])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda s, _: written(s)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_ylim(0)
    _named(ax, "message", "all-reduce, bus bandwidth, GB/s")
    _legend(ax, title="points: published; lines: modelled")
    return figure


def _modelled(curve: Curve, size: float) -> float:
    return bus_bandwidth(named(curve.machine), curve.op, size, curve.span, curve.group)


def by_group(machine: Machine = MI300X, other: Machine = H100) -> Figure:
    """Bus bandwidth of a large all-gather by how many GPUs of a node take part.

    Of a point-to-point machine, of the same links behind a switch, and of a switched machine.
    """
    figure, ax = _axes(6.4, 3.6)
    sizes = range(2, machine.gpus + 1)
    for known, name, colour in (
        (machine, f"{machine.name}, point-to-point", LINKS),
        (machine.switched(), f"{machine.name}'s links, behind a switch", RAIL),
        (other, f"{other.name}, behind a switch", SERIES[2]),
    ):
        rates = [bus_bandwidth(known, "all_gather", LARGE, "partial", n) / 1e9 for n in sizes]
        ax.plot(sizes, rates, "o-", color=colour, lw=1.2, ms=4, label=name)
    ax.set_xticks(list(sizes))
    ax.set_ylim(0)
    _named(ax, "GPUs of a node that take part", "all-gather of 16 GiB, GB/s a GPU")
    _legend(ax)
    return figure


def node(machine: Machine = MI300X) -> Figure:
    """The GPUs of a node, their links to each other or to a switch, and the NIC of each."""
    figure = Figure((6, 6), facecolor=PAPER)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(-1.75, 1.75), ylim=(-1.75, 1.75), aspect="equal")
    ax.axis("off")
    n = machine.gpus
    turns = [math.tau * (g + 0.5) / n for g in range(n)]
    at = [(math.sin(t), math.cos(t)) for t in turns]
    hub = (0.0, 0.0)
    pairs = itertools.combinations(at, 2) if machine.point_to_point else ((p, hub) for p in at)
    for a, b in pairs:
        width = 1 if machine.point_to_point else 3
        ax.plot(*zip(a, b, strict=True), color=LINKS, lw=width, zorder=1)
    for g, (x, y) in enumerate(at):
        ax.plot((x, 1.42 * x), (y, 1.42 * y), color=RAIL, lw=1.5, zorder=1)
        ax.text(1.56 * x, 1.56 * y, f"rail {g}", color=RAIL, ha="center", va="center", fontsize=9)
        ax.plot(x, y, "o", ms=26, mfc=PAPER, mec=INK, zorder=2)
        ax.text(x, y, str(g), color=INK, ha="center", va="center", fontsize=9, zorder=3)
    if not machine.point_to_point:
        ax.plot(*hub, "s", ms=34, mfc=PAPER, mec=INK, zorder=2)
        ax.text(*hub, "switch", color=INK, ha="center", va="center", fontsize=9, zorder=3)
    count = n * (n - 1) // 2 if machine.point_to_point else n * machine.links
    ax.text(
        0,
        -1.7,
        f"{machine.name}: {count} links of {machine.link / 1e9:g} GB/s each way, "
        f"NICs of {machine.nic / 1e9:g} GB/s",
        color=MUTED,
        ha="center",
        fontsize=9,
    )
    return figure


def _axes(width: float, height: float):
    figure = Figure((width, height), facecolor=PAPER, layout="constrained")
    ax = figure.add_subplot(facecolor=PAPER)
    ax.grid(color=GRID, lw=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(colors=MUTED, labelsize=8, length=0)
    for side, spine in ax.spines.items():
        spine.set(color=GRID, visible=side in ("left", "bottom"))
    return figure, ax


def _named(ax, x: str, y: str):
    ax.set_xlabel(x, color=INK, fontsize=9)
    ax.set_ylabel(y, color=INK, fontsize=9)


def _legend(ax, title: str | None = None):
    found = ax.legend(frameon=False, fontsize=8, labelcolor=INK, title=title)
    found.get_title().set(color=MUTED, fontsize=8)
