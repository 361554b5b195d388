"""The metrics of the experts by hand, and what a kill, a resume and a NaN do to the file."""

import json
import math

import numpy as np
import pytest

from zayajax.errors import UserError
from zayajax.training.metrics import (
    FILE,
    TRAIN_KEYS,
    MetricsLog,
    entropy_by_layer,
    exchange_metrics,
    expert_load,
    iter_metrics,
    load_metrics,
    max_expert_load,
    read_metrics,
    router_entropy,
    skip_fraction,
    to_json,
)


def train_line(step, **values):
    return dict.fromkeys(TRAIN_KEYS, 0.5) | {"step": step, "kind": "train", "mfu": None} | values


def steps(path):
    return [line["step"] for line in read_metrics(path)]


@pytest.mark.parametrize(
    "counts, entropy, load, skip",
    [
        ([[5, 5, 0]], 1.0, 1.0, 0.0),
        ([[5, 5, 10]], 1.0, 1.0, 0.5),  # the skip class changes no share among the experts
        ([[8, 0, 0]], 0.0, 2.0, 0.0),
        ([[3, 1, 0], [2, 2, 0]], (0.811278 + 1) / 2, 1.5, 0.0),  # H(1/4) = 0.811278 bits
        ([[4, 4, 0], [0, 0, 8]], 1.0, 1.0, 0.5),  # a layer that skips all has no shares
        ([[7, 1]], 1.0, 1.0, 1 / 8),  # a single expert
        ([[0, 0, 0]], 0.0, 0.0, 0.0),
        ([[0, 0, 4]], 0.0, 0.0, 1.0),
    ],
)
def test_load_by_hand(counts, entropy, load, skip):
    counts = np.array(counts, dtype=np.int32)
    assert router_entropy(counts) == pytest.approx(entropy, abs=1e-6)
    assert max_expert_load(counts) == pytest.approx(load)
    assert skip_fraction(counts) == pytest.approx(skip)


def test_entropy_of_each_layer():
    counts = np.array([[3, 1, 9], [2, 2, 0], [0, 0, 8], [8, 0, 0]])
    assert entropy_by_layer(counts) == [pytest.approx(0.811278, abs=1e-6), 1.0, None, 0.0]
    assert entropy_by_layer(np.array([[7, 1], [0, 4]])) == [1.0, None]
    assert load_metrics(counts)["entropy_by_layer"] == [0.81128, 1.0, None, 0.0]


def test_capacities_of_the_exchange_by_hand():
    """Two layers on four devices: once a layer the worst case."""
    rooms = np.array([[3, 0, 1], [3, 0, 1]], np.int32)
    found = exchange_metrics(rooms, [1.25, 2.0, 8.0])
    assert found == {"exchange_capacity": 0.75 * 1.25 + 2.0, "exchange_buckets": [0.75, 0.0, 0.25]}
    assert exchange_metrics(np.array([[4]]), [1.0])["exchange_capacity"] == 1.0


def test_large_counts_do_not_overflow():
    counts = np.full((40, 17), 2**30, dtype=np.int32)
    assert skip_fraction(counts) == pytest.approx(1 / 17)
    assert max_expert_load(counts) == pytest.approx(1)


def test_expert_load_is_the_share_of_the_layer_in_five_digits():
    assert expert_load(np.array([[1, 1, 1], [0, 0, 0]])) == [[0.33333] * 3, [0.0] * 3]


