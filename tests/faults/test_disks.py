"""Disks that fill up or turn read-only, and files that are not what was written."""

import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import processes
import pytest

from zayajax.errors import Exit

pytestmark = pytest.mark.faults

SETTINGS = dict(
    mesh__gpus=2,
    train__steps=24,
    optim__horizon=24,
    train__eval_every=0,
    train__sample_tokens=0,
    checkpoint__every=4,
    checkpoint__keep=2,
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


def size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


# A run whose checkpoints lie on a small file system of its own; once it has ended the disk is
# mended, the run resumed, and what it saved copied to where it can be seen.
STOPPED = "stopped with one sentence; the last good checkpoint stays, and the run went on from it"
SCRIPT = """
mkdir -p {run}/checkpoints
mount -t tmpfs -o size={size} tmpfs {run}/checkpoints
status=0; {train} & train=$!
{meanwhile}
wait $train || status=$?
echo "ended with status $status"
mount -o remount,rw,size=1g {run}/checkpoints
rm -f {run}/checkpoints/filler
ls {run}/checkpoints
{train} --resume
cp -r {run}/checkpoints {copy}
"""


def on_its_own_disk(config, run_dir, size, meanwhile=":"):
    probe = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
    )
    if probe.returncode:
        pytest.skip("this system lets nobody mount in a namespace of his own")
    train = shlex.join([*processes.ZAYAJAX, "train", str(config), "--run-dir", str(run_dir)])
    copy = run_dir.with_name("copy")
    script = SCRIPT.format(run=run_dir, size=size, train=train, meanwhile=meanwhile, copy=copy)
    return processes.program(["unshare", "-rm", "bash", "-euc", script], run_dir=run_dir)


def assert_went_on(run, whole, status=Exit.MISTAKE):
    assert run.wait() == 0, run.text()[-3000:]
    text = run.text()
    assert f"ended with status {int(status)}" in text, text[-3000:]
    assert processes.resumed_at(text), text[-3000:]
    copy = run.run_dir.with_name("copied")
    copy.mkdir()
    run.run_dir.with_name("copy").rename(copy / "checkpoints")
    assert processes.arrays(copy) == processes.arrays(whole)
    assert "Traceback" not in text


def test_a_full_disk(config, whole, tmp_path, outcome):
    room = int(1.6 * size(whole / "checkpoints" / "24"))
    with on_its_own_disk(config, tmp_path / "run", room) as run:
        assert_went_on(run, whole)
    assert "the disk is full" in run.text() and "the last good one is of step 4" in run.text()
    outcome("a disk without room for a checkpoint", STOPPED)


def test_a_disk_that_fills_while_saving(config, whole, tmp_path, outcome):
    run_dir = tmp_path / "run"
    room = int(4.5 * size(whole / "checkpoints" / "24"))
    with on_its_own_disk(config, run_dir, room) as run:
        # Seen from outside through the process that has mounted it.
        inside = Path(f"/proc/{run.process.pid}/root{run_dir}")
        assert run.until(lambda: processes.complete(inside)), run.text()[-3000:]
        with (
            contextlib.suppress(OSError),
            (inside / "checkpoints" / "filler").open("wb", 0) as file,
        ):
            while True:
                file.write(bytes(4096))
        assert_went_on(run, whole)
    assert "o space left" in run.text() or "disk is full" in run.text(), run.text()[-2000:]
    outcome("a disk that fills up while saving", STOPPED)


def test_a_folder_that_turns_read_only(config, whole, tmp_path, outcome):
    run_dir = tmp_path / "run"
    ready = tmp_path / "now"
    meanwhile = (
        f"while [ ! -e {ready} ]; do sleep 0.02; done; "
        f"until mount -o remount,ro {run_dir}/checkpoints; do sleep 0.02; done"
    )
    with on_its_own_disk(config, run_dir, "1g", meanwhile) as run:
        inside = Path(f"/proc/{run.process.pid}/root{run_dir}")
        assert run.until(lambda: processes.complete(inside)), run.text()[-3000:]
        ready.touch()
        assert_went_on(run, whole)
    assert "ead-only" in run.text(), run.text()[-2000:]
    outcome("a folder that turns read-only", STOPPED)


def largest(path: Path) -> Path:
    return max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(path: Path, rng: random.Random):
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def flip(path: Path, rng: random.Random):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def remove(path: Path, rng: random.Random):
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_a_damaged_shard(damage, config, whole, tmp_path, outcome):
    rng, times, seen = random.Random(0), 5, 0
    for i in range(times):
        run_dir = tmp_path / f"run{i}"
        shutil.copytree(whole, run_dir)
        newest = run_dir / "checkpoints" / "24"
        files = [p for p in newest.rglob("*") if p.is_file() and "/d/" in str(p)]
        damage(*rng.choices(files, [p.stat().st_size for p in files]), rng)
        words = ("train", config, "--run-dir", run_dir, "--resume")
        with processes.command(*words, run_dir=run_dir) as run:
            assert run.wait() == 0, run.text()[-3000:]
        # Where it hit what nobody reads, the checkpoint is whole, and its digests say so.
        found = "24: damaged, passed over" in run.text()
        assert processes.resumed_at(run.text()) == [20 if found else 24], run.text()
        assert (run_dir / "checkpoints" / "damaged-24").is_dir() == found
        assert processes.arrays(run_dir) == processes.arrays(whole)
        seen += found
    assert seen >= times - 1
    outcome(
        {truncate: "a truncated shard", flip: "a flipped bit", remove: "a missing shard"}[damage],
        "named, set aside, and the checkpoint before it used",
        seen,
    )


def test_a_file_of_the_text_changed(config, whole, tmp_path, outcome):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    text = shutil.copytree(config.with_name("text"), tmp_path / "text")
    file = sorted(text.iterdir())[3]
    file.write_text(file.read_text() + "one word more\n")
    words = ("train", config, "--run-dir", run_dir, "--resume", "--data.corpus", text)
    with processes.command(*words, run_dir=run_dir) as run:
        assert run.wait() == Exit.MISTAKE
    assert "text has changed" in run.text()
    assert processes.complete(run_dir) == processes.complete(whole)
    outcome("a data file that changed between runs", "refused in one sentence; nothing is lost")


def test_processes_that_end_leave_no_temporary_checkpoint(config, tmp_path, outcome):
    run_dir = tmp_path / "run"
    with processes.launch(config, run_dir, 2, 2) as run:
        assert run.until(lambda: processes.saving(run_dir)), run.text()[-3000:]
        for pid in run.workers().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert run.wait() == 0, run.text()[-3000:]
    assert not processes.saving(run_dir)
    outcome("SIGKILL of all processes while saving", "the unfinished checkpoint is cleared away")
