"""A run's folder as one HTML page that loads nothing from elsewhere.

Its plots are inline SVG whose colours are the page's CSS variables, so that one drawing serves the
light and the dark scheme.
"""

import math
import os
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import jinja2
import numpy as np

from zayajax.errors import UserError
from zayajax.report.goodput import goodput
from zayajax.report.plots import plots
from zayajax.report.series import Run
from zayajax.training import ledger, metrics

LOAD_BYTES = 150_000_000  # of metrics; of a larger file the heat map samples the lines
SAMPLE_CHARS = 200_000


def write_report(run_dir) -> Path:
    """Writes `report.html` from a run's metrics, config, samples and ledger; returns its path.

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
    spent = goodput(run_dir) if (run_dir / ledger.FILE).is_file() else None
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    page = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(template)
    html = page.render(
        name=run_dir.resolve().name,
        summary=summary(run, config),
        warnings=warnings(run),
        plots=plots(run, config, spent),
        goodput=spent,
        samples=_text(run_dir / "samples.txt")[:SAMPLE_CHARS],
        config=config_text,
    )
    out = run_dir / "report.html"
    part = out.with_name("report.html.part")
    part.write_text(html, encoding="utf-8")
    os.replace(part, out)
    return out


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
