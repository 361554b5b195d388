"""A thread that ends the process when no step has ended for too long, and says who is behind.

It works while the main thread is inside C++, as when it waits for a peer that has stopped, because
XLA gives up the interpreter's lock there. What holds that lock for ever stops the heartbeat too,
and the supervisor sees that.
"""

import contextlib
import faulthandler
import os
import platform
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from zayajax.errors import Exit
from zayajax.training import heartbeats
from zayajax.training.heartbeats import Rank, read_ranks
from zayajax.training.interrupts import warn, within

__all__ = ["Watchdog", "read_ranks"]

STEP, START = "step", "start"
RECENT = 32  # step times of which the median is taken
KNOWN = 3  # step times before the median says anything: the first steps also warm up
TIMES = 10  # a step may take this many medians more
REPORT = 10.0  # seconds in which a report is written, or left: its folder may be what hangs


class Watchdog:
    """Watches the main thread by what it says, and writes what it is at to `folder`.

    In the phase "step", once three steps have ended, a step may take `stall` seconds more than ten
    times the median of the last 32, counted from the end of the one before or the start of the
    phase. Anything else may take `patience`. After that the stacks of all threads go to standard
    error and `folder/PROCESS.stacks.txt`, a sentence names the ranks that are behind, and the
    process leaves with `Exit.STALLED`.

    Time is counted in ticks of the watching thread, each of a limited length: a process that was
    stopped, or a laptop that slept, is not late when it wakes.

    Args:
      folder: shared by all processes of the run.
      process, processes: which of how many this is.
      stall, patience: seconds. `stall` = 0: heartbeats only.
      host: what others call this machine.
      say: takes a line of text.
    """

    def __init__(
        self,
        folder: str | Path,
        process: int,
        processes: int,
        *,
        stall: float,
        patience: float,
        host: str | None = None,
        say: Callable[[str], object] = warn,
    ):
        self._folder, self._process, self._processes = Path(folder), process, processes
        self._stall, self._patience, self._say = stall, patience, say
        self._host = host or platform.node() or "this host"
        self._dispatched = self._finished = -1
        self._times: deque[float] = deque(maxlen=RECENT)
        self._ended = threading.Event()
        self._told = False
        self._start = time.time()
        self._enter([START])

    def __enter__(self):
        # Two threads: a file system that hangs must not keep the one that judges.
        work = [self._beat, self._judge] if self._stall else [self._beat]
        self._threads = [threading.Thread(target=f, name=f.__name__, daemon=True) for f in work]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._enter([heartbeats.ENDED])
        self._ended.set()
        for thread in self._threads:
            thread.join(REPORT)

    @contextlib.contextmanager
    def phase(self, name: str):
        """What the main thread is at. Of nested phases the inner one counts until it ends; then
        the outer one starts anew."""
        outer = self._phases
        self._enter([*outer, name])
        try:
            yield
        finally:
            self._enter(outer)

    def dispatched(self, step: int) -> None:
        """This step was handed to the devices."""
        self._dispatched = step

    def finished(self, step: int) -> None:
        """This step has ended."""
        now = time.monotonic()
        if self._phases[-1] == STEP:
            self._times.append(now - self._mark)
        self._finished, self._mark = step, now

    def _enter(self, phases: list[str]):
        self._phases, self._since, self._mark = phases, time.time(), time.monotonic()

    def _limit(self) -> float:
        times = list(self._times)
        if self._phases[-1] != STEP or len(times) < KNOWN:
            return self._patience
        return self._stall + TIMES * statistics.median(times)

    def _judge(self):
        tick = min(1.0, min(self._stall, self._patience) / 10)
        mark, quiet, before = None, 0.0, time.monotonic()
        while not self._ended.wait(tick):
            now = time.monotonic()
            # Three ticks: a busy machine may be late, and more than that was no time to work in.
            quiet, before = quiet + min(now - before, 3 * tick), now
            if mark != (mark := self._mark):
                quiet = min(now - mark, tick)
            elif quiet > (limit := self._limit()) and not self._ended.is_set():
                self._fire(limit)

    def _fire(self, limit: float):
        """Ends the process, whatever the report meets."""
        try:
            within(REPORT, lambda: self._report(limit))
        finally:
            os._exit(Exit.STALLED)

    def _report(self, limit: float):
        # Written to memory first: it holds the interpreter's lock, and a pipe may be full.
        with open(os.memfd_create("stacks"), "w+b") as memory:
            faulthandler.dump_traceback(memory)
            memory.seek(0)
            stacks = memory.read()
        phase = self._phases[-1]
        what = (
            f"no step has ended for {limit:.3g} s" if phase == STEP else f"longer than {limit:g} s"
        )
        text = f"rank {self._process}: stalled in {phase}: {what} (last finished: {self._finished})"
        self._say(text)
        sys.stdout.flush()
        os.write(2, stacks)

        ranks = [r for r in read_ranks(self._folder) if r.process != self._process]
        ranks.append(self._rank(0))  # as it is now; its file may be from before
        self._say(heartbeats.behind(ranks, self._processes, self._start, time.time()))
        stacks = f"{text}\n".encode() + stacks
        (self._folder / f"{self._process}.stacks.txt").write_bytes(stacks)

    def _beat(self):
        beat, pause = 0, heartbeats.interval(self._processes)
        while True:
            ended = self._ended.is_set()
            try:
                heartbeats.write(self._folder, self._rank(beat))
            except OSError as error:
                if not self._told:
                    self._told = True
                    self._say(f"{self._folder}: no heartbeats ({error.strerror}); going on")
            if ended:
                return
            beat += 1
            self._ended.wait(pause)

    def _rank(self, beat: int) -> Rank:
        return Rank(
            process=self._process,
            host=self._host,
            pid=os.getpid(),
            phase=self._phases[-1],
            since=self._since,
            dispatched=self._dispatched,
            finished=self._finished,
            time=time.time(),
            beat=beat,
        )
