"""One node's share of a run: its processes, started again from the last complete checkpoint when
one of them dies or hangs. What starts nodes again is the cluster's engine.
"""

import dataclasses
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from zayajax.errors import Exit, UserError
from zayajax.launch import crashes
from zayajax.launch.workers import Terminal, Worker, Workers, as_words
from zayajax.training import heartbeats
from zayajax.training.interrupts import KEYBOARD

CHECKPOINTS = "checkpoints"  # in the run's folder; a complete one is a folder named by its step
LOGS = "logs"
WORKER = (sys.executable, "-m", "zayajax")
TICK = 0.5  # seconds between looks at the processes; the end of one is noticed at once
DYING = 5.0  # seconds from SIGTERM to SIGKILL once a process has failed: nothing is saved then
SLACK = 15.0  # seconds beyond the grace in which processes end by themselves
LONGEST = 60.0  # seconds of the longest pause between two attempts
# Started again, a user's mistake is still one, and a broken device computes on.
FINAL = (Exit.DONE, Exit.MISTAKE, Exit.SUSPECT)
FUTILE = 3  # attempts that end with Python's own status before a rank was heard of: a bug
BEATS = 3  # heartbeats that a rank may miss
BLOCK = 4096  # bytes: of a usual file system, and more than a heartbeat
AS_ASKED = {Exit.DONE, Exit.STOPPED, KEYBOARD, -signal.SIGTERM}  # how processes end after SIGTERM
# Of the processes' environment: set here or not at all, whatever this process was started with.
OURS = ("ZAYAJAX_COORDINATOR", "ZAYAJAX_PROCESSES", "ZAYAJAX_PROCESS", "ZAYAJAX_NODES")
OURS += ("LOCAL_RANK", ATTEMPTED := "ZAYAJAX_ATTEMPT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What one node runs. Times are in seconds.

    Args:
      arguments: of `zayajax`: "train", a config, and so on.
      run_dir: where that run writes.
      processes: on this node, the same number on each.
      gpus: of this node, split evenly among its processes.
      node, nodes: which of how many this is.
      coordinator: HOST:PORT of process 0; None on one node: a free port, another each time.
      restarts: in a row without a new checkpoint between them.
      hang: a rank that has not been heard of for so long hangs; 0: none does.
      start: until a rank is first heard of.
      grace: after SIGTERM, until all is saved.
      settle: for the others to end by themselves once one process has failed.
      pause: before the first restart, up to twice that; doubled each time, at most a minute.
      worker: the command before `arguments`.
    """

    arguments: tuple[str, ...]
    run_dir: Path
    processes: int = 1
    gpus: int = 1
    node: int = 0
    nodes: int = 1
    coordinator: str | None = None
    restarts: int = 10
    hang: float = 60.0
    start: float = 420.0
    grace: float = 300.0
    settle: float = 10.0
    pause: float = 1.0
    worker: tuple[str, ...] = WORKER

    def __post_init__(self):
        for name in ("processes", "gpus", "nodes"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"--{name}: must be positive, and is {value}")
        for name in ("restarts", "hang"):
            if not (value := getattr(self, name)) >= 0:
                raise UserError(f"--{name}: must not be negative, and is {value}")
        if self.gpus % self.processes:
            raise UserError(
                f"--gpus {self.gpus}: does not divide over {self.processes} processes (--processes)"
            )
        if not 0 <= self.node < self.nodes:
            raise UserError(
                f"--node {self.node}: nodes are numbered 0 .. {self.nodes - 1} (--nodes)"
            )
        if self.nodes > 1 and not self.coordinator:
            raise UserError(
                f"--nodes {self.nodes}: name the host and a port of node 0 with --coordinator "
                "HOST:PORT, the same on all nodes"
            )
        least = BEATS * heartbeats.interval(self.total)
        if 0 < self.hang < least:
            raise UserError(
                f"--hang {self.hang:g}: each of {self.total} processes is heard of every "
                f"{least / BEATS:g} s; use at least {least:g}, or 0 for never"
            )

    @property
    def total(self) -> int:
        return self.processes * self.nodes

    @property
    def ranks(self) -> range:
        """Of this node's processes."""
        return range(self.node * self.processes, (self.node + 1) * self.processes)


def supervise(job: Job, environ: Mapping[str, str] = os.environ) -> int:
    """Runs a job to its end, with restarts; the exit status for the command.

    0 once all processes ended with 0; 2 after a user's mistake, 143 after SIGTERM and 130 after
    Ctrl-C, none of which is restarted; else how the process ended that failed first in the last
    attempt. Only on the main thread of a process without others: it forks and takes the signals.
    """
    with _Signals() as signals:
        return _Supervisor(job, environ, signals).run()


class _Signals:
    """Those that ask for the end of the job, kept until they are looked at."""

    def __init__(self):
        self.asked: int | None = None
        self.again = False

    def __enter__(self):
        self.wake, self._write = os.pipe()
        for fd in (self.wake, self._write):
            os.set_blocking(fd, False)
        taken = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
            taken -= {signal.SIGHUP}
        self._before = {s: signal.signal(s, self._ask) for s in taken}
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.wake)
        os.close(self._write)

    def _ask(self, number, frame):
        self.again = self.again or number == self.asked == signal.SIGINT
        self.asked = self.asked or number

    @property
    def status(self) -> int:
        return KEYBOARD if self.asked == signal.SIGINT else Exit.STOPPED

    def sleep(self, seconds: float):
        """Until a signal asks for the end, at most so long."""
        end = time.monotonic() + seconds
        while self.asked is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))


