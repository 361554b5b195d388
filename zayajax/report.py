"""A run's folder as one HTML page: `write_report(run_dir)` writes `report.html` into it.

The page loads nothing from elsewhere. Its plots are inline SVG whose colours are the page's CSS
variables, so that one drawing serves the light and the dark scheme. Reading is one pass in bounded
memory but for a few numbers a step: expert loads are averaged into columns as they come.

Shape letters: L layers, E experts, C = E + 1 classes (the last skips), W columns of the heat map.
"""

import io
import math
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import jinja2
import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from zayajax.errors import UserError
from zayajax.training import metrics

POINTS = 800  # that a line is drawn with; longer series are averaged
COLUMNS = 400  # of the heat map
LOAD_BYTES = 150_000_000  # of metrics; of a larger file the heat map samples the lines
SAMPLE_CHARS = 200_000
WIDE, NARROW = 8.7, 4.2  # inches, in the proportion of the page's columns: one size of letters

# Placeholders in the drawing for CSS variables in the page (the palette there is Okabe and Ito's).
INK, MUTED, GRID, MAIN, OTHER = "#111111", "#777777", "#dddddd", "#0072b2", "#d55e00"
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", MAIN: "main", OTHER: "other"}

SCALARS = (
    "loss",
    "tokens",
    "tokens_per_second",
    "mfu",
    "step_seconds",
    "learning_rate",
    "grad_norm",
    "router_entropy",
    "max_expert_load",
    "skip_fraction",
)


