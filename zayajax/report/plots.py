"""The drawings of a report, as inline SVG.

Shape letters: L layers, E experts, C = E + 1 classes (the last skips), W columns of the heat map.
"""

import io
import math
import re

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from zayajax.report.goodput import Goodput
from zayajax.report.series import SCALARS, Run

POINTS = 800  # that a line is drawn with; longer series are averaged
WIDE, NARROW = 8.7, 4.2  # inches, in the proportion of the page's columns: one size of letters

WASTED = ("lost", "restart")  # kinds of time that a run without failures has none of

# Placeholders in the drawing for CSS variables in the page (the palette there is Okabe and Ito's).
INK, MUTED, GRID, MAIN, OTHER = "#111111", "#777777", "#dddddd", "#0072b2", "#d55e00"
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", MAIN: "main", OTHER: "other"}


def plots(run: Run, config: dict, found: Goodput | None = None) -> dict[str, str]:
    """The plots that the run has data for, as SVG; how to read them is said in the template."""
    known = {key for key in SCALARS if np.isfinite(run.train[key]).any()}
    figures = {}
    if "loss" in known or np.isfinite(run.eval["loss"]).any():
        figures["loss"] = loss_plot(run, config)
    for key, label, options in (
        ("learning_rate", "learning rate", {"raw": False}),
        (
            "grad_norm",
            "norm before clipping",
            {"log": True, "level": config.get("optim", {}).get("clip")},
        ),
        ("tokens_per_second", "tokens per second", {"zero": True}),
        ("max_expert_load", "largest load (1 = even)", {"zero": True, "level": 1}),
        ("exchange_capacity", "room (1 = even)", {"zero": True, "level": 1}),
    ):
        if key in known and not (key == "exchange_capacity" and np.all(run.train[key] == 1)):
            figures[key] = series_plot(run.train, key, label, **options)
    if (mean := run.load.mean()) is not None:
        figures["expert_load"] = load_plot(*mean)
    if found is not None and found.wall:
        figures["goodput"] = goodput_plot(found)
    return {key: to_svg(figure, key.replace("_", " ")) for key, figure in figures.items()}


def loss_plot(run: Run, config: dict) -> Figure:
    figure, ax = _figure(WIDE, 3.8)
    train, held = run.train, run.eval
    _draw(ax, train["step"], train["loss"], label="training")
    ok = np.isfinite(held["loss"])
    if ok.any():
        x, y = held["step"][ok], held["loss"][ok]
        chosen = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).astype(int))
        style = {"color": OTHER, "lw": 1.2, "marker": "o", "ms": 2.5 if len(chosen) > 60 else 5}
        ax.plot(x[chosen], y[chosen], label="held-out", zorder=4, **style)
    values = np.concatenate([train["loss"], held["loss"]])
    values = values[np.isfinite(values)]
    low, high = values.min(), values.max()
    x, mean, *_ = _binned(train["step"], train["loss"])
    if len(x) > 200:  # one spike must not flatten the rest
        high = max([_smooth(mean).max(), *held["loss"][ok]])
    vocab = config.get("model", {}).get("vocab")
    if isinstance(vocab, int) and vocab > 1 and high > 0.6 * math.log(vocab):
        guess = math.log(vocab)
        ax.axhline(guess, color=MUTED, lw=1, ls=":")
        ax.annotate(
            "a uniform guess",
            (1, guess),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            color=MUTED,
        )
        high = max(high, guess)
    pad = 0.06 * (high - low) or 0.1
    ax.set_ylim(low - pad, high + 1.6 * pad)
    ax.set_ylabel("loss (nats per token)")
    bits = ax.secondary_yaxis(
        "right", functions=(lambda y: y / math.log(2), lambda y: y * math.log(2))
    )
    bits.set_ylabel("bits per token", color=INK)
    bits.tick_params(colors=MUTED, labelcolor=INK, length=3)
    bits.spines["right"].set_visible(False)
    _steps_axis(ax)
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(frameon=False, labelcolor=INK, loc="upper right", bbox_to_anchor=(1, 0.92))
    return figure