def test_lines_are_on_disk_at_once_and_come_back(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(train_line(1, loss=np.float32(0.5), **load_metrics(np.array([[1, 3, 0]]))))
        log.write({"step": 1, "kind": "eval", "loss": 2.0, "tokens": 8, "bits_per_byte": 1.5})
        first, second = read_metrics(tmp_path / FILE)
    assert first["loss"] == 0.5 and first["mfu"] is None
    assert first["expert_load"] == [[0.25, 0.75, 0.0]] and first["max_expert_load"] == 1.5
    assert second["bits_per_byte"] == 1.5
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_valid_json(value):
    def refuse(constant):
        raise AssertionError(constant)

    line = {"step": 1, "kind": "eval", "loss": value, "mfu": None, "parts": [1.0, value]}
    text = to_json(line)
    assert json.loads(text, parse_constant=refuse) == {
        "step": 1,
        "kind": "eval",
        "loss": None,
        "mfu": None,
        "parts": [1.0, None],
        "not_finite": {"loss": repr(value), "parts": repr(value)},
    }


def test_what_is_not_finite_comes_back(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(train_line(1, loss=math.nan, grad_norm=np.float32(np.inf)))
    (line,) = read_metrics(tmp_path / FILE)
    assert math.isnan(line["loss"]) and line["grad_norm"] == math.inf and line["mfu"] is None
    assert "not_finite" not in line


def test_resume_cuts_the_file_back(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 6):
            log.write(train_line(step))
            log.write({"step": step, "kind": "eval", "loss": 1.0, "tokens": 1})
    whole = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    with MetricsLog(tmp_path, 3) as log:
        assert (tmp_path / FILE).read_bytes() == b"".join(whole[:6])
        log.write(train_line(4))
    assert steps(tmp_path / FILE) == [1, 1, 2, 2, 3, 3, 4]
    assert {p.name for p in tmp_path.iterdir()} == {FILE, "tensorboard"}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2  # none overwritten


def test_resume_at_zero_and_without_a_file(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        log.write(train_line(1))
    with MetricsLog(tmp_path, 0):
        assert steps(tmp_path / FILE) == []


def test_tensorboard_is_purged_after_the_restored_step(tmp_path):
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    MetricsLog(tmp_path, 3).close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    data, events = path.read_bytes(), []
    while data:  # TFRecord: length, its checksum, the event, its checksum
        size = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert [e.step for e in events if e.session_log.status == SessionLog.START] == [4]


def test_a_full_disk_ends_tensorboard_and_not_the_run(tmp_path):
    said = []
    with MetricsLog(tmp_path, say=said.append) as log:
        log._board._writer.write_event = _full
        for step in range(1, 30):  # more than a queue of tensorboardX holds
            log.write(train_line(step))
    assert steps(tmp_path / FILE) == list(range(1, 30))
    assert len(said) == 1 and "no more for TensorBoard" in said[0]


def _full(event):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "ki', b'{"step"', b"\0\0\0\0", b'{"step": 3\n', b"3"]
)
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    with MetricsLog(tmp_path) as log:
        log.write(train_line(1))
        log.write(train_line(2))
    with (tmp_path / FILE).open("ab") as file:
        file.write(torn)
    assert steps(tmp_path / FILE) == [1, 2]
    with MetricsLog(tmp_path, 2) as log:
        log.write(train_line(3))
    assert steps(tmp_path / FILE) == [1, 2, 3]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    (tmp_path / FILE).write_text(to_json(train_line(1)))
    with MetricsLog(tmp_path, 1) as log:
        log.write(train_line(2))
    assert steps(tmp_path / FILE) == [1, 2]


@pytest.mark.parametrize("foreign", ["hello", '{"loss": 1}', "[]", '{"step": 2, "kind": NaN}'])
def test_a_foreign_line_in_the_middle_is_named_and_set_aside_on_resume(tmp_path, foreign):
    path = tmp_path / FILE
    text = "\n".join([to_json(train_line(1)), foreign, foreign, to_json(train_line(3)), ""])
    path.write_text(text)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: "):
        read_metrics(path)
    assert path.read_text() == text
    said = []
    for step in (3, 4):  # once only
        with MetricsLog(tmp_path, step, say=said.append) as log:
            log.write(train_line(step + 1))
    assert steps(path) == [1, 3, 4, 5]
    (sentence,) = said
    assert "line 2" in sentence and "1 other" in sentence and f"{FILE}.damaged" in sentence
    assert (tmp_path / f"{FILE}.damaged").read_text() == f"{foreign}\n" * 2


def test_a_new_run_does_not_touch_an_old_one(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(train_line(1))
    with pytest.raises(UserError, match="--resume"):
        MetricsLog(tmp_path)
    assert steps(tmp_path / FILE) == [1]


def test_other_processes_write_nothing(tmp_path):
    with MetricsLog(tmp_path / "run", enabled=False) as log:
        log.write(train_line(1))
    assert not (tmp_path / "run").exists()


def test_an_incomplete_line_is_refused(tmp_path):
    with MetricsLog(tmp_path) as log:
        with pytest.raises(ValueError, match="lacks tokens, "):
            log.write({"step": 1, "kind": "train", "loss": 1.0})
        with pytest.raises(ValueError, match="kind"):
            log.write({"step": 1, "kind": "test", "loss": 1.0})


def test_loads_may_be_sampled(tmp_path):
    load = [[0.5, 0.5, 0.0]]
    path = tmp_path / FILE
    path.write_text("".join(to_json(train_line(s, expert_load=load)) + "\n" for s in range(1, 7)))
    lines = list(iter_metrics(path, load_every=3))
    assert [line["expert_load"] for line in lines] == [None, None, load] * 2
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
