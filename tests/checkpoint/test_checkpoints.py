"""What is saved comes back or is said to be damaged; what is kept is never less than promised."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import patterns
import pytest
import runs

from zayajax import checkpoint
from zayajax.checkpoint import Checkpoints, copies, files
from zayajax.checkpoint.agreement import Lost
from zayajax.config import to_tree
from zayajax.errors import NotMet, UserError
from zayajax.model.zaya import Decoder

MESH = patterns.mesh("2x4")


def state(seed=0):
    return patterns.state(MESH, seed)


def names(run_dir):
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


def expected(saves, keep):
    """The rule, over again: {step: temporary} after these saves."""
    there = {}
    for step, temporary in saves:
        if there.get(step, True):
            there[step] = temporary
        permanent = [s for s, t in sorted(there.items()) if not t]
        newest = max([s for s in there if there[s]], default=-1)
        for s in [
            s for s, t in there.items() if t and (s < newest or s < max(permanent, default=-1))
        ]:
            del there[s]
        for s in permanent[:-keep] if keep else []:
            del there[s]
    return there


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept(seed, tmp_path):
    """Any order of both kinds, some steps twice, with restarts between."""
    rng = random.Random(seed)
    keep, saves, step = (0, 1, 2)[seed], [], 0
    small = {"x": patterns.state(MESH, 0)["counts"]}
    saved = Checkpoints(tmp_path, keep)
    for _ in range(10):
        step += rng.random() < 0.7
        saves.append((step, rng.random() < 0.6))
        saved.save(*saves[-1][:1], small, {}, temporary=saves[-1][1])
        if rng.random() < 0.3:
            saved.close()
            saved = Checkpoints(tmp_path, keep)
        else:
            saved.wait()
        want = expected(saves, keep)
        assert names(tmp_path) == {str(s) for s in want}, saves
        assert {s: saved.kind(s) == "temporary" for s in saved.steps()} == want
    saved.close()


def test_nothing_goes_before_what_replaces_it_is_there(tmp_path, monkeypatch):
    there = []
    complete = files.complete
    monkeypatch.setattr(
        files, "complete", lambda new, path: (there.append(names(tmp_path)), complete(new, path))
    )
    with Checkpoints(tmp_path, keep=1) as saved:
        for step, temporary in ((1, False), (2, True), (3, True), (4, False)):
            saved.save(step, state(), {}, temporary)
    assert there == [
        {"1.saving"},
        {"1", "2.saving"},
        {"1", "2", "3.saving"},
        {"1", "3", "4.saving"},
    ]
    assert names(tmp_path) == {"4"}


def test_an_old_one_that_is_being_read_ends_nothing(tmp_path, monkeypatch):
    """A network's disk keeps its files as long, so that the folder cannot go."""
    with Checkpoints(tmp_path, keep=1) as saved, monkeypatch.context() as network:
        saved.save(1, state(1), {})
        saved.wait()

        def busy(path, *args, **options):
            raise OSError(39, "Directory not empty")

        network.setattr(os, "rmdir", busy)
        saved.save(2, state(2), {})
        saved.wait()
    assert names(tmp_path) == {"1.old", "2"}
    with Checkpoints(tmp_path) as saved:
        assert saved.steps() == [2] and names(tmp_path) == {"2"}


def test_processes_that_are_gone_are_no_mistake_of_the_folder(tmp_path, monkeypatch):
    """Another start of all may meet again; one on a full disk may not."""

    def gone(said, decide):
        raise Lost("not heard of within 2 s: process 1")

    saved = Checkpoints(tmp_path, on_devices=True)
    monkeypatch.setattr(saved._together, "agree", gone)
    saved.save(1, state(1), {})
    with pytest.raises(NotMet, match="not heard of within 2 s: process 1"):
        saved.wait()


def test_a_writer_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, keep=1) as saved:
        saved.save(1, state(1), {})
        saved.wait()
        with monkeypatch.context() as broken:

            def full(folder, arrays):
                (folder / "half").write_bytes(b"x")
                raise OSError(28, "No space left on device")

            broken.setattr(files, "write_arrays", full)
            saved.save(2, state(2), {})
            while not saved.failed:
                time.sleep(0.01)
        with pytest.raises(UserError, match=r"No space left on device\); the last good .* step 1$"):
            saved.check()
        saved.check()  # said once
        assert names(tmp_path) == {"1"}
        saved.save(2, state(2), {})
        saved.wait()
        assert names(tmp_path) == {"2"}
    with Checkpoints(tmp_path) as saved:
        found, _ = saved.restore(patterns.like(MESH))
    patterns.assert_holds(found, MESH, 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=r"cannot be used \(Permission denied\)"):
        Checkpoints(tmp_path)


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(UserError, match=r"cannot be used \(File exists\)"):
        Checkpoints(tmp_path)


def data_files(path):
    return sorted((p for p in path.rglob("d/*") if p.is_file()), key=lambda p: -p.stat().st_size)


