"""Processes that die, hang, or are stopped: all go, nothing is left over, and the run goes on."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
from hypothesis import given, settings, strategies as st

from zayajax.cli import main
from zayajax.config import build, to_toml
from zayajax.errors import Exit, UserError
from zayajax.launch.supervisor import Job, again, complete, newest, next_attempt
from zayajax.launch.workers import as_words

# Waits of a test for something that comes at once, on a machine that is busy with other tests.
SOON = 30.0

DRIVER = """
import sys
from pathlib import Path
from zayajax.launch import supervisor, workers
supervisor.SLACK = supervisor.DYING = 0.5
job = dict(arguments=("train", "c.toml"), run_dir=Path(sys.argv[1]), processes=2, gpus=8,
           settle=0.5, pause=0.01, restarts=3, worker=(sys.executable, sys.argv[2]))
sys.exit(supervisor.supervise(supervisor.Job(**(job | eval(sys.argv[3])))))
"""

# A process of a run: `attempt` counts from 1; `beat` writes a heartbeat.
WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from zayajax.training import heartbeats
rank, run = int(os.environ["ZAYAJAX_PROCESS"]), Path({run!r})
attempt = len(list((run / "logs").glob(f"*/{{rank}}.log")))
def beat(n=0, pid=os.getpid(), phase="step"):
    heartbeats.write(run / "heartbeats", heartbeats.Rank(
        process=rank, host="h", pid=pid, phase=phase, since=0.0, dispatched=12,
        finished=12, time=time.time(), beat=n))
def sleeps():
    time.sleep(600)
def child():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code]).pid
"""


class Run:
    """A supervisor in a process of its own, over processes that run `body`."""

    def __init__(self, folder: Path, body: str, **job):
        self.folder = folder / "run"
        script = folder / "worker.py"
        script.write_text(WORKER.format(run=str(self.folder)) + body)
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(self.folder), str(script), repr(job)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ended(self, status: int) -> tuple[str, str]:
        """(stdout, stderr) once it has ended, and nothing is left over."""
        try:
            out, err = self.process.communicate(timeout=SOON)
        finally:
            self.process.kill()
        assert self.process.returncode == status, (self.process.returncode, out, err)
        assert "Traceback" not in err, err
        assert not self.left()
        return out, err

    def left(self) -> list[str]:
        """Processes of this run that still live, grandchildren by what they inherited."""
        time.sleep(0.05)
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
                if f"MARK={self.folder}".encode() in words or str(self.folder).encode() in words:
                    found.append(words.decode(errors="replace"))
        return found

    def until(self, name: str) -> str:
        """The text of a file once there is one."""
        end = time.monotonic() + SOON
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if text := (self.folder / name).read_text():
                    return text
            time.sleep(0.02)
        raise AssertionError(f"no {name}; {self.process.kill()} {self.process.communicate()}")

    def crash(self, attempt: int) -> str:
        return (self.folder / "crashes" / f"{attempt}.txt").read_text()

    def log(self, attempt: int, rank: int) -> str:
        return (self.folder / "logs" / str(attempt) / f"{rank}.log").read_text()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(tmp_path / "run"))
    made = []

    def start(body, **job):
        made.append(Run(tmp_path, body, **job))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()


def test_each_process_knows_its_place_and_the_first_is_shown(run):
    body = """
print(*(os.environ[f"ZAYAJAX_{k}"] for k in ("COORDINATOR", "PROCESSES", "PROCESS", "NODES")),
      os.environ["LOCAL_RANK"], *sys.argv[1:])
print("warned", file=sys.stderr)
"""
    one = run(body)
    out, err = one.ended(0)
    assert re.fullmatch(r"127\.0\.0\.1:\d+ 2 0 1 0 train c\.toml\nwarned\n", out)
    assert err == ""
    assert one.log(1, 0) == out
    assert one.log(1, 1) == out.replace("2 0 1 0", "2 1 1 1")
    two = run(body, processes=4, node=2, nodes=3, coordinator="h:99")
    assert two.ended(0)[0] == "h:99 12 8 3 0 train c.toml\nwarned\n"
    assert two.log(1, 11).startswith("h:99 12 11 3 3 ")


def test_one_alone_joins_nobody(run, monkeypatch):
    monkeypatch.setenv("ZAYAJAX_PROCESSES", "9")
    one = run("", processes=1, worker=(sys.executable, "-c", "import os; print([k for k in "
              "os.environ if k.startswith('ZAYAJAX')])"))  # fmt: skip
    assert one.ended(0)[0] == "[]\n"


