"""What the faults came to, as one table at the end."""

import collections
import json
from pathlib import Path

import pytest

from zayajax.tables import Column, Table

ROWS = collections.defaultdict(list)
KEPT = Path(__file__).resolve().parents[2] / ".cache" / "faults.json"


@pytest.fixture
def outcome():
    """`outcome(fault, what came of it, times=1)`; a failed test has none."""

    def record(fault: str, came_to: str, times: int = 1):
        ROWS[fault, came_to].append(times)
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(table().rows, indent=1))

    return record


def table() -> Table:
    rows = [
        {"fault": fault, "times": sum(times), "outcome": came_to}
        for (fault, came_to), times in ROWS.items()
    ]
    columns = [
        Column("fault", "fault", left=True),
        Column("times", "times"),
        Column("outcome", "what came of it", left=True),
    ]
    return Table("Faults and what came of them", columns, rows)


def pytest_terminal_summary(terminalreporter):
    if ROWS:
        terminalreporter.write_line(str(table()))
