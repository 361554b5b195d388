"""XLA flags and environment variables that a run sets, each with a reason and a source.

Ours go before the user's own `XLA_FLAGS`, because of a repeated flag the last wins, and a variable
that is set stays. All flags are known to jaxlib 0.10.2 to 0.12: XLA ends the process at one that it
does not know, so a test compiles with all of them.
"""

import importlib.metadata
import json
import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from zayajax.errors import UserError
from zayajax.tables import Column, Table

ROCM, CUDA, CPU = PLATFORMS = ("rocm", "cuda", "cpu")
AUTOTUNE = "autotune"  # in the run's folder
# What we set, as JSON {variable: text}, so that a second time, or a child, can tell it from theirs.
RECORD = "ZAYAJAX_FLAGS_SET"

PRIMUS = "AMD-AGI/Primus, its MaxText back end"
NVIDIA = "NVIDIA JAX-Toolbox, Tips for High-Performance LLMs with JAX and XLA"
MI300X = f"{PRIMUS}; ROCm, MI300X workload optimization"
NCCL = "NVIDIA NCCL user guide"
DETERMINISM = "openxla/xla 12520; seen on an H200, jax 0.11.2: nothing is autotuned then"
PERSISTED = "openxla.org/xla/persisted_autotuning; an H200, jax 0.11.2: 0.6 s, not 2.7, to compile"


class Situation(NamedTuple):
    """What decides whether a setting applies."""

    architecture: str | None  # of an AMD GPU, such as gfx942
    nodes: int
    deterministic: bool
    folder: Path | None  # the run's


class Setting(NamedTuple):
    """One XLA flag (its name begins with --) or environment variable. `{folder}` is the run's."""

    name: str
    value: str
    platforms: tuple[str, ...]
    why: str
    source: str
    when: Callable[[Situation], bool] = lambda _: True


def _several_nodes(s: Situation) -> bool:
    return s.nodes > 1


def _keeps_autotuning(s: Situation) -> bool:
    # With deterministic operations XLA tries nothing, and so keeps nothing.
    return s.folder is not None and not s.deterministic


def _on(architecture: str) -> Callable[[Situation], bool]:
    return lambda s: s.architecture == architecture


GPU = (ROCM, CUDA)
SETTINGS = (
    Setting(
        "--xla_gpu_enable_latency_hiding_scheduler",
        "true",
        GPU,
        "starts collectives early and waits for them late",
        f"{PRIMUS}; {NVIDIA}",
    ),
    Setting(
        "--xla_gpu_enable_triton_gemm",
        "false",
        (ROCM,),
        "products go to hipBLASLt, which is faster there",
        PRIMUS,
    ),
    Setting("--xla_gpu_enable_cublaslt", "true", (ROCM,), "products go to hipBLASLt", PRIMUS),
    Setting("--xla_gpu_autotune_level", "4", (ROCM,), "tries the library's algorithms", PRIMUS),
    Setting(
        "--xla_gpu_all_gather_combine_threshold_bytes",
        str(8 << 30),
        (ROCM,),
        "gathers of weights travel as one message",
        PRIMUS,
    ),
    Setting(
        "--xla_gpu_reduce_scatter_combine_threshold_bytes",
        str(8 << 30),
        (ROCM,),
        "so do the sums of gradients",
        PRIMUS,
    ),
    Setting("--xla_gpu_enable_command_buffer", "", (ROCM,), "HIP graphs end in segfaults", PRIMUS),
    Setting(
        "--xla_gpu_memory_limit_slop_factor",
        "95",
        (ROCM,),
        "the scheduler may plan with 95 % of the memory",
        PRIMUS,
    ),
    Setting(
        "--xla_gpu_enable_cub_radix_sort",
        "false",
        (ROCM,),
        "sorts of a router's few classes take 15 ms each otherwise",
        PRIMUS,
    ),
    Setting(
        "--xla_gpu_deterministic_ops",
        "true",
        GPU,
        "faults.deterministic: operations repeat themselves bit for bit, no algorithm is tried",
        DETERMINISM,
        lambda s: s.deterministic,
    ),
    Setting(
        "--xla_gpu_per_fusion_autotune_cache_dir",
        "{folder}/" + AUTOTUNE,
        GPU,
        "a run that goes on keeps the algorithms that it began with, and starts sooner",
        PERSISTED,
        _keeps_autotuning,
    ),
    # Devices that share a few busy cores can keep each other waiting for longer than XLA's 40 s.
    Setting(
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds",
        "120",
        (CPU,),
        "emulated devices wait for a core; XLA warns after 20 s",
        "jax 31818, xla 32115",
    ),
    Setting(
        "--xla_cpu_collective_call_terminate_timeout_seconds",
        "600",
        (CPU,),
        "and ends the process after 40 s",
        "jax 31818, xla 32115",
    ),
    Setting("XLA_PYTHON_CLIENT_MEM_FRACTION", ".97", (ROCM,), "JAX takes 75 % otherwise", PRIMUS),
    Setting("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9", (CUDA,), "JAX takes 75 % otherwise", NVIDIA),
    Setting("GPU_MAX_HW_QUEUES", "2", (ROCM,), "computation and messages overlap", PRIMUS),
    Setting("HSA_FORCE_FINE_GRAIN_PCIE", "1", (ROCM,), "direct writes between GPUs", PRIMUS),
    Setting("HIP_FORCE_DEV_KERNARG", "1", (ROCM,), "kernels start 2 to 3 us earlier", MI300X),
    Setting(
        "DEBUG_HIP_IGNORE_STREAM_PRIORITY", "0", (ROCM,), "messages before computation", PRIMUS
    ),
    Setting(
        "HSA_NO_SCRATCH_RECLAIM",
        "1",
        (ROCM,),
        "gfx942: scratch memory is kept",
        PRIMUS,
        _on("gfx942"),
    ),
    Setting(
        "RCCL_WARP_SPEED_AUTO", "0", (ROCM,), "gfx950: as AMD's own stack", PRIMUS, _on("gfx950")
    ),
    Setting(
        "NCCL_CROSS_NIC",
        "0",
        GPU,
        "traffic between nodes stays on its rail",
        f"{PRIMUS}; {NCCL}",
        _several_nodes,
    ),
)

