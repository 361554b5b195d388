"""Real runs of real processes, and what is done to them.

A run here is `zayajax launch ... -- train ...` in a process of its own, as small as a run can be.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import runs

from zayajax import config as configs

PATIENCE = 300  # seconds that anything may take on two busy cores
ZAYAJAX = [sys.executable, "-m", "zayajax"]
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "jax"


def write_config(folder: Path, **changes) -> Path:
    """A config file of a small run, and its text."""
    if not (folder / "text").exists():
        runs.write_text(folder / "text")
    config = runs.config(folder / "text", **changes)
    path = folder / "small.toml"
    path.write_text(configs.to_toml(config))
    return path


@dataclasses.dataclass
class Launched:
    """A running command, its output in a file."""

    process: subprocess.Popen
    run_dir: Path
    output: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, seconds: float = PATIENCE) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {seconds} s:\n{self.text()[-3000:]}") from None

    def until(self, happened: Callable[[], object], seconds: float = PATIENCE):
        """What `happened` returns once that is true; None where the command has ended before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := happened():
                return found
            if self.process.poll() is not None:
                return None
            time.sleep(0.02)
        raise AssertionError(f"did not happen in {seconds} s:\n{self.text()[-3000:]}")

    def workers(self) -> dict[int, int]:
        """{rank: pid} of the processes that train, by their environment."""
        found = {}
        for status in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                environ = dict(
                    word.split(b"=", 1) for word in status.read_bytes().split(b"\0") if b"=" in word
                )
                if environ.get(b"FAULTS_RUN") == str(self.run_dir).encode():
                    if b"ZAYAJAX_PROCESS" in environ:
                        found[int(environ[b"ZAYAJAX_PROCESS"])] = int(status.parent.name)
        return found


def command(*words, **options):
    """`zayajax WORDS`, as `program`."""
    return program([*ZAYAJAX, *map(str, words)], **options)


@contextlib.contextmanager
def program(argv: list[str], *, run_dir: Path, name: str = "output", **env) -> Iterator[Launched]:
    """A running program, which is gone with all that it has started at the end."""
    output = run_dir.with_name(f"{run_dir.name}.{name}.txt")
    env = {
        **{k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS",)},
        "FAULTS_RUN": str(run_dir),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        # Compiles fast, and alike in every process of the suite.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        **env,
    }
    with output.open("ab") as file:
        process = subprocess.Popen(
            argv,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    launched = Launched(process, run_dir, output)
    try:
        yield launched
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pid in launched.workers().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def launch(config: Path, run_dir: Path, processes: int, gpus: int, *words, **options):
    """A run of `processes` on one node of `gpus` emulated GPUs."""
    launching = ["launch", "--processes", processes, "--gpus", gpus, *options.pop("launching", ())]
    training = ["--", "train", config, "--run-dir", run_dir, *words]
    return command(*launching, *training, run_dir=run_dir, **options)


def complete(run_dir: Path) -> list[int]:
    """Steps with a complete checkpoint."""
    folder = run_dir / "checkpoints"
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def saving(run_dir: Path) -> bool:
    """A checkpoint is being written."""
    folder = run_dir / "checkpoints"
    return folder.is_dir() and any(p.suffix == ".saving" for p in folder.iterdir())


def lines(run_dir: Path, kind: str = "") -> list[dict]:
    """Of the metrics as they are now; a torn last line is left out."""
    path = run_dir / "metrics.jsonl"
    found = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(text))
    return [line for line in found if not kind or line["kind"] == kind]


def last_step(run_dir: Path) -> int:
    return max((line["step"] for line in lines(run_dir)), default=-1)


def resumed_at(text: str) -> list[int]:
    """Where each attempt after the first went on, from what was said."""
    said = re.findall(r"resuming at step (\d+)|no complete checkpoint, starting at step (0)", text)
    return [int(a or b) for a, b in said]


def arrays(run_dir: Path) -> dict[str, bytes]:
    """All arrays of the newest checkpoint, moments too, as bytes with shape and type."""
    import orbax.checkpoint as ocp

    step = run_dir / "checkpoints" / str(complete(run_dir)[-1])
    record = json.loads((step / "record" / "metadata").read_text())
    found = {}
    for part in ("weights", "rest"):
        plain = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in record[part]}
        with ocp.PyTreeCheckpointer() as reader:
            arrays = reader.restore(step / part, restore_args=plain)
        for name, x in arrays.items():
            found[f"{part}/{name}"] = f"{x.dtype}{x.shape} ".encode() + np.asarray(x).tobytes()
    return found


TIMES = ("tokens_per_second", "step_seconds", "seconds", "mfu")


def numbers(run_dir: Path) -> list[dict]:
    """The metrics without what depends on the clock."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines(run_dir)]
