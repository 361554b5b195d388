"""Saved on one mesh by some processes, resumed on another by others: the same run."""

import random
import shutil

import numpy as np
import processes
import pytest

pytestmark = pytest.mark.faults

SAVED, STEPS = 6, 16  # ten steps after the checkpoint
WAYS = [
    (nodes, gpus, count)
    for nodes, gpus in ((1, 8), (2, 4), (8, 1), (1, 1))
    for count in (1, 2, 4)
    if nodes * gpus >= count
]
SETTINGS = dict(
    train__batch=8,
    train__eval_every=0,
    train__sample_tokens=0,
    optim__horizon=STEPS,
    checkpoint__every=SAVED,
    # In float32, as the tolerance below. Of a gradient summed in another order Muon makes another
    # update where it rounds to bfloat16.
    optim__matrices="adamw",
    optim__eps=1e-3,
)


def run(folder, run_dir, way, steps, *words):
    nodes, gpus, count = way
    mesh = ("--mesh.nodes", nodes, "--mesh.gpus", gpus, "--train.steps", steps)
    config = processes.write_config(folder, **SETTINGS)
    return processes.launch(config, run_dir, count, nodes * gpus, *mesh, *words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reshape")


@pytest.fixture(scope="module")
def want(folder):
    with run(folder, folder / "whole", (1, 8, 1), STEPS) as whole:
        assert whole.wait() == 0, whole.text()[-3000:]
    return {line["step"]: line for line in processes.lines(whole.run_dir, "train")}


@pytest.mark.parametrize("way", WAYS, ids=lambda w: f"{w[0]}x{w[1]} in {w[2]}")
def test_the_run_goes_on_with_the_same_losses(way, folder, want, tmp_path, outcome):
    run_dir = tmp_path / "run"
    with run(folder, run_dir, way, SAVED) as first:
        assert first.wait() == 0, first.text()[-3000:]
    rng = random.Random(str(way))
    other = rng.choice([w for w in WAYS if w != way])
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    with run(folder, copy, other, STEPS, "--resume") as second:
        assert second.wait() == 0, second.text()[-3000:]
    assert processes.resumed_at(second.text()) == [SAVED]
    got = {line["step"]: line for line in processes.lines(copy, "train")}
    assert got.keys() == want.keys()
    for step, line in got.items():
        np.testing.assert_allclose(line["loss"], want[step]["loss"], rtol=1e-5)
        assert line["tokens"] == want[step]["tokens"]
    outcome("another mesh and number of processes", "the same losses for ten steps, to 1e-5")
