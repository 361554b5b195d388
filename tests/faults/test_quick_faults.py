"""A few of the faults, quick enough for every run of the tests; the whole is `make faults`."""

import os
import random
import signal

import processes
import pytest

from zayajax.errors import Exit

SETTINGS = dict(
    mesh__gpus=2,
    train__steps=24,
    optim__horizon=24,
    train__eval_every=12,
    train__sample_tokens=0,
    checkpoint__every=6,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return processes.write_config(tmp_path_factory.mktemp("config"), **SETTINGS)


@pytest.fixture(scope="module")
def whole(config):
    with processes.launch(config, config.with_name("whole"), 2, 2) as run:
        assert run.wait() == 0, run.text()[-3000:]
    return run.run_dir


def test_a_killed_process_changes_nothing(config, whole, tmp_path):
    run_dir = tmp_path / "run"
    with processes.launch(config, run_dir, 2, 2) as run:
        assert run.until(lambda: processes.complete(run_dir)), run.text()[-3000:]
        newest = processes.complete(run_dir)[-1]
        os.kill(run.workers()[random.randrange(2)], signal.SIGKILL)
        assert run.wait() == 0, run.text()[-3000:]
    assert processes.resumed_at(run.text())[0] >= newest
    assert processes.arrays(run_dir) == processes.arrays(whole)
    assert processes.numbers(run_dir) == processes.numbers(whole)
    assert "SIGKILL" in next((run_dir / "crashes").glob("*.txt")).read_text()


def test_sigterm_saves_the_last_step_and_another_mesh_goes_on(config, whole, tmp_path):
    """Two processes are stopped; one goes on alone."""
    run_dir = tmp_path / "run"
    with processes.launch(config, run_dir, 2, 2) as run:
        assert run.until(lambda: processes.last_step(run_dir) >= 3), run.text()[-3000:]
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == Exit.STOPPED, run.text()[-3000:]
    stopped = processes.complete(run_dir)[-1]
    assert stopped == processes.last_step(run_dir)
    words = ("train", config, "--run-dir", run_dir, "--resume")
    with processes.command(*words, run_dir=run_dir) as run:
        assert run.wait() == 0, run.text()[-3000:]
    assert processes.resumed_at(run.text()) == [stopped]
    got, want = (
        {x["step"]: x["loss"] for x in processes.lines(d, "train")} for d in (run_dir, whole)
    )
    assert got.keys() == want.keys()
    for step in got:  # the same numbers: the mesh is the same, and sums are made alike
        assert abs(got[step] - want[step]) <= 1e-5 * want[step], step
