"""What others have measured of collectives, as data: what the model is held against."""

import dataclasses

from zayajax.machine import OCI, OHARA, Machine, named
from zayajax.planning.fabric import bus_factor, seconds

MIB, GIB = 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class Curve:
    """One operation of one group, by size."""

    machine: str
    op: str
    span: str
    group: int
    points: tuple[tuple[int, float], ...]  # bytes of the message, seconds
    source: str

    def label(self) -> str:
        gpus = named(self.machine).gpus
        nodes = f"{self.group // gpus} x " if self.span == "world" else ""
        return f"{nodes}{min(self.group, gpus)} {self.machine}, {self.op.replace('_', '-')}"

    def bandwidths(self) -> list[tuple[int, float]]:
        """Bytes, and bus bandwidth in bytes a second."""
        factor = bus_factor(self.op, self.group)
        return [(size, size * factor / t) for size, t in self.points]

    def errors(self, machine: Machine | None = None) -> list[tuple[int, float]]:
        """Bytes, and by what part the modelled bus bandwidth is off."""
        machine = machine or named(self.machine)
        return [
            (size, t / seconds(machine, self.op, size, self.span, self.group) - 1)
            for size, t in self.points
        ]


def _timed(start: int, microseconds: str) -> tuple[tuple[int, float], ...]:
    """Times of messages of `start` bytes, twice as many, and so on; - where there is none."""
    times = microseconds.split()
    return tuple((start << i, float(t) * 1e-6) for i, t in enumerate(times) if t != "-")


def _rated(op: str, group: int, gigabytes: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """From bus bandwidths in GB/s."""
    factor = bus_factor(op, group)
    return tuple((size, size * factor / (1e9 * x)) for size, x in gigabytes.items())


# RCCL's table by message size in ROCm 6.3.
EIGHT_MI300X = {
    **{2**k * MIB: x for k, x in enumerate((67, 105, 142, 175, 197, 241, 274, 295, 306))},
    GIB: 315,
    16 * GIB: 319,
}
# Left out: its 512 KiB and 1 MiB, 306 and 415 us, are as slow as its 2 MiB and 8 MiB.
TWO_NODES_MI300X = (
    "220.8 223.6 226.2 240.5 238.8 239.9 241.1 242.9 248.8 - - 318.6 337.9 402.2 497.3 590.3 "
    "821.9 1448.8 1713.4 3096.3 5908.3 11574 22788 45224 90115"
)
TWO_NODES_MI355X = (
    "55.28 55.27 56.25 56.51 59.17 65.97 67.22 69.78 81.37 98.50 118.6 166.5 261.6 391.8 614.3 "
    "1041.8 1652.0 2880.5 5525.0 10989 21870 43643"
)
# One process a GPU; larger ones vary threefold there.
EIGHT_MI350X = "24.97 32.29 49.53 79.17 137.7 251.2 414.6 703.7 1342.3"
EIGHT_H100 = "613.3 1139.2 2175.8 4038.8 8020.3 15870"
OHARA_ROCM64 = f"{OHARA} (ROCm 6.4)"
ISSUE_1455 = "NVIDIA/nccl issue 1455, September 2024: 2 to 4 GiB"

CURVES = (
    Curve(
        "MI300X",
        "all_reduce",
        "node",
        8,
        _rated("all_reduce", 8, EIGHT_MI300X),
        "AMD's ROCm blog on RCCL and xGMI, March 2025 (ROCm 6.3)",
    ),
    Curve("MI300X", "all_reduce", "world", 16, _timed(1024, TWO_NODES_MI300X), OHARA_ROCM64),
    Curve(
        "MI355X",
        "all_reduce",
        "world",
        16,
        _timed(4096, TWO_NODES_MI355X),
        f"{OHARA} (ROCm 7.0, Pollara 400)",
    ),
    Curve(
        "MI350X",
        "all_reduce",
        "node",
        8,
        _timed(MIB, EIGHT_MI350X),
        "AMD Instinct system acceptance guide (ROCm 7.0), in place",
    ),
    Curve(
        "MI350X",
        "all_to_all",
        "node",
        8,
        _rated("all_to_all", 8, {8 * GIB: 349}),
        "rccl-tests, 8 MI350X",
    ),
    Curve("MI355X", "all_reduce", "node", 8, _timed(8 * GIB, "36956 73913"), OCI),
    Curve("MI355X", "all_to_all", "node", 8, _timed(8 * GIB, "20837 41593"), OCI),
    Curve("MI325X", "all_reduce", "node", 8, _timed(4 * GIB, "23719 47217 94222"), OHARA_ROCM64),
    Curve("MI325X", "all_reduce", "world", 16, _timed(4 * GIB, "23192 46123 91973"), OHARA_ROCM64),
    Curve("MI325X", "all_reduce", "world", 32, _timed(4 * GIB, "23904 47563 94942"), OHARA_ROCM64),
    Curve("MI325X", "all_reduce", "world", 64, _timed(4 * GIB, "24572 48321 96405"), OHARA_ROCM64),
    Curve(
        "H100",
        "all_reduce",
        "node",
        8,
        _timed(128 * MIB, EIGHT_H100),
        "NVIDIA/nccl-tests issue 290, March 2025",
    ),
    Curve(
        "H200",
        "all_reduce",
        "node",
        8,
        _rated("all_reduce", 8, {4 * GIB: 475}),
        "NVIDIA/nccl-tests issue 272, November 2024 (NCCL 2.20)",
    ),
    *(
        Curve(
            "H100",
            "all_reduce",
            "partial",
            n,
            _rated("all_reduce", n, {4 * GIB: x}),
            ISSUE_1455,
        )
        for n, x in ((2, 367), (4, 370), (5, 420), (6, 440), (7, 460))
    ),
)