def write_report(run_dir) -> Path:
    """Writes `report.html` from `config.toml`, `metrics.jsonl` and `samples.txt`; returns its path.

    Only `metrics.jsonl` must be there, with at least one line; UserError otherwise.
    """
    run_dir = Path(run_dir)
    path = run_dir / metrics.FILE
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: there is no such run folder")
    if not path.is_file():
        raise UserError(f"{run_dir}: holds no run, for it has no {metrics.FILE}")
    run = Run(metrics.iter_metrics(path, load_every=1 + path.stat().st_size // LOAD_BYTES))
    if not len(run.train["step"]) and not len(run.eval["step"]):
        raise UserError(f"{path}: has no line yet; ask again after the run's first step")
    config_text = _text(run_dir / "config.toml")
    config = _config(config_text)
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    page = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(template)
    html = page.render(
        name=run_dir.resolve().name,
        summary=summary(run, config),
        warnings=warnings(run),
        plots=plots(run, config),
        samples=_text(run_dir / "samples.txt")[:SAMPLE_CHARS],
        config=config_text,
    )
    out = run_dir / "report.html"
    part = out.with_name("report.html.part")
    part.write_text(html, encoding="utf-8")
    os.replace(part, out)
    return out


class Run:
    """The lines of a run as columns: `train[key]` and `eval[key]` are float64, NaN where unknown.

    Of several lines of one step and kind, as a resumed run may have, the last counts.
    """

    def __init__(self, lines: Iterable[dict]):
        rows = {"train": {}, "eval": {}}
        self.load = LoadMap()
        for line in lines:
            if line["kind"] not in rows:
                continue
            values = [math.nan if (v := line.get(k)) is None else float(v) for k in SCALARS]
            rows[line["kind"]][line["step"]] = values
            if line.get("expert_load"):
                self.load.add(line["step"], line["expert_load"])
        self.train, self.eval = (_columns(rows[kind]) for kind in ("train", "eval"))


def _columns(rows: dict[int, list[float]]) -> dict[str, np.ndarray]:
    steps = sorted(rows)
    table = np.array([rows[s] for s in steps], dtype=np.float64).reshape(len(steps), len(SCALARS))
    return {"step": np.array(steps, dtype=np.int64)} | dict(zip(SCALARS, table.T, strict=True))


class LoadMap:
    """Expert loads averaged into at most COLUMNS columns of equally many steps, in one pass.

    When a step falls beyond the last column, columns are merged in pairs.
    """

    def __init__(self):
        self.steps_a_column = 1
        self.sum_WLC = self.count_W = None

    def add(self, step: int, shares_LC):
        shares_LC = np.asarray(shares_LC, dtype=np.float64)
        if self.sum_WLC is None:
            self.sum_WLC = np.zeros((COLUMNS, *shares_LC.shape))
            self.count_W = np.zeros(COLUMNS)
        # A batch without weight, or another model's line, has nothing to say here.
        if shares_LC.shape != self.sum_WLC.shape[1:] or not np.isfinite(shares_LC).all():
            return
        while step // self.steps_a_column >= COLUMNS:
            self.steps_a_column *= 2
            for x in (self.sum_WLC, self.count_W):
                x[: COLUMNS // 2] = x[0::2] + x[1::2]
                x[COLUMNS // 2 :] = 0
        self.sum_WLC[step // self.steps_a_column] += shares_LC
        self.count_W[step // self.steps_a_column] += 1

    def mean(self):
        """The steps of the columns' edges [W+1], and shares [W, L, C]; empty columns repeat the one
        before. None without a load."""
        if self.count_W is None or not self.count_W.any():
            return None
        used = np.flatnonzero(self.count_W)
        first, last = used[0], used[-1]
        column_W = np.arange(first, last + 1)
        source_W = used[np.searchsorted(used, column_W, side="right") - 1]
        mean_WLC = self.sum_WLC[source_W] / self.count_W[source_W][:, None, None]
        return np.arange(first, last + 2) * self.steps_a_column, mean_WLC


MODEL = (
    "{layers} layers, {hidden} wide, {heads} query and {kv_heads} key-value heads, "
    "{experts} experts of {expert_hidden}, vocabulary {vocab}"
)
MESH = "{nodes} node x {gpus} gpu, {layout}, zero {zero}"


def summary(run: Run, config: dict) -> list[tuple[str, str]]:
    """Rows of the table at the head of the page: what, and how much."""
    train, held = run.train, run.eval
    model, mesh, opts = (config.get(k, {}) for k in ("model", "mesh", "train"))
    rows = []
    last = max((int(x["step"][-1]) for x in (train, held) if len(x["step"])), default=0)
    rows.append(("Steps", f"{last:,}" + (f" of {opts['steps']:,}" if "steps" in opts else "")))
    tokens = [np.nanmax(t) for x in (train, held) if np.isfinite(t := x["tokens"]).any()]
    if tokens:
        rows.append(("Tokens", f"{max(tokens):,.0f}"))
    if len(loss := train["loss"]):
        tail = loss[-min(50, max(1, len(loss) // 10)) :]
        over = f"mean of the last {len(tail)} lines" if len(tail) > 1 else "last step"
        rows.append(("Training loss", f"{_loss(np.mean(tail))} ({over})"))
    if len(held["loss"]):
        text = f"{_loss(held['loss'][-1])} (at step {held['step'][-1]:,})"
        rows.append(("Held-out loss", text))
        if len(held["loss"]) > 1 and np.isfinite(held["loss"]).any():
            best = int(np.nanargmin(held["loss"]))
            text = f"{_loss(held['loss'][best])} (at step {held['step'][best]:,})"
            rows.append(("Best held-out loss", text))
    for key, name, show in (
        ("tokens_per_second", "Speed", lambda x: f"{x:,.0f} tokens/s (median)"),
        ("step_seconds", "Step", lambda x: f"{x:.3g} s (median)"),
        ("mfu", "MFU", lambda x: f"{x:.1%} of the peak (median)"),
    ):
        if np.isfinite(train[key]).any():
            rows.append((name, show(np.nanmedian(train[key]))))
    for name, values, text in (("Model", model, MODEL), ("Mesh", mesh, MESH)):
        if values:
            rows.append((name, text.format_map(defaultdict(lambda: "?", values))))
    if "batch" in opts and "sequence" in opts:
        rows.append(("Batch", f"{opts['batch']} sequences of {opts['sequence']} tokens"))
    return rows


def warnings(run: Run) -> list[str]:
    """What a reader must not overlook."""
    found = []
    for kind, x in (("training", run.train), ("held-out", run.eval)):
        bad = x["step"][~np.isfinite(x["loss"])]
        if len(bad):
            found.append(
                f"The {kind} loss is not a finite number at {len(bad):,} of "
                f"{len(x['step']):,} lines, first at step {bad[0]:,}."
            )
    return found


def plots(run: Run, config: dict) -> dict[str, str]:
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
    ):
        if key in known:
            figures[key] = series_plot(run.train, key, label, **options)
    if (mean := run.load.mean()) is not None:
        figures["expert_load"] = load_plot(*mean)
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


def _loss(nats: float) -> str:
    return f"{nats:.4f} nats = {nats / math.log(2):.4f} bits per token"


def _config(text: str) -> dict:
    """Tables of the config. Not `config.load`: a run of another version has a report, too."""
    try:
        return {k: v for k, v in tomllib.loads(text).items() if isinstance(v, dict)}
    except tomllib.TOMLDecodeError:
        return {}


def _text(path: Path) -> str:
    """The file's text, "" without one; control characters, which HTML refuses, are replaced."""
    if not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\ufffd", text)