class _Supervisor:
    def __init__(self, job: Job, environ, signals: _Signals):
        self.job, self.environ, self.signals = job, environ, signals
        self.beats = job.run_dir / heartbeats.FOLDER
        self.terminal, self.errors = Terminal(1), Terminal(2)
        self.number = 0

    def say(self, text: str):
        self.errors.put(f"zayajax launch: {text}\n".encode())

    def run(self) -> int:
        job, arguments = self.job, self.job.arguments
        # Of a run that --fresh deletes: no progress of this one, and not to be resumed.
        old = complete(job.run_dir) if "--fresh" in arguments else {}
        best, left, tries, futile = newest(job.run_dir, old), job.restarts, 0, 0
        while True:
            status, what = self.attempt(arguments)
            futile = 0 if self.began else futile + 1
            if status == Exit.SUSPECT:
                self.say(what)
            if status in FINAL or self.signals.asked:
                return self.end(status)
            if (now := newest(job.run_dir, old)) > best:
                best, left, tries = now, job.restarts, 0
            if status == 1 and futile == FUTILE:
                self.say(f"{what}; {FUTILE} attempts in a row ended before they began")
                return self.end(status)
            if not left:
                last = f"; that was the last of {job.restarts} restarts without a new checkpoint"
                self.say(what + (last if job.restarts else ""))
                return self.end(status)
            left, tries = left - 1, tries + 1
            pause = min(LONGEST, job.pause * 2.0 ** min(tries, 32)) * random.uniform(0.5, 1)
            self.say(f"{what}; again in {pause:.1f} s, {left} restarts left")
            self.signals.sleep(pause)
            if self.signals.asked:
                return self.end(self.signals.status)
            arguments = again(arguments, not old.keys() & complete(job.run_dir).keys())

    def end(self, status: int) -> int:
        self.terminal.flush(2.0)  # who reads may be slow, or have stopped
        self.errors.flush(2.0)
        return status

    def attempt(self, arguments: tuple[str, ...]) -> tuple[int, str]:
        """(the exit status that it comes to, what happened in a sentence)."""
        self.number = next_attempt(self.job.run_dir / LOGS, self.job.ranks[0], self.number)
        for rank in self.job.ranks:
            heartbeats.forget(self.beats, rank)
        logs = self.job.run_dir / LOGS / str(self.number)
        with Workers(self.started(arguments), logs, self.terminal, self.signals.wake) as workers:
            failure = self.watch(workers)
            workers.drain()
            beats = ((w, heartbeats.read_rank(self.beats, w.rank)) for w in workers.all)
            self.began = any(beat and beat.pid == w.pid for w, beat in beats)
            return self.judge(workers, failure)

    def started(self, arguments):
        """Rank, command and environment of each process."""
        job, common = self.job, {k: v for k, v in self.environ.items() if k not in OURS}
        common.setdefault("PYTHONUNBUFFERED", "1")  # output comes as it is made
        common.setdefault("PYTHONFAULTHANDLER", "1")  # a segmentation fault says where
        coordinator = job.coordinator or f"127.0.0.1:{_free_port()}"
        for local, rank in enumerate(job.ranks):
            own = common
            if job.total > 1:
                values = coordinator, job.total, rank, job.nodes, local, self.number
                own = common | dict(zip(OURS, map(str, values), strict=True))
            yield rank, [*job.worker, *arguments], own

    def watch(self, workers: Workers) -> "_Failure | None":
        """Until all have ended, by themselves or not. The failure that came first, if any."""
        job, failure, stopping = self.job, None, False
        hearing = _Hearing(job, self.beats, self.say)
        plan: list[tuple[float, str]] = []  # when to do what to those that live, in order
        while workers.alive():
            due = plan[0][0] - time.monotonic() if plan else TICK
            ended = workers.wait(min(max(due, 0.0), TICK))
            found = [w for w in ended if w.code not in (AS_ASKED if stopping else {0})]
            late = None if failure or stopping else hearing.late(workers.alive())
            now = time.monotonic()
            if failure is None and (found or late):
                failure = _Failure.of(found) if found else late
                limit = now + job.settle
                plan = [(limit, "terminate"), (limit + DYING, "kill")]
            elif failure and failure.code == Exit.LOST and found and now < limit:
                failure = _Failure.of([*found, failure])
            if self.signals.asked and not stopping:
                stopping = True
                wait = job.settle + DYING if failure else job.grace + SLACK
                plan = [(now, "terminate"), (now + wait, "kill")]
            if self.signals.again:
                plan = [(now, "kill")]
            while plan and plan[0][0] <= now:
                for worker in workers.alive():
                    getattr(worker, plan[0][1])()
                plan.pop(0)
        return failure

    def judge(self, workers: Workers, failure: "_Failure | None") -> tuple[int, str]:
        codes = {w.code for w in workers.all}
        asked = self.signals.asked
        if codes == {0}:
            return Exit.DONE, ""
        if asked and codes <= AS_ASKED:
            return self.signals.status, ""
        if failure is None:  # all ended after a signal, and not as they should
            failure = _Failure.of([w for w in workers.all if w.code])
        worker = next(w for w in workers.all if w.rank == failure.rank)
        if failure.code == Exit.MISTAKE and not asked:
            if workers.all[0].code != Exit.MISTAKE:  # else what is shown ends with a sentence
                self.say(f"rank {worker.rank}: {' '.join(worker.last_lines(1))}")
            return Exit.MISTAKE, ""
        beat = heartbeats.read_rank(self.beats, failure.rank)
        heard = f" ({crashes.last_heard(beat)})" if beat and beat.pid == worker.pid else ""
        what = f"rank {failure.rank} {failure.words}{heard}"
        path = self.job.run_dir / crashes.FOLDER / self.name()
        try:
            crashes.write(path, self.number, what, workers.all, heartbeats.read_ranks(self.beats))
            what = f"{what}; see {path}"
        except OSError as error:
            what = f"{what}; {path}: cannot be written ({error.strerror})"
        if asked:
            self.say(what)
            return self.signals.status, what
        return (failure.code if failure.code > 0 else 128 - failure.code), what

    def name(self) -> str:
        """Of the crash log: nodes share the folder."""
        node = f"-node{self.job.node}" if self.job.nodes > 1 else ""
        return f"{self.number}{node}.txt"


