"""Measures collectives on the devices at hand, in the units of rccl-tests.

Groups are parts of a node, the node, and with several nodes their rails and the world. All groups
of a kind work at once, as in a training step. Each output is compared, on the devices, with what it
has to be. Messages are float32 and count as `planning.fabric.seconds` says.

Shape letters: n GPUs of a group, K values of one GPU's part, N = n K.
"""

import contextlib
import dataclasses
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from rich.console import Console
from rich.progress import track

from zayajax.devices import arrange, seats
from zayajax.errors import UserError
from zayajax.machine import CPU, Machine, machine
from zayajax.mesh import emulate
from zayajax.planning.fabric import OPS, bus_factor, seconds
from zayajax.tables import Column, Table, duration, rate, size as written

AXES = ("rest", "part")
PART = ("part",)
EMULATED = 8  # a node of the machines that matter here
UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SMALLEST = 2**10


@dataclasses.dataclass(frozen=True)
class Effort:
    """How large and how often."""

    largest: int  # bytes
    repeats: int
    calls: int  # in flight at once; a repeat's time is a call's share
    warm_up: int = 3


# On few cores several programs in flight starve each other of threads. On GPUs one call's dispatch
# is hidden behind the others, as between the 20 iterations of rccl-tests.
EFFORTS = {"cpu": Effort(4 * 2**20, repeats=11, calls=1)}
ON_GPU = Effort(2**30, repeats=11, calls=10)


@dataclasses.dataclass(frozen=True)
class Group:
    span: str
    size: int
    mesh: Mesh


def measure(largest: str | int | None = None, nodes: int | None = None) -> Table:
    """Times all operations. A CPU that JAX has not started on yet stands for eight GPUs.

    Args:
      largest: bytes of the largest message, as a number or text such as "64MiB"; by default what is
        sensible for the platform. Sizes go down from it by fours to 1 KiB.
      nodes: how many nodes the devices are, by default as many as there are hosts.

    Returns:
      rows {"op", "span", "group_size", "bytes", "seconds", "seconds_quartiles",
      "algorithm_bandwidth", "bus_bandwidth", "modelled_seconds"} in bytes, seconds and bytes a
      second; times are medians, with the lower and the upper quartile. `modelled_seconds` is None
      where the machine is not known. With several processes each has to call it, and has its own.

    Raises UserError where there is one device, or nothing of that size.
    """
    asked = None if largest is None else parse_bytes(largest)
    with contextlib.suppress(UserError):  # JAX runs already: then it is measured as it is
        emulate(EMULATED)
    devices = jax.devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    if len(devices) == 1:
        raise UserError(
            f"a collective takes two devices, and there is one ({kind}): nothing to measure"
        )
    effort = EFFORTS.get(platform, ON_GPU)
    known = machine(kind)
    if platform == "cpu" and jax.process_count() == 1:  # processes share no memory
        known = CPU
    found = list(_groups(devices, nodes))
    todo = list(itertools.product(OPS, found, _sizes(asked or effort.largest)))
    console = Console(stderr=True)
    silent = not console.is_terminal or jax.process_index() > 0
    todo = track(todo, "measuring", console=console, transient=True, disable=silent)
    rows = [_row(known, op, group, bytes_, effort) for op, group, bytes_ in todo]
    return _table(rows, devices, found, effort, known)


def parse_bytes(text: str | int, option: str = "--largest") -> int:
    """1048576, "1048576", "1MiB" or "1 MiB". Raises UserError where it is no size of a message."""
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]IB)?\s*", str(text).upper())
    if not match:
        raise UserError(f"{option} {text}: is no number of bytes such as 1048576 or 64MiB")
    found = int(match[1]) * UNITS[match[2] or ""]
    if found < SMALLEST:
        raise UserError(f"{option} {text}: the smallest is {written(SMALLEST)}")
    return found


