"""What a run's ledger adds up to: seconds by kind, over all attempts, and how many were useful."""

import dataclasses
from pathlib import Path

from zayajax.errors import UserError
from zayajax.tables import Column, Table
from zayajax.training import ledger
from zayajax.training.display import duration

# All kinds of time, in the order of the table, and what they are.
KINDS = {
    "step": "training steps that count",
    "lost": "training steps that were done again after a failure, or gone back over",
    "restart": "between the last sign of an attempt and the start of the next",
    "startup": "from the start of the process to its first work",
    "compile": "the first step, which compiles",
    "data": "waiting for a batch",
    "eval": "evaluation on held-out text",
    "save": "blocked by a checkpoint",
    "sample": "writing samples",
    "other": "anything else",
}


@dataclasses.dataclass(frozen=True, repr=False)
class Goodput:
    """`print` it, or show it in a notebook. All of `wall` is in exactly one of `seconds`."""

    seconds: dict[str, float]  # by kind, all of KINDS
    attempts: int
    steps_lost: int  # that were finished, and then done again or gone back over
    rollbacks: int
    damaged: int  # lines that could not be read; their time is in "other"

    @property
    def wall(self) -> float:
        """Seconds from the start of the first process to the last line."""
        return sum(self.seconds.values())

    @property
    def percent(self) -> float:
        """Useful step seconds of the wall time; 0 of none."""
        return 100 * self.seconds["step"] / self.wall if self.wall else 0.0

    @property
    def sentence(self) -> str:
        def times(n: int, what: str) -> str:
            return f"{n:,} {what}{'' if n == 1 else 's'}"

        said = (
            f"Goodput {self.percent:.1f} %: of {_time(self.wall)} in "
            f"{times(self.attempts, 'attempt')}, {_time(self.seconds['step'])} were training "
            "steps that count"
        )
        if self.steps_lost:
            said += f"; {times(self.steps_lost, 'step')} were lost"
        if self.rollbacks:
            said += f"; {times(self.rollbacks, 'time')} the run went back to a checkpoint"
        if self.damaged:
            said += f"; {times(self.damaged, 'line')} of {ledger.FILE} could not be read"
        return said + "."

    @property
    def table(self) -> Table:
        """A row for each kind that took any time."""
        wall = self.wall or 1.0
        rows = [
            {"what": what, "seconds": s, "share": s / wall, "meaning": KINDS[what]}
            for what, s in self.seconds.items()
            if s
        ]
        columns = (
            Column("what", "what", left=True),
            Column("seconds", "time", _time),
            Column("share", "share", "{:.1%}".format),
            Column("meaning", "which is", left=True),
        )
        return Table("Where the time went", columns, rows, [self.sentence])

    def to_json(self) -> dict:
        counts = ("attempts", "steps_lost", "rollbacks", "damaged", "wall", "percent")
        return {"seconds": self.seconds, **{name: getattr(self, name) for name in counts}}

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def goodput(run_dir: str | Path) -> Goodput:
    """From a run's `goodput.jsonl`; UserError where there is none."""
    path = Path(run_dir) / ledger.FILE
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return add_up(*ledger.read(raw))


def add_up(lines: list[dict], damaged: int = 0) -> Goodput:
    """Of `ledger.read`."""
    seconds, useful = dict.fromkeys(KINDS, 0.0), _Useful()
    attempts: dict[int, list[dict]] = {}
    for line in lines:
        attempts.setdefault(line["attempt"], []).append(line)
        if line["what"] in (ledger.RESUME, ledger.ROLLBACK):
            useful.back_to(line["step"], broken_off=True)
        elif line["what"] == "step":
            steps = line.get("steps", 0)
            useful.back_to(line["step"] - steps)  # where the line that said so is damaged
            useful.add(line["step"], steps, line["seconds"])
        elif line["what"] in seconds:
            seconds[line["what"]] += line["seconds"]
    seconds["step"], seconds["lost"] = useful.seconds, useful.lost
    last = None
    for attempt in attempts.values():
        begin = min(line["time"] - line["seconds"] for line in attempt)
        end = max(line["time"] for line in attempt)
        # What lines that are missing would have said.
        seconds["other"] += max(end - begin - sum(line["seconds"] for line in attempt), 0.0)
        if last is not None:
            seconds["restart"] += max(begin - last, 0.0)  # clocks of two hosts may differ
        last = end
    rollbacks = sum(line["what"] == ledger.ROLLBACK for line in lines)
    return Goodput(seconds, len(attempts), useful.steps_lost, rollbacks, damaged)


class _Useful:
    """Step seconds that count so far, and those that were lost."""

    def __init__(self):
        self._spans: list[tuple[int, int, float]] = []  # after this step, to this one, seconds
        self.lost, self.steps_lost = 0.0, 0

    @property
    def seconds(self) -> float:
        return sum(s for *_, s in self._spans)

    def add(self, step: int, steps: int, seconds: float):
        self._spans.append((step - steps, step, seconds))

    def back_to(self, step: int, *, broken_off: bool = False):
        """All steps after this one will be done again; a line's seconds are shared out evenly.
        `broken_off`: so will what was spent on a step that was never finished."""
        while self._spans:
            start, end, seconds = self._spans[-1]
            if end < step or (end == step and not (broken_off and start == end)):
                return
            self._spans.pop()
            kept = (step - start) / (end - start) if start < step else 0.0
            self.lost += seconds * (1 - kept)
            self.steps_lost += end - max(start, step)
            if kept:
                self._spans.append((start, step, seconds * kept))


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else duration(seconds)