def cut(path):
    file = data_files(path)[0]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(path):
    """A bit of the largest array, found by its bytes."""
    raw = patterns.values(2)["params.experts"][:2, :, :32]
    for file in data_files(path / "weights"):
        content = bytearray(file.read_bytes())
        if (at := content.find(raw[0, 0].tobytes())) >= 0:
            content[at + 5] ^= 4
            file.write_bytes(content)
            return
    raise AssertionError("not found")


def lose(path):
    data_files(path / "rest")[0].unlink()


def tear(path):
    record = path / "record" / "metadata"
    record.write_bytes(record.read_bytes()[:200])


def empty(path):
    (path / "record" / "metadata").unlink()


def other_bits(path):
    record = json.loads((path / "record" / "metadata").read_text())
    record["digests"]["weights"]["dense"] ^= 1
    (path / "record" / "metadata").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (cut, ""),
        (flip, "other bits than were saved, in params.experts"),
        (lose, ""),
        (tear, ""),
        (empty, "No such file"),
        (other_bits, "other bits than were saved, in params.dense"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_damaged_one_is_named_and_set_aside(damage, word, tmp_path):
    with Checkpoints(tmp_path, keep=0) as saved:
        saved.save(1, state(1), {})
        saved.save(2, state(2), {})
    damage(tmp_path / "checkpoints" / "2")
    said = []
    with Checkpoints(tmp_path, keep=0) as saved:
        found, record = saved.restore(patterns.like(patterns.mesh("1x8")), say=said.append)
        patterns.assert_holds(found, patterns.mesh("1x8"), 1)
        assert record["step"] == 1 and saved.steps() == [1]
        (line,) = said
        assert line.startswith(str(tmp_path / "checkpoints" / "2")) and word in line
        saved.save(2, state(2), {})
    assert names(tmp_path) == {"1", "2", "damaged-2"}


def test_only_damaged_ones_are_no_start(tmp_path):
    with Checkpoints(tmp_path) as saved:
        saved.save(1, state(), {})
    tear(tmp_path / "checkpoints" / "1")
    with Checkpoints(tmp_path) as saved:
        with pytest.raises(UserError, match="none of the checkpoints can be read"):
            saved.restore(patterns.like(MESH), say=lambda line: None)
    assert names(tmp_path) == {"1"}


@pytest.mark.parametrize("room", [True, False])
def test_both_copies_are_equal_and_their_own(room, monkeypatch, tmp_path):
    arrays = state(5)
    made = (copies.on_devices if room else copies.on_host)(arrays)
    jax.block_until_ready(made)
    for name, copy in made.items():
        x = jax.random.key_data(arrays[name]) if name in patterns.KEYS else arrays[name]
        for a, b in zip(copy.addressable_shards, x.addressable_shards, strict=True):
            assert a.data.unsafe_buffer_pointer() != b.data.unsafe_buffer_pointer(), name
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes(), name
    asked = []
    monkeypatch.setattr(copies, "there_is_room", lambda arrays: asked.append(1) or room)
    overwrite = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    with Checkpoints(tmp_path, keep=0) as saved:
        for step in (1, 2):
            live = state(step)
            numbers = {n: x for n, x in live.items() if n not in patterns.KEYS}
            saved.save(step, live, {})
            jax.block_until_ready(overwrite(numbers))
            assert all(x.is_deleted() for x in numbers.values())
        found, _ = saved.restore(patterns.like(MESH))
    patterns.assert_holds(found, MESH, 2)
    assert asked == [1]


def test_room_is_that_of_each_device(monkeypatch):
    arrays = state()
    assert copies.there_is_room(arrays)
    monkeypatch.setattr(copies, "_available", lambda: 100)
    assert not copies.there_is_room(arrays)


def test_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    go, write = threading.Event(), files.write_arrays
    monkeypatch.setattr(files, "write_arrays", lambda *args: (go.wait(30), write(*args)))
    with Checkpoints(tmp_path, keep=0) as saved:
        saved.save(1, state(1), {})
        threading.Timer(0.5, go.set).start()
        assert saved.steps() == []
        assert saved.save(2, state(2), {}) > 0.4
        assert saved.steps() == [1]


def test_a_writer_that_hangs_is_said_in_bounded_time(tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(files, "write_arrays", lambda *args: go.wait(30))
    saved = Checkpoints(tmp_path, patience=0.05)
    saved.save(1, state(), {})
    with pytest.raises(UserError, match=r"not done within .* there is no earlier one"):
        saved.wait()
    go.set()


def test_keys_keep_their_implementation(tmp_path):
    with Checkpoints(tmp_path) as saved:
        saved.save(1, {"rng": jax.random.key(7, impl="rbg"), "x": jnp.ones(3)}, {})
        like = {"rng": jax.random.key(0, impl="rbg"), "x": jnp.zeros(3)}
        found, _ = saved.restore(jax.eval_shape(lambda: like))
        assert jax.random.key_impl(found["rng"]) == "rbg"
        want = jax.random.normal(jax.random.key(7, impl="rbg"), 4)
        np.testing.assert_array_equal(jax.random.normal(found["rng"], 4), want)
        other = like | {"rng": jax.random.key(0)}
        with pytest.raises(UserError, match=r"rng is key<rbg>\[\] there and key<fry>\[\] here"):
            saved.restore(jax.eval_shape(lambda: other))


def test_the_record_is_a_manifest(tmp_path):
    with Checkpoints(tmp_path) as saved:
        saved.save(1, state(), {"row": 8}, temporary=True)
        saved.wait()
        _, record = saved.restore(patterns.like(MESH))
    assert abs(record.pop("time") - time.time()) < 300
    digests = record.pop("digests")
    weights, rest = record.pop("weights"), record.pop("rest")
    assert record == {
        **{"format": 2, "step": 1, "kind": "temporary", "row": 8},
        **{"mesh": {"node": 2, "gpu": 4}, "processes": 1},
    }
    assert weights["dense"] == "bfloat16[48, 5]" and rest["rng"] == "key<fry>[]"
    assert digests["weights"].keys() == weights.keys() and digests["rest"].keys() == rest.keys()


def test_an_older_format_gives_weights_alone(tmp_path):
    """Format 1 as it was: three items of Orbax, no digests."""
    config = runs.config("x").model
    model = jax.jit(lambda: Decoder(config, jax.random.key(0)))()
    arrays = checkpoint.to_arrays(model)
    record = {"format": 1, "config": {"model": vars(config)}, "weights": checkpoint.shapes(arrays)}
    path = tmp_path / "checkpoints" / "3"
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        items = dict(weights=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record))
        writer.save(path, args=ocp.args.Composite(**items))
    again, _ = checkpoint.read_weights(tmp_path)
    for name, x in checkpoint.to_arrays(again).items():
        assert np.asarray(x).tobytes() == np.asarray(arrays[name]).tobytes(), name
    with Checkpoints(tmp_path) as saved:
        with pytest.raises(UserError, match=r"has checkpoint format 1, .* --init-from"):
            saved.restore(patterns.like(MESH))
    assert names(tmp_path) == {"3"}


def test_weights_with_other_bits_are_refused(tmp_path):
    config = runs.config("x").model
    model = jax.jit(lambda: Decoder(config, jax.random.key(0)))()
    checkpoint.save_weights(tmp_path / "w", model, config)
    path = tmp_path / "w" / "record" / "metadata"
    record = json.loads(path.read_text())
    record["digests"]["weights"]["embed"] ^= 1 << 31
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"is damaged \(other bits than were saved in embed"):
        checkpoint.read_weights(tmp_path / "w")