def _sizes(largest: int) -> list[int]:
    steps = int(math.log(largest / SMALLEST, 4) + 1e-9)
    return [largest // 4**k for k in range(steps, -1, -1)]


def _groups(devices, nodes: int | None) -> Iterator[Group]:
    found = seats(devices)
    nodes = nodes or len({seat.host for seat in found})
    grid = arrange(devices, found, nodes, len(devices) // nodes)
    gpus = grid.shape[1]
    parts = [n for n in (2, 4) if n < gpus and gpus % n == 0]
    for span, n in [("partial", n) for n in parts] + [("node", gpus)] * (gpus > 1):
        yield Group(span, n, _mesh(grid.reshape(-1, n)))
    if nodes > 1:
        yield Group("rail", nodes, _mesh(grid.T))
    if nodes > 1 and gpus > 1:
        yield Group("world", grid.size, _mesh(grid.reshape(1, -1)))


def _mesh(rows) -> Mesh:
    return Mesh(rows, AXES, axis_types=(AxisType.Auto,) * 2)


def _row(known: Machine | None, op: str, group: Group, bytes_: int, effort: Effort) -> dict:
    n = group.size
    unit = 4 * n  # every part of a message holds whole numbers
    bytes_ = max(bytes_ // unit, 1) * unit
    run, wrong = programs(op, group.mesh, bytes_ // 4)
    x = _input(op, group.mesh, bytes_ // 4)
    output = jax.block_until_ready(run(x))
    if errors := int(np.sum(_local(wrong(output)))):
        raise RuntimeError(f"{op} over {n} devices ({group.span}): {errors} wrong numbers")
    del output
    low, median, high = np.percentile(_times(partial(run, x), effort), (25, 50, 75)).tolist()
    # Emulated devices share one memory, wherever they are said to be.
    span = "node" if known is CPU else group.span
    return {
        "op": op,
        "span": group.span,
        "group_size": n,
        "bytes": bytes_,
        "seconds": median,
        "seconds_quartiles": [low, high],
        "algorithm_bandwidth": bytes_ / median,
        "bus_bandwidth": bytes_ * bus_factor(op, n) / median,
        "modelled_seconds": known and seconds(known, op, bytes_, span, n),
    }


def _local(x) -> np.ndarray:
    return np.concatenate([np.asarray(shard.data).ravel() for shard in x.addressable_shards])


def _times(call: Callable, effort: Effort) -> list[float]:
    for _ in range(effort.warm_up):
        jax.block_until_ready(call())
    times = []
    for _ in range(effort.repeats):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(effort.calls)])
        times.append((time.perf_counter() - start) / effort.calls)
    return times


def programs(op: str, mesh: Mesh, N: int) -> tuple[Callable, Callable]:
    """The operation on a message of N numbers, and how many of an output are wrong, by device."""
    n, gpu = mesh.shape["part"], mesh.devices.flat[0].platform != "cpu"

    def wrong(output):
        right = _expected(op, n, N, jax.lax.axis_index("part"))
        return jnp.sum(output != right, dtype=jnp.int32)[None]

    return mapped(partial(OPERATIONS[op], n, gpu), mesh), mapped(wrong, mesh)


def mapped(fn: Callable, mesh: Mesh) -> Callable:
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES)))


def _input(op: str, mesh: Mesh, N: int):
    """Each device's numbers `[N]`, or its part `[K]` of what is gathered."""
    own = N // mesh.shape["part"] if op == "all_gather" else N

    def fill():
        return _value(jax.lax.axis_index("part"), jnp.arange(own))

    return jax.jit(jax.shard_map(fill, mesh=mesh, in_specs=(), out_specs=P(AXES)))()


def _value(rank, i):
    """Whole numbers, so small that sums over thousands of ranks are exact in float32."""
    return ((rank + 1) * (i % 13 + 1)).astype(jnp.float32)


def _expected(op: str, n: int, N: int, rank):
    i, K = jnp.arange(N), N // n
    if op == "all_reduce":
        return _value(n * (n + 1) // 2 - 1, i)
    if op == "reduce_scatter":
        return _value(n * (n + 1) // 2 - 1, rank * K + i[:K])
    if op == "all_gather":
        return _value(i // K, i % K)
    if op == "all_to_all":
        return _value(i // K, rank * K + i % K)
    return _value(0 if op == "broadcast" else (rank - 1) % n, i)


def _broadcast(n, gpu, x):
    if gpu:
        return jax.lax.pbroadcast(x, PART, 0)
    # XLA for CPU has none.
    return jax.lax.psum(jnp.where(jax.lax.axis_index("part") == 0, x, 0), PART)


# Of n devices, on GPUs or not.
OPERATIONS = {
    "all_reduce": lambda n, gpu, x: jax.lax.psum(x, PART),
    "reduce_scatter": lambda n, gpu, x: jax.lax.psum_scatter(x, PART, tiled=True),
    "all_gather": lambda n, gpu, x: jax.lax.all_gather(x, PART, tiled=True),
    "all_to_all": lambda n, gpu, x: jax.lax.all_to_all(x, PART, 0, 0, tiled=True),
    "broadcast": _broadcast,
    "permute": lambda n, gpu, x: jax.lax.ppermute(x, PART, [(i, (i + 1) % n) for i in range(n)]),
}


def _table(rows, devices, groups: list[Group], effort: Effort, known) -> Table:
    kind, emulated = devices[0].device_kind, devices[0].platform == "cpu"
    hosts = len({d.process_index for d in devices})
    spans = ", ".join(f"{g.span} of {g.size}" for g in groups)
    notes = [
        f"{len(devices)} devices ({kind}) of {hosts} process{'es' * (hosts > 1)}, jax "
        f"{jax.__version__}; groups: {spans}; all groups of a kind at once.",
        f"Medians of {effort.repeats} times, each the share of {effort.calls} call"
        f"{'s' * (effort.calls > 1)} from Python, after {effort.warm_up} to warm up; outputs are "
        "as they have to be.",
    ]
    if emulated:
        notes.append("Emulated devices share cores and memory: this says nothing of a GPU.")
        notes.append("A broadcast is a sum with zeros here: XLA for CPU has no other.")
    if known is CPU:
        notes.append(f"The model is {CPU.inside.rate.source}.")
    if known is None:
        notes.append(f"There is no model of this machine ({kind}, {hosts} processes).")
    return Table(
        f"collectives on {len(devices)} {'emulated devices' if emulated else kind}",
        [
            Column("op", "operation", left=True),
            Column("span", "span", left=True),
            Column("group_size", "GPUs", str),
            Column("bytes", "message", written),
            Column("seconds", "time", duration),
            Column("seconds_quartiles", "quartiles", lambda x: " - ".join(map(duration, x))),
            Column("algorithm_bandwidth", "algorithm", rate),
            Column("bus_bandwidth", "bus", rate),
            Column("modelled_seconds", "modelled", duration),
        ],
        rows,
        notes,
    )
