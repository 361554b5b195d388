"""What each process of a run says about itself, in a file of its own in a shared folder."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

FOLDER = "heartbeats"  # in the run's folder
ENDED = "ended"  # the phase of a process that has left the loop by itself
NAMED = 8  # ranks in one sentence: of a thousand, the first say enough


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """One process, as it last wrote. Times are seconds since 1970, on the clock of its host."""

    process: int
    host: str
    pid: int
    phase: str
    since: float  # when the phase began
    dispatched: int  # the last step handed to the devices; -1: none yet
    finished: int  # the last step that has ended
    time: float  # when this was written
    beat: int  # writings before this one

    def __str__(self) -> str:
        ago = max(0.0, time.time() - self.time)
        return (
            f"rank {self.process} (host {self.host}, pid {self.pid}): last heard of {ago:.0f} s "
            f"ago, at step {max(self.dispatched, self.finished, 0)}, in {self.phase}"
        )


def interval(processes: int) -> float:
    """Seconds between two writings of one process: at most 64 files a second in all, so that a
    shared file system serves any number of them (an assumption; it is a small load for one)."""
    return max(1.0, processes / 64)


def write(folder: Path, rank: Rank) -> None:
    """Replaces the rank's file: who reads sees the one before or this one, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{rank.process}.new"
    new.write_text(json.dumps(dataclasses.asdict(rank)))
    os.replace(new, _file(folder, rank.process))


def read_rank(folder: Path, process: int) -> Rank | None:
    """None where there is no file, or one that no rank wrote."""
    try:
        return Rank(**json.loads(_file(folder, process).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def read_ranks(folder: Path) -> list[Rank]:
    """All that have ever written there, in order; a file that no rank wrote is passed over."""
    numbers = sorted(int(p.stem) for p in folder.glob("*.json") if p.stem.isdecimal())
    return [rank for n in numbers if (rank := read_rank(folder, n)) is not None]


def forget(folder: Path, process: int) -> None:
    """Deletes what a rank wrote, before it starts anew."""
    with contextlib.suppress(OSError):  # none is there, or the folder is read-only: it stays old
        _file(folder, process).unlink()


def behind(ranks: Iterable[Rank], processes: int, start: float, now: float) -> str:
    """A sentence that names the ranks that hold up the others.

    Those that have been silent for several intervals, or have not written since `start`; where
    there are none, those that have dispatched fewer steps than others.
    """
    heard = {r.process: r for r in ranks if r.time >= start and r.process < processes}
    missing = [p for p in range(processes) if p not in heard]
    limit = 4 * interval(processes)
    silent = [r for r in heard.values() if now - r.time > limit or r.phase == ENDED]
    if missing or silent:
        words = [str(r) for r in silent] + [
            f"rank {p}: not heard of since the start" for p in missing
        ]
        return _listed(words)
    last = min(r.dispatched for r in heard.values())
    slow = [r for r in heard.values() if r.dispatched == last]
    if len(slow) == len(heard):
        return f"no rank is behind: all {processes} are at step {max(last, 0)}"
    return _listed([str(r) for r in slow])


def _listed(words: list[str]) -> str:
    more = len(words) - NAMED
    return "behind: " + "; ".join(words[:NAMED] + ([f"and {more} more"] if more > 0 else []))


def _file(folder: Path, process: int) -> Path:
    return folder / f"{process}.json"
