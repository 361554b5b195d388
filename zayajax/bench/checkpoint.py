"""Measures what saving costs: the time a step waits, bytes a second to disk, the host's memory.

Against a gather of the same state to one writer, which the step waits for, and against the disk
alone. All ways end with the bytes on disk (fsync).
"""

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from zayajax.bench.collectives import EMULATED, parse_bytes
from zayajax.checkpoint import Checkpoints, copies, digest
from zayajax.errors import UserError
from zayajax.layout import WORLD
from zayajax.mesh import emulate, make_mesh
from zayajax.tables import Column, Table, duration, rate, size as written

ARRAYS = 16
REPEATS = 3
CHUNK = 64 * 2**20  # bytes of one write to the bare disk
SAMPLED = 0.002  # seconds between two looks at the memory in use
DEVICES, HOST = "copied on the devices", "copied on the host"
GATHER, DISK = "gathered to one writer", "the disk alone"


def measure(size: str | int = "2GiB", folder: Path = Path(), repeats: int = REPEATS) -> Table:
    """Saves a state of random float32 arrays, sharded over all devices, each way in turn.

    Args:
      size: bytes of the state, as a number or text such as "2GiB"; rounded up to whole shards.
      folder: on the disk that is measured; what is written there goes when it returns.

    Returns:
      rows {"way", "bytes", "call_seconds", "call_quartiles", "blocked_seconds",
      "blocked_quartiles", "seconds", "seconds_quartiles", "bytes_per_second", "host_bytes"} in
      seconds and bytes: how long the call keeps the loop, a step's time with the call before it
      beyond that of a step without, the time from the call until all is on disk, and the most
      memory the process had beyond what it had before. Times are medians, with the lower and upper
      quartile; memory is the most of all repeats. The disk alone blocks nothing.

    Raises UserError where there is no room for it, or several processes.
    """
    bytes_ = parse_bytes(size, "--bytes")
    with contextlib.suppress(UserError):  # JAX runs already: then it is measured as it is
        emulate(EMULATED)
    if jax.process_count() > 1:
        raise UserError("bench checkpoint: measures one process; start it once, without a launcher")
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder to write to (--folder)")
    free = shutil.disk_usage(folder).free
    if free < 3 * bytes_:
        raise UserError(
            f"{folder}: {written(free)} are free, and {written(3 * bytes_)} are needed; use a "
            "smaller --bytes, or another --folder"
        )
    state = _state(bytes_)
    bytes_ = sum(x.nbytes for x in state.values())
    before = _resident()
    for warm in (digest.partial_digests, copies.on_devices, copies.on_host):
        jax.block_until_ready(warm(state))
    for _ in range(2):
        state = jax.block_until_ready(_step(state))
    times = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-checkpoint-") as name:
        for repeat, way in itertools.product(range(repeats), (DEVICES, HOST, GATHER, DISK)):
            target = Path(name, f"{repeat}-{list(WAYS).index(way)}")
            # JAX keeps what a copy to the host has taken: it counts from before the first one.
            state, *found = _one(WAYS[way], state, target, None if way == GATHER else before)
            times.setdefault(way, []).append(found)
            shutil.rmtree(target)
    return _table([_row(way, bytes_, times[way]) for way in times], repeats)


def _state(bytes_: int) -> dict[str, jax.Array]:
    devices = jax.devices()
    mesh = make_mesh(1, len(devices))
    rows = len(devices) * max(1, round(bytes_ / (ARRAYS * 4 * len(devices) * 1024)))
    sharding = NamedSharding(mesh, P(WORLD[::-1]))

    @partial(jax.jit, out_shardings=sharding)
    def made(key):
        return jax.random.normal(key, (rows, 1024))

    keys = jax.random.split(jax.random.key(0), ARRAYS)
    return {f"params.{i}": jax.block_until_ready(made(key)) for i, key in enumerate(keys)}


@partial(jax.jit, donate_argnums=0)
def _step(state):
    """Of a training step what matters here: it overwrites the state, in the same memory."""
    return jax.tree.map(lambda x: x * 0.999, state)


def _one(way: Callable, state, folder: Path, before: int | None):
    """(the state afterwards; seconds of the call, with the delay of the step after, until all is on
    disk; bytes of host memory)"""
    started = time.perf_counter()
    state = jax.block_until_ready(_step(state))
    step = time.perf_counter() - started
    folder.mkdir()
    with way(folder) as save, _memory(before) as most:
        started = time.perf_counter()
        wait = save(state)
        call = time.perf_counter() - started
        state = jax.block_until_ready(_step(state))
        blocked = time.perf_counter() - started - step
        wait()
        seconds = time.perf_counter() - started
    return state, call, max(blocked, 0.0), seconds, most()