WIRING = (
    "NCCL_IB_HCA, NCCL_SOCKET_IFNAME and NCCL_IB_GID_INDEX (1 with Pollara NICs, else mostly 3) "
    "depend on how the nodes are wired, and are yours to set"
)


class Prepared(Table):
    """What a run was started with. `line` is its short form."""

    @property
    def line(self) -> str:
        counts = [
            f"{sum(row['whose'] == whose for row in self.rows)} {whose}"
            for whose in (OURS, YOURS, INSTEAD)
            if any(row["whose"] == whose for row in self.rows)
        ]
        return f"XLA flags and variables: {', '.join(counts) or 'none'}"


OURS, YOURS, INSTEAD = "ours", "yours", "yours instead of ours"
COLUMNS = [Column(k, k, left=True) for k in ("name", "value", "whose", "why", "source")]


def prepare(
    environ: MutableMapping[str, str],
    *,
    platform: str,
    nodes: int = 1,
    deterministic: bool = False,
    folder: Path | None = None,
    kind: str | None = None,
) -> Prepared:
    """Sets in `environ` what a run on `platform` wants, before JAX starts; returns what is set.

    Nothing of the user's is changed. Called again, with other arguments too, it leaves what one
    call with the last arguments would.

    Args:
      environ: such as `os.environ`.
      deterministic: `faults.deterministic`.
      folder: the run's, where autotuning is kept; None: it is not.
      kind: an AMD GPU's architecture, such as gfx942; None: this host's.

    Raises UserError where variables contradict each other about which GPUs are visible.
    """
    if platform == ROCM:
        check_visible(environ)
        kind = kind or architecture()
    situation = Situation(kind, nodes, deterministic, folder)
    _undo(environ)
    theirs = _users_flags(environ)
    rows, flags, record = [], [], {}
    for s in SETTINGS:
        if platform not in s.platforms or not s.when(situation):
            continue
        is_flag, value = s.name.startswith("--"), s.value.format(folder=folder and folder.resolve())
        given = _names(theirs).get(s.name) if is_flag else environ.get(s.name)
        if given is None:
            if is_flag:
                flags.append(f'{s.name}="{value}"' if " " in value else f"{s.name}={value}")
            else:
                record[s.name] = environ[s.name] = value
        row = dict(name=s.name, value=value if given is None else given)
        row |= dict(whose=OURS if given is None else INSTEAD, why=s.why, source=s.source)
        rows.append(row)
    known = {row["name"] for row in rows}
    rows += [
        dict(name=name, value=value, whose=YOURS, why="", source="XLA_FLAGS")
        for name, value in _names(theirs).items()
        if name not in known
    ]
    if flags:
        record["XLA_FLAGS"] = " ".join(flags)
        environ["XLA_FLAGS"] = f"{record['XLA_FLAGS']} {theirs}".strip()
    if record:
        environ[RECORD] = json.dumps(record)
    if platform in GPU and _keeps_autotuning(situation):
        (folder / AUTOTUNE).mkdir(parents=True, exist_ok=True)
    notes = [WIRING] if platform in GPU and nodes > 1 else []
    return Prepared(f"XLA flags and variables on {platform}", COLUMNS, rows, notes)


def prepared(environ: Mapping[str, str]) -> bool:
    """Whether flags of ours are in `environ`."""
    ours = _record(environ).get("XLA_FLAGS")
    return bool(ours) and ours in environ.get("XLA_FLAGS", "")


