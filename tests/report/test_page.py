"""The report of complete, short, long, resumed and broken runs."""

import math
import re
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from zayajax import config
from zayajax.errors import UserError
from zayajax.report.page import summary, write_report
from zayajax.report.series import COLUMNS, LoadMap, Run
from zayajax.training import ledger
from zayajax.training.metrics import FILE, load_metrics, to_json

CONFIG = config.build(
    {
        "model": {
            "vocab": 272,
            "layers": 2,
            "hidden": 32,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "experts": 8,
            "expert_hidden": 64,
            "router_hidden": 16,
        },
        "data": {"corpus": "stdlib"},
        "optim": {"horizon": 100},
        "train": {"steps": 100, "batch": 8, "sequence": 64},
    }
)


def train_line(step, load=True, **values):
    counts_LC = np.random.default_rng(step).integers(1, 100, (2, 9))
    line = {
        "step": step,
        "kind": "train",
        "loss": 1.4 + 4 / step**0.5,
        "tokens": step * 512,
        "tokens_per_second": 1000.0 + step % 7,
        "mfu": None,
        "step_seconds": 0.5,
        "learning_rate": 1e-3,
        "grad_norm": 0.5 + 1 / step,
        **load_metrics(counts_LC),
    }
    if not load:
        del line["expert_load"]
    return line | values


def eval_line(step, loss=2.0):
    return {"step": step, "kind": "eval", "loss": loss, "tokens": step * 512}


