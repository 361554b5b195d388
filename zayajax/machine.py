"""What is known about machines, as data: each number with its source.

Rates are of one GPU, in FLOP/s and bytes/s; links count one direction.
"""

import dataclasses

from zayajax.errors import UserError


class Sourced(float):
    """A number that knows where it comes from; arithmetic with it gives plain floats."""

    source: str

    def __new__(cls, value: float, source: str):
        self = super().__new__(cls, value)
        self.source = source
        return self

    def __getnewargs__(self):
        return float(self), self.source


@dataclasses.dataclass(frozen=True)
class Wire:
    """What one step of a collective takes: `min` over two protocols of latency + bytes / rate.

    Libraries send short messages with flags among the data, which costs rate and saves a wait, and
    long ones without. `zayajax.planning.fabric` says what a step is.
    """

    short_latency: Sourced  # seconds
    short_rate: Sourced  # bytes/s
    latency: Sourced
    rate: Sourced

    def numbers(self) -> tuple[Sourced, ...]:
        return self.short_latency, self.short_rate, self.latency, self.rate


@dataclasses.dataclass(frozen=True)
class Machine:
    """A kind of GPU and how nodes of them are wired."""

    name: str  # part of the name that JAX gives the device
    gpus: int  # in a node
    point_to_point: bool  # a link to every other GPU of the node; else links to a switch
    peak_bf16: Sourced  # dense FLOP/s
    peak_float32: Sourced  # of products of float32, as such
    reached_bf16: Sourced  # what large matrix products reach
    hbm: Sourced  # bytes
    hbm_bandwidth: Sourced
    hbm_reached: Sourced
    links: int
    link: Sourced  # bytes/s each way, by data sheet
    nic: Sourced  # bytes/s each way of the GPU's own NIC, by data sheet
    inside: Wire  # a link within the node, as collectives see it
    across: Wire  # a GPU's NIC between nodes, as collectives see it; latencies are for two nodes
    pairwise: Sourced  # of the rate inside: what sends between pairs reach (all-to-all, permute)
    reduced_rate: Sourced | None = None  # of a link, where the switch itself adds up
    reduced_latency: Sourced | None = None
    price: Sourced | None = None  # dollars an hour of one GPU

    def bandwidth(self, group: int) -> float:
        """Bytes/s each way of a GPU to the others of a group of `group` in its node."""
        return self.link * (group - 1 if self.point_to_point else min(group - 1, 1) * self.links)

    def share(self, group: int) -> str:
        """In words, what a group of `group` GPUs gets of the node's bandwidth."""
        node = f"the node's {self.bandwidth(self.gpus) / 1e9:g} GB/s"
        if not self.point_to_point:
            return f"a group of {group} GPUs behind a switch keeps {node}"
        links = f"({group} - 1) x {self.link / 1e9:g} = " if group > 1 else ""
        return (
            f"on point-to-point links ({self.name}) a group of {group} GPUs has "
            f"{links}{self.bandwidth(group) / 1e9:g} of {node}"
        )

    def check(self, gpus: int) -> None:
        """UserError where a mesh has neither whole nodes nor one GPU of each."""
        if gpus not in (1, self.gpus):
            raise UserError(
                f"mesh.gpus = {gpus}: a node of {self.name} has {self.gpus} GPUs, and "
                f"{self.share(gpus)}; use mesh.gpus = {self.gpus}"
            )

    def switched(self) -> "Machine":
        """The same links and rates, if they ended in a switch."""
        return dataclasses.replace(self, point_to_point=False)


