"""What is kept of an attempt that failed: one text file a person reads first."""

import datetime
import time
from collections.abc import Iterable
from pathlib import Path

from zayajax.launch.workers import Worker, as_words
from zayajax.training.heartbeats import Rank

FOLDER = "crashes"  # in the run's folder
LINES = 50  # of each process


def last_heard(beat: Rank) -> str:
    step = max(beat.dispatched, beat.finished, 0)
    return f"last heard of {_clock(beat.time)}, at step {step}, in {beat.phase}"


def write(path: Path, attempt: int, what: str, workers: list[Worker], ranks: Iterable[Rank]):
    """When, what, how each process ended, and the last lines of each.

    `ranks` are the heartbeats of all processes of the run; `workers` are those of this node.
    """
    beats = {r.process: r for r in ranks}
    own = {w.pid for w in workers}
    lines = [f"attempt {attempt}, ended {_clock(time.time())}", f"{what}.", ""]
    for worker in workers:
        beat = beats.get(worker.rank)
        heard = last_heard(beat) if beat and beat.pid in own else "never heard of"
        lines.append(f"rank {worker.rank} (pid {worker.pid}) {as_words(worker.code)}; {heard}")
    here = {w.rank for w in workers}
    lines += [
        f"rank {r.process} (host {r.host}) {last_heard(r)}"
        for r in beats.values()
        if r.process not in here
    ]
    for worker in workers:
        last = worker.last_lines(LINES)
        lines += ["", f"--- rank {worker.rank}, its last {len(last)} lines", *last]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _clock(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
