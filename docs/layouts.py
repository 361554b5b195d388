"""Draws how one layer's data moves in each layout: the SVGs of docs/layouts.md.

    python docs/layouts.py [FOLDER]

Sizes are of ZAYA1-8B in bfloat16 with T tokens a GPU, on two nodes of eight GPUs. Drawings are made
of stages (what each GPU has: the cells filled of the whole) and lanes (what travels between them).

Shape letters: B rows, S sequence, T tokens of a GPU, D embed, H query heads, N key-value heads,
K head width, E experts, P GPUs of a node, M nodes.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

from drawing import (
    BAND,
    EMPTY,
    INK,
    KEYS,
    LINKS,
    MUTED,
    PAPER,
    PARTIAL,
    RAIL,
    TOKENS,
    WEIGHTS,
    canvas,
    rectangle,
    shape,
    to_svg,
    write,
)
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

D, H, N, K, E = 2048, 8, 2, 128, 16
ATTENTION, ROUTER, EXPERT = 5.57e6, 0.66e6, 12.58e6  # parameters of a layer; of one expert
P, M, T = 8, 2, 16384
R = P * M


@dataclasses.dataclass(frozen=True)
class Stage:
    """What each GPU has. `held(node, gpu)`: the (row, column) cells, of `grid`, that it has."""

    title: str
    shape: str
    held: Callable
    colour: str = TOKENS
    grid: tuple[int, int] = (1, R)


@dataclasses.dataclass(frozen=True)
class Lane:
    """What travels to the next stage: over the links of a node, along rails, or not at all."""

    links: tuple[str, ...]  # LINKS, RAIL, one after the other; (): stays on the GPU
    op: str
    size: str = ""
    back: str = ""  # what the backward pass sends


def every(rows: int, columns: int):
    return {(i, j) for i in range(rows) for j in range(columns)}


def size(n: float) -> str:
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if n >= 10**power:
            x = n / 10**power
            return f"{x:.{1 if x < 9.95 else 0}f} {unit}"
    return f"{n:.0f} B"


def zigzag(rank: int, ranks: int):
    return rank, 2 * ranks - 1 - rank


def two_experts(node, gpu):
    return {(0, 2 * gpu), (0, 2 * gpu + 1)}


EXPERTS = Stage("experts", "2 of 16, on each node", two_experts, WEIGHTS, (1, E))
SENT = size(1.25 * T * D * 2)
TO_EXPERTS = Lane((LINKS,), "all-to-all", SENT, "all-to-all, twice")
FROM_EXPERTS = Lane((LINKS,), "all-to-all", SENT, "all-to-all")
FLOAT32 = "reduce-scatter, float32"
AGAIN = "all-gather,\nreduce-scatter"
TAILS = 2 * 2 * ((H + N) * K + N * K // 2) * 2  # two chunks of a rank, two tokens, bfloat16
KV = 2 * N * K * 2  # of one token


def weights():
    """Dense weights on the left, those of the experts on the right; both once a step."""
    dense = 2 * ATTENTION + 4 * ROUTER

    def inner(whole):
        def held(node, gpu):
            rows = range(M) if whole else (node,)
            return {(i, j) for i in rows for j in (2 * gpu, 2 * gpu + 1)}

        return held

    return [
        Stage("dense, stored", "1/16 of D", lambda n, g: {(0, M * g + n)}, WEIGHTS),
        Lane((RAIL,), "all-gather", size(dense / P), FLOAT32),
        Stage("of the rail", "1/8 of D", lambda n, g: {(0, M * g + i) for i in range(M)}, WEIGHTS),
        Lane((LINKS,), "all-gather", size(dense), FLOAT32),
        Stage("dense, used", "whole", lambda n, g: every(1, R), WEIGHTS),
        None,
        Stage("experts, stored", "2 of 16, half of each", inner(False), WEIGHTS, (M, E)),
        Lane((RAIL,), "all-gather", size(2 * EXPERT * E / P), FLOAT32),
        Stage("experts, used", "2 of 16, whole", inner(True), WEIGHTS, (M, E)),
    ]


def pretrain():
    def own(node, gpu):
        return {(0, P * node + gpu)}

    return [
        Stage("tokens", "[B/16, S, D]", own),
        Lane((), "attention"),
        Stage("tokens", "[B/16, S, D]", own),
        TO_EXPERTS,
        EXPERTS,
        FROM_EXPERTS,
        Stage("tokens", "[B/16, S, D]", own),
    ]


def context():
    def own(node, gpu):
        return {(node, j) for j in zigzag(gpu, P)}

    def row(node, gpu):
        return {(node, j) for j in range(2 * P)}

    grid = (M, 2 * P)
    return [
        Stage("tokens", "[B/2, S/8, D]", own, TOKENS, grid),
        Lane((LINKS,), "all-gather\ntails", size(P * TAILS), AGAIN),
        Stage("k, v", "[B/2, S/8, 2, 128]", own, KEYS, grid),
        Lane((LINKS,), "all-gather\nk, v", size(P * T * KV), AGAIN),
        Stage("all k, v", "[B/2, S, 2, 128]", row, KEYS, grid),
        Lane((), "attention"),
        Stage("tokens", "[B/2, S/8, D]", own, TOKENS, grid),
        TO_EXPERTS,
        EXPERTS,
        FROM_EXPERTS,
        Stage("tokens", "[B/2, S/8, D]", own, TOKENS, grid),
    ]


def context_wide():
    def own(node, gpu):
        return {(0, j) for j in zigzag(M * gpu + node, R)}

    def rail(node, gpu):
        return {(0, j) for i in range(M) for j in zigzag(M * gpu + i, R)}

    grid = (1, 2 * R)
    return [
        Stage("tokens", "[B, S/16, D]", own, TOKENS, grid),
        Lane((RAIL, LINKS), "all-gather\ntails", size(R * TAILS), AGAIN),
        Stage("k, v", "[B, S/16, 2, 128]", own, KEYS, grid),
        Lane((RAIL,), "all-gather\nk, v", size(M * T * KV), AGAIN),
        Stage("of the rail", "[B, S/8, 2, 128]", rail, KEYS, grid),
        Lane((LINKS,), "all-gather\nk, v", size(R * T * KV), AGAIN),
        Stage("all k, v", "[B, S, 2, 128]", lambda n, g: every(*grid), KEYS, grid),
        Lane((), "attention"),
        Stage("tokens", "[B, S/16, D]", own, TOKENS, grid),
        TO_EXPERTS,
        EXPERTS,
        FROM_EXPERTS,
        Stage("tokens", "[B, S/16, D]", own, TOKENS, grid),
    ]


def decode():
    def own(node, gpu):
        return {(0, M * gpu + node)}

    def of_node(node, gpu):
        return {(0, M * g + node) for g in range(P)}

    merged = size(H * (K + 1) * 4)
    return [
        Stage("tokens", "[B, 1, D]", lambda n, g: every(1, 1), TOKENS, (1, 1)),
        Lane((), "q, k, v"),
        Stage("own k, v", "[B, S/16, 2, 128]", own, KEYS),
        Lane((), "attention"),
        Stage("out, lse", "[B, 1, 8, 128 + 1]", own, PARTIAL),
        Lane((LINKS,), "merge", merged),
        Stage("of the node", "[B, 1, 8, 128 + 1]", of_node, PARTIAL),
        Lane((RAIL,), "merge", merged),
        Stage("of all keys", "[B, 1, 8, 128 + 1]", lambda n, g: every(1, R), PARTIAL),
        Lane((), "router"),
        EXPERTS,
        Lane((LINKS,), "sum", size(D * 2)),
        Stage("tokens", "[B, 1, D]", lambda n, g: every(1, 1), TOKENS, (1, 1)),
    ]


WIDTH, LEFT, ROW, TOP, BOTTOM, GAP = 11.6, 0.75, 0.2, 0.78, 0.62, 0.28  # inches
CELLS = 0.55  # a stage's part of the width of a stage and a lane


def row_of(node: int, gpu: int) -> float:
    """Middle of a GPU's row."""
    return TOP + node * (P * ROW + GAP) + (gpu + 0.5) * ROW


