"""Real processes save together, any others restore the same bytes, and an error of one is known
to all."""

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import patterns
import pytest

from zayajax.checkpoint import Checkpoints

pytestmark = pytest.mark.faults  # eight starts of processes

WORKER = Path(__file__).with_name("worker.py")
SHAPES = ("1x8", "2x4", "8x1")


def run_processes(processes, words, devices=8):
    """{word: (steps, what was said)}, the same from each of `processes`, which share `devices`."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    started = []
    for i in range(processes):
        args = map(str, (address, processes, i, devices // processes, *words))
        command = [sys.executable, str(WORKER), *args]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, env=env, **pipes))
    try:
        outs = [p.communicate(timeout=240) for p in started]
    finally:
        for p in started:
            p.kill()
    said = []
    for p, (out, err) in zip(started, outs, strict=True):
        assert p.returncode == 0, f"{out[-1000:]}\n{err[-3000:]}"
        found = re.findall(r"^(\w+:\S+:\d+): (\[.*?\]) (\[.*\])$", out, re.M)  # Gloo prints, too
        said.append({word: tuple(map(ast.literal_eval, rest)) for word, *rest in found})
    assert all(s == said[0] for s in said) and list(said[0]) == words, said
    return said[0]


def here(folder, words):
    """The same in this process."""
    for word in words:
        what, _, shape, step = word.split(":")
        with Checkpoints(folder, keep=0) as saved:
            if what == "save":
                patterns.save(saved, shape, int(step))
            else:
                patterns.assert_restores(saved, shape, int(step))


def pairs(folder, shapes, first):
    """Saved on each, restored on all others."""
    words = []
    for step, shape in enumerate(shapes, first):
        words += [f"save:{folder}:{shape}:{step}"]
        words += [f"restore:{folder}:{other}:{step}" for other in shapes if other != shape]
    return words


def restored(folder, shapes, step):
    return [f"restore:{folder}:{shape}:{step}" for shape in shapes]


def test_saved_by_any_restored_by_any(tmp_path):
    """1, 2 and 4 processes, each before and after each other; one device, too."""
    one, single, two, four = (tmp_path / name for name in ("one", "single", "two", "four"))
    here(one, pairs(one, (*SHAPES, "1x1"), 1))  # ends on one device
    here(single, [f"save:{single}:2x4:7"])
    words = restored(one, SHAPES, 4) + restored(single, ["1x8"], 7) + pairs(two, SHAPES, 1)
    run_processes(2, words)
    words = restored(one, ["8x1"], 4) + restored(single, ["1x8"], 7) + restored(two, SHAPES, 3)
    run_processes(4, [*words, f"save:{four}:8x1:1", f"save:{four}:2x4:2"])
    for folder, step in ((two, 3), (four, 2)):
        here(folder, restored(folder, (*SHAPES, "1x1"), step))
    said = run_processes(2, [*restored(four, SHAPES, 2), *faults(tmp_path / "faults")])
    check_faults(said, tmp_path / "faults", 1)


def faults(folder):
    words = ("save", 1), ("fail", 2), ("silent", 3), ("save", 4), ("wrong", 1)
    return [f"{what}:{folder}:1x8:{step}" for what, step in words]


def check_faults(said, folder, last):
    found = {word.partition(":")[0]: rest for word, rest in said.items()}
    (failed,), (silent,), (wrong,) = (found[k][1] for k in ("fail", "silent", "wrong"))
    assert f"process {last}: No space left on device); the last good one is of step 1" in failed
    assert f"not heard of within 2 s: process {last}); the last good one is of step 1" in silent
    assert "/4: damaged, passed over (other bits than were saved, in counts)" in wrong
    assert found["wrong"][0] == [1]
    names = {p.name for p in (folder / "checkpoints").iterdir()}
    assert names == {"1", "damaged-4"}
