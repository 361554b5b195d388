"""Where the time of a run goes, over all its attempts: `goodput.jsonl`, and what it adds up to.

An attempt is one start of the run's processes. A line says what so many seconds were spent on:

    {"attempt": 1, "what": "step", "seconds": 9.8, "step": 120, "steps": 31, "time": 1.7e9}

`step` is the last one finished, `time` when the line was written (seconds since 1970); of an
attempt all time from its start to its last line is in exactly one line. `steps`, where it is there,
is how many were finished since the line before that had it. Three lines are events of no length:
`attempt` (its time is when the process started), `resume` and `rollback` (to `step`). What lies
between the last line of an attempt and the start of the next is `restart`.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from zayajax.training.lines import Lines, to_stderr

FILE = "goodput.jsonl"
PHASES = ("startup", "compile", "step", "data", "eval", "save", "sample", "other")
FREQUENT = ("step", "data")  # written together, now and then
ATTEMPT, RESUME, ROLLBACK = EVENTS = ("attempt", "resume", "rollback")


class Ledger:
    """Writes a run's ledger: one process of a run does, the others pass `enabled=False`.

    Time is in the innermost open phase. In none it is `startup` until the first is entered,
    `other` afterwards. A disk that is full does not stop the run: see `Lines`.

    Args:
      clock: seconds since 1970.
      every: seconds between lines of steps and data; other phases are written as they end.
      started: when this process did, by `clock`; None asks the system.
      say: where a sentence about a full disk goes.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        enabled: bool = True,
        clock: Callable[[], float] = time.time,
        every: float = 10.0,
        started: float | None = None,
        say: Callable[[str], None] = to_stderr,
    ):
        self._enabled, self._clock, self._every = enabled, clock, every
        if not enabled:
            return
        self._lines = Lines(Path(run_dir) / FILE, say)
        self._now = clock()
        started = min(process_start(self._now) if started is None else started, self._now)
        self._open, self._idle = [], "startup"
        self._spent: dict[str, float] = {}
        self._step = self._steps = 0
        self._written = self._mark = started
        self._attempt = self._start_file()
        self._lines.write(self._text({"what": ATTEMPT, "seconds": 0.0, "time": started}))
        self._charge()
        self._flush()

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Time in here is `what`, but for phases inside it."""
        if what not in PHASES:
            raise ValueError(f"{what!r} is none of {', '.join(PHASES)}")
        if not self._enabled:
            yield
            return
        self._charge()
        self._idle = "other"
        self._open.append(what)
        try:
            yield
        finally:
            if self._enabled:  # not closed in here, by a run that is told to stop
                self._charge()
                self._open.pop()
                if what not in FREQUENT:
                    self._flush()

    def finished(self, step: int) -> None:
        """A training step has ended."""
        if self._enabled:
            self._steps += max(step - self._step, 0)
            self._step = step
            self._charge()
            if self._now - self._written >= self._every:
                self._flush()

    def resumed(self, step: int) -> None:
        """This attempt goes on from `step`, 0 where there was nothing to restore."""
        self._event(RESUME, step)

    def rolled_back(self, step: int) -> None:
        """The run goes on from an earlier `step` than the last one finished."""
        self._event(ROLLBACK, step)

    def close(self) -> None:
        """Writes what is left; nothing counts afterwards."""
        if self._enabled:
            self._charge()
            self._flush()
            self._enabled = False
            self._lines.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _event(self, what: str, step: int):
        if self._enabled:
            self._charge()
            self._flush()  # steps so far belong before it
            self._step = step
            self._lines.write(self._text({"what": what, "seconds": 0.0, "time": self._now}))

    def _charge(self):
        """The time since the last call goes to what is open; a clock set back stands still."""
        self._now = max(self._clock(), self._mark)
        what = self._open[-1] if self._open else self._idle
        self._spent[what] = self._spent.get(what, 0.0) + self._now - self._mark
        self._mark = self._now

    def _flush(self):
        if self._steps:
            self._spent.setdefault("step", 0.0)
        text = ""
        for what, seconds in self._spent.items():
            line = {"what": what, "seconds": seconds, "time": self._now}
            if what == "step":
                line["steps"] = self._steps
            if seconds > 0 or what == "step":
                text += self._text(line)
        self._spent, self._steps, self._written = {}, 0, self._now
        self._lines.write(text)

    def _text(self, line: dict) -> str:
        return json.dumps({"attempt": self._attempt, "step": self._step} | line) + "\n"

    def _start_file(self) -> int:
        """Drops a last line that a kill tore; the number of this attempt."""
        path = self._lines.path
        try:
            raw = path.read_bytes() if path.exists() else b""
            whole = raw[: raw.rfind(b"\n") + 1]
            if len(whole) < len(raw):
                os.truncate(path, len(whole))
        except OSError as error:
            self._lines.complain(error)
            return 1
        return 1 + max((line["attempt"] for line in read(whole)[0]), default=0)


def process_start(now: float) -> float:
    """When this process started, seconds since 1970; `now` where the system does not say.

    From /proc (proc(5), proc_pid_stat(5)): start in clock ticks since the machine did, and when
    that was.
    """
    try:
        # The name of the program, in brackets, may hold anything.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
        return now - max(up - int(fields[19]) / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError):
        return now


def read(raw: bytes) -> tuple[list[dict], int]:
    """(the lines of a ledger, how many others are damaged); a last line that is torn is neither."""
    lines, damaged = [], 0
    *whole, torn = raw.split(b"\n")
    for text in whole + ([torn] if _parse(torn) else []):
        if (line := _parse(text)) is not None:
            lines.append(line)
        elif text.strip():
            damaged += 1
    return lines, damaged


def _parse(text: bytes) -> dict | None:
    def number(line, key, kind=(int, float)):
        value = line[key]
        return isinstance(value, kind) and not isinstance(value, bool) and 0 <= value < 1e15

    try:
        line = json.loads(text)
        fine = (
            line["what"] in PHASES + EVENTS
            and all(number(line, key) for key in ("seconds", "time"))
            and all(number(line, key, int) for key in ("attempt", "step"))
            and number({"steps": 0} | line, "steps", int)
        )
    except (ValueError, KeyError, TypeError):
        return None
    return line if fine else None