@contextlib.contextmanager
def _saved(folder: Path, on_devices: bool):
    with Checkpoints(folder, on_devices=on_devices) as checkpoints:

        def save(state):
            checkpoints.save(1, state, {})
            return checkpoints.wait

        yield save


@contextlib.contextmanager
def _gathered(folder: Path):
    """All arrays to the memory of one process, and from there into one file."""
    with open(folder / "state", "wb") as file:

        def save(state):
            for x in jax.device_get(state).values():
                file.write(np.ascontiguousarray(x).data)
            file.flush()
            os.fsync(file.fileno())
            return lambda: None

        yield save


@contextlib.contextmanager
def _disk(folder: Path):
    chunk = np.random.default_rng(0).bytes(CHUNK)
    with open(folder / "state", "wb", buffering=0) as file:

        def save(state):
            left = sum(x.nbytes for x in state.values())
            while left:
                left -= file.write(chunk[:left])
            os.fsync(file.fileno())
            return lambda: None

        yield save


WAYS = {
    DEVICES: partial(_saved, on_devices=True),
    HOST: partial(_saved, on_devices=False),
    GATHER: _gathered,
    DISK: _disk,
}


@contextlib.contextmanager
def _memory(before: int | None) -> Iterator[Callable[[], int]]:
    """The most resident memory of this process beyond `before`, or what it has now, in bytes."""
    first, most, done = _resident() if before is None else before, [0], threading.Event()

    def watch():
        while not done.wait(SAMPLED):
            most[0] = max(most[0], _resident() - first)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: most[0]
    finally:
        done.set()
        watcher.join()


def _resident() -> int:
    """proc(5), statm: the second number is of pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _row(way: str, bytes_: int, found: list) -> dict:
    call, blocked, seconds, memory = zip(*found, strict=True)
    row = {"way": way, "bytes": bytes_}
    for name, times in (("call", call), ("blocked", blocked)):
        row |= {f"{name}_seconds": None, f"{name}_quartiles": None}
        if way != DISK:
            row |= _timed(f"{name}_seconds", times)
    row |= _timed("seconds", seconds)
    row["bytes_per_second"] = bytes_ / row["seconds"]
    row["host_bytes"] = None if way == DISK else max(memory)
    return row


def _timed(name: str, seconds) -> dict:
    low, median, high = np.percentile(seconds, (25, 50, 75)).tolist()
    return {name: median, f"{name.removesuffix('_seconds')}_quartiles": [low, high]}


def _table(rows: list[dict], repeats: int) -> Table:
    devices = jax.devices()
    emulated, kind = devices[0].platform == "cpu", devices[0].device_kind
    gathered = next(row for row in rows if row["way"] == GATHER)["blocked_seconds"]
    notes = [
        f"{len(devices)} devices ({kind}) of one process, jax {jax.__version__}; {ARRAYS} arrays; "
        f"medians of {repeats}, each way in turn; all synced to disk.",
    ]
    for row in rows:
        if row["way"] in (DEVICES, HOST) and row["blocked_seconds"]:
            call, less = (gathered / row[f"{k}_seconds"] for k in ("call", "blocked"))
            notes.append(
                f"{row['way']}: the call takes {call:.3g} times less than the gather, and with the "
                f"delay of the step after it {less:.3g} times."
            )
    if emulated:
        notes.append(
            "Emulated devices are the host: a copy on them is host memory, and goes through the "
            "memory that steps and writing share."
        )

    def span(quartiles):
        return " - ".join(map(duration, quartiles))

    return Table(
        f"saving {written(rows[0]['bytes'])}",
        [
            Column("way", "way", left=True),
            Column("bytes", "state", written),
            Column("call_seconds", "call", duration),
            Column("call_quartiles", "quartiles", span),
            Column("blocked_seconds", "and the step after", duration),
            Column("blocked_quartiles", "quartiles", span),
            Column("seconds", "on disk after", duration),
            Column("seconds_quartiles", "quartiles", span),
            Column("bytes_per_second", "rate", rate),
            Column("host_bytes", "host memory", written),
        ],
        rows,
        notes,
    )
