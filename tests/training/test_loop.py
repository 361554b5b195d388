"""A run is one thing, however often it was stopped on the way."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import runs

import zayajax
from zayajax import checkpoint
from zayajax.checkpoint import files
from zayajax.errors import UserError
from zayajax.training import folder
from zayajax.training.metrics import read_metrics

TIMES = ("tokens_per_second", "step_seconds", "seconds")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_text(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """12 steps at once."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    return zayajax.train(runs.config(corpus), run_dir, show=False)


def lines(run_dir):
    return [
        {k: v for k, v in line.items() if k not in TIMES}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]


def assert_same_state(a, b):
    a, b = (checkpoint.to_arrays(x) for x in (a, b))
    assert a.keys() == b.keys()
    for name in a:
        assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes(), name


def test_it_learns_and_writes_all_down(whole):
    found = {path.name for path in whole.run_dir.iterdir()}
    files = {"config.toml", "metrics.jsonl", "samples.txt", "report.html"}
    files |= {"goodput.jsonl", ".lock"}
    assert found == files | {"checkpoints", "data", "heartbeats", "tensorboard"}
    written = lines(whole.run_dir)
    train = [line for line in written if line["kind"] == "train"]
    held_out = [line for line in written if line["kind"] == "eval"]
    assert [line["step"] for line in train] == list(range(1, 13))
    assert [line["step"] for line in held_out] == [0, 6, 12]
    assert train[-1]["tokens"] == 12 * 8 * 32
    assert held_out[-1]["loss"] == whole.held_out_loss < held_out[0]["loss"] - 1
    assert whole.step == 12 and whole.loss == train[-1]["loss"]
    for line in train:
        assert line["mfu"] is None and 0 < line["router_entropy"] <= 1
        assert 1 <= line["max_expert_load"] <= 8 and 0 <= line["skip_fraction"] <= 1
        # By layer, and what the exchange made of it.
        entropy = line["entropy_by_layer"]
        assert len(entropy) == 2 and abs(np.mean(entropy) - line["router_entropy"]) < 1e-5
        assert 1.25 <= line["exchange_capacity"] <= 8 and sum(line["exchange_buckets"]) > 0.999
    saved = checkpoint.Checkpoints(whole.run_dir)
    assert saved.steps() == [6, 12]
    saved.close()


def test_resume_is_bitwise_exact(corpus, whole, tmp_path):
    config = runs.config(corpus, train__steps=6)
    half = zayajax.train(config, tmp_path / "run", show=False)
    assert half.step == 6
    rest = zayajax.train(runs.config(corpus), tmp_path / "run", resume=True, show=False)
    assert_same_state(rest.state, whole.state)
    # The shorter run evaluated at its end, where the longer one did anyway.
    assert lines(rest.run_dir) == lines(whole.run_dir)


def test_resume_cuts_metrics_back_to_the_checkpoint(corpus, whole, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "12")  # as if killed before the last was complete
    again = zayajax.train(runs.config(corpus), run_dir, resume=True, show=False)
    assert lines(run_dir) == lines(whole.run_dir)
    assert_same_state(again.state, whole.state)


def test_an_evaluation_that_was_cut_short_comes_once(corpus, whole, tmp_path):
    """However often the run goes on from the checkpoint that was saved before it."""
    run_dir = shutil.copytree(whole.run_dir, tmp_path / "copy")
    path = run_dir / "checkpoints" / "12"
    files.write_record(path, files.read_record(path) | {"evaluated": False})
    for _ in range(2):
        found = zayajax.train(runs.config(corpus), run_dir, resume=True, show=False)
        assert found.held_out_loss == whole.held_out_loss
        assert lines(run_dir) == lines(whole.run_dir)


def test_a_damaged_newest_checkpoint_is_passed_over(corpus, whole, tmp_path, capsys):
    run_dir = tmp_path / "run"
    shutil.copytree(whole.run_dir, run_dir)
    newest = run_dir / "checkpoints" / "12"
    for path in newest.rglob("*"):
        if path.is_file() and "record" not in path.parts:
            path.write_bytes(b"")
    with pytest.raises(UserError, match=r"12: is damaged \(.*an older one of the run"):
        checkpoint.read_weights(run_dir)
    again = zayajax.train(runs.config(corpus), run_dir, resume=True)
    assert "12: damaged, passed over" in capsys.readouterr().out
    assert_same_state(again.state, whole.state)
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"6", "12", "damaged-12"}
    assert_same_state(checkpoint.read_weights(run_dir)[0], whole.state.params)


