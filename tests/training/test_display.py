"""The display on a terminal, in a log file, and when the run fails."""

import sys
from io import StringIO

import pytest
from rich.console import Console

from zayajax.training.display import PLAIN_EVERY, Progress, duration, load_bars

SHOW, HIDE = "\x1b[?25h", "\x1b[?25l"  # the cursor


def train_line(step, **values):
    return {
        "step": step,
        "kind": "train",
        "loss": 10 / step,
        "tokens": step * 4096,
        "tokens_per_second": 12_345.0,
        "mfu": None,
        "step_seconds": 0.25,
        "learning_rate": 3e-4,
        "grad_norm": 0.83,
        "router_entropy": 0.9,
        "max_expert_load": 1.4,
        "skip_fraction": 0.03,
        "expert_load": [[0.25, 0.75, 0.0], [0.5, 0.25, 0.25]],
    } | values


def eval_line(step):
    return {"step": step, "kind": "eval", "loss": 1.2345, "tokens": step}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def terminal(**options):
    return Console(file=StringIO(), force_terminal=True, width=100, _environ={}, **options)


def log_file():
    return Console(file=StringIO(), force_terminal=False, width=80)


def test_plain_lines_are_rare_and_without_escape_codes(clock):
    console = log_file()
    with Progress(100, console=console, clock=clock) as progress:
        for step in range(1, 101):
            clock.now += 1.0
            progress.update(train_line(step))
            if step == 50:
                progress.update(eval_line(step))
    text = console.file.getvalue()
    lines = text.splitlines()
    assert "\x1b" not in text and text.isascii()
    assert len([x for x in lines if "held-out" in x]) == 1
    assert len(lines) == pytest.approx(100 / PLAIN_EVERY, abs=3)
    assert lines[0].startswith("step 1/100  loss 10.0000  12.3k tokens/s")
    assert lines[-1].startswith("step 100/100") and "left" not in lines[-1]


def test_the_last_step_is_always_shown(clock):
    console = log_file()
    with Progress(3, console=console, clock=clock) as progress:
        for step in (1, 2, 3):
            progress.update(train_line(step))
    assert [x.split()[1] for x in console.file.getvalue().splitlines()] == ["1/3", "3/3"]


def test_a_file_gets_no_codes_even_if_colour_is_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", StringIO())
    with Progress(2) as progress:
        progress.update(train_line(1))
    assert "step 1/2" in sys.stdout.getvalue() and "\x1b" not in sys.stdout.getvalue()


def test_a_terminal_gets_a_panel(clock):
    console = terminal()
    with Progress(12, start_step=4, console=console, clock=clock) as progress:
        assert "4/12" in console.file.getvalue() and "compiles" in console.file.getvalue()
        progress.update(train_line(6, mfu=0.314))
        progress.update(eval_line(6))
    text = console.file.getvalue()
    for part in ("6/12", "1.6667", "1.2345", "12.3k tokens/s", "MFU 31.4%", "0.83", "3.00e-04"):
        assert part in text
    assert "max 1.40 x even" in text and "▂▆" in text
    assert text.count(HIDE) == text.count(SHOW) == 1 and text.index(HIDE) < text.index(SHOW)


def test_an_exception_leaves_the_terminal_sane(clock):
    console = terminal()
    before = sys.stdout, sys.stderr
    with pytest.raises(RuntimeError, match="diverged"):
        with Progress(12, console=console, clock=clock) as progress:
            progress.update(train_line(1))
            raise RuntimeError("diverged")
    assert (sys.stdout, sys.stderr) == before
    assert console.file.getvalue().rstrip().endswith(SHOW)
    assert not console._live_stack
    progress.message("after")
    assert console.file.getvalue().endswith("after\n")


@pytest.mark.parametrize("make", [terminal, log_file])
def test_a_message_is_printed_as_it_is(make, clock):
    console = make()
    with Progress(12, console=console, clock=clock) as progress:
        progress.message("saved [bold]step 3[/bold] [/]")
    assert "saved [bold]step 3[/bold] [/]\n" in console.file.getvalue()


@pytest.mark.parametrize("make", [terminal, log_file])
def test_values_that_are_missing_or_not_finite_do_not_fail(make, clock):
    console = make()
    nan = float("nan")
    with Progress(12, console=console, clock=clock) as progress:
        progress.update(train_line(1, loss=nan, expert_load=[[nan, None, 0.0]], grad_norm=None))
        progress.update({"step": 2, "kind": "train", "loss": None})
        progress.update({"step": 2, "kind": "eval", "loss": nan})
    assert "nan" in console.file.getvalue()


@pytest.mark.parametrize("make", [terminal, log_file])
def test_other_processes_show_nothing(make, clock):
    console = make()
    with Progress(12, enabled=False, console=console, clock=clock) as progress:
        progress.update(train_line(1))
        progress.update(eval_line(1))
        progress.message("hello")
    assert console.file.getvalue() == ""


def test_time_left_leaves_the_compiling_step_out(clock):
    progress = Progress(20, start_step=10, enabled=False, clock=clock)
    clock.now += 300  # compiles
    progress.update(train_line(11))
    assert progress.seconds_left() is None
    for step in (12, 13):
        clock.now += 2
        progress.update(train_line(step))
    assert progress.seconds_left() == pytest.approx(7 * 2)
    clock.now += 1  # it also counts down between two steps
    assert progress.seconds_left() == pytest.approx(7 * 2 - 1)
    progress.update(train_line(20))
    assert progress.seconds_left() == 0


def test_time_left_follows_the_recent_rate(clock):
    progress = Progress(1000, enabled=False, clock=clock)
    for step in range(1, 501):
        clock.now += 10 if step < 300 else 1
        progress.update(train_line(step))
    assert progress.seconds_left() == pytest.approx(500)


def test_bars_show_the_least_even_layer():
    assert load_bars([[0.25, 0.25, 0.5], [0.4, 0.1, 0.5]]) == (1, "▆▂")
    assert load_bars([[0.0, 0.0, 1.0]]) == (0, "  ")
    _, text = load_bars([[1.0] + [0.0] * 255 + [0.0]])
    assert len(text) == 32 and text[0] == "█"
    assert load_bars(None) is None and load_bars([]) is None


def test_durations():
    assert [duration(s) for s in (0, 59.4, 59.6, 189, 7500, 370_800)] == [
        "0s",
        "59s",
        "1m00s",
        "3m09s",
        "2h05m",
        "4d07h",
    ]


@pytest.mark.parametrize("console", [log_file, terminal])
def test_bad_steps_and_going_back_are_said(console, clock):
    console = console()
    with Progress(100, console=console, clock=clock) as progress:
        for step in range(1, 21):
            clock.now += 1.0
            bad = {"bad": "spike", "bad_in_row": step - 18, "skipped": step - 15}
            progress.update(train_line(step, loss=float("nan"), **(bad if step > 18 else {})))
        progress.rolled_back(10)
        assert progress.step == 10 and progress.seconds_left() is None
        clock.now += 1.0
        progress.update(train_line(11))
    text = console.file.getvalue()
    assert "step 19: the loss, nan, is a spike" in text and "(2 in a row, 5 in all)" in text
    assert "going back to step 10" in text