def write_run(folder, lines, samples=None, with_config=True):
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text("".join(to_json(line) + "\n" for line in lines))
    if with_config:
        (folder / "config.toml").write_text(config.to_toml(CONFIG))
    if samples is not None:
        (folder / "samples.txt").write_bytes(samples)
    return folder


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what a browser would act on."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.ids, self.refs, self.text = [], [], [], [], ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.note(attributes)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.note(attributes)

    def note(self, attributes):
        for key, value in attributes:
            if key == "id":
                self.ids.append(value)
            elif key in ("href", "src", "xlink:href"):
                self.refs.append(value)
            self.refs += [f"#{x}" for x in re.findall(r"url\(#([^)]*)\)", value or "")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(path):
    page = Page(path.read_text(encoding="utf-8"))
    assert len(set(page.ids)) == len(page.ids)
    for ref in page.refs:  # nothing is loaded, and nothing within the page is missing
        assert ref.startswith("data:image/png") or ref.removeprefix("#") in page.ids, ref
    assert "script" not in page.tags
    return page


def test_a_whole_run(tmp_path):
    lines = [x for s in range(1, 101) for x in (train_line(s), eval_line(s))[: 1 + (s % 25 == 0)]]
    run = write_run(tmp_path / "run", lines, b"def f(x):\n    return x\n")
    path = write_report(run)
    assert path == run / "report.html"
    page = read(path)
    assert page.tags.count("svg") == 6
    assert "100 of 100" in page.text and "51,200" in page.text
    assert f"2.0000 nats = {2 / math.log(2):.4f} bits per token" in page.text
    assert "1 node x 8 gpu, pretrain, zero 1" in page.text and "8 experts of 64" in page.text
    assert "def f(x):" in page.text and 'corpus = "stdlib"' in page.text
    assert {p.name for p in run.iterdir()} == {FILE, "config.toml", "samples.txt", "report.html"}


@pytest.mark.parametrize(
    "lines",
    [
        [train_line(1)],
        [eval_line(0)],
        [train_line(1), eval_line(1)],
        [train_line(s, load=False) for s in (1, 2)],
        [train_line(1, loss=math.nan, grad_norm=math.inf)],
        [train_line(s, loss=math.nan) for s in range(1, 300)],
        [train_line(500), train_line(501)],
        [{"step": 1, "kind": "train", "loss": 1.0, "tokens": 8, "grad_norm": 0.0}],
        [train_line(1, expert_load=[[1.0, 0.0]]), train_line(2, expert_load=[[0.0, 1.0]])],
    ],
)
def test_unusual_runs(tmp_path, lines):
    read(write_report(write_run(tmp_path / "run", lines)))


def test_without_config_or_with_a_broken_one(tmp_path):
    run = write_run(tmp_path / "run", [train_line(1)], with_config=False)
    assert "no config.toml" in read(write_report(run)).text
    (run / "config.toml").write_text("[model\n<b>")
    assert "[model\n<b>" in read(write_report(run)).text


def test_sampled_text_and_names_are_escaped(tmp_path):
    samples = b"<script>alert('x')</script> & </pre> \x00\x1b[31m \xff caf\xc3\xa9"
    run = write_run(tmp_path / "a<b>&c", [train_line(1)], samples)
    page = read(write_report(run))
    assert "<script>alert('x')</script> & </pre>" in page.text and "café" in page.text
    assert "a<b>&c" in page.text and not re.search(r"[\x00-\x08\x0e-\x1f]", page.text)


def test_a_loss_that_is_not_finite_is_said(tmp_path):
    lines = [train_line(s, **({"loss": math.nan} if s > 7 else {})) for s in range(1, 10)]
    page = read(write_report(write_run(tmp_path / "run", lines)))
    assert "not a finite number at 2 of 9 lines, first at step 8" in page.text


def test_a_long_run_is_small_and_fast(tmp_path):
    run, n = tmp_path / "run", 200_000
    write_run(run, [])
    lines = [to_json(train_line(s, load=s % 10 == 0)) for s in range(1, 51)]
    with (run / FILE).open("w") as file:
        for step in range(1, n + 1):
            line = lines[step % 50]
            file.write(f'{{"step": {step}, {line[line.index(",") + 2 :]}\n')
    start = time.monotonic()
    path = write_report(run)
    assert path.stat().st_size < 3_000_000
    assert time.monotonic() - start < 10
    assert "200,000 of 100" in read(path).text


def test_of_lines_written_twice_the_last_counts():
    lines = [train_line(1), eval_line(1, 3.0), train_line(2), eval_line(1, 2.5)]
    run = Run(lines)
    assert run.eval["step"].tolist() == [1] and run.eval["loss"].tolist() == [2.5]
    assert dict(summary(run, {}))["Held-out loss"].startswith("2.5000 nats")


def test_load_is_averaged_by_step():
    load = LoadMap()
    for step in range(1, 3 * COLUMNS):
        load.add(step, [[step, 1.0]])
    edges, mean_WLC = load.mean()
    assert load.steps_a_column == 4
    assert len(edges) == len(mean_WLC) + 1 <= COLUMNS + 1
    np.testing.assert_allclose(mean_WLC[1:-1, 0, 0], edges[1:-2] + 1.5)
    np.testing.assert_allclose(mean_WLC[:, 0, 1], 1)


def test_gaps_in_the_load_repeat_what_was_before():
    load = LoadMap()
    load.add(1, [[0.25, 0.75]])
    load.add(4, [[0.5, 0.5]])
    edges, mean_WLC = load.mean()
    assert edges.tolist() == [1, 2, 3, 4, 5]
    assert mean_WLC[:, 0, 0].tolist() == [0.25, 0.25, 0.25, 0.5]


def test_mistakes_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match="there is no such run folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        write_report(tmp_path)
    (tmp_path / FILE).write_text("")
    with pytest.raises(UserError, match="has no line yet"):
        write_report(tmp_path)
    (tmp_path / FILE).write_text('hello\n{"step": 1, "kind": "eval", "loss": 1, "tokens": 1}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1"):
        write_report(tmp_path)


def test_where_the_time_went_is_a_section_with_a_bar_for_each_kind(tmp_path):
    write_run(tmp_path, [train_line(1), train_line(2)])
    assert "Where the time went" not in write_report(tmp_path).read_text()
    lines = [("attempt", 0, 0, 100), ("compile", 6, 0, 106), ("step", 2, 2, 108)]
    text = "".join(
        to_json({"attempt": 1, "what": w, "seconds": s, "step": n, "steps": n, "time": t}) + "\n"
        for w, s, n, t in lines
    )
    (tmp_path / ledger.FILE).write_text(text)
    page = write_report(tmp_path).read_text()
    _, _, section = page.partition("Where the time went")
    assert "Goodput 25.0 %" in section and "75.0 %" in section and "compile" in section
    (tmp_path / ledger.FILE).write_text("not a ledger\n")
    assert "1 line of goodput.jsonl could not be read" in write_report(tmp_path).read_text()