# Sources that several numbers share.
MI300_SHEET = "AMD Instinct MI300X data sheet"
MI300_LINKS = "AMD data sheet: 7 links of 128 GB/s, both ways together"
MI325_SHEET = "AMD Instinct MI325X data sheet"
MI350_SHEET = "AMD Instinct MI350X data sheet"
MI355_SHEET = "AMD Instinct MI355X data sheet"
MI350_LINKS = "AMD data sheet: 7 links of 153.6 GB/s, both ways together"
H100_SHEET = "NVIDIA H100 data sheet, SXM, dense"
H200_SHEET = "NVIDIA H200 data sheet, SXM, dense"
NVLINK4 = "NVIDIA data sheet: NVLink 900 GB/s, both ways together, in 18 links"
OHARA = "rccl-tests in github.com/hisohara/ai-scripts, training/01_rccl-smoketest"
RCCL = "fitted to rccl-tests, 8 MI300X, ROCm 6.3: AMD's ROCm blog on RCCL and xGMI, March 2025"
TWO_MI300X = f"fitted to all-reduce of 2 x 8 MI300X, ROCm 6.4: {OHARA}"
TWO_MI355X = f"fitted to all-reduce of 2 x 8 MI355X, Pollara 400, ROCm 7.0: {OHARA}"
MI325X_NODES = f"fitted to all-reduce of 2, 4 and 8 nodes of 8 MI325X, ROCm 6.4: {OHARA}"
ACCEPTANCE = "fitted to rccl-tests, 8 MI350X, ROCm 7.0: AMD Instinct system acceptance guide"
OCI = "rccl-tests, 8 MI355X, 8 GiB: Oracle's quick start for OCI's MI355X shapes, 2025"
VULTR = "Vultr, on demand by the hour, 8 GPUs: list price, September 2026"


def _assumed(x, name: str, **own):
    """A number, or a wire but for its `own`, of another machine: where nothing is published."""
    if isinstance(x, Wire):
        return Wire(**{key: _assumed(v, name) for key, v in vars(x).items()} | own)
    if isinstance(x, Sourced) and not x.source.startswith("assumed"):
        return Sourced(x, f"assumed: as {name} ({x.source})")
    return x


def _as(known: Machine, name: str, **own) -> Machine:
    """Another machine but for its `own` numbers."""
    fields = {key: _assumed(x, known.name) for key, x in vars(known).items()}
    return Machine(**fields | {"name": name, "price": None} | own)


def _share(reached: Sourced, peak: Sourced, of: Sourced, name: str) -> Sourced:
    """The part of a peak that another machine reaches of its own."""
    return Sourced(of * reached / peak, f"assumed: {reached / peak:.0%} of the peak, as {name}")


