"""What is wrong with this machine, and the line that mends it.

Nothing here needs root or changes anything; JAX is started in a process of its own, for a minute at
most. Each part is a pure function of a `View`.
"""

from collections.abc import Iterator
from pathlib import Path

from zayajax.launch.doctor import gpus, network, packages, resources, starts
from zayajax.launch.doctor.view import OK, UNSEEN, VERDICTS, WARNING, WRONG, Finding, View, here
from zayajax.tables import Column, Table

__all__ = ["OK", "UNSEEN", "WARNING", "WRONG", "Diagnosis", "Finding", "View", "diagnose", "here"]

COLUMNS = [Column(k, k, left=True) for k in ("area", "name", "verdict", "found")]


class Diagnosis(Table):
    """A row is a `Finding`; `mend` is None where nothing is amiss."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. A warning is not."""
        return all(row["verdict"] != WRONG for row in self.rows)


def diagnose(
    view: View | None = None, *, coordinator: str | None = None, runs: Path = Path("runs")
) -> Diagnosis:
    """Looks at everything, in two minutes at most.

    Args:
      view: None: this machine.
      coordinator: host:port of a run to come; None: what the cluster's variables say.
      runs: the folder of runs, which need not exist.
    """
    view = here() if view is None else view
    findings = list(_look(view, coordinator, runs))
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in VERDICTS}
    title = f"{view.host}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    notes = [f"{f.area}, {f.name}: {f.mend}" for f in findings if f.mend]
    rows = [f._asdict() | {"found": " ".join(f.found.split())} for f in findings]
    return Diagnosis(title, COLUMNS, rows, ["What mends it:", *notes] if notes else [])


def _look(view: View, coordinator: str | None, runs: Path) -> Iterator[Finding]:
    before, gpu = view.clocks(), gpus.present(view)
    yield from packages.check(view, gpu)
    yield from gpus.check(view, gpu)
    yield from starts.check(view, gpu)
    yield from network.check(view, coordinator, gpu)
    yield from resources.limits(view, gpu, gpus.expected(view, gpu) if gpu else 0)
    yield from resources.disk(view, runs, gpu)
    yield from resources.clocks(before, view.clocks())
