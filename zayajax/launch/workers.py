"""The processes of one node: started, heard, and ended with everything they started.

One thread does it all, so that a process may be forked at any time: what would block (a terminal
that is held, a full pipe) is asked first.
"""

import contextlib
import ctypes
import os
import select
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from zayajax.errors import Exit

TAIL = 64 * 1024  # bytes of a process's last output that are kept
HELD = 1024 * 1024  # bytes kept for a terminal that takes none
CHUNK = 4096  # a pipe that can be written to takes this many bytes (POSIX: PIPE_BUF of Linux)
PDEATHSIG = 1  # prctl(2), linux/prctl.h: a signal for the child when its parent dies

# Ends the process groups of a supervisor that was killed: it sees the end of its standard input.
SWEEPER = """
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass  # it has ended
"""


def as_words(code: int) -> str:
    """What a return code of `subprocess` says: "was killed by SIGKILL", "left with LOST (82)"."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    with contextlib.suppress(ValueError):
        return f"left with {Exit(code).name} ({code})"
    return f"left with status {code}"


class Terminal:
    """A file descriptor that is written to only as far as it takes it."""

    def __init__(self, fd: int):
        self._fd: int | None = fd
        self._left = bytearray()

    def put(self, data: bytes):
        if self._fd is None:
            return
        self._left += data
        if (over := len(self._left) - HELD) > 0:
            self._left[:over] = b"\n[... not shown; it is in the logs]\n"
        self.flush(0)

    def flush(self, seconds: float) -> bool:
        """Writes what is left, waiting at most this long at a time; whether all is written."""
        poll = select.poll()
        while self._left and self._fd is not None:
            poll.register(self._fd, select.POLLOUT)
            if not poll.poll(seconds * 1000):
                return False
            try:
                del self._left[: os.write(self._fd, self._left[:CHUNK])]
            except BlockingIOError:  # others of this terminal asked it not to wait
                return False
            except OSError:  # whoever read has gone; the logs remain
                self._fd = None
        return True


class Worker:
    """One process, its process group, and its log.

    Args:
      rank: among all processes of the run.
      log: takes its output too; None where there is no place for it.
      show: takes its output as it comes.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: int | None,
        show: Terminal | None,
    ):
        self.rank, self.code, self.tail = rank, None, bytearray()
        self._log, self._show = log, show
        self.output, write = os.pipe()
        os.set_blocking(self.output, False)
        parent = os.getpid()
        try:
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                start_new_session=True,  # Ctrl-C of the terminal is the supervisor's alone
                preexec_fn=lambda: _die_with(parent),
            )
        finally:
            os.close(write)
        self.pid = self._process.pid

    def ended(self) -> bool:
        """Whether it has; then its group is killed and its code known."""
        if self.code is None:
            # Not reaped yet: until then no other group can have its number.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self.kill()
            self.code = self._process.wait()
        return True

    def terminate(self):
        """SIGTERM to the process alone: its helpers are needed for saving."""
        if self.code is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self):
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def read(self) -> bool:
        """Takes what it has printed; False at the end of its output."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return True
        if self._show:
            self._show.put(data)
        self.tail = (self.tail + data)[-TAIL:]
        if self._log is not None:
            try:
                os.write(self._log, data)
            except OSError:  # the disk is full; the run goes on, and `tail` remains
                os.close(self._log)
                self._log = None
        return bool(data)

    def close(self):
        os.close(self.output)
        if self._log is not None:
            os.close(self._log)

    def last_lines(self, count: int) -> list[str]:
        return bytes(self.tail).decode(errors="replace").splitlines()[-count:]


class Workers:
    """All processes of this node. A context manager: at its end none of them is left, also where
    the supervisor itself is killed.

    Args:
      ranks: of each process its rank, command and environment.
      logs: a folder for `RANK.log`.
      show: takes the output of the first one.
    """

    def __init__(
        self,
        ranks: Sequence[tuple[int, Sequence[str], Mapping[str, str]]],
        logs: Path,
        show: Terminal,
        wake: int,
    ):
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ)
        self._show, self.all = show, []
        self._sweeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SWEEPER],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        try:
            for rank, command, environ in ranks:
                log = _open(logs / f"{rank}.log")
                worker = Worker(rank, command, environ, log, None if self.all else show)
                self.all.append(worker)
                self._selector.register(worker.output, selectors.EVENT_READ, worker)
                self._sweep("+", worker)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def wait(self, seconds: float) -> list[Worker]:
        """Moves output for at most this long, less if a signal comes; who has ended since."""
        shown = self._show.flush(0)
        for key, _ in self._selector.select(seconds if shown else min(seconds, 0.1)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)
            elif not key.data.read():
                self._selector.unregister(key.fileobj)
        ended = [w for w in self.all if w.code is None and w.ended()]
        for worker in ended:
            self._sweep("-", worker)
        return ended

    def alive(self) -> list[Worker]:
        return [w for w in self.all if w.code is None]

    def drain(self):
        """The last output of those that have ended."""
        for worker in self.all:
            poll = select.poll()
            poll.register(worker.output, select.POLLIN)
            while poll.poll(200) and worker.read():  # 200 ms: something that left its group has it
                pass

    def close(self):
        for worker in self.all:
            worker.kill()
        for worker in self.alive():
            worker.code = worker._process.wait()
        self._selector.close()
        self.drain()
        for worker in self.all:
            worker.close()
        with contextlib.suppress(BrokenPipeError):
            self._sweeper.stdin.close()
        self._sweeper.wait()

    def _sweep(self, sign: str, worker: Worker):
        with contextlib.suppress(BrokenPipeError):  # it was killed; prctl still holds
            self._sweeper.stdin.write(f"{sign}{worker.pid}\n")
            self._sweeper.stdin.flush()


def _open(path: Path) -> int | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    except OSError:
        return None


if sys.platform == "linux":
    _prctl = ctypes.CDLL(None).prctl  # looked up here: nothing is loaded after a fork

    def _die_with(parent: int):
        _prctl(PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that
            os._exit(Exit.LOST)
else:  # the sweeper alone

    def _die_with(parent: int):
        pass