def series_plot(
    table, key: str, label: str, raw: bool = True, log: bool = False, zero: bool = False, level=None
) -> Figure:
    """One quantity over steps. `level` is a dotted line, `zero` starts the axis at 0, `log` uses a
    logarithmic axis where the values span more than a factor 20."""
    figure, ax = _figure(NARROW, 2.5)
    x, y = table["step"], table[key]
    _draw(ax, x, y, raw=raw)
    if level is not None:
        ax.axhline(level, color=MUTED, lw=1, ls=":")
    good = y[np.isfinite(y)]
    if log and good.min() > 0 and good.max() > 20 * good.min():
        ax.set_yscale("log")
        few = good.max() < 1e3 * good.min()
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        ax.yaxis.set_major_formatter(_short)
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        ax.yaxis.set_major_formatter(EngFormatter(sep="") if good.max() >= 1e4 else _short)
        if zero or not raw:
            top = max(good.max() if len(good) < 100 else np.quantile(good, 0.995), level or 0)
            ax.set_ylim(0, 1.12 * top or 1)
    ax.set_ylabel(label)
    _steps_axis(ax)
    return figure


def goodput_plot(found: Goodput) -> Figure:
    """A bar for each kind of time that there was, the longest on top."""
    spent = sorted((s, what) for what, s in found.seconds.items() if s > 0)
    figure, ax = _figure(WIDE, 0.6 + 0.28 * max(len(spent), 1))
    share = [100 * s / found.wall for s, _ in spent]
    colors = [MAIN if w == "step" else OTHER if w in WASTED else MUTED for _, w in spent]
    bars = ax.barh([what for _, what in spent], share, color=colors, height=0.7)
    ax.bar_label(bars, [f"{x:.1f} %" for x in share], padding=4, color=INK)
    ax.set_xlim(0, 112)  # room for the label of a bar of 100 %
    ax.set_xticks([0, 25, 50, 75, 100])
    ax.set_xlabel("percent of all time")
    ax.grid(False, axis="y")
    return figure


def load_plot(edges_W, share_WLC) -> Figure:
    """Heat map of load relative to even, [L*E, W], above the fraction that skips, [L, W]."""
    W, L, C = share_WLC.shape
    E = C - 1
    experts_WLE, skip_LW = share_WLC[..., :-1], share_WLC[..., -1].T
    total_WL1 = experts_WLE.sum(-1, keepdims=True)
    load_WLE = experts_WLE * E / np.where(total_WL1 > 0, total_WL1, 1)
    rows = load_WLE.reshape(W, L * E).T
    height = float(np.clip(0.075 * L * E, 2.0, 9.0))
    strip = float(np.clip(0.075 * L, 0.4, 1.6))
    figure, (ax, below) = _figure(
        WIDE, height + strip + 0.9, nrows=2, sharex=True, height_ratios=(height, strip)
    )
    top = float(np.clip(np.quantile(rows, 0.998), 2, max(E, 2)))
    extent = (edges_W[0] - 0.5, edges_W[-1] - 0.5)
    image = ax.imshow(
        rows,
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        norm=TwoSlopeNorm(1, 0, top),
        extent=(*extent, L * E, 0),
    )
    for layer in range(1, L):
        ax.axhline(layer * E, color=MUTED, lw=0.8 if L <= 16 else 0.3)
    every = -(-L // 24)
    ax.set_yticks([(i + 0.5) * E for i in range(0, L, every)], [str(i) for i in range(0, L, every)])
    ax.set_ylabel("layer, and its experts")
    above = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(1, top)
    ticks = [0, 0.5, 1, *above[(above > 1) & (above <= top)]]
    bar = figure.colorbar(image, ax=ax, pad=0.015, aspect=max(8, 8 * height), ticks=ticks)
    bar.ax.set_yticklabels([f"{t:g}" for t in ticks])
    bar.set_label("load (1 = even)", color=INK)
    most = float(max(skip_LW.max(), 0.01))
    image = below.imshow(
        skip_LW,
        aspect="auto",
        interpolation="nearest",
        cmap="cividis",
        vmin=0,
        vmax=most,
        extent=(*extent, L, 0),
    )
    ends = sorted({0, L - 1})
    below.set_yticks([i + 0.5 for i in ends], [str(i) for i in ends])
    below.set_ylabel("skip")
    skip = figure.colorbar(image, ax=below, pad=0.015, aspect=max(2, 8 * strip), ticks=[0, most])
    skip.ax.set_yticklabels(["0%", f"{most:.1%}" if most < 0.1 else f"{most:.0%}"])
    for b in (bar, skip):
        b.outline.set_visible(False)
        b.ax.tick_params(colors=MUTED, labelcolor=INK, length=3)
    for a in (ax, below):
        a.grid(False)
        a.spines[:].set_visible(False)
    _steps_axis(below, fit=False)
    return figure


def _figure(width: float, height: float, **grid):
    """A figure in inches without any global state, and its axes in the page's colours."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    axes = figure.subplots(**grid)
    for ax in np.atleast_1d(axes):
        ax.patch.set_alpha(0)
        ax.grid(True, color=GRID, lw=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(which="both", colors=MUTED, labelcolor=INK, length=3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(MUTED)
        ax.xaxis.label.set_color(INK)
        ax.yaxis.label.set_color(INK)
    return figure, axes


def _steps_axis(ax, fit: bool = True):
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    ax.xaxis.set_major_formatter(EngFormatter(sep="") if ax.get_xlim()[1] >= 1e4 else _short)
    if fit:
        ax.margins(x=0.02)


def _short(value, _=None) -> str:
    return f"{value:.6g}"


def _binned(x, y):
    """At most POINTS means of equally many neighbours, with each bin's least and largest value."""
    ok = np.isfinite(y)
    x, y = x[ok].astype(float), y[ok]
    if len(y) <= POINTS:
        return x, y, y, y
    starts = np.unique(np.linspace(0, len(y), POINTS, endpoint=False).astype(int))
    sizes = np.diff([*starts, len(y)])
    mean_x, mean_y = (np.add.reduceat(v, starts) / sizes for v in (x, y))
    return mean_x, mean_y, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)


