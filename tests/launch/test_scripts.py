"""Scripts are run with stand-ins for Slurm's commands; what they start gets the very words."""

import json
import os
import signal
import stat
import subprocess
import time

import pytest
from hypothesis import given, settings, strategies as st

from zayajax.errors import UserError
from zayajax.launch import scripts

ARGV = ["train", "configs/my run.toml", "--fresh", "--run-dir", "/runs/it's $(HOME)"]
AGAIN = ["train", "configs/my run.toml", "--run-dir", "/runs/it's $(HOME)", "--resume"]
SHAPE = dict(nodes=16, gpus=8, processes=8)
PODS = SHAPE | dict(image="registry/zayajax:1", claim="runs")

# Writes its words; with WAIT waits until it is told to end, and ends as a stopped run does.
SRUN = """#!/usr/bin/env python3
import json, os, signal, sys, time
def stop(*_):
    os._exit(143)
signal.signal(signal.SIGTERM, stop)
here = os.path.dirname(__file__)
with open(here + "/words.new", "w") as f:
    json.dump([os.getpid(), os.environ["NCCL_CROSS_NIC"], *sys.argv[1:]], f)
os.rename(here + "/words.new", here + "/words")
if "WAIT" in os.environ:
    time.sleep(30)
sys.exit(int(os.environ.get("STATUS", 0)))
"""
SCANCEL = """#!/usr/bin/env python3
import json, os, signal, sys
here = os.path.dirname(__file__)
assert sys.argv[1:] == ["--signal=TERM", "77"], sys.argv
os.kill(json.load(open(here + "/words"))[0], signal.SIGTERM)
"""
SCONTROL = '#!/bin/sh\necho "$@" > "$(dirname "$0")/requeued"\n'


@pytest.fixture
def start(tmp_path):
    """Starts a script with these variables, Slurm's commands being stand-ins."""
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755 | stat.S_IXUSR)
    started = []

    def run(script, **variables):
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
        started.append(
            subprocess.Popen(
                ["bash", "-c", script], env=env | variables, stderr=subprocess.PIPE, text=True
            )
        )
        return started[-1]

    yield run
    for p in started:
        p.kill()
        p.communicate()


def words(tmp_path):
    deadline = time.monotonic() + 20
    while not (tmp_path / "words").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    _, cross, *found = json.loads((tmp_path / "words").read_text())
    assert cross == "0"
    split = found.index("--")
    return found[:split], found[split + 1 :]


@pytest.mark.parametrize(("restarts", "want"), [("0", ARGV), ("2", AGAIN)])
def test_a_batch_script_starts_each_node_with_the_very_words(restarts, want, start, tmp_path):
    script = scripts.slurm(ARGV, **SHAPE)
    p = start(script, SLURM_RESTART_COUNT=restarts, STATUS="82")
    assert p.wait(30) == 82, p.stderr.read()
    before, after = words(tmp_path)
    assert after == want
    launch = before[before.index("zayajax") :]
    assert launch == "zayajax launch --processes 8 --gpus 8 --nodes 16".split()
    assert {"--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpu-bind=none"} < set(before)
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    ("seconds_left", "comes_back"), [(200, True), (7200, False), (None, False)]
)
def test_sigterm_reaches_the_step_and_the_end_of_time_queues_again(
    seconds_left, comes_back, start, tmp_path
):
    variables = {"WAIT": "1"}
    if seconds_left:
        variables["SLURM_JOB_END_TIME"] = str(int(time.time()) + seconds_left)
    p = start(scripts.slurm(ARGV, **SHAPE), **variables)
    words(tmp_path)
    p.send_signal(signal.SIGTERM)
    assert p.wait(20) == 143, p.stderr.read()
    assert (tmp_path / "requeued").exists() == comes_back


PRINTABLE = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=12)


@given(st.lists(PRINTABLE.filter(str.isprintable), max_size=4))
@settings(max_examples=25, deadline=None)
def test_any_words_survive_the_shell(more):
    argv = ["train", *more]
    script = scripts.slurm(argv, **SHAPE)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    line = next(x for x in script.splitlines() if x.strip().startswith("run=("))
    code = line.strip() + r"; printf '%s\0' "
    out = subprocess.run(["bash", "-c", code + '"${run[@]}"'], capture_output=True)
    assert out.stdout.decode().split("\0")[:-1] == argv


def test_directives_come_before_any_command():
    lines = scripts.slurm(ARGV, **SHAPE, name="long-run", time="2-12:00:00", grace=120).splitlines()
    head = [x for x in lines if x.startswith("#SBATCH")]
    first_command = next(i for i, x in enumerate(lines) if x and not x.startswith("#"))
    assert max(lines.index(x) for x in head) < first_command
    assert {"#SBATCH --nodes=16", "#SBATCH --exclusive", "#SBATCH --requeue"} < set(head)
    assert {"#SBATCH --time=2-12:00:00", "#SBATCH --signal=B:TERM@180"} < set(head)
    assert {"#SBATCH --gpus-per-node=8", "#SBATCH --job-name=long-run"} < set(head)


