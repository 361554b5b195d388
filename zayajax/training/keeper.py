"""What looks after a run while it works: signals, the watchdog, and the ledger of where time goes.

They share what the loop tells: which phase it is in, and which steps have started and ended.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from zayajax.settings import CheckpointConfig, FaultsConfig
from zayajax.training import heartbeats
from zayajax.training.feed import Requests
from zayajax.training.interrupts import Interrupts
from zayajax.training.ledger import Ledger
from zayajax.training.watchdog import Watchdog


class Keeper:
    """One process's; a context manager, entered once the folder is the run's own.

    Args:
      interrupts: entered already, since a signal may come before there is a folder.
      process, processes: the first keeps the clock of temporary checkpoints and the ledger.
      command: the process is the run's own, and may be ended when it stalls; a notebook's not.
    """

    def __init__(
        self,
        run_dir: Path,
        faults: FaultsConfig,
        checkpoint: CheckpointConfig,
        interrupts: Interrupts,
        *,
        process: int = 0,
        processes: int = 1,
        command: bool = False,
    ):
        self._interrupts, self._lead = interrupts, process == 0
        self._watchdog = Watchdog(
            run_dir / heartbeats.FOLDER,
            process,
            processes,
            stall=faults.stall if command else 0,
            patience=faults.patience,
        )
        self._run_dir, self._ledger = run_dir, Ledger(run_dir, enabled=False)
        self._seconds = checkpoint.minutes * 60 or float("inf")
        self._saved = time.monotonic()
        self._called: set[str] = set()
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        self._stack.enter_context(self._watchdog)
        return self

    def __exit__(self, *error):
        return self._stack.__exit__(*error)

    def open_ledger(self):
        """Once the folder is as this run wants it. What was before counts as start-up."""
        self._ledger = self._stack.enter_context(Ledger(self._run_dir, enabled=self._lead))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, time counts as `name`; phases nest, and the inner one counts."""
        with self._watchdog.phase(name), self._ledger.phase(name):
            yield

    def compiling(self, program: str):
        """The phase of a call of a compiled function, which compiles when it is the first."""
        if program in self._called:
            return contextlib.nullcontext()
        self._called.add(program)
        return self.phase("compile")

    def dispatched(self, step: int):
        self._watchdog.dispatched(step)

    def finished(self, step: int):
        self._watchdog.finished(step)
        self._ledger.finished(step)
        self._interrupts.first_step()

    def resumed(self, step: int):
        self._ledger.resumed(step)

    def rolled_back(self, step: int):
        self._ledger.rolled_back(step)

    def saved(self):
        """A checkpoint was started, of either kind: the clock of temporary ones starts anew."""
        self._saved = time.monotonic()

    def requests(self, failed: bool = False) -> Requests:
        """What this process asks of all now."""
        due = self._lead and time.monotonic() - self._saved > self._seconds
        return Requests(int(self._interrupts.asked), int(due), int(failed))

    def done(self):
        """All is saved: a signal has nothing left to wait for."""
        self._interrupts.done()