def test_resume_without_a_checkpoint_starts_over_and_says_so(corpus, whole, tmp_path, capsys):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    shutil.copy(whole.run_dir / "metrics.jsonl", run_dir)
    again = zayajax.train(runs.config(corpus, train__steps=2), run_dir, resume=True)
    assert "no complete checkpoint, starting at step 0" in capsys.readouterr().out
    got, want = lines(run_dir), lines(whole.run_dir)
    assert [x for x in got if x["kind"] == "train"] == [
        x for x in want if x["kind"] == "train" and x["step"] <= 2
    ]
    assert again.step == 2


def test_the_horizon_sets_the_rate_not_the_steps(corpus, whole, tmp_path):
    short = zayajax.train(runs.config(corpus, train__steps=3), tmp_path / "run", show=False)
    rates = [line["learning_rate"] for line in lines(short.run_dir) if line["kind"] == "train"]
    want = [line["learning_rate"] for line in lines(whole.run_dir) if line["kind"] == "train"]
    assert rates == want[:3]


def test_a_folder_with_a_run_needs_a_word(corpus, whole, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole.run_dir, run_dir)
    config = runs.config(corpus, train__steps=1)
    with pytest.raises(UserError, match="has a run in it; continue it with --resume, or delete"):
        zayajax.train(config, run_dir, show=False)
    with pytest.raises(UserError, match="contradict"):
        zayajax.train(config, run_dir, resume=True, fresh=True, show=False)
    keep = run_dir / "notes.txt"
    keep.write_text("mine")
    result = zayajax.train(config, run_dir, fresh=True, show=False)
    assert result.step == 1 and keep.read_text() == "mine"
    assert [x["step"] for x in lines(run_dir) if x["kind"] == "train"] == [1]


def test_fresh_deletes_nothing_while_something_is_wrong(corpus, whole, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole.run_dir, run_dir)
    before = sorted(run_dir.rglob("*"))
    for arguments, reason in (
        ({"config": runs.config(tmp_path / "absent")}, "absent"),
        ({"init_from": run_dir}, "--fresh would delete it"),
        ({"init_from": whole.run_dir, "config": runs.config(corpus, model__hidden=64)}, "another"),
    ):
        arguments = {"config": runs.config(corpus), "show": False} | arguments
        with pytest.raises(UserError, match=reason):
            zayajax.train(run_dir=run_dir, fresh=True, **arguments)
        assert sorted(run_dir.rglob("*")) == before


def test_a_full_disk_leaves_the_config_that_was_there(tmp_path, monkeypatch):
    """A half of it would not be taken for a run's, and could not be resumed."""
    config = runs.config(tmp_path)
    folder.write_config(tmp_path, config)
    before, write = (tmp_path / folder.CONFIG).read_text(), Path.write_text

    def full(self, text):
        write(self, text[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        folder.write_config(tmp_path, config)
    assert (tmp_path / folder.CONFIG).read_text() == before
    folder.check(tmp_path, resume=True, fresh=False)


def test_files_that_no_run_wrote_stay(corpus, tmp_path):
    run_dir = tmp_path / "mine"
    (run_dir / "checkpoints").mkdir(parents=True)
    for name in ("report.html", "checkpoints/notes.txt"):
        (run_dir / name).write_text("mine")
    config = runs.config(corpus, train__steps=1, train__eval_every=0, train__sample_tokens=0)
    (run_dir / "config.toml").write_text("# mine\n")
    with pytest.raises(UserError, match="was not written by a run"):
        zayajax.train(config, run_dir, fresh=True, show=False)
    (run_dir / "config.toml").unlink()
    result = zayajax.train(config, run_dir, fresh=True, show=False)
    assert (run_dir / "checkpoints" / "notes.txt").read_text() == "mine"
    assert result.held_out_loss is None  # eval_every = 0: never


def test_a_run_at_its_end_has_nothing_to_do(corpus, whole, capsys):
    written = (whole.run_dir / "config.toml").read_text()
    again = zayajax.train(runs.config(corpus, train__steps=3), whole.run_dir, resume=True)
    assert again.step == 12
    assert "nothing to do: at step 12, and train.steps is 3" in capsys.readouterr().out
    assert (whole.run_dir / "config.toml").read_text() == written


def test_a_single_layer_is_saved_and_resumed(corpus, tmp_path):
    config = runs.config(corpus, model__layers=1, train__steps=1, checkpoint__every=1)
    zayajax.train(config, tmp_path / "run", show=False)
    config = runs.config(corpus, model__layers=1, train__steps=2, checkpoint__every=1)
    assert zayajax.train(config, tmp_path / "run", resume=True, show=False).step == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model__hidden": 64}, "model.hidden: 32 -> 64"),
        ({"train__seed": 1}, "train.seed: 0 -> 1"),
        ({"train__sequence": 16}, "train.sequence: 32 -> 16"),
    ],
)
def test_another_run_is_refused_by_name(corpus, whole, changes, reason):
    with pytest.raises(UserError) as error:
        zayajax.train(runs.config(corpus, **changes), whole.run_dir, resume=True, show=False)
    assert reason in str(error.value)