@dataclasses.dataclass(frozen=True)
class _Failure:
    """What came first, as far as this node can tell."""

    rank: int
    code: int  # of `subprocess`: negative for a signal
    words: str

    @classmethod
    def of(cls, ended: Sequence["Worker | _Failure"]) -> "_Failure":
        """Of several at a time. That a peer was lost is never the cause where there is another."""
        first = min(ended, key=lambda w: w.code == Exit.LOST)
        return cls(first.rank, first.code, as_words(first.code))


class _Hearing:
    """Which process has not been heard of for too long.

    Time is counted in looks, each of a limited length: where all of this machine was stopped,
    nobody is late when it wakes.
    """

    def __init__(self, job: Job, folder: Path, say):
        self._job, self._folder, self._say = job, folder, say
        self._every = min(1.0, max(job.hang, 0.1) / 4, job.start / 4)
        self._last = time.monotonic()
        self._silent = dict.fromkeys(job.ranks, 0.0)
        self._beats: dict[int, int] = {}
        self._told = False

    def late(self, alive: list[Worker]) -> _Failure | None:
        now = time.monotonic()
        if not self._job.hang or (passed := now - self._last) < self._every:
            return None
        self._last = now
        for worker in alive:
            rank, beat = worker.rank, heartbeats.read_rank(self._folder, worker.rank)
            if beat and beat.pid == worker.pid and beat.beat != self._beats.get(rank):
                self._beats[rank], self._silent[rank] = beat.beat, 0.0
                continue
            self._silent[rank] += min(passed, 3 * TICK)
            # One that has left the loop waits for the others at its exit, and says nothing more.
            speaks = rank in self._beats and beat and beat.phase != heartbeats.ENDED
            limit = self._job.hang if speaks else self._job.start
            if self._silent[rank] > limit and self._can_be_heard():
                since = "" if rank in self._beats else " since its start"
                words = f"hangs: not heard of for {self._silent[rank]:.0f} s{since}"
                return _Failure(rank, Exit.STALLED, words)
        return None

    def _can_be_heard(self) -> bool:
        """A full disk keeps all ranks silent, and is no reason to end them."""
        probe = self._folder / f".probe{self._job.node}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(bytes(BLOCK))
            probe.unlink()
            return True
        except OSError as error:
            self._silent = dict.fromkeys(self._silent, 0.0)
            if not self._told:
                self._told = True
                self._say(f"{self._folder}: cannot be written ({error.strerror}): no rank is heard")
            return False


