"""Scalars for TensorBoard, beside a run's metrics."""

import time
from collections.abc import Callable
from pathlib import Path

FLUSH = 10.0  # seconds between writings to disk


class Board:
    """Writes one event file into `folder`; a disk that takes no more ends that, not the run.

    Written on the thread that calls: tensorboardX's own `SummaryWriter` has another for it, and
    once that one has met a full disk its queue fills up and holds the caller for ever.

    Args:
      purge: what older files have of this step and later ones is hidden; None: nothing.
      complain: takes the error that ended it.
    """

    def __init__(self, folder: Path, purge: int | None, complain: Callable[[OSError], object]):
        # Half a second to import, which only the process that writes needs.
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._complain, self._scalar, self._event = complain, summary.scalar, Event
        self._writer, self._flushed = None, time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Its file names have whole seconds; a quick restart must not overwrite the first file.
            self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        except OSError as error:
            complain(error)
        if purge is not None:
            self._write(Event(step=purge, session_log=SessionLog(status=SessionLog.START)))

    def add(self, name: str, value: float, step: int) -> None:
        summary = self._scalar(name, value)
        self._write(self._event(step=step, wall_time=time.time(), summary=summary))

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._complain(error)
            self._writer = None

    def _write(self, event) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write_event(event)
            if time.monotonic() - self._flushed > FLUSH:
                self._writer.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            self._complain(error)
            self._writer = None