def test_a_killed_process_takes_all_down_and_all_come_back(run):
    one = run(
        """
print("attempt", attempt, *sys.argv[2:], flush=True)
if attempt == 1:
    beat()
    (run / f"child{rank}").write_text(str(child()))
    print("\\n".join(f"line {i}" for i in range(80)), flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sleeps()
""",
        arguments=("train", "c.toml", "--fresh", "--train.steps", "3"),
    )
    out, err = one.ended(0)
    assert out.startswith("attempt 1 c.toml --fresh --train.steps 3\n")
    assert out.endswith("attempt 2 c.toml --train.steps 3 --resume\n")
    assert err.count("\n") == 1 and "1.txt; again in 0.0 s, 2 restarts left" in err
    assert "rank 1 was killed by SIGKILL (last heard of 20" in err
    crash = one.crash(1)
    assert "at step 12, in step" in crash and "rank 0 (pid " in crash
    assert "was killed by SIGTERM" in crash  # the other, in the end by us
    assert "line 79" in crash and "line 31\n" in crash and "line 29\n" not in crash
    assert (one.folder / "child0").exists() and (one.folder / "child1").exists()


def test_who_ignores_sigterm_or_is_stopped_is_killed_too(run):
    one = run(
        """
if attempt == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run / f"pid{rank}").touch()
    while rank == 2 and not all((run / f"pid{r}").exists() for r in range(4)):
        time.sleep(0.01)
    if rank == 2:
        sys.exit(82)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 3:
        sys.exit(81)
    sleeps()
""",
        processes=4,
    )
    _, err = one.ended(0)
    assert "rank 3 left with STALLED (81)" in err  # not who lost a peer by it
    assert one.crash(1).count("was killed by SIGKILL") == 2


def test_a_mistake_is_said_and_not_started_again(run):
    one = run("print('c.toml: wrong', rank)\nsys.exit(2 if rank == 1 else sleeps())")
    out, err = one.ended(Exit.MISTAKE)
    assert out == "c.toml: wrong 0\n" and err == "zayajax launch: rank 1: c.toml: wrong 1\n"
    assert not (one.folder / "crashes").exists()
    one = run("print('c.toml: wrong')\nsys.exit(2)")
    assert one.ended(Exit.MISTAKE) == ("c.toml: wrong\n", "")