def flow(parts, note: str) -> Figure:
    """Stages and lanes from left to right; None is a gap as wide as a lane."""
    height = TOP + M * P * ROW + (M - 1) * GAP + BOTTOM
    figure, ax = canvas(height, WIDTH)
    for node in range(M):
        y = row_of(node, 0) - ROW / 2
        box = FancyBboxPatch(
            (0.08, y - 0.05), WIDTH - 0.16, P * ROW + 0.1, "round,pad=0,rounding_size=0.06"
        )
        box.set(facecolor=BAND, edgecolor="none")
        ax.add_patch(box)
        write(ax, 0.2, y + P * ROW / 2, f"node {node}", points=8.5, rotation=90)
        for gpu in range(P):
            write(ax, LEFT - 0.08, row_of(node, gpu), f"gpu {gpu}", MUTED, 7, ha="right")

    stages = (len(parts) + 1) // 2
    pitch = (WIDTH - LEFT - 0.2) / (stages - 1 + CELLS)
    wide = CELLS * pitch
    for i, part in enumerate(parts):
        x = LEFT + (i // 2) * pitch + (i % 2) * wide
        if isinstance(part, Stage):
            draw_stage(ax, part, x, wide)
        elif part is not None:
            draw_lane(ax, part, x, pitch - wide)
    y, backward = height - BOTTOM + 0.22, any(isinstance(p, Lane) and p.back for p in parts)
    if backward:
        write(ax, 0.12, y, "backward:", MUTED, 7.5, ha="left")
    legend(ax, height - 0.17, note)
    return figure


def draw_stage(ax, stage: Stage, x: float, wide: float):
    write(ax, x + wide / 2, 0.2, stage.title, weight="bold")
    write(ax, x + wide / 2, 0.4, stage.shape, MUTED, 7)
    rows, columns = stage.grid
    w, h = wide / columns, 0.68 * ROW / rows
    whole, filled, cuts = [], [], []
    for node in range(M):
        top, bottom = (row_of(node, g) + f * ROW for g, f in ((0, -0.34), (P - 1, 0.34)))
        cuts += [[(x + j * w, top), (x + j * w, bottom)] for j in range(1, columns)]
        for gpu in range(P):
            y, held = row_of(node, gpu) - 0.34 * ROW, stage.held(node, gpu)
            whole.append(rectangle(x, y, wide, h * rows))
            for i, j, n in sorted(runs(held)):
                filled.append(rectangle(x + j * w, y + i * h, n * w, h))
            cuts += [[(x, y + i * h), (x + wide, y + i * h)] for i in range(1, rows)]
    shape(ax, whole, closed=True, facecolor=EMPTY, edgecolor="none")
    shape(ax, filled, closed=True, facecolor=stage.colour, edgecolor="none")
    if cuts:
        shape(ax, cuts, facecolor="none", edgecolor=BAND, linewidth=0.7 if columns <= R else 0.4)


def runs(cells):
    """(row, first column, columns) of the cells that touch."""
    for i, j in cells:
        if (i, j - 1) not in cells:
            yield i, j, next(n for n in range(1, len(cells) + 1) if (i, j + n) not in cells)


def draw_lane(ax, lane: Lane, x: float, wide: float):
    colour = lane.links[0] if len(lane.links) == 1 else INK
    middle, pad = x + wide / 2, 0.04
    write(ax, middle, 0.24, lane.op, colour if lane.links else MUTED, 7.5)
    write(ax, middle, 0.5, lane.size, colour, 7.5)
    bottom = row_of(M - 1, P - 1) + ROW / 2 + 0.22
    write(ax, middle, bottom, lane.back.replace(", ", ",\n"), MUTED, 7)
    gpus = [(node, gpu) for node in range(M) for gpu in range(P)]
    if not lane.links:
        for at in gpus:
            style = {"arrowstyle": "->", "color": MUTED, "lw": 0.6, "shrinkA": 0, "shrinkB": 0}
            y = row_of(*at)
            ax.annotate("", (x + wide - pad, y), (x + pad, y), arrowprops=style)
    part = (wide - 2 * pad) / max(len(lane.links), 1)
    for i, link in enumerate(lane.links):
        start, same = x + pad + i * part, 0 if link == LINKS else 1  # a node, or a rail
        lines = [
            [(start, row_of(*a)), (start + part, row_of(*b))]
            for a in gpus
            for b in gpus
            if a[same] == b[same]
        ]
        shape(ax, lines, facecolor="none", edgecolor=link, lw=0.45 if link == LINKS else 0.8)


def legend(ax, y: float, note: str):
    x = 0.12
    for colour, text in ((LINKS, "links inside a node"), (RAIL, "rails between nodes")):
        ax.plot((x, x + 0.25), (y, y), color=colour, lw=2)
        write(ax, x + 0.32, y, text, points=7.5, ha="left")
        x += 1.65
    write(ax, WIDTH - 0.12, y, note, MUTED, 7.5, ha="right")


def mesh() -> Figure:
    """Nodes as rows, GPUs of the same rank below each other: a rail is a column."""
    figure, ax = canvas(4.1, 8.6)
    left, pitch, tops = 2.1, 0.8, (1.15, 2.05, 3.1)
    for y, name in zip(tops, ("node 0", "node 1", "node M-1"), strict=True):
        box = FancyBboxPatch(
            (left - 0.4, y - 0.5), 7 * pitch + 0.8, 0.72, "round,pad=0,rounding_size=0.08"
        )
        box.set(facecolor=BAND, edgecolor=EMPTY)
        ax.add_patch(box)
        write(ax, left - 0.55, y - 0.14, name, ha="right")
    xs = [left + g * pitch for g in range(P)]
    for g, x in enumerate(xs):
        ax.plot((x, x), (tops[0], 3.5), color=RAIL, lw=1.6, zorder=1)
        write(ax, x, 3.62, f"rail {g}", RAIL, 8)
        write(ax, x, 0.5, f"gpu {g}", MUTED, 8)
    for y in tops:
        curves = []
        for a, b in combinations(range(P), 2):
            height = 0.12 + 0.035 * (b - a)
            curve = [(i / 16, height * math.sin(math.pi * i / 16)) for i in range(17)]
            curves.append([(xs[a] + u * (xs[b] - xs[a]), y - v) for u, v in curve])
        shape(ax, curves, facecolor="none", edgecolor=LINKS, lw=0.6, zorder=2)
        for g, x in enumerate(xs):
            ax.add_patch(Circle((x, y), 0.11, facecolor=PAPER, edgecolor=INK, lw=1, zorder=3))
            write(ax, x, y, str(g), points=7, zorder=4)
    write(ax, left - 0.8, 2.5, "...", MUTED, 11)
    style = {"arrowstyle": "->", "color": INK, "lw": 1}
    ax.annotate("", (xs[-1], 0.25), (xs[0], 0.25), arrowprops=style)
    write(ax, left - 0.2, 0.25, "axis gpu", ha="right", weight="bold")
    ax.annotate("", (0.55, 3.2), (0.55, 0.8), arrowprops=style)
    write(ax, 0.35, 2, "axis node", weight="bold", rotation=90)
    write(ax, 0.12, 3.93, "inside a node: a link between any two GPUs", LINKS, 8, ha="left")
    text = "between nodes: GPU i of each node has its own NIC on rail i"
    write(ax, 8.48, 3.93, text, RAIL, 8, ha="right")
    return figure


def part_node() -> Figure:
    """The links that a group of n of the eight GPUs uses."""
    figure, ax = canvas(3.35, 8.6)
    for i, n in enumerate((2, 4, 8)):
        cx, cy, r = 1.45 + 2.85 * i, 1.4, 1.05
        at = [
            (
                cx + r * math.sin(math.tau * (g + 0.5) / P),
                cy - r * math.cos(math.tau * (g + 0.5) / P),
            )
            for g in range(P)
        ]
        for a, b in combinations(range(P), 2):
            used = max(a, b) < n
            line = {"color": LINKS if used else EMPTY, "lw": 1.8 if used else 0.7}
            ax.plot(*zip(at[a], at[b], strict=True), zorder=2 if used else 1, **line)
        for g, (x, y) in enumerate(at):
            edge = LINKS if g < n else MUTED
            ax.add_patch(Circle((x, y), 0.13, facecolor=PAPER, edgecolor=edge, lw=1.2, zorder=3))
            write(ax, x, y, str(g), INK if g < n else MUTED, 7.5, zorder=4)
        write(ax, cx, 2.8, f"a group of {n}: {n - 1} of 7 links of each GPU", weight="bold")
        write(ax, cx, 3.05, f"{64 * (n - 1)} GB/s each way", LINKS)
    return figure


def drawings() -> dict[str, tuple[str, Figure]]:
    """name: (title, figure)"""
    sizes = f"ZAYA1-8B, bfloat16, {T:,} tokens a GPU"
    return {
        "mesh": ("The mesh: nodes x GPUs", mesh()),
        "part_node": ("Links in use by a group of 2, 4 and 8 of a node's GPUs", part_node()),
        "weights": (
            "Weights, once a step",
            flow(weights(), "bytes of one layer that a GPU then has; master weights are float32"),
        ),
        "pretrain": ("One layer in the layout pretrain", flow(pretrain(), sizes)),
        "context": ("One layer in the layout context", flow(context(), sizes)),
        "context_wide": ("One layer in the layout context-wide", flow(context_wide(), sizes)),
        "decode": (
            "One layer in the layout decode",
            flow(decode(), "ZAYA1-8B; one token of one sequence, any number of keys"),
        ),
    }


def main(folder: Path):
    for name, (title, figure) in drawings().items():
        (folder / f"{name}.svg").write_text(to_svg(figure, title))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "layouts")