def test_another_tokenizer_text_or_spike_is_said():
    config = runs.config("x")
    record = {"config": to_tree(config), "data": "text", "tokenizer": "words"}
    source = Path("run/checkpoints/3")

    def compare(config=config, data="text", tokenizer="words"):
        return checkpoint.require_compatible(record, config, data, tokenizer, source)

    assert compare() == []
    with pytest.raises(UserError, match="the tokenizer is another one"):
        compare(data="other", tokenizer="other")
    with pytest.raises(UserError, match="the text has changed"):
        compare(data="other")
    free = runs.config("x", checkpoint__every=1, checkpoint__keep=9)
    assert compare(free) == []
    assert compare(runs.config("x", train__batch=16)) == ["train.batch: 8 -> 16"]


KILLED = """
import sys, pathlib, jax
jax.config.update("jax_num_cpu_devices", 8)
import patterns
from zayajax.checkpoint import Checkpoints
saved = Checkpoints(pathlib.Path(sys.argv[1]), keep=2)
mesh = patterns.mesh("2x4")
done = [s for s in saved.steps()]
for step in range(max(done, default=0) + 1, 1000):
    saved.save(step, patterns.state(mesh, step), {}, temporary=step % 3 > 0)
    print(step, flush=True)
"""


@pytest.mark.faults
def test_killed_at_any_moment_a_complete_one_is_there(tmp_path):
    rng = random.Random(0)
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    last = 0
    for _ in range(3):
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        process = subprocess.Popen(
            command, cwd=Path(__file__).parent, env=env, stdout=subprocess.PIPE, text=True
        )
        # A line is said when the save of its step has begun, and that before is complete.
        said = [int(process.stdout.readline()) for _ in range(rng.randint(1, 3))]
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        said += map(int, process.stdout.read().split())
        process.wait()
        with Checkpoints(tmp_path, keep=2) as saved:
            assert names(tmp_path) == {str(s) for s in saved.steps()}  # nothing half
            found = saved.restore(patterns.like(MESH), say=pytest.fail)
            newest = max(saved.steps(), default=0)
            assert newest >= max(said[-1] - 1, last)
            if found:
                patterns.assert_holds(found[0], MESH, newest)
            last = newest
    assert last > 0


def test_arrays_may_be_larger_than_what_is_in_flight(tmp_path, monkeypatch):
    """Such as the embedding of a large vocabulary on one GPU."""
    monkeypatch.setattr(files, "IN_FLIGHT", 1)
    with Checkpoints(tmp_path) as saved:
        saved.save(1, state(1), {})
        found, _ = saved.restore(patterns.like(MESH))
    patterns.assert_holds(found, MESH, 1)