def test_restarts_are_counted_and_a_checkpoint_brings_them_back(run):
    one = run(
        "(run / 'checkpoints' / '9.tmp').mkdir(parents=True, exist_ok=True)  # never complete\n"
        "attempt == 3 and (run / 'checkpoints' / '7').mkdir(exist_ok=True)\n"
        "sleeps() if rank else os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    _, err = one.ended(128 + signal.SIGSEGV)
    assert re.findall(r"(\d+) restarts left", err) == ["2", "1", "2", "1", "0"]
    assert err.splitlines()[-1].endswith("the last of 3 restarts without a new checkpoint")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_all_save_and_ends_the_job(run, number, status):
    one = run("""
def save(number, frame):
    (run / f"saved{rank}").write_text(signal.Signals(number).name)
    time.sleep(1.0 if rank else 0)  # longer than `settle`
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(run / f"ready{rank}").write_text("x")
sleeps()
""")
    one.until("ready0")
    one.until("ready1")
    one.process.send_signal(number)
    assert one.ended(status) == ("saved\n", "")
    assert [one.until(f"saved{r}") for r in (0, 1)] == ["SIGTERM", "SIGTERM"]
    assert one.log(1, 1) == "saved\n"


def test_who_does_not_save_within_the_grace_is_killed(run):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(run / f"ready{rank}").write_text("x")
sleeps()
"""
    one = run(body, grace=0.3)
    one.until("ready0")
    one.until("ready1")
    one.process.send_signal(signal.SIGTERM)
    assert "was killed by SIGKILL; see " in one.ended(143)[1]
    for rank in (0, 1):
        (one.folder / f"ready{rank}").unlink()
    two = run(body)  # 300 s of grace, and a second Ctrl-C
    two.until("ready0")
    two.until("ready1")
    for _ in range(2):
        two.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    two.ended(130)


def test_a_signal_between_two_attempts_ends_the_job(run):
    one = run("sys.exit(1)", pause=60.0)
    one.until("crashes/1.txt")
    time.sleep(0.3)
    one.process.send_signal(signal.SIGTERM)
    one.ended(143)


def test_one_that_is_told_to_stop_from_outside_is_a_fault(run):
    one = run("attempt == 1 and os.kill(os.getpid(), signal.SIGTERM)\nsys.exit(0)")
    assert "was killed by SIGTERM" in one.ended(0)[1]
    one = run("sys.exit(143 if not (run / 'crashes' / '3.txt').exists() else 0)")
    assert "left with STOPPED (143)" in one.ended(0)[1]


def test_nothing_is_left_when_the_supervisor_is_killed(run):
    one = run("""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(run / f"child{rank}").write_text(str(child()))
sleeps()
""")
    one.until("child0")
    one.until("child1")
    assert one.left()
    one.process.kill()
    one.process.wait()
    end = time.monotonic() + SOON
    while (left := one.left()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def test_a_rank_that_is_not_heard_of_hangs(run):
    """Heard of every second: three of those are the least."""
    one = run(
        """
if attempt == 1:
    for i in range(600):
        if i == 0 or rank == 0:
            beat(i)
        time.sleep(0.25)
""",
        hang=3.0,
    )
    began = time.monotonic()
    _, err = one.ended(0)
    assert 3 < time.monotonic() - began < 15
    assert "rank 1 hangs: not heard of for 3 s (last heard of 20" in err


def test_a_rank_at_its_exit_does_not_hang(run):
    """It says nothing while it waits for another, which writes the report."""
    one = run("beat(phase='ended')\ntime.sleep(6)", hang=3.0)
    assert one.ended(0) == ("", "")


def test_a_rank_that_never_starts_hangs(run):
    one = run("attempt == 1 and sleeps()", start=1.0)
    assert "rank 0 hangs: not heard of for 1 s since its start; see" in one.ended(0)[1]
    assert "never heard of" in one.crash(1)


def test_heartbeats_of_another_process_are_nobodys(run):
    """An earlier job's that could not be deleted, or one that runs in the same folder."""
    one = run(
        "if attempt == 1:\n    for i in range(600):\n        beat(i, pid=1)\n"
        "        time.sleep(0.1)\n",
        start=1.0,
    )
    assert "not heard of for 1 s since its start; see" in one.ended(0)[1]
    assert "never heard of" in one.crash(1)


def test_a_folder_that_takes_nothing_does_not_end_the_run(run, tmp_path):
    (tmp_path / "run").touch()  # a file
    one = run("print('done', rank)\nrank and time.sleep(1.5)", start=0.5)
    out, err = one.ended(0)
    assert out == "done 0\n"
    assert err.count("\n") == 1 and "no rank is heard" in err


def test_a_terminal_that_takes_nothing_does_not_hold_the_run(run):
    one = run(
        "for i in range(40_000):\n    print(f'{i:0100}')\n(run / f'ready{rank}').write_text('x')\n"
    )
    one.until("ready0")  # nothing was read of its 4 MB
    out, _ = one.ended(0)
    assert one.log(1, 0).count("\n") == 40_000
    assert out.endswith(f"{39_999:0100}\n") and "not shown; it is in the logs" in out
    one = run("print('x' * 1000_000)")
    one.process.stdout.close()
    one.process.stdout = None
    one.ended(0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (dict(processes=3, gpus=8), "--gpus 8: does not divide over 3 processes"),
        (dict(processes=0), "--processes: must be positive, and is 0"),
        (dict(gpus=-1), "--gpus: must be positive"),
        (dict(node=2, nodes=2, coordinator="h:1"), "--node 2: nodes are numbered 0 .. 1"),
        (dict(node=-1), "--node -1: "),
        (dict(nodes=2), "name the host and a port of node 0"),
        (dict(restarts=-1), "--restarts: must not be negative"),
        (dict(hang=float("nan")), "--hang: must not be negative"),
        (dict(hang=2.0), "--hang 2: each of 1 processes is heard of every 1 s; use at least 3"),
        (dict(processes=8, gpus=8, nodes=128, coordinator="h:1", hang=30.0), "every 16 s"),
    ],
)
def test_mistakes(words, text):
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        Job(**(dict(arguments=("train",), run_dir=Path("r")) | words))
    assert text in str(error.value)


