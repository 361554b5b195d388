"""A process that stands still ends itself and names who is behind; one that is slow does not."""

import dataclasses
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings, strategies as st

from zayajax.errors import Exit
from zayajax.training import heartbeats
from zayajax.training.heartbeats import ENDED, Rank, behind, interval, read_rank, read_ranks
from zayajax.training.watchdog import Watchdog

# Waits of a test for something that comes at once, on a machine that is busy with other tests.
SOON = 30.0

HEAD = """
import sys, time
from zayajax.training.watchdog import Watchdog
def dog(stall, patience, process=0, processes=1, folder=sys.argv[1]):
    return Watchdog(folder, process, processes, stall=stall, patience=patience, host="h")
def steps(d, n, seconds=0.01, first=1):
    for step in range(first, first + n):
        d.dispatched(step)
        time.sleep(seconds)
        d.finished(step)
    print("ready", flush=True)
def c_call():
    import hashlib  # gives up the interpreter's lock, as XLA does
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 100_000_000)
"""


def start(folder, body: str):
    command = [sys.executable, "-c", HEAD + body, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process) -> tuple[int, str]:
    """(status, stderr)"""
    try:
        status = process.wait(SOON)
    finally:
        process.kill()
    return status, process.stderr.read()


def rank(process, **changes):
    made = Rank(
        process=process,
        host="h",
        pid=17,
        phase="step",
        since=0.0,
        dispatched=5,
        finished=4,
        time=time.time(),
        beat=1,
    )
    return dataclasses.replace(made, **changes)


def test_a_stall_inside_c_ends_with_stacks_and_the_rank_behind(tmp_path):
    future = time.time() + 60  # heard of all the while
    heartbeats.write(tmp_path, rank(1, dispatched=2, finished=2, time=future))
    heartbeats.write(tmp_path, rank(2, dispatched=9, time=future))
    body = "with dog(0.3, 60, processes=3) as d, d.phase('step'):\n    steps(d, 4)\n    c_call()\n"
    status, err = ended(start(tmp_path, body))
    assert status == Exit.STALLED
    assert "rank 0: stalled in step: no step has ended for 0." in err
    assert "in c_call" in err and err.count("behind: ") == 1
    assert "behind: rank 1 (host h, pid 17): last heard of 0 s ago, at step 2, in step\n" in err
    stacks = (tmp_path / "0.stacks.txt").read_text()
    assert stacks.startswith("rank 0: stalled") and "in c_call" in stacks


def test_a_stopped_peer_is_named_in_time(tmp_path):
    """The peer's last sign of life has to be four intervals old, so that is how long it takes."""
    other = start(tmp_path, "with dog(0, 60, 1, 2) as d:\n    steps(d, 3)\n    time.sleep(600)\n")
    assert other.stdout.readline() == "ready\n"
    other.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    body = "with dog(5, 60, 0, 2) as d, d.phase('step'):\n    steps(d, 4)\n    c_call()\n"
    status, err = ended(start(tmp_path, body))
    other.kill()
    assert status == Exit.STALLED
    assert re.search(r"behind: rank 1 \((host h, pid \d+\): last heard of|not heard)", err) or (
        "behind: rank 1: not heard of since the start" in err
    )
    assert 5 < time.monotonic() - began < 15


def test_who_was_stopped_is_not_late_when_it_wakes(tmp_path):
    body = "with dog(0.6, 60) as d, d.phase('step'):\n    steps(d, 4)\n    steps(d, 60, first=5)\n"
    process = start(tmp_path, body)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # twice what a step may take
    process.send_signal(signal.SIGCONT)
    assert ended(process) == (0, "")


@pytest.mark.parametrize(
    "body",
    [
        # The first steps, and whatever is no step, have their patience.
        "with dog(0.1, 60) as d, d.phase('step'):\n    steps(d, 2, 0.6)\n",
        "with dog(0.1, 60) as d, d.phase('step'):\n    steps(d, 4)\n    with d.phase('eval'):\n"
        "        time.sleep(0.6)\n    steps(d, 4, first=5)\n",
        # Nine times the median, and stall.
        "with dog(0.1, 60) as d, d.phase('step'):\n    steps(d, 4, 0.1)\n    steps(d, 1, 0.9, 5)\n",
        "with dog(0, 0.1) as d, d.phase('compile'):\n    time.sleep(0.6)\n",
    ],
)
def test_what_is_slow_is_left_alone(tmp_path, body):
    assert ended(start(tmp_path, body)) == (0, "")


