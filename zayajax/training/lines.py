"""A file that lines are appended to while a run goes on, whatever the disk says."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

KEPT = 2**26  # bytes that wait for room on the disk; of more, the oldest are given up


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Lines:
    """Text is on its way to disk when `write` returns. Where the disk is full or the folder cannot
    be written, that is said once, the run goes on, and the text waits for the next `write`. A line
    is there as a whole or not at all, but for a kill, which tears the last one.

    Nothing is opened before there is something to write.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = to_stderr):
        self.path, self._say = path, say
        self._file, self._waiting, self._complained = None, b"", False

    def write(self, text: str) -> None:
        self._waiting += text.encode()
        if not self._waiting:
            return
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)
            size = os.fstat(self._file.fileno()).st_size
            if self._file.write(self._waiting) < len(self._waiting):  # room for a part of it
                os.truncate(self.path, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.complain(error)
            if len(self._waiting) > KEPT:
                self._waiting = self._waiting[self._waiting.index(b"\n", -KEPT) + 1 :]
        else:
            self._waiting = b""

    def sync(self) -> None:
        """What the disk took outlives the machine from here on."""
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self.complain(error)

    def complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            self._say(f"{self.path}: cannot be written ({error.strerror}); the run goes on")

    def close(self) -> None:
        self.write("")
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:  # a network's disk may say so only now
                self.complain(error)
            self._file = None