def test_fresh_stays_until_the_old_run_is_gone(tmp_path):
    first = ("train", "c.toml", "--fresh", "--init-from", "w")
    old = tmp_path / "checkpoints" / "40"
    old.mkdir(parents=True)
    (tmp_path / "checkpoints" / "50.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / "checkpoints" / "damaged-30").mkdir()
    before = complete(tmp_path)
    assert [*before.values()] == [40] and newest(tmp_path, {}) == 40
    assert newest(tmp_path, before) == -1
    assert again(first, not before.keys() & complete(tmp_path).keys()) == first
    old.rmdir()
    time.sleep(0.01)  # the file system's clock has ticks
    old.mkdir()  # another of the same step
    assert newest(tmp_path, before) == 40
    resumed = again(first, not before.keys() & complete(tmp_path).keys())
    assert resumed == ("train", "c.toml", "--init-from", "w", "--resume")
    assert again(resumed, True) == resumed


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3))), st.integers(0, 60))
@settings(max_examples=25, deadline=None)
def test_an_attempt_never_writes_over_another(tmp_path_factory, made, before):
    logs = tmp_path_factory.mktemp("logs")
    for attempt, rank in made:
        (logs / str(attempt)).mkdir(exist_ok=True)
        (logs / str(attempt) / f"{rank}.log").touch()
    for rank in range(4):
        number = next_attempt(logs, rank, before)
        assert number > before and not (logs / str(number) / f"{rank}.log").exists()


def test_codes_have_names():
    assert as_words(-9) == "was killed by SIGKILL"
    assert as_words(-64) == "was killed by SIGRTMAX" and "signal 99" in as_words(-99)
    assert as_words(82) == "left with LOST (82)" and as_words(7) == "left with status 7"


def test_the_command_says_mistakes_before_it_starts_anything(tmp_path, capsys):
    config = tmp_path / "small.toml"
    config.write_text(to_toml(build(runs.tree(tmp_path / "none"))))
    train = ["--", "train", str(config), "--run-dir", str(tmp_path / "run")]

    def refused(*words, text):
        assert main(["launch", *words]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and text in err, err

    refused(text="name what to run")
    refused("--", "eval", text="name what to run")
    refused(*train, "--train.stepz", "3", text="did you mean train.steps?")
    refused(*train, "--process", "3", text="--process after --: launch sets it")
    refused("--gpus", "4", *train, text="mesh.nodes * mesh.gpus = 8")
    refused("--processes", "3", *train, text="--gpus 8: does not divide over 3 processes")
    refused("--nodes", "2", *train, text="--node")
    refused("--node", "1", *train, text="--node 1: nodes are numbered 0 .. 0")
    refused("--nodes", "2", "--node", "0", *train, text="--coordinator HOST:PORT")
    refused("--slurm", "2", "--node", "0", *train, text="leave out --nodes, --node")
    refused("--slurm", "0", *train, text="must be positive, and is 0")
    refused("--name", "x", *train, text="--name: goes with --slurm or --kubernetes N")
    refused("--setup", "x", *train, text="--setup: goes with --slurm or --kubernetes N")
    refused("--slurm", "1", "--image", "x", *train, text="--image: goes with --kubernetes N")
    refused("--kubernetes", "1", "--image", "x", *train, text="name the --claim")
    refused("--slurm", "1", "--hang", "1", *train, text="use at least 3")
    assert not (tmp_path / "run").exists()


def test_the_command_prints_scripts(tmp_path, capsys):
    config = tmp_path / "small_2.toml"
    config.write_text(to_toml(build(runs.tree(tmp_path / "none"))))
    for words in (["--slurm", "1"], ["--kubernetes", "1", "--image", "i", "--claim", "c"]):
        options = ["--processes", "2", "--hang", "90", "--", "train", str(config)]
        assert main(["launch", *words, *options]) == 0
        out = capsys.readouterr().out
        assert "zayajax launch --processes 2 --gpus 8 --nodes 1 --hang 90 " in out
        assert "small-2" in out and str(config) in out


def test_the_command_launches_train(tmp_path):
    """A mistake that only the process itself can find: the corpus is not there."""
    config = tmp_path / "small.toml"
    config.write_text(to_toml(build(runs.tree(tmp_path / "none"))))
    environ = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-m", "zayajax", "launch", "--", "train", config.name],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert done.returncode == Exit.MISTAKE, done
    assert done.stderr == "" and "none" in done.stdout and done.stdout.count("\n") == 1
    log = tmp_path / "runs" / "small" / "logs" / "1" / "0.log"  # the folder as `train` has it
    assert log.read_text() == done.stdout