def test_patience_ends_too(tmp_path):
    body = "with dog(60, 0.3) as d, d.phase('step'), d.phase('compile'):\n    c_call()\n"
    status, err = ended(start(tmp_path, body))
    assert status == Exit.STALLED
    assert "rank 0: stalled in compile: longer than 0.3 s (last finished: -1)" in err
    assert "no rank is behind: all 1 are at step 0" in err


def test_a_folder_that_takes_nothing_is_said_once(tmp_path):
    """And the process still ends in time when it stalls."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    body = "with dog(0.3, 60) as d, d.phase('step'):\n    time.sleep(1.5)\n    steps(d, 4)\n"
    status, err = ended(start(folder, body))
    assert (status, err) == (0, f"{folder}: no heartbeats (Not a directory); going on\n")
    status, err = ended(start(folder, body + "    c_call()\n"))
    assert status == Exit.STALLED and "in c_call" in err
    assert "stalled in step" in err


def test_a_folder_that_hangs_does_not_keep_it(tmp_path):
    """As a network's file system does: neither writing nor reading comes back."""
    body = """
from zayajax.training import heartbeats, watchdog
heartbeats.write = watchdog.read_ranks = lambda *_: time.sleep(600)
watchdog.REPORT = 0.5
with dog(0, 60) as d:
    steps(d, 1)
print("left", flush=True)
with dog(0.3, 60) as d, d.phase("step"):
    steps(d, 4)
    c_call()
"""
    process = start(tmp_path, body)
    status, err = ended(process)
    assert status == Exit.STALLED and "in c_call" in err
    assert process.stdout.read() == "ready\nleft\nready\n"


def test_a_reader_that_is_gone_does_not_keep_it(tmp_path):
    process = start(
        tmp_path, "with dog(0.3, 60) as d, d.phase('step'):\n    steps(d, 4)\n    c_call()\n"
    )
    process.stderr.close()
    assert process.wait(SOON) == Exit.STALLED


def test_what_it_writes(tmp_path):
    with Watchdog(tmp_path, 3, 8, stall=0, patience=1, host="here") as dog:
        with dog.phase("step"):
            dog.dispatched(7)
            dog.finished(6)
            with dog.phase("save"):
                assert dog._phases[-1] == "save"
            assert dog._phases[-1] == "step"
    (found,) = read_ranks(tmp_path)
    assert (found.process, found.host, found.phase) == (3, "here", ENDED)
    assert (found.dispatched, found.finished) == (7, 6)
    assert abs(found.time - time.time()) < SOON


def test_files_of_others_are_passed_over(tmp_path):
    heartbeats.write(tmp_path, rank(10))
    heartbeats.write(tmp_path, rank(2))
    rng = random.Random(0)
    for i, text in enumerate(("", "{", "[]", "3", '{"process": 1}', "\x00" * 99)):
        (tmp_path / f"{20 + i}.json").write_text(text)
    (tmp_path / "30.json").write_bytes(rng.randbytes(200))
    (tmp_path / "x.json").write_text("{}")
    assert [r.process for r in read_ranks(tmp_path)] == [2, 10]
    assert read_rank(tmp_path, 20) is None and read_ranks(tmp_path / "none") == []


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_exactly_those_behind_are_named(data):
    now, n = 1000.0, data.draw(st.integers(1, 12))
    kinds = data.draw(
        st.lists(st.sampled_from("fine slow silent none old ended".split()), min_size=n, max_size=n)
    )
    made = {
        "fine": dict(dispatched=9),
        "slow": dict(dispatched=8),
        "silent": dict(time=now - 5 * interval(n)),
        "old": dict(time=1.0),
        "ended": dict(phase=ENDED),
    }
    ranks = [rank(i, **{"time": now} | made[k]) for i, k in enumerate(kinds) if k != "none"]
    text = behind(ranks, n, 500.0, now)
    gone = {i for i, k in enumerate(kinds) if k in ("silent", "none", "old", "ended")}
    slow = {i for i, k in enumerate(kinds) if k == "slow"}
    want = gone or (slow if len(slow) < n else set())
    named = {int(i) for i in re.findall(r"rank (\d+)", text)}
    more = re.search(r"and (\d+) more", text)
    assert named <= want and len(named) + int(more[1] if more else 0) == len(want)
    assert bool(want) == text.startswith("behind: ") and "\n" not in text


def test_a_thousand_ranks_write_64_files_a_second():
    assert all(p / interval(p) <= 64 for p in (1, 8, 64, 100, 1024, 4096))