def complete(run_dir: Path) -> dict[tuple, int]:
    """The step of each complete checkpoint. The keys tell apart two of one step."""
    found = {}
    for path in (run_dir / CHECKPOINTS).glob("[0-9]*"):
        if path.name.isdecimal():
            try:
                stat = path.stat()
            except OSError:  # just deleted: a newer one has come
                continue
            found[path.name, stat.st_ino, stat.st_mtime_ns] = int(path.name)
    return found


def newest(run_dir: Path, old: Mapping[tuple, int]) -> int:
    """The step of the newest complete checkpoint that is none of `old`; -1: there is none."""
    return max((n for key, n in complete(run_dir).items() if key not in old), default=-1)


def again(arguments: tuple[str, ...], cleared: bool) -> tuple[str, ...]:
    """The arguments of `train` for going on. `--fresh` stays until it has deleted the run that it
    was meant for: that one must not be resumed."""
    if "--fresh" in arguments and not cleared:
        return arguments
    rest = tuple(a for a in arguments if a not in ("--fresh", "--resume"))
    return (*rest, "--resume")


def next_attempt(logs: Path, rank: int, before: int = 0) -> int:
    """Counts the starts of this rank in this folder, those of earlier jobs too."""
    found = (p.parent.name for p in logs.glob(f"*/{rank}.log"))
    return max([before, *(int(n) for n in found if n.isdecimal())]) + 1


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
