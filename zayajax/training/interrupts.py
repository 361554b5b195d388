"""SIGTERM and Ctrl-C, noticed at once whatever the main thread does; and how to leave hard.

A handler written in Python runs between two bytecodes of the main thread, so not while that is
inside a compilation or waits for a device. The interpreter's own handler, in C, also writes the
number of the signal to a pipe (`signal.set_wakeup_fd`), and a thread reads it.
"""

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from zayajax.errors import Exit

KEYBOARD = 128 + signal.SIGINT  # a shell's status for a program that Ctrl-C ended
FLUSH = 2.0  # seconds that last words may take: whoever reads them may have stopped


def warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Interrupts:
    """Turns signals into a question that the training loop asks once a step.

    Before the first finished step, and once all is saved, a signal ends the process at once.
    Between, the loop sees `asked`, saves and ends; what takes longer than the grace is left.
    Signals belong to the main thread: entered in another one, this does nothing.

    Args:
      grace: seconds from the signal to the end of the process, saving included.
      keyboard: Ctrl-C likewise, with status 130; a second one leaves at once. Else it stays
        Python's KeyboardInterrupt.
      say: takes one line of text, on another thread than the main one.
    """

    def __init__(
        self, grace: float, *, keyboard: bool = False, say: Callable[[str], object] = warn
    ):
        self._grace, self._say = grace, say
        self._signals = (signal.SIGTERM, signal.SIGINT) if keyboard else (signal.SIGTERM,)
        self._saves = False
        self._asked: int | None = None
        self._thread: threading.Thread | None = None

    @property
    def asked(self) -> bool:
        """Whether to save and end."""
        return self._asked is not None

    @property
    def status(self) -> int:
        """With which status to end: `Exit.STOPPED`, 130 after Ctrl-C, else `Exit.DONE`."""
        if self._asked is None:
            return Exit.DONE
        return KEYBOARD if self._asked == signal.SIGINT else Exit.STOPPED

    def first_step(self) -> None:
        """From here on there is something to save."""
        self._saves = True

    def done(self) -> None:
        """All is saved: a signal has nothing left to wait for."""
        self._saves = False

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)  # as `set_wakeup_fd` wants it
        self._before = {s: signal.signal(s, _noticed) for s in self._signals}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        if self._thread is None:
            return
        for number, handler in self._before.items():  # first: no signal falls between
            # None: what was there before was not installed from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._write, b"\0")  # no signal has this number: the thread ends
        self._thread.join()
        self._thread = None
        os.close(self._read)
        os.close(self._write)

    def _watch(self):
        deadline = None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._read], [], [], left)[0]:
                text = f"still not saved {self._grace:g} s after the signal: leaving"
                leave(self.status, text, self._say)
            now = time.monotonic()
            for number in os.read(self._read, 64):
                if number == 0:
                    return
                if self._wakeup >= 0:  # who listened before still hears of every signal
                    with contextlib.suppress(OSError):  # closed, or full: it has heard
                        os.write(self._wakeup, bytes([number]))
                if number in self._signals and self._notice(number):
                    deadline = now + self._grace

    def _notice(self, number: int) -> bool:
        """Whether this signal is the one from which the grace counts."""
        name, again = signal.Signals(number).name, self._asked is not None
        impatient = again and number == signal.SIGINT and self._asked == signal.SIGINT
        if impatient or not self._saves:
            self._asked = self._asked or number
            why = "again" if impatient else "nothing to save"
            leave(self.status, f"{name}: {why}, leaving at once", self._say)
        if again:
            return False
        self._asked = number
        within(
            FLUSH,
            lambda: self._say(f"{name}: saving after this step, at most {self._grace:g} s"),
        )
        return True


def _noticed(number, frame):
    """Only so that the interpreter's own handler is installed."""


def leave(status: int, text: str = "", say: Callable[[str], object] = warn):
    """Says `text`, flushes what was printed and logged, and ends this process at once.

    Where another process of the run has died, the usual exit waits for it for more than a minute
    inside JAX. Waits at most FLUSH seconds for the text; open files of others are not flushed.
    """

    def last_words():
        if text:
            say(text)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for handler in list(logging.getLogger().handlers):
            handler.flush()

    try:
        within(FLUSH, last_words)
    finally:
        os._exit(status)


def within(seconds: float, call: Callable[[], object]) -> bool:
    """Whether `call` ended in time. It runs on a thread that is left behind if it did not.

    For what may block and must not: a terminal or a file system that no longer answers.
    """

    def run():
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more, or closed
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