def _smooth(y):
    """The centred moving average over a 25th of the points."""
    half, i = len(y) // 50, np.arange(len(y))
    # At the start, where a loss is steep, the window shrinks on both sides, or it would be off. At
    # the end, where a loss is flat and its noise would show, only the missing side is cut off.
    half = np.minimum(half, i)
    first, end = i - half, np.minimum(i + half, len(y) - 1) + 1
    total = np.concatenate([[0.0], np.cumsum(y)])
    return (total[end] - total[first]) / (end - first)


def _draw(ax, x, y, label=None, raw=True):
    """The moving average, over the single values, faint, or the range of those of each bin."""
    x, mean, low, high = _binned(x, y)
    if len(x) < 2:
        ax.plot(x, mean, "o", color=MAIN, ms=5, label=label if len(x) else None)
        if len(x):
            ax.set_xlim(x[0] - 1, x[0] + 1)
        return
    if raw and (low < high).any():
        ax.fill_between(x, low, high, color=MAIN, alpha=0.22, lw=0)
    elif raw:
        ax.plot(x, mean, color=MAIN, alpha=0.35, lw=0.8)
    ax.plot(x, _smooth(mean) if raw else mean, color=MAIN, lw=1.6, label=label)


def to_svg(figure: Figure, title: str) -> str:
    """The figure as an `<svg>` element that takes the page's font, width and colours."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        keys = ("Date", "Creator", "Format", "Type")
        figure.savefig(out, format="svg", dpi=144, metadata=dict.fromkeys(keys))
    text = out.getvalue()
    text = text[text.index("<svg") :]
    # Names like "axes_1" would repeat over the page's plots; those that are referred to are hashes.
    text = re.sub(r' id="[A-Za-z][A-Za-z0-9]*(\.[a-z]+)?_\d+"', "", text)
    head = rf'<svg \1 role="img" aria-label="{title}" {NAMESPACES}>'
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', head, text, count=1)
    text = re.sub(
        "|".join(VARIABLES), lambda m: f"var(--{VARIABLES[m[0]]})", text, flags=re.IGNORECASE
    )
    return text


NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
