"""What the README shows of planning is what planning says."""

from pathlib import Path

import pytest

from zayajax.config import load
from zayajax.machine import MI300X
from zayajax.planning.arithmetic import experts
from zayajax.planning.audit import audit
from zayajax.planning.scale import at_scale
from zayajax.tables import duration, size

ROOT = Path(__file__).parents[2]
CONFIG = load(ROOT / "configs/zaya1_8b.toml")


@pytest.mark.parametrize("nodes", [1, 16, 128])
def test_audits(nodes):
    found = audit(at_scale(CONFIG, nodes), MI300X)
    cells = [str(nodes)]
    for span in ("node", "rail"):
        rows = [r for r in found.collectives.rows if r["span"] == span]
        moved, took, hidden = (
            sum(r[key] * r["count"] for r in rows) for key in ("bytes", "seconds", "hidden")
        )
        cells += [size(moved), f"{duration(took)} ({duration(hidden)})"] if rows else ["", ""]
    held = found.footprint
    cells += [size(held[key]) for key in ("weights", "moments", "gathered", "gradients")]
    cells += [size(held["activations"]), size(held["total"]), found.verdict]
    assert_in_readme(f"| {' | '.join(cells)} |")


def test_expert_degrees():
    table = experts.table(at_scale(CONFIG, 128), MI300X)
    for line in table.markdown().splitlines():
        assert_in_readme(line)


def assert_in_readme(line: str):
    assert line in (ROOT / "README.md").read_text().splitlines(), line
