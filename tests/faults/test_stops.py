"""SIGTERM, wherever it falls; SIGSTOP; and the supervisor's own end."""

import json
import os
import signal
import time

import processes
import pytest

from zayajax.errors import Exit

pytestmark = pytest.mark.faults

GPUS, STEPS = 2, 40
SETTINGS = dict(
    mesh__gpus=GPUS,
    train__steps=STEPS,
    train__batch=8,
    optim__horizon=STEPS,
    train__eval_every=20,
    train__eval_batches=2,
    train__sample_tokens=0,
    checkpoint__every=20,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return processes.write_config(tmp_path_factory.mktemp("config"), **SETTINGS)


@pytest.fixture(scope="module")
def whole(config):
    run_dir = config.with_name("whole")
    with processes.command("train", config, "--run-dir", run_dir, run_dir=run_dir) as run:
        assert run.wait() == 0, run.text()[-3000:]
    return run_dir


def phase(run_dir):
    try:
        return json.loads((run_dir / "heartbeats" / "0.json").read_text())["phase"]
    except (OSError, ValueError, KeyError):
        return None


MOMENTS = {
    "start-up": lambda d: phase(d) == "startup",
    "compilation": lambda d: phase(d) == "compile",
    "training": lambda d: processes.last_step(d) >= 5,
    # A line of the step is written just before.
    "evaluation": lambda d: any(line["step"] == 20 for line in processes.lines(d, "train")),
    "saving": lambda d: processes.saving(d),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_saves_and_ends(moment, config, whole, tmp_path, outcome):
    run_dir = tmp_path / "run"
    words = ["train", config, "--run-dir", run_dir]
    env = {}
    if moment == "evaluation":  # long enough to be met
        words += ["--train.eval_batches", "64"]
    if moment == "compilation":  # nothing kept from before
        env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    with processes.command(*words, run_dir=run_dir, **env) as run:
        assert run.until(lambda: MOMENTS[moment](run_dir)), run.text()[-3000:]
        steps = processes.last_step(run_dir)
        run.process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        assert run.wait(60) == Exit.STOPPED, run.text()[-3000:]
        took = time.monotonic() - sent
    saved = processes.complete(run_dir)
    if moment in ("start-up", "compilation"):
        assert not saved and took < 5, took
        came = "ended at once: no step had finished"
    else:
        # The last finished step: none is lost.
        assert saved and saved[-1] == processes.last_step(run_dir) >= steps, saved
        came = "saved the last finished step, and ended; resumed to the same bytes"
    with processes.command(*words, "--resume", run_dir=run_dir) as run:
        assert run.wait() == 0, run.text()[-3000:]
    if saved:
        assert processes.resumed_at(run.text())[-1] == saved[-1]
    assert processes.arrays(run_dir) == processes.arrays(whole)
    if moment != "evaluation":  # its losses are of more text
        assert processes.numbers(run_dir) == processes.numbers(whole)
    outcome(f"SIGTERM during {moment}", came)


@pytest.mark.parametrize("to", ["one rank", "the supervisor"])
def test_sigterm_with_several_processes(to, config, whole, tmp_path, outcome):
    run_dir = tmp_path / "run"
    with processes.launch(config, run_dir, 2, GPUS) as run:
        assert run.until(lambda: processes.last_step(run_dir) >= 5), run.text()[-3000:]
        target = run.workers()[1] if to == "one rank" else run.process.pid
        os.kill(target, signal.SIGTERM)
        if to == "one rank":  # all save at the same step, and all come up again
            assert run.wait() == 0, run.text()[-3000:]
            assert len(processes.resumed_at(run.text())) == 1
        else:
            assert run.wait() == Exit.STOPPED, run.text()[-3000:]
            assert processes.complete(run_dir)[-1] == processes.last_step(run_dir)
            with processes.launch(config, run_dir, 2, GPUS, "--resume") as again:
                assert again.wait() == 0, again.text()[-3000:]
    outcome(f"SIGTERM to {to} of two processes", "both saved the same step, and went on from it")


def test_a_stopped_rank_is_caught_and_named(config, tmp_path, outcome):
    run_dir = tmp_path / "run"
    with processes.launch(
        config, run_dir, 2, GPUS, "--faults.stall", "4", launching=("--hang", "120")
    ) as run:
        assert run.until(lambda: processes.last_step(run_dir) >= 6), run.text()[-3000:]
        os.kill(run.workers()[1], signal.SIGSTOP)
        stopped = time.monotonic()
        assert run.until(lambda: list((run_dir / "crashes").glob("*.txt")), 60)
        took = time.monotonic() - stopped
        assert run.wait() == 0, run.text()[-3000:]
    crash = next((run_dir / "crashes").glob("*.txt")).read_text()
    assert "STALLED" in crash and "rank 1" in crash, crash
    stacks = "".join(p.read_text() for p in run_dir.rglob("*.stacks.txt"))
    assert "Thread" in stacks
    assert took < 30, took
    outcome(
        "SIGSTOP of one of 2 processes (faults.stall 4)",
        f"after {took:.0f} s: stacks of all threads, the rank named, killed, up again",
    )


def test_a_supervisor_that_is_killed_leaves_nothing(config, whole, tmp_path, outcome):
    run_dir = tmp_path / "run"
    with processes.launch(config, run_dir, 2, GPUS) as run:
        assert run.until(lambda: processes.last_step(run_dir) >= 5), run.text()[-3000:]
        run.process.kill()
        run.process.wait()
        end = time.monotonic() + 20
        while run.workers() and time.monotonic() < end:
            time.sleep(0.1)
        assert not run.workers()
    with processes.launch(config, run_dir, 2, GPUS, "--resume") as run:
        assert run.wait() == 0, run.text()[-3000:]
    outcome("SIGKILL of the supervisor", "its processes went with it; resumed by hand")


def test_two_runs_on_one_folder(config, tmp_path, outcome):
    run_dir = tmp_path / "run"
    words = ["train", config, "--run-dir", run_dir, "--train.steps", 10**6]
    with processes.command(*words, run_dir=run_dir) as run:
        assert run.until(lambda: processes.last_step(run_dir) >= 1), run.text()[-3000:]
        for word in ("--resume", "--fresh"):
            with processes.command(*words, word, run_dir=run_dir, name="second") as second:
                assert second.wait() == Exit.MISTAKE
                assert "another run is writing there (process" in second.text()
        steps = processes.last_step(run_dir)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == Exit.STOPPED, run.text()[-3000:]
        assert processes.complete(run_dir)[-1] == processes.last_step(run_dir) >= steps
    outcome("a second run on the same folder", "refused in one sentence; the first went on", 2)