MI300X = Machine(
    name="MI300X",
    gpus=8,
    point_to_point=True,
    peak_bf16=Sourced(1307e12, MI300_SHEET),
    peak_float32=Sourced(163.4e12, MI300_SHEET),
    reached_bf16=Sourced(732e12, "arXiv 2511.17127: over 750 PFLOP/s on 1,024 GPUs"),
    hbm=Sourced(192e9, MI300_SHEET),
    hbm_bandwidth=Sourced(5.3e12, MI300_SHEET),
    hbm_reached=Sourced(4.33e12, "arXiv 2511.17127"),
    links=7,
    link=Sourced(64e9, MI300_LINKS),
    nic=Sourced(50e9, "arXiv 2511.17127: one 400 Gb/s NIC a GPU"),
    inside=Wire(
        Sourced(9.6e-6, RCCL), Sourced(32.4e9, RCCL), Sourced(31e-6, RCCL), Sourced(45.7e9, RCCL)
    ),
    across=Wire(
        Sourced(126e-6, TWO_MI300X),
        Sourced(18.6e9, TWO_MI300X),
        Sourced(295e-6, TWO_MI300X),
        Sourced(46e9, TWO_MI300X),
    ),
    pairwise=Sourced(0.888, f"assumed: as MI355X (all-to-all 361, all-reduce 407 GB/s; {OCI})"),
    price=Sourced(1.85, VULTR),
)
MI325X = _as(
    MI300X,
    "MI325X",
    peak_bf16=Sourced(1307e12, MI325_SHEET),
    peak_float32=Sourced(163.4e12, MI325_SHEET),
    reached_bf16=Sourced(831e12, "AMD's ROCm blog on typical attained FLOPs, October 2026"),
    hbm=Sourced(256e9, MI325_SHEET),
    hbm_bandwidth=(bandwidth := Sourced(6e12, MI325_SHEET)),
    hbm_reached=_share(MI300X.hbm_reached, MI300X.hbm_bandwidth, bandwidth, "MI300X"),
    link=Sourced(64e9, MI300_LINKS),
    inside=_assumed(
        MI300X.inside,
        "MI300X",
        rate=Sourced(45.6e9, f"all-reduce of 8 MI325X, 319 GB/s at 16 GiB: {OHARA}"),
    ),
    across=_assumed(MI300X.across, "MI300X", rate=Sourced(44e9, MI325X_NODES)),
    price=Sourced(2.00, VULTR),
)
POLLARA = Wire(
    Sourced(31e-6, TWO_MI355X),
    Sourced(17.5e9, TWO_MI355X),
    Sourced(130e-6, TWO_MI355X),
    Sourced(46e9, TWO_MI355X),
)
MI350X = _as(
    MI300X,
    "MI350X",
    peak_bf16=(peak := Sourced(2307e12, MI350_SHEET)),
    peak_float32=Sourced(144.2e12, MI350_SHEET),
    reached_bf16=_share(MI300X.reached_bf16, MI300X.peak_bf16, peak, "MI300X"),
    hbm=Sourced(288e9, MI350_SHEET),
    hbm_bandwidth=(bandwidth := Sourced(8e12, MI350_SHEET)),
    hbm_reached=_share(MI300X.hbm_reached, MI300X.hbm_bandwidth, bandwidth, "MI300X"),
    link=Sourced(76.8e9, MI350_LINKS),
    nic=Sourced(50e9, "assumed: one 400 Gb/s NIC a GPU, as MI355X"),
    inside=Wire(
        Sourced(8.75e-6, ACCEPTANCE),
        Sourced(34.9e9, ACCEPTANCE),
        Sourced(55e-6, ACCEPTANCE),
        Sourced(56.1e9, "rccl-tests, all-reduce of 8 MI350X, 8 GiB: 393 GB/s over 7 links"),
    ),
    across=_assumed(POLLARA, "MI355X"),
    pairwise=Sourced(0.888, "rccl-tests, 8 MI350X, 8 GiB: all-to-all 349, all-reduce 393 GB/s"),
)
MI355X = _as(
    MI350X,
    "MI355X",
    peak_bf16=(peak := Sourced(2517e12, MI355_SHEET)),
    peak_float32=Sourced(157.3e12, MI355_SHEET),
    reached_bf16=_share(MI300X.reached_bf16, MI300X.peak_bf16, peak, "MI300X"),
    hbm=Sourced(288e9, MI355_SHEET),
    hbm_bandwidth=(bandwidth := Sourced(8e12, MI355_SHEET)),
    hbm_reached=_share(MI300X.hbm_reached, MI300X.hbm_bandwidth, bandwidth, "MI300X"),
    link=Sourced(76.8e9, MI350_LINKS),
    nic=Sourced(50e9, "Oracle's and Ohara's MI355X nodes: one 400 Gb/s Pollara a GPU"),
    inside=_assumed(MI350X.inside, "MI350X", rate=Sourced(58.1e9, f"{OCI}: 407 GB/s over 7 links")),
    across=POLLARA,
    pairwise=Sourced(0.888, f"{OCI}: all-to-all 361, all-reduce 407 GB/s"),
    price=Sourced(2.59, VULTR),
)
NVLS = "busbw 420 to 480 GB/s on 5 to 8 H100 as S (1 + 1/n) bytes a GPU: NVIDIA/nccl issue 1455"
NCCL_LATENCY = "assumed: as MI300X, which has as many GPUs a node"
NCCL_RATE = "370 GB/s over 18 links, all but all-reduce: NVIDIA/nccl-tests issue 212"
NDR = "assumed: as MI355X on Pollara; 16 H20 on NDR take 47 us, NVIDIA/nccl issue 1244"
NDR_RATE = "46 to 48 GB/s of a 400 Gb/s NDR NIC: NVIDIA/nccl-tests issue 290"
H200 = Machine(
    name="H200",
    gpus=8,
    point_to_point=False,
    peak_bf16=Sourced(989e12, H200_SHEET),
    peak_float32=Sourced(67e12, H200_SHEET),
    reached_bf16=Sourced(790e12, "measured: the best product of 8192-cubes, November 2026"),
    hbm=Sourced(141e9, H200_SHEET),
    hbm_bandwidth=Sourced(4.8e12, H200_SHEET),
    hbm_reached=Sourced(4.3e12, "measured: a copy, bytes read and written, October 2026"),
    links=18,
    link=Sourced(25e9, NVLINK4),
    nic=Sourced(50e9, "NVIDIA DGX H200 data sheet: one 400 Gb/s NIC a GPU"),
    inside=Wire(
        Sourced(9.6e-6, NCCL_LATENCY),
        Sourced(14.6e9, "assumed: 71 % of the long messages' rate, as MI300X"),
        Sourced(31e-6, NCCL_LATENCY),
        Sourced(20.6e9, NCCL_RATE),
    ),
    across=Wire(
        *(Sourced(x, NDR) for x in (POLLARA.short_latency, POLLARA.short_rate, POLLARA.latency)),
        Sourced(47e9, NDR_RATE),
    ),
    pairwise=Sourced(1, NCCL_RATE),
    reduced_rate=Sourced(17.1e9, f"308 GB/s over 18 links: {NVLS}"),
    reduced_latency=Sourced(150e-6, "fitted to 8 H100: NVIDIA/nccl-tests issue 290"),
    price=Sourced(3.99, "Hyperstack, on demand: list price, 26 August 2026"),
)
H100 = _as(
    H200,
    "H100",
    peak_bf16=Sourced(989e12, H100_SHEET),
    peak_float32=Sourced(67e12, H100_SHEET),
    hbm=Sourced(80e9, H100_SHEET),
    hbm_bandwidth=Sourced(3.35e12, H100_SHEET),
    hbm_reached=Sourced(3.04e12, "arXiv 2511.17127"),
    link=Sourced(25e9, NVLINK4),
    nic=Sourced(50e9, "NVIDIA DGX H100 data sheet: one 400 Gb/s NIC a GPU"),
    inside=H200.inside,
    across=H200.across,
    pairwise=H200.pairwise,
    reduced_rate=H200.reduced_rate,
    reduced_latency=H200.reduced_latency,
    price=Sourced(2.30, VULTR),
)
# Eight emulated devices share the cores and the memory of one host: an eighth of them each.
CORES = (
    "an eighth of what two cores of an Intel Xeon reach, measured with jax 0.10.2, December 2026"
)
ALL_OPS = (
    "fitted to `zayajax bench collectives` on two cores, December 2026: nine of ten times are "
    "within a factor of 2.1"
)
SHARED = Wire(
    Sourced(160e-6, ALL_OPS),
    Sourced(1.4e9, ALL_OPS),
    Sourced(160e-6, ALL_OPS),
    Sourced(1.4e9, ALL_OPS),
)
CPU = Machine(
    name="cpu",
    gpus=8,
    point_to_point=False,
    peak_bf16=Sourced(32e9, f"assumed: what is reached ({CORES})"),
    peak_float32=Sourced(32e9, "assumed: as bfloat16"),
    reached_bf16=Sourced(32e9, f"a bfloat16 product of 2048-cubes, {CORES}"),
    hbm=Sourced(3e9, "an eighth of 24 GB"),
    hbm_bandwidth=Sourced(1e9, f"assumed: what is reached ({CORES})"),
    hbm_reached=Sourced(1e9, f"reading and writing 512 MiB, {CORES}"),
    links=1,
    link=SHARED.rate,
    nic=SHARED.rate,
    inside=SHARED,
    across=_assumed(SHARED, "within the node"),
    pairwise=Sourced(1, "assumed: no slower than the other operations"),
)
GPUS = (MI300X, MI325X, MI350X, MI355X, H100, H200)
MACHINES = (*GPUS, CPU)


def machine(device_kind: str) -> Machine | None:
    """By the name that JAX gives a device; None where it is not known, and for a CPU, whose
    devices are a node of any size."""
    return next((m for m in GPUS if m.name.lower() in device_kind.lower()), None)


def named(name: str) -> Machine:
    """By its own name, in any case; UserError with those that are known."""
    for found in MACHINES:
        if found.name.lower() == name.lower():
            return found
    known = ", ".join(m.name for m in MACHINES)
    raise UserError(f"--machine {name}: is not known; one of {known}")


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of one device by the name that JAX gives it; None if not known."""
    found = machine(device_kind)
    return found and found.peak_bf16
