import importlib.util
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zayajax.machine import GPUS
from zayajax.planning import fabric_plots
from zayajax.planning.published import CURVES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(DOCS))  # as `python docs/fabric.py` does
    spec = importlib.util.spec_from_file_location("fabric_drawing", DOCS / "fabric.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(DOCS))
    return module


def words(svg: str):
    return [e.text for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("text")]


def points(svg: str):
    """Where the published points are, to a point of the drawing."""
    uses = [e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("use")]
    return [(round(float(e.get("x"))), round(float(e.get("y")))) for e in uses]


def test_the_committed_drawing_is_the_one_the_data_gives(script, tmp_path):
    script.main(tmp_path)
    made, committed = (tmp_path / "fabric.svg").read_text(), (DOCS / "fabric.svg").read_text()
    assert words(made) == words(committed), "run docs/fabric.py"
    assert points(made) == points(committed), "run docs/fabric.py"
    dark = sys.modules[script.to_svg.__module__].DARK
    for colour in re.findall(r"(?:fill|stroke): (#\w+)", made.partition("<style>@media")[0]):
        assert colour in dark, f"{colour} has no dark twin"


def test_lines_are_the_model_and_points_are_the_published():
    (ax,) = fabric_plots.published().axes
    lines = {line.get_label(): line for line in ax.lines if line.get_marker() == "None"}
    assert len(lines) == len(fabric_plots.SHOWN)
    drawn = sum(len(line.get_xdata()) for line in ax.lines if line.get_marker() == "o")
    shown = [
        c for c in CURVES if c.op == "all_reduce" and (c.machine, c.group) in fabric_plots.SHOWN
    ]
    assert drawn == sum(size >= 2**16 for c in shown for size, _ in c.points)


def test_point_to_point_rises_with_the_group_and_a_switch_does_not():
    (ax,) = fabric_plots.by_group().axes
    direct, switched, _ = (list(line.get_ydata()) for line in ax.lines)
    assert direct == sorted(direct) and direct[-1] / direct[0] == pytest.approx(7, rel=0.01)
    assert switched == pytest.approx([direct[-1]] * 7, rel=0.01)


@pytest.mark.parametrize("machine", GPUS, ids=lambda m: m.name)
def test_a_node_has_all_its_links(machine):
    (ax,) = fabric_plots.node(machine).axes
    links = [line for line in ax.lines if line.get_color() == fabric_plots.LINKS]
    assert len(links) == (28 if machine.point_to_point else 8)
    assert sum(line.get_color() == fabric_plots.RAIL for line in ax.lines) == 8
