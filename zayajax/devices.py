"""Which device stands where in the mesh: whole hosts in order, and the rails kept.

`gpu` neighbours are the devices of one host. `node` neighbours have the same local rank, because
NIC i of each node is on rail i, and traffic that changes rail is slow. JAX promises no such order,
and a process knows neither the host nor the local rank of another's devices: processes tell each
other. `arrange` is a pure function of what they told.
"""

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from zayajax.errors import UserError
from zayajax.machine import machine

# The launcher nearest to the process first: what mpirun or a script starts inside one SLURM task
# inherits the SLURM_LOCALID of that task.
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
SEAT_BYTES = 1024  # of a seat as JSON: a host's name has at most 64 characters


@dataclasses.dataclass(frozen=True)
class Seat:
    """Where one device is, as only its own process knows.

    Args:
      host: tells machines apart.
      name: what people call the host.
      hardware: `local_hardware_id`. Counts from 0 in each process whose visible devices are masked.
      rank: the process's rank on its host by its launcher, as text; None if it gave none.
      variable: where that rank was found.
    """

    host: str
    name: str
    hardware: int
    rank: str | None = None
    variable: str = ""


def seats(devices: Sequence[jax.Device], host: str | None = None) -> list[Seat]:
    """The seat of each device. A collective where there are several processes.

    Args:
      devices: all of them, `jax.devices()`.
      host: stands for the host's name, so that processes of one machine can stand for several
        nodes. The launcher's local ranks, which count on the real host, are then left aside.
    """
    name = (host or platform.node() or "this host")[:64]
    mine = [d for d in devices if d.process_index == jax.process_index()]
    alone = len(mine) == len(devices)
    # Alone, a rank is left over from a launcher that started something else.
    variable = "" if host or alone else next((v for v in LOCAL_RANKS if v in os.environ), "")
    rank = os.environ[variable][:32] if variable else None
    identity = name if host else machine_id() or name
    seats = [Seat(identity, name, d.local_hardware_id, rank, variable) for d in mine]
    if alone:
        return seats
    # Not `process_allgather`: it wants as many devices in each process, which is to be found out.
    mesh = Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,))
    rows = [
        jax.device_put(np.frombuffer(_encode(seat), np.uint8)[None], d)
        for d, seat in zip(mine, seats, strict=True)
    ]
    shape, split = (len(devices), SEAT_BYTES), NamedSharding(mesh, P("device"))
    rows = jax.make_array_from_single_device_arrays(shape, split, rows)
    everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(rows)
    return [Seat(**json.loads(bytes(row))) for row in np.asarray(everywhere.addressable_data(0))]


def machine_id() -> str | None:
    # The names of hosts need not differ ("localhost"), and containers of one host have several.
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _encode(seat: Seat) -> bytes:
    text = json.dumps(dataclasses.asdict(seat), ensure_ascii=False)
    return text.encode(errors="replace").ljust(SEAT_BYTES)


def arrange(devices: Sequence, seats: Sequence[Seat], nodes: int, gpus: int) -> np.ndarray:
    """Devices as [nodes, gpus]: a row is of one host, a column of one local rank.

    Hosts come in the order of their first process. Emulated devices (CPU) of one host may stand for
    several nodes, cut in order; `gpus` is then the node by definition.

    Args:
      devices: all there are, in any order.
      seats: where each is.

    Raises UserError where that mesh is not this machine, or leaves most of a node's links idle.
    """
    known = machine(devices[0].device_kind)
    if known and known.point_to_point and 1 < gpus < known.gpus:  # a mask may hide the others
        raise UserError(f"mesh.gpus = {gpus}: {known.share(gpus)}; {_whole(devices, known.gpus)}")
    hosts = _hosts(devices, seats)
    _check_hosts(devices, hosts, nodes, gpus)
    array = np.empty(nodes * gpus, object)
    array[:] = [d for _, row in hosts for d in row][: nodes * gpus]
    return array.reshape(nodes, gpus)


