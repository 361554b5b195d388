"""Batches that are not numbers: passed over one by one, or by going back; and other ends."""

import shutil
import signal

import numpy as np
import pytest
import runs
from test_loop import assert_same_state, lines

import zayajax
from zayajax import checkpoint
from zayajax.data import pipeline
from zayajax.errors import Exit, ReplicasDiffer, UserError
from zayajax.training import loop, run as running, watchdog
from zayajax.training.feed import Feed

B = runs.TREE["train"]["batch"]
QUICK = dict(train__eval_every=0, train__sample_tokens=0, faults__bad_steps=3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_text(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture
def spoil(monkeypatch):
    """`spoil(3, 4)`: the weights of the fourth and the fifth batch of the text are no numbers."""
    spoiled, batches = set(), pipeline.batches

    def read(rows, start, batch, *args, **words):
        for i, found in enumerate(batches(rows, start, batch, *args, **words)):
            bad = start // batch + i in spoiled or "all" in spoiled
            yield found | {"weights": found["weights"] * np.float32("nan")} if bad else found

    monkeypatch.setattr(running.pipeline, "batches", read)
    return lambda *which: spoiled.update(which)


def train_lines(run_dir):
    return [line for line in lines(run_dir) if line["kind"] == "train"]


def test_a_bad_batch_is_skipped_and_counted(corpus, spoil, tmp_path, capsys):
    spoil(4)
    found = zayajax.train(runs.config(corpus, **QUICK), tmp_path / "run")
    assert "step 5" in (said := capsys.readouterr().out) and "not finite" in said
    steps = train_lines(found.run_dir)
    assert [s["step"] for s in steps] == list(range(1, 13))
    assert [s.get("bad") for s in steps] == [None] * 4 + ["not finite"] + [None] * 7
    assert steps[4]["skipped"] == 1 and np.isnan(steps[4]["loss"]) and np.isfinite(found.loss)


def test_bad_steps_in_a_row_go_back_and_past_the_text(corpus, spoil, tmp_path, capsys):
    """As if the text had never had the bad batches, from the last checkpoint before them on."""
    spoil(6, 7, 8)
    config = runs.config(corpus, train__steps=9, **QUICK)
    found = zayajax.train(config, tmp_path / "run")
    assert "going back to step 6" in capsys.readouterr().out
    got = lines(found.run_dir)
    assert [x["step"] for x in got if x["kind"] == "train"] == list(range(1, 10))
    (back,) = [x for x in got if x["kind"] == "rollback"]
    assert back == {"kind": "rollback", "step": 6, "from": 9, "row": 9 * B}
    # The same steps on the same text, without the fault.
    clean = zayajax.train(
        runs.config(corpus, train__steps=6, **QUICK), tmp_path / "clean", show=False
    )
    assert train_lines(clean.run_dir) == train_lines(found.run_dir)[:6]
    # A kill later changes nothing: the resumed run meets the bad batches as the first did.
    shutil.rmtree(found.run_dir / "checkpoints" / "9")
    again = zayajax.train(config, found.run_dir, resume=True, show=False)
    assert_same_state(again.state, found.state)
    assert lines(again.run_dir) == got


def test_text_that_stays_bad_ends_the_run(corpus, spoil, tmp_path):
    spoil("all")
    config = runs.config(corpus, **QUICK)
    with pytest.raises(
        UserError, match=r"3 bad steps in a row up to step 3 .* no checkpoint to go"
    ):
        zayajax.train(config, tmp_path / "run", show=False)
    run_dir = tmp_path / "later"
    spoil_later = runs.config(corpus, checkpoint__every=1, train__steps=2, **QUICK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running.pipeline, "batches", _clean)
        zayajax.train(spoil_later, run_dir, show=False)
    with pytest.raises(UserError, match="after each of 3 returns to step 2, with other text"):
        zayajax.train(runs.config(corpus, **QUICK), run_dir, resume=True, show=False)


_clean = pipeline.batches


def test_the_clock_saves_what_is_temporary(corpus, tmp_path):
    config = runs.config(corpus, checkpoint__minutes=1e-6, checkpoint__every=6, **QUICK)
    seen = []

    class Watching(running.checkpoint.Checkpoints):
        def save(self, step, state, record, temporary=False):
            seen.append((step, temporary))
            return super().save(step, state, record, temporary)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running.checkpoint, "Checkpoints", Watching)
        zayajax.train(config, tmp_path / "run", show=False)
    assert seen == [(step, step % 6 > 0) for step in range(1, 13)]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["12", "6"]


def test_sigterm_saves_and_the_run_goes_on_alike(corpus, tmp_path, monkeypatch):
    config = runs.config(corpus, train__sample_tokens=0)
    whole = zayajax.train(config, tmp_path / "whole", show=False)
    put, calls = Feed.put, []

    def interrupted(self, batch, requests=None):
        calls.append(1)
        if len(calls) == 2 + 4:  # two batches of the first evaluation, and the fourth step
            signal.raise_signal(signal.SIGTERM)
        return put(self, batch, requests)

    monkeypatch.setattr(Feed, "put", interrupted)
    found = zayajax.train(config, tmp_path / "run", show=False)
    assert found.stopped == Exit.STOPPED and 4 <= found.step <= 6
    monkeypatch.undo()
    again = zayajax.train(config, tmp_path / "run", resume=True, show=False)
    assert again.stopped is None
    assert_same_state(again.state, whole.state)
    assert lines(again.run_dir) == lines(whole.run_dir)


def test_replicas_are_compared_and_a_broken_one_ends_the_run(corpus, tmp_path, monkeypatch):
    config = runs.config(corpus, faults__recheck_every=4, checkpoint__every=2, **QUICK)
    found = zayajax.train(config, tmp_path / "run", show=False)
    checks = [x for x in lines(found.run_dir) if x["kind"] == "recheck"]
    assert checks == [{"kind": "recheck", "step": s, "suspects": []} for s in (4, 8, 12)]
    build = loop.build

    def broken(*args):
        program = build(*args)

        def compare(*args):  # device 3 is wrong about its own rows and its neighbour's
            return program.compare(*args).at[3].mul(1.01)

        return program._replace(compare=compare)

    monkeypatch.setattr(loop, "build", broken)
    with pytest.raises(ReplicasDiffer, match=r"step 4: replicas \[3\] .*3: cpu:3 of process 0"):
        zayajax.train(config, tmp_path / "broken", show=False)
    saved = {p.name for p in (tmp_path / "broken" / "checkpoints").iterdir()}
    assert saved == {"2"}  # nothing of the step that was checked


def test_only_ended_steps_are_saved(corpus, spoil, tmp_path, monkeypatch):
    """Also where the step before is waited for, as on a GPU, and a bad one puts off what is due."""
    save, unfinished = running.Run.save, []

    def watched(self, **words):
        unfinished.append(len(self.pending))
        save(self, **words)

    steps = running.Run.steps

    def ahead(self):
        self.ahead = 1
        steps(self)

    monkeypatch.setattr(running.Run, "save", watched)
    monkeypatch.setattr(running.Run, "steps", ahead)
    spoil(5, 7)
    config = runs.config(corpus, mesh__gpus=1, **QUICK)
    found = zayajax.train(config, tmp_path / "run", show=False)
    saved = {p.name for p in (found.run_dir / "checkpoints").iterdir()}
    assert saved == {"7", "12"} and unfinished == [0, 0]


def test_the_way_back_is_not_a_step(corpus, spoil, tmp_path, monkeypatch):
    """The watchdog gives a step less time than reading a large checkpoint takes."""
    restore, phases = checkpoint.Checkpoints.restore, []

    def watched(self, *args):
        phases.append(watch[0]._phases[-1])
        return restore(self, *args)

    watch, enter = [], watchdog.Watchdog.__enter__
    monkeypatch.setattr(checkpoint.Checkpoints, "restore", watched)
    monkeypatch.setattr(
        watchdog.Watchdog, "__enter__", lambda self: watch.append(self) or enter(self)
    )
    spoil(6, 7, 8)
    config = runs.config(corpus, train__steps=9, mesh__gpus=1, **QUICK)
    zayajax.train(config, tmp_path / "run", show=False)
    assert phases == ["other"]


def test_weights_to_start_from_count_only_without_a_checkpoint(corpus, tmp_path, capsys):
    first = zayajax.train(
        runs.config(corpus, train__steps=1, **QUICK), tmp_path / "first", show=False
    )
    run_dir = tmp_path / "run"
    config = runs.config(corpus, train__steps=1, optim__learning_rate=1e-30, **QUICK)
    words = dict(resume=True, init_from=first.run_dir)
    started = zayajax.train(config, run_dir, **words)
    assert "starting at step 0" in capsys.readouterr().out
    some = started.state.params.embed[...], first.state.params.embed[...]
    np.testing.assert_array_equal(*map(np.asarray, some))
    assert zayajax.train(config, run_dir, **words).step == 1
    assert "resuming at step 1" in capsys.readouterr().out