def jobset(argv=ARGV, **more):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(scripts.kubernetes(argv, **PODS | more))


def test_a_jobset_is_whole():
    found = jobset(setup="source env\nulimit -l unlimited", grace=120)
    spec, name = found["spec"], found["metadata"]["name"]
    (job,) = spec["replicatedJobs"]
    of_job = job["template"]["spec"]
    assert of_job["completionMode"] == "Indexed" and of_job["backoffLimit"] == 0
    assert of_job["completions"] == of_job["parallelism"] == 16
    assert spec["network"]["subdomain"] == name and spec["network"]["publishNotReadyAddresses"]
    pod = of_job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 120 and pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"amd.com/gpu": 8}
    mounted = {m["name"] for m in container["volumeMounts"]}
    assert mounted == {v["name"] for v in pod["volumes"]}
    (rule,) = of_job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert spec["failurePolicy"]["maxRestarts"] > 0
    other = jobset(vendor="nvidia")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert other["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}


@pytest.mark.parametrize(("attempt", "want"), [("0", ARGV), ("1", AGAIN)])
def test_a_pod_starts_its_node_with_the_very_words(attempt, want, tmp_path):
    pod = jobset(name="run")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (code,) = pod["containers"][0]["args"]
    code = code.replace("$$(", "$(")  # as the kubelet does
    (tmp_path / "zayajax").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "zayajax").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RESTART_ATTEMPT": attempt}
    env |= {"JOB_COMPLETION_INDEX": "5"}
    out = subprocess.run(["bash", "-c", code], env=env, capture_output=True, text=True)
    found = out.stdout.split("\0")[:-1]
    split = found.index("--")
    assert found[split + 1 :] == want
    given = dict(zip(found[1:split:2], found[2:split:2], strict=True))
    address = given.pop("--coordinator")
    assert address.startswith("run-nodes-0-0.run:")
    assert given == {"--processes": "8", "--gpus": "8", "--nodes": "16", "--node": "5"}


@given(st.lists(PRINTABLE.filter(str.isprintable), max_size=4), st.sampled_from(["null", "on"]))
@settings(max_examples=25, deadline=None)
def test_any_words_survive_yaml_too(more, name):
    found = jobset(["train", *more], name=name)
    assert found["metadata"]["name"] == found["spec"]["network"]["subdomain"] == name
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (text,) = pod["containers"][0]["args"]
    line = next(x for x in text.splitlines() if x.strip().startswith("run=("))
    code = line.replace("$$(", "$(").strip() + "; printf '%s\\0' \"${run[@]}\""
    out = subprocess.run(["bash", "-c", code], capture_output=True)
    assert out.stdout.decode().split("\0")[:-1] == ["train", *more]


def test_without_yaml_the_structure_is_seen():
    """Indentation by twos, no tab, and no `{` of a template left."""
    text = scripts.kubernetes(ARGV, **PODS)
    for line in text.splitlines():
        assert "\t" not in line and (len(line) - len(line.lstrip())) % 2 == 0
    assert "{{" not in text and "{%" not in text


def test_going_on_neither_deletes_nor_starts_anew():
    argv = ["train", "c", "--init-from", "x", "--fresh", "--train.steps", "5"]
    assert scripts.again(argv) == [*argv[:4], *argv[5:], "--resume"]
    assert scripts.again(scripts.again(argv)) == scripts.again(argv)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"nodes": 0}, "--nodes"),
        ({"processes": 3}, "3 processes on a node cannot share its 8 GPUs"),
        ({"name": "a b"}, "a b"),
        ({"name": ""}, "name"),
        ({"name": "x\n#SBATCH --uid=0"}, "name"),
        ({"time": "tomorrow"}, "12:00:00"),
        ({"time": "1:00\n"}, "12:00:00"),
        ({"argv": []}, "train CONFIG"),
        ({"argv": ["generate"]}, "train CONFIG"),
        ({"argv": ["train", "a\nb"]}, "cannot be shown"),
    ],
)
def test_what_no_job_can_have_is_one_sentence(more, words):
    argv = more.pop("argv", ARGV)
    with pytest.raises(UserError, match=rf"^[^\n]*{words}"):
        scripts.slurm(argv, **SHAPE | more)


@pytest.mark.parametrize(
    "more",
    [
        {"name": "Run"},
        {"name": "a" * 60},
        {"vendor": "intel"},
        {"mount": "runs"},
        {"image": ""},
        {"claim": "a\nb"},
        {"restarts": -1},
    ],
)
def test_what_no_pod_can_have_is_one_sentence(more):
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        scripts.kubernetes(ARGV, **PODS | more)