def _check_hosts(devices, hosts, nodes: int, gpus: int):
    kind, emulated = devices[0].device_kind, devices[0].platform == "cpu"
    known, processes = machine(kind), len({d.process_index for d in devices})
    counts = {name: len(row) for name, row in hosts}
    name, n = next(iter(counts.items()))
    asked = f"the config asks for {nodes} x {gpus} devices (mesh.nodes, mesh.gpus)"
    where = f" on {len(hosts)} hosts ({', '.join(counts)})" if len(hosts) > 1 else ""
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}: {n}" for name, n in counts.items())
        raise UserError(
            f"the hosts have different numbers of devices ({listed}); leave out the host that "
            "lacks some, or start a process for each of its devices"
        )
    if len(devices) < nodes * gpus:
        raise UserError(f"{asked}, and there are {len(devices)} ({kind}){where}")
    if not emulated and gpus > n:
        raise UserError(
            f"mesh.gpus = {gpus}, and host {name} has {n} devices ({kind}): the GPUs of a node are "
            f"those of one host; use mesh.gpus = {n} with mesh.nodes = {len(hosts)}"
        )
    if not emulated and gpus not in (1, n):
        cost = known.share(gpus) if known else "what a part of a node costs here is not known"
        raise UserError(
            f"mesh.gpus = {gpus} of the {n} devices of host {name} ({kind}): {cost}, but `gpu` is "
            f"the whole node in every layout; {_whole(devices, n)}, or hide the "
            "other devices from this process"
        )
    if processes > 1 and nodes * gpus != len(devices):
        raise UserError(
            f"{asked}, and {processes} processes have {len(devices)}{where}: each of them takes "
            f"part, so mesh.nodes * mesh.gpus has to be {len(devices)}"
        )
    if known and known.point_to_point and gpus == 1 < nodes < n:
        raise UserError(
            f"mesh.nodes = {nodes} with mesh.gpus = 1 on {n} devices of host {name}: "
            f"{known.share(nodes)}; {_whole(devices, n)}"
        )
    if len(hosts) > 1 and n % gpus:
        raise UserError(
            f"mesh.gpus = {gpus} does not divide the {n} devices of host {name}: a node would "
            "span two hosts"
        )


def _whole(devices, n: int) -> str:
    nodes, seen = max(len(devices) // n, 1), len(devices)
    shown = f" (of which {seen} can be seen)" if seen < n else ""
    return (
        f"use mesh.gpus = {n}, the whole node{shown}, with mesh.nodes = {nodes}, "
        f"or mesh.gpus = 1 with mesh.nodes = {seen}"
    )


def _hosts(devices, seats) -> list[tuple[str, list]]:
    """The name of each host and its devices by local rank; hosts by their first process."""
    rows: dict[str, list] = {}
    for d, seat in sorted(zip(devices, seats, strict=True), key=lambda x: x[0].process_index):
        rows.setdefault(seat.host, []).append((d, seat))
    names = [row[0][1].name for row in rows.values()]
    # Where two hosts have one name, their first processes tell them apart.
    labels = [
        name if names.count(name) == 1 else f"{name} (process {row[0][0].process_index})"
        for name, row in zip(names, rows.values(), strict=True)
    ]
    return [(name, _by_rail(name, row)) for name, row in zip(labels, rows.values(), strict=True)]


def _by_rail(host: str, row: list) -> list:
    ranks = _ranks(host, {d.process_index: seat for d, seat in row})

    def by_process(x):
        return ranks[x[0].process_index], x[1].hardware

    hardware = [seat.hardware for _, seat in row]
    if len(set(hardware)) < len(hardware):  # masked: each process counts its devices from 0
        return [d for d, _ in sorted(row, key=by_process)]
    found = sorted(row, key=lambda x: x[1].hardware)
    order = list(dict.fromkeys(d.process_index for d, _ in found))
    if row[0][1].rank is not None and order != sorted(order, key=ranks.get):
        pairs = ", ".join(f"{ranks[d.process_index]}: {seat.hardware}" for d, seat in found)
        raise UserError(
            f"host {host}: local ranks ({row[0][1].variable}) and their devices are in different "
            f"orders ({pairs}); give local rank i device i, so that it keeps to NIC i"
        )
    return [d for d, _ in found]


def _ranks(host: str, processes: dict[int, Seat]) -> dict[int, int]:
    """The rank of each process on its host: by the launcher, else in the order of processes."""
    given = {p: seat.rank for p, seat in processes.items()}
    if set(given.values()) == {None}:
        return {p: i for i, p in enumerate(sorted(given))}
    variable = next(seat.variable for seat in processes.values() if seat.rank is not None)
    silent = [p for p, rank in given.items() if rank is None]
    wrong = {p: r for p, r in given.items() if r is not None and not (r.isascii() and r.isdigit())}
    listed = ", ".join(f"process {p}: {rank}" for p, rank in sorted(given.items()))
    if silent:
        problem = f"process {silent[0]} has no local rank and others have"
    elif wrong:
        problem = f"{next(iter(wrong.values()))!r} is no local rank"
    elif len({int(r) for r in given.values()}) < len(given):
        problem = "two processes have the same local rank"
    elif missing := set(range(len(given))) - {int(r) for r in given.values()}:
        problem = f"local rank {min(missing)} is missing among {len(given)} processes"
    else:
        return {p: int(rank) for p, rank in given.items()}
    raise UserError(
        f"host {host}: {problem} ({variable}: {listed}); start processes so that those of a host "
        f"count from 0, or unset {variable} in all"
    )