def test_changed_text_is_refused(whole, tmp_path):
    other = runs.write_text(tmp_path / "text", seed=1)
    run_dir = tmp_path / "run"
    shutil.copytree(whole.run_dir, run_dir)
    record = json.loads((run_dir / "checkpoints" / "12" / "record" / "metadata").read_text())
    corpus = record["config"]["data"]["corpus"]
    config = runs.config(corpus)
    assert config.data.corpus == corpus
    backup = shutil.copytree(corpus, tmp_path / "backup")
    try:
        shutil.copy(other / "000.txt", corpus)
        with pytest.raises(UserError, match="the text has changed since"):
            zayajax.train(config, run_dir, resume=True, show=False)
    finally:
        shutil.copy(backup / "000.txt", corpus)


def test_a_new_phase_says_what_differs(corpus, whole, tmp_path, capsys):
    config = runs.config(corpus, train__steps=1, train__sample_tokens=0, model__rope_theta=5e6)
    zayajax.train(config, tmp_path / "run", init_from=whole.run_dir)
    said = capsys.readouterr().out
    assert "model.rope_theta was 1000000.0 and is 5000000.0" in said
    assert "text: " in said and "held out" in said


def test_a_new_phase_starts_from_weights(corpus, whole, tmp_path):
    config = runs.config(corpus, train__steps=1, optim__learning_rate=1e-30)
    phase = zayajax.train(config, tmp_path / "run", init_from=whole.run_dir, show=False)
    held_out = [line["loss"] for line in lines(phase.run_dir) if line["kind"] == "eval"]
    np.testing.assert_allclose(held_out[0], whole.held_out_loss, rtol=1e-6)
    narrow = runs.config(corpus, model__router_hidden=16)
    with pytest.raises(UserError, match=r"is of another model: model\.\w+ was") as error:
        zayajax.train(narrow, tmp_path / "other", init_from=whole.run_dir, show=False)
    assert "router" in str(error.value)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((1, 1), "pretrain"), ((8, 1), "pretrain"), ((2, 4), "context"), ((4, 2), "context-wide")],
)
def test_mesh_and_layout_may_change_on_resume(corpus, whole, shape, layout, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "12")
    nodes, gpus = shape
    config = runs.config(corpus, mesh__nodes=nodes, mesh__gpus=gpus, mesh__layout=layout)
    again = zayajax.train(config, run_dir, resume=True, show=False)
    # float32 sums in another order; Adam divides small gradients by their own size, and where Muon
    # rounds to bfloat16 a matrix's update differs by up to 3 %: 1e-5 of the loss so far.
    for got, want in zip(lines(run_dir), lines(whole.run_dir), strict=True):
        np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-4)
    assert again.step == 12


def test_saved_on_one_mesh_restored_on_another_same_bytes(corpus, whole):
    from zayajax.mesh import make_mesh
    from zayajax.training.step import build

    for nodes, gpus in ((1, 1), (2, 4), (8, 1)):
        config = runs.config(corpus, mesh__nodes=nodes, mesh__gpus=gpus)
        program = build(config, make_mesh(nodes, gpus))
        saved = checkpoint.Checkpoints(whole.run_dir, keep=2)
        state, record = saved.restore(program.state)
        saved.close()
        assert record["row"] == 12 * 8
        assert_same_state(state, whole.state)
        for v, want in zip(
            *map(jax.tree.leaves, (state.params, program.state.params)), strict=True
        ):
            assert v.sharding == want.sharding


def test_weights_alone_are_read(whole, tmp_path):
    model, config = checkpoint.read_weights(whole.run_dir)
    assert config == runs.config("x").model
    assert_same_state(model, whole.state.params)
    checkpoint.save_weights(tmp_path / "weights", model, config)
    again, _ = checkpoint.read_weights(tmp_path / "weights")
    assert_same_state(again, model)
    with pytest.raises(UserError, match="not empty"):
        checkpoint.save_weights(tmp_path / "weights", model, config)
    with pytest.raises(UserError, match="neither a run's folder nor a checkpoint"):
        checkpoint.read_weights(tmp_path)


def test_a_newer_format_is_refused(whole, tmp_path):
    path = tmp_path / "checkpoint"
    shutil.copytree(whole.run_dir / "checkpoints" / "12", path)
    record = path / "record" / "metadata"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"format": 99}))
    with pytest.raises(UserError, match="written by a newer zayajax"):
        checkpoint.read_weights(path)
