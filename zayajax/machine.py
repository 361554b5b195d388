"""What is known about machines, as data with its source."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Machine:
    """A kind of GPU and how a node of them is wired; rates are the vendor's, of one GPU."""

    name: str  # part of the name that JAX gives the device
    peak_bf16: float  # dense FLOP/s
    gpus: int  # in a node
    link: float  # GB/s each way: of the link between two GPUs, or of a GPU to the switch
    point_to_point: bool  # each GPU has a link to every other of the node; else a switch
    source: str

    def bandwidth(self, group: int) -> float:
        """GB/s each way of a GPU to the others of a group of `group` in its node."""
        return self.link * (group - 1 if self.point_to_point else min(group - 1, 1))

    def share(self, group: int) -> str:
        """In words, what a group of `group` GPUs gets of the node's bandwidth."""
        node = f"the node's {self.bandwidth(self.gpus):g} GB/s"
        if not self.point_to_point:
            return f"a group of {group} GPUs behind a switch keeps {node}"
        links = f"({group} - 1) x {self.link:g} = " if group > 1 else ""
        return (
            f"on point-to-point links ({self.name}) a group of {group} GPUs has "
            f"{links}{self.bandwidth(group):g} of {node}"
        )


MI300_SHEET = "AMD data sheet: 7 links of 128 GB/s, both ways together"
MI350_SHEET = "AMD data sheet: 7 links of 153.6 GB/s, both ways together"
NVLINK4 = "NVIDIA data sheet of the SXM module: NVLink 900 GB/s, both ways together"

MACHINES = (
    Machine("MI300X", 1307e12, 8, 64, True, MI300_SHEET),
    Machine("MI325X", 1307e12, 8, 64, True, MI300_SHEET),
    Machine("MI350X", 2307e12, 8, 76.8, True, MI350_SHEET),
    Machine("MI355X", 2517e12, 8, 76.8, True, MI350_SHEET),
    Machine("H100", 989e12, 8, 450, False, NVLINK4),
    Machine("H200", 989e12, 8, 450, False, NVLINK4),
)
MI300X = MACHINES[0]


def machine(device_kind: str) -> Machine | None:
    """By the name that JAX gives a device; None where it is not known."""
    return next((m for m in MACHINES if m.name in device_kind), None)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of one device by the name that JAX gives it; None if not known."""
    found = machine(device_kind)
    return found and found.peak_bf16