def _record(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        found = json.loads(environ.get(RECORD, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _undo(environ: MutableMapping[str, str]) -> None:
    for name, ours in _record(environ).items():
        if name == "XLA_FLAGS":
            theirs = environ.get(name, "").replace(ours, "", 1).strip()
            environ.pop(name, None)
            if theirs:
                environ[name] = theirs
        elif environ.get(name) == ours:
            del environ[name]
    environ.pop(RECORD, None)


def _users_flags(environ: Mapping[str, str]) -> str:
    text = environ.get("XLA_FLAGS", "").strip()
    if not text or text.startswith("-"):
        return text
    try:  # XLA takes what begins with no dash for the name of a file with flags
        return Path(text).read_text().strip()
    except (OSError, ValueError):
        raise UserError(f"XLA_FLAGS: {text!r} is no flag (--name=value) and no file") from None


FLAG = re.compile(r"""(?:^|(?<=\s))(--[\w-]+)(?:=("[^"]*"|'[^']*'|\S*))?""")


def _names(flags: str) -> dict[str, str]:
    """{name: value} of flags as text; of a repeated one the last."""
    return {name: value for name, value in FLAG.findall(flags)}


def platform(
    environ: Mapping[str, str] = os.environ,
    *,
    plugins: Iterable[str] | None = None,
    root: Path = Path("/"),
) -> str:
    """ "rocm", "cuda" or "cpu": where JAX will compute, without starting it.

    Args:
      plugins: JAX's, by name; None: those that are installed.
      root: under which /dev is.

    Raises UserError where JAX_PLATFORMS names another platform, or a GPU that has no plugin.
    """
    asked = [word for word in environ.get("JAX_PLATFORMS", "").split(",") if word]
    plugins = installed_plugins() if plugins is None else set(plugins)
    has_plugin = {p: any(p in name for name in plugins) for p in GPU}
    if asked:
        first = asked[0].strip()
        if first in PLATFORMS:
            return first
        if first != "gpu":
            raise UserError(
                f"JAX_PLATFORMS: {first!r} is none of those that zayajax runs on; "
                f"use one of {', '.join(PLATFORMS)}"
            )
    has_device = {
        ROCM: (root / "dev/kfd").exists(),
        CUDA: any(root.glob("dev/nvidia[0-9]*")) or (root / "dev/dxg").exists(),
    }
    for candidate in GPU:
        if has_plugin[candidate] and (has_device[candidate] or asked):
            return candidate
    if asked:
        raise UserError(
            "JAX_PLATFORMS: is 'gpu', and JAX has no plugin for one; install zayajax[rocm] or "
            "zayajax[cuda]"
        )
    return CPU


def installed_plugins() -> set[str]:
    try:
        import jax_plugins

        modules = {m.name for m in pkgutil.iter_modules(jax_plugins.__path__)}
    except ImportError:  # then there are none beside entry points
        modules = set()
    return modules | {e.name for e in importlib.metadata.entry_points(group="jax_plugins")}


def architecture(root: Path = Path("/")) -> str | None:
    """Such as "gfx942": of the first AMD GPU of this host, as its driver says; None without one."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    for properties in sorted(nodes):
        found = re.search(r"^gfx_target_version (\d+)$", _read(properties), re.MULTILINE)
        if found and (version := int(found[1])):  # 0 is a CPU
            # Decimal, two digits each: major, minor, stepping; names have the last two in hex.
            return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return None


def gpus(platform: str, environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """GPUs of this host that a process sees, by its driver's files and the variables that mask
    them; 0 where they do not say."""
    if platform == CUDA:
        count = sum(p.name[6:].isdecimal() for p in root.glob("dev/nvidia[0-9]*"))
    else:
        nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
        count = sum(bool(re.search(r"^simd_count [1-9]", _read(p), re.MULTILINE)) for p in nodes)
    masked = [len(_listed(environ[v])) for v in MASKS[platform] if environ.get(v)]
    return min([count, *masked]) if count else min(masked, default=0)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # a node of the topology that a container may not see
        return ""


# Each masks what the one before it leaves (rocm.docs.amd.com, GPU isolation techniques).
HIP_MASKS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
MASKS = {ROCM: ("ROCR_VISIBLE_DEVICES", *HIP_MASKS), CUDA: ("CUDA_VISIBLE_DEVICES",), CPU: ()}


def _listed(mask: str) -> list[str]:
    return [word.strip() for word in mask.split(",") if word.strip()]


def check_visible(environ: Mapping[str, str]) -> None:
    """UserError where the variables that hide GPUs from ROCm contradict each other."""
    hip = {v: _listed(environ[v]) for v in HIP_MASKS if environ.get(v)}
    first = next(iter(hip), None)
    for other, devices in hip.items():
        if devices != hip[first]:
            raise UserError(
                f"{first}={environ[first]} and {other}={environ[other]} contradict each other; "
                "unset one of them"
            )
    left = _listed(environ.get("ROCR_VISIBLE_DEVICES", ""))
    if not left or first is None:
        return
    numbers = [d for d in hip[first] if d.isdecimal()]
    if beyond := [d for d in numbers if int(d) >= len(left)]:
        raise UserError(
            f"ROCR_VISIBLE_DEVICES={environ['ROCR_VISIBLE_DEVICES']} leaves {len(left)} GPUs, "
            f"which count from 0 again, and {first}={environ[first]} names "
            f"{', '.join(beyond)} of them; unset one of the two"
        )
