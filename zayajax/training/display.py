"""What a person sees while a run trains: a live panel on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_EVERY = 5.0  # seconds between plain lines
RECENT = 64  # updates that the rate is measured over
BARS = " ▁▂▃▄▅▆▇█"


class Progress:
    """A context manager that shows the lines of `metrics.jsonl` as they come.

    `steps` is where the run stops, `start_step` where it started or resumed. On a terminal this is
    a panel that stays in place; where standard output is a file or a pipe it is plain text without
    escape codes: a line every few seconds, at each evaluation and at the last step. With
    `enabled=False` (every process but 0) nothing is shown. The terminal is given back as it was,
    also when an exception passes; `message` then and before prints as plain `print` does.
    """

    def __init__(
        self,
        steps: int,
        start_step: int = 0,
        enabled: bool = True,
        console: Console | None = None,
        *,
        clock=time.monotonic,
    ):
        if console is None:
            # A FORCE_COLOR in the environment must not put escape codes into a log file.
            console = Console(force_terminal=None if sys.stdout.isatty() else False)
        self.steps, self.step, self.enabled = steps, start_step, enabled
        self._console, self._clock = console, clock
        self._train, self._eval = {}, {}
        self._skipped = 0  # bad steps so far, as far as lines said
        self._recent = deque(maxlen=RECENT)  # (time, step), without the step that compiles
        self._started = clock()
        self._printed = -math.inf
        self._live = None

    def __enter__(self):
        self._started = self._clock()
        console = self._console
        usable = console.is_terminal and console.is_interactive and not console.is_dumb_terminal
        if self.enabled and usable:
            self._live = Live(get_renderable=self._panel, console=console, refresh_per_second=4)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_):
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def update(self, line: Mapping):
        """Takes a line as `MetricsLog.write` does, of kind `train` or `eval`."""
        if line.get("kind") == "eval":
            self._eval = dict(line)
        else:
            self._train, self.step = dict(line), line["step"]
            self._recent.append((self._clock(), self.step))
        if line.get("bad"):
            self._skipped = line["skipped"]
            self.message(bad_step(line))
        if self.enabled and self._live is None:
            self._plain(line)

    def rolled_back(self, step: int):
        """The run goes on from a checkpoint that is older than the last line."""
        self.message(f"step {self.step}: too many bad steps in a row; going back to step {step}")
        self.step = step
        self._recent.clear()

    def message(self, text: str):
        """Prints a line, above the panel where there is one."""
        if not self.enabled:
            return
        if self._live is None:
            self._print(text)
        else:
            self._console.print(Text(str(text)))  # as it is: "[...]" is no markup here

    def seconds_left(self) -> float | None:
        """From the rate of the last updates, evaluations and saves included; None while unknown."""
        if self.step >= self.steps:
            return 0.0
        if len(self._recent) < 2:
            return None
        (t0, s0), (t1, s1) = self._recent[0], self._recent[-1]
        if s1 <= s0:
            return None
        return max((t1 - t0) / (s1 - s0) * (self.steps - s1) - (self._clock() - t1), 0.0)

    def _plain(self, line: Mapping):
        if line.get("kind") == "eval":
            self._print(f"step {line['step']}/{self.steps}  held-out loss {_number(line, 'loss')}")
            return
        now = self._clock()
        if now - self._printed < PLAIN_EVERY and self.step < self.steps:
            return
        self._printed = now
        parts = [
            f"step {self.step}/{self.steps}",
            f"loss {_number(line, 'loss')}",
            f"{_count(line.get('tokens_per_second'))} tokens/s",
            f"gradient {_number(line, 'grad_norm', '.2f')}",
            f"rate {_number(line, 'learning_rate', '.2e')}",
            f"max load {_number(line, 'max_expert_load', '.2f')}",
            f"skip {_percent(line.get('skip_fraction'))}",
        ]
        if line.get("mfu") is not None:
            parts.insert(3, f"MFU {_percent(line['mfu'])}")
        if (left := self.seconds_left()) is not None and self.step < self.steps:
            parts.append(f"{duration(left)} left")
        self._print("  ".join(parts))

    def _print(self, text: str):
        # Not through rich, which would fold a log's lines at 80 columns.
        print(text, file=self._console.file, flush=True)

    def _panel(self):
        line = self._train
        top = Table.grid(padding=(0, 2), expand=True)
        top.add_column(ratio=1)
        for _ in range(3):
            top.add_column(justify="right", no_wrap=True)
        part = self.step / max(self.steps, 1)
        left = self.seconds_left()
        top.add_row(
            ProgressBar(total=max(self.steps, 1), completed=self.step),
            f"{self.step}/{self.steps}",
            f"{part:.0%}",
            f"{duration(left)} left" if left and self.step < self.steps else "",
        )
        if not line:
            waited = duration(self._clock() - self._started)
            return _framed(Group(top, Text(f"the first step compiles: {waited}", style="dim")))

        held_out = Text(_number(self._eval, "loss"))
        if self._eval:
            held_out.append(f"  at step {self._eval['step']}", style="dim")
        speed = f"{_count(line.get('tokens_per_second'))} tokens/s"
        if line.get("mfu") is not None:
            speed += f", MFU {_percent(line['mfu'])}"
        body = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None, 1):
            body.add_column(ratio=ratio, style=None if ratio else "dim", no_wrap=True)
        body.add_row("loss", Text(_number(line, "loss"), style="bold"), "held-out", held_out)
        body.add_row("speed", speed, "step", f"{_number(line, 'step_seconds', '.3g')} s")
        if self._skipped:
            body.add_row("bad steps", f"{self._skipped} changed nothing", "", "")
        gradient, rate = _number(line, "grad_norm", ".3g"), _number(line, "learning_rate", ".2e")
        body.add_row("gradient", gradient, "rate", rate)
        load = f"max {_number(line, 'max_expert_load', '.2f')} x even"
        body.add_row("experts", load, "skip", _percent(line.get("skip_fraction")))
        if not self._console.options.ascii_only and (bars := load_bars(line.get("expert_load"))):
            layer, text = bars
            # The top of the scale is twice an expert's even share.
            body.add_row("load", Text(text, style="cyan"), "", f"layer {layer}, the least even")
        return _framed(Group(top, body))


def bad_step(line: Mapping) -> str:
    """What is said of a step that changed nothing (`guard.line`)."""
    what = {"spike": "is a spike"}.get(line["bad"], "or its gradient is not finite")
    return (
        f"step {line['step']}: the loss, {_number(line, 'loss')}, {what}; nothing was changed "
        f"({line['bad_in_row']} in a row, {line['skipped']} in all)"
    )


def _framed(body):
    return Panel(body, title="zayajax", title_align="left", border_style="dim", padding=(0, 1))


def load_bars(expert_load, width: int = 32) -> tuple[int, str] | None:
    """The layer with the largest expert, and a bar for each of its experts: half height is even.

    `expert_load` is `[L, E+1]` shares, of which the last, the skip class, is left out. Of more than
    `width` experts, neighbours share a bar, which shows the largest.
    """
    layers = []
    for shares in expert_load or ():
        experts = [s if s is not None and math.isfinite(s) else 0.0 for s in shares[:-1]]
        total = sum(experts)
        layers.append([s * len(experts) / total if total else 0.0 for s in experts])
    if not layers or not layers[0]:
        return None
    worst = max(range(len(layers)), key=lambda i: max(layers[i]))
    load = layers[worst]
    group = -(-len(load) // width)
    load = [max(load[i : i + group]) for i in range(0, len(load), group)]
    top = len(BARS) - 1
    return worst, "".join(BARS[min(round(x * top / 2), top)] for x in load)


def duration(seconds: float) -> str:
    """`9s`, `3m09s`, `2h05m`, `4d07h`."""
    s = round(seconds)
    for big, small, unit, rest in (
        (86400, 3600, "d", "h"),
        (3600, 60, "h", "m"),
        (60, 1, "m", "s"),
    ):
        if s >= big:
            return f"{s // big}{unit}{s % big // small:02d}{rest}"
    return f"{s}s"


def _number(line: Mapping, key: str, spec: str = ".4f") -> str:
    value = line.get(key)
    return "-" if value is None else format(float(value), spec)


def _percent(value) -> str:
    return "-" if value is None else f"{float(value):.1%}"


def _count(value) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return (
                f"{value / size:.3g}{unit}" if value < 1000 * size else f"{value / size:.0f}{unit}"
            )
    return f"{value:.3g}"
