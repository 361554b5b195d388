import importlib.util
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FLOWS = ["weights", "pretrain", "context", "context_wide", "decode"]


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(DOCS))  # as `python docs/layouts.py` does
    spec = importlib.util.spec_from_file_location("layouts", DOCS / "layouts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(DOCS))
    return module


def gpus(script):
    return [(node, gpu) for node in range(script.M) for gpu in range(script.P)]


@pytest.mark.parametrize("name", FLOWS)
def test_nothing_is_lost_and_all_gpus_have_the_same_share(script, name):
    for part in getattr(script, name)():
        if isinstance(part, script.Stage):
            held = [part.held(*at) for at in gpus(script)]
            assert set().union(*held) == script.every(*part.grid), part.title
            assert len({len(cells) for cells in held}) == 1, part.title


@pytest.mark.parametrize("name", FLOWS)
def test_a_gather_or_merge_brings_together_what_its_group_had(script, name):
    parts = getattr(script, name)()
    found = 0
    for before, lane, after in zip(parts[::2], parts[1::2], parts[2::2], strict=False):
        if lane is None or lane.op not in ("all-gather", "all-gather\nk, v", "merge"):
            continue
        found += 1
        for node, gpu in gpus(script):
            if lane.links == (script.LINKS,):
                group = [(node, g) for g in range(script.P)]
            else:
                group = [(n, gpu) for n in range(script.M)]
            together = set().union(*(before.held(*at) for at in group))
            assert after.held(node, gpu) == together, (after.title, node, gpu)
    assert found == {"weights": 3, "pretrain": 0, "context": 1}.get(name, 2)


def words(svg: str):
    return [e.text for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("text")]


def test_the_drawings_are_there_and_shown_and_made_the_same_each_time(script, tmp_path):
    script.main(tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in (DOCS / "layouts").iterdir()}
    shown = re.findall(r"\(layouts/(\w+\.svg)\)", (DOCS / "layouts.md").read_text())
    assert made == set(shown)
    for path in tmp_path.iterdir():
        text = path.read_text()
        # Paths may differ in another matplotlib; what is written may not.
        committed = (DOCS / "layouts" / path.name).read_text()
        assert words(text) == words(committed), f"{path.name}: run docs/layouts.py"
        assert "date" not in text.lower(), path.name
        for colour in re.findall(r"(?:fill|stroke): (#\w+)", text.partition("<style>@media")[0]):
            assert colour in sys.modules[script.to_svg.__module__].DARK, (
                f"{path.name}: {colour} has no dark twin"
            )
    title, figure = script.drawings()["decode"]
    assert script.to_svg(figure, title) == (tmp_path / "decode.svg").read_text()
