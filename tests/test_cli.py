"""The command: what a user types, in a process of its own, and the one sentence for a mistake."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from zayajax import checkpoint, cli
from zayajax.cli import main
from zayajax.config import build, to_toml
from zayajax.errors import Exit, NotMet, UserError
from zayajax.launch.cluster import Cluster
from zayajax.training import interrupts
from zayajax.training.metrics import read_metrics


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_text(tmp_path_factory.mktemp("corpus") / "text")


def zayajax(*words, file_limit: int | None = None):
    """Without the emulated devices of the tests: the command sets up its own."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    cache = Path(__file__).resolve().parent.parent / ".cache" / "jax"
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache)}

    command = [sys.executable, "-m", "zayajax", *map(str, words)]
    if file_limit is not None:
        command = ["prlimit", f"--fsize={file_limit}", *command]
        # Compiled programs are read, not written: one cut short would stay for the next runs.
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def write(path: Path, corpus, **changes) -> Path:
    path.write_text(to_toml(build(runs.tree(corpus, **changes))))
    return path


def test_train_report_generate(corpus, tmp_path):
    config = write(tmp_path / "small.toml", corpus)
    run_dir = tmp_path / "run"
    done = zayajax("train", config, "--run-dir", run_dir, "--train.steps", 2)
    assert done.returncode == 0, done.stderr
    assert "held-out loss" in done.stdout and "report.html" in done.stdout
    assert "\x1b" not in done.stdout
    assert read_metrics(run_dir / "metrics.jsonl")[-1]["step"] == 2
    assert zayajax("report", run_dir).returncode == 0
    text = zayajax("generate", run_dir, "--prompt", "the alpha", "--tokens", 5)
    assert text.stdout.startswith("the alpha"), text.stderr
    again = zayajax("train", config, "--run-dir", run_dir)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1 and "--resume" in again.stderr


MISTAKES = {
    "misspelt key": (["--train.stepz", "3"], "did you mean train.steps?"),
    "wrong type": (["--train.steps=many"], "must be a whole number"),
    "heads": (["--model.heads", "3"], "do not divide over 2 kv_heads"),
    "experts": (["--model.experts", "12"], "do not divide over the 8 GPUs of a node"),
    "batch": (["--train.batch", "9"], "do not divide over 8 devices"),
    "no corpus": (["--data.corpus", "/nowhere"], "/nowhere"),
    "vocabulary": (["--model.vocab", "100"], "model.vocab"),
    "no tokenizer": (["--data.tokenizer", "/nowhere.json"], "/nowhere.json"),
    "no value": (["--train.steps="], "must be a whole number"),
    "no key": (["--steps", "3"], "--steps: unknown argument; did you mean --train.steps?"),
    "cut short": (["--resum"], "unrecognized arguments: --resum"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake, corpus, tmp_path, capsys):
    words, reason = MISTAKES[mistake]
    config = write(tmp_path / "small.toml", corpus)
    try:
        status = main(["train", *words, str(config), "--run-dir", str(tmp_path / "run")])
    except SystemExit as exit:
        status = exit.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1 and error.startswith("zayajax") and reason in error
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_empty_corpus(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    config = write(tmp_path / "small.toml", tmp_path / "text")
    assert main(["train", str(config), "--run-dir", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["nonsense"], [], ["convert"], ["train"], ["report", "/nowhere"]]
)
def test_wrong_commands(words, capsys):
    try:
        status = main(words)
    except SystemExit as exit:
        status = exit.code
    error = capsys.readouterr().err
    assert status == 2 and error.startswith("zayajax") and error.count("\n") == 1


@pytest.mark.skipif(not shutil.which("prlimit"), reason="needs prlimit, of util-linux")
def test_a_full_disk_leaves_the_last_good_checkpoint(corpus, tmp_path):
    """No file may pass a limit that the arrays of a checkpoint do: the write fails half-way."""
    config = write(tmp_path / "small.toml", corpus, checkpoint__every=2, train__sample_tokens=0)
    run_dir = tmp_path / "run"
    words = ["train", config, "--run-dir", run_dir]
    assert zayajax(*words, "--train.steps", 4).returncode == 0
    full = zayajax(*words, "--resume", file_limit=60_000)
    assert full.returncode == 2, full.stdout + full.stderr
    assert full.stderr.count("\n") == 1, full.stderr
    assert full.stderr.startswith("zayajax: ") and "could not be written" in full.stderr
    assert "the last good one is of step 4" in full.stderr
    saved = checkpoint.Checkpoints(run_dir, keep=3)
    assert saved.steps()[-1] == 4
    saved.close()
    assert zayajax(*words, "--resume").returncode == 0


def test_a_disk_that_is_full_already(corpus, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    config = write(tmp_path / "small.toml", corpus, train__steps=1, train__eval_every=0)
    assert main(["train", str(config), "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "the disk is full" in error and "no earlier one" in error


class JaxRuntimeError(RuntimeError):
    """Called as JAX's."""


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (UserError("wrong"), Exit.MISTAKE, "zayajax: process 1: wrong"),
        (NotMet("late"), Exit.LOST, "zayajax: process 1: late"),
        (OSError(28, "full", "a.txt"), Exit.MISTAKE, "zayajax: process 1: a.txt: full"),
        (OSError(5, "broken"), 1, ""),
        (JaxRuntimeError("UNKNOWN: Connection reset by peer"), Exit.LOST, ""),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 1, ""),
    ],
)
def test_how_a_process_of_several_ends(error, status, text, monkeypatch):
    """A supervisor starts again what may end otherwise, and names who failed first."""
    left = []

    def leave(status, text=""):
        left.append((status, text))
        raise SystemExit

    monkeypatch.setattr(interrupts, "leave", leave)
    monkeypatch.setenv("ZAYAJAX_ATTEMPT", "1")
    with pytest.raises(SystemExit), cli._ends_together(Cluster("localhost:1", 2, 1)):
        raise error
    assert left == [(status, text)]
