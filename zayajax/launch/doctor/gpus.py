"""The GPUs before JAX: drivers' files, who may use them, and the variables that hide them."""

import re
import shlex
from collections.abc import Iterator, Mapping

from zayajax.errors import UserError
from zayajax.launch import flags
from zayajax.launch.doctor.view import OK, UNSEEN, WARNING, WRONG, Finding, View
from zayajax.launch.flags import CUDA, GPU, HIP_MASKS, MASKS, ROCM
from zayajax.tables import size

AREA = "GPUs"
VENDORS = {"0x1002": ROCM, "0x10de": CUDA}
# PCI classes of what computes: other display, 3D, processing accelerator. The other may be no more
# than a laptop's screen, and counts once its driver offers to compute.
COMPUTING, DISPLAY = ("0x0380", "0x0302", "0x1200"), ("0x0300",)
# Of JAX itself: numbers among what the masks leave; "all" is every one.
JAX_MASKS = {ROCM: "JAX_ROCM_VISIBLE_DEVICES", CUDA: "JAX_CUDA_VISIBLE_DEVICES"}
IN_CONTAINER = {
    ROCM: "docker run --device=/dev/kfd --device=/dev/dri --group-add video --group-add render ...",
    CUDA: "docker run --gpus all ...",
}


def present(view: View) -> str | None:
    """The platform of the GPUs that this machine has to compute with, usable or not; None: none."""
    for platform in GPU:
        if on_bus(view, platform):
            return platform
    with_driver = [p for p in GPU if _has_driver(view, p)]
    # Of two, the one that JAX has a plugin for. A processor's own AMD graphics have the driver too,
    # and are meant only where ROCm's plugin is installed.
    for platform in sorted(with_driver, key=lambda p: not _has_plugin(view, p)):
        if platform == CUDA or _has_plugin(view, ROCM) or not _on_bus(view, ROCM, DISPLAY):
            return platform
    return None


def _has_driver(view: View, platform: str) -> bool:
    special = "dev/kfd" if platform == ROCM else "dev/dxg"
    return (view.root / special).exists() or _physical(view, platform) > 0


def _has_plugin(view: View, platform: str) -> bool:
    return any(platform in plugin for plugin in view.plugins)


def on_bus(view: View, platform: str) -> int:
    """GPUs made for computing that the PCI bus has, with or without a driver."""
    return _on_bus(view, platform, COMPUTING)


def _on_bus(view: View, platform: str, classes: tuple[str, ...]) -> int:
    places = [f"sys/bus/pci/devices/{name}" for name in view.names("sys/bus/pci/devices")]
    return sum(
        VENDORS.get(view.read(f"{p}/vendor") or "") == platform
        and (view.read(f"{p}/class") or "").startswith(classes)
        for p in places
    )


def _physical(view: View, platform: str) -> int:
    return flags.gpus(platform, {}, view.root)


def expected(view: View, platform: str) -> int:
    """How many a process sees; 0 where nothing says so."""
    return flags.gpus(platform, view.environ, view.root)


def check(view: View, gpu: str | None) -> Iterator[Finding]:
    if gpu is None:
        yield Finding(AREA, "GPUs", UNSEEN, "neither the PCI bus nor a driver shows one")
        return
    yield from _amd(view) if gpu == ROCM else _nvidia(view)
    yield masks(view, gpu)


def _contained(view: View) -> bool:
    return any((view.root / mark).exists() for mark in (".dockerenv", "run/.containerenv"))


def _amd(view: View) -> Iterator[Finding]:
    kfd, render = view.root / "dev/kfd", view.names("dev/dri", "renderD*")
    count = max(_physical(view, ROCM), on_bus(view, ROCM))
    if not kfd.exists() or not render:
        found = f"{'/dev/kfd' if not kfd.exists() else '/dev/dri/renderD*'} is not there"
        mend = IN_CONTAINER[ROCM] if _contained(view) else "sudo modprobe amdgpu"
        yield Finding(AREA, "driver", WRONG, found, mend)
        return
    version = view.read("sys/module/amdgpu/version") or "of the kernel"
    found = f"{count} AMD GPUs, amdgpu driver {version}"
    if len(render) < count:
        found = f"{count} AMD GPUs, and /dev/dri has {len(render)} of them"
        mend = (
            IN_CONTAINER[ROCM]
            if _contained(view)
            else "sudo modprobe -r amdgpu && sudo modprobe amdgpu"
        )
        yield Finding(AREA, "driver", WRONG, found, mend)
    else:
        yield Finding(AREA, "driver", OK, found)
    closed = [p for p in (kfd, *(view.root / "dev/dri" / n for n in render)) if not view.may_use(p)]
    if closed:
        name = f"/{closed[0].relative_to(view.root)}"
        found = f"{view.user} may not use {name}" + (" and others" if len(closed) > 1 else "")
        mend = f"sudo usermod -aG render,video {view.user}  # then log in again"
        yield Finding(
            AREA, "access", WRONG, found, IN_CONTAINER[ROCM] if _contained(view) else mend
        )
    else:
        yield Finding(
            AREA, "access", OK, f"{view.user} may use /dev/kfd and {len(render)} renderers"
        )
    yield from _amd_host(view)
    yield from _in_use(view)


def _amd_host(view: View) -> Iterator[Finding]:
    """rocm.docs.amd.com: MI300X system optimization, and RCCL's own warning of the last."""
    if view.read("proc/sys/kernel/numa_balancing") not in (None, "0"):
        found = "the kernel moves pages between sockets, which stalls GPUs that read them"
        mend = "sudo sysctl -w kernel.numa_balancing=0"
        yield Finding(AREA, "NUMA balancing", WARNING, found, mend)
    command = view.read("proc/cmdline") or ""
    groups = view.names("sys/kernel/iommu_groups")
    if groups and not re.search(r"\b(iommu=pt|(intel_|amd_)?iommu=off)\b", command):
        found = "the IOMMU translates between GPUs (no iommu=pt), and RCCL may hang"
        mend = (
            "sudo grubby --update-kernel=ALL --args=iommu=pt  # or GRUB_CMDLINE_LINUX; then reboot"
        )
        yield Finding(AREA, "IOMMU", WARNING, found, mend)
    if override := view.environ.get("HSA_OVERRIDE_GFX_VERSION"):
        found = f"HSA_OVERRIDE_GFX_VERSION={override} makes ROCm take the GPU for another"
        yield Finding(AREA, "architecture", WARNING, found, "unset HSA_OVERRIDE_GFX_VERSION")


def _in_use(view: View) -> Iterator[Finding]:
    cards = []
    for card in view.names("sys/class/drm", "card*"):
        used, total = (
            view.number(f"sys/class/drm/{card}/device/mem_info_vram_{kind}")
            for kind in ("used", "total")
        )
        # JAX takes up to 97 % as it starts (launch/flags.py), so 5 % by others are in its way.
        if used and total and used > 0.05 * total:
            cards.append((card, used))
    if cards:
        most = max(used for _, used in cards)
        found = f"others use up to {size(most)} of {len(cards)} GPUs ({cards[0][0]} first)"
        yield Finding(AREA, "memory", WARNING, found, "rocm-smi --showpids  # and end what is old")


def _nvidia(view: View) -> Iterator[Finding]:
    count = max(_physical(view, CUDA), on_bus(view, CUDA))
    if (view.root / "dev/dxg").exists():  # Windows' own driver serves Linux inside it
        yield Finding(AREA, "driver", OK, "Windows' driver (/dev/dxg)")
        return
    devices = view.names("dev", "nvidia[0-9]*")
    if not devices or not (view.root / "dev/nvidiactl").exists():
        found = f"{count} NVIDIA GPUs, and no driver shows them in /dev"
        mend = IN_CONTAINER[CUDA] if _contained(view) else "sudo modprobe nvidia && nvidia-smi"
        yield Finding(AREA, "driver", WRONG, found, mend)
        return
    if not (view.root / "dev/nvidia-uvm").exists():
        found = "/dev/nvidia-uvm is not there, so CUDA cannot start"
        yield Finding(AREA, "driver", WRONG, found, "sudo nvidia-modprobe -u -c=0")
    else:
        yield Finding(AREA, "driver", OK, f"{len(devices)} NVIDIA GPUs in /dev")
    if closed := [n for n in (*devices, "nvidiactl") if not view.may_use(view.root / "dev" / n)]:
        found = f"{view.user} may not use /dev/{closed[0]}"
        mend = f"sudo usermod -aG video,render {view.user}  # then log in again"
        yield Finding(
            AREA, "access", WRONG, found, IN_CONTAINER[CUDA] if _contained(view) else mend
        )
    else:
        yield Finding(AREA, "access", OK, f"{view.user} may use {len(devices)} GPUs")


def masks(view: View, gpu: str) -> Finding:
    """The variables that hide GPUs: contradictions, numbers that do not exist, nothing left."""
    environ, total = view.environ, _physical(view, gpu)
    names = MASKS[gpu]
    given = {name: environ[name] for name in (*names, JAX_MASKS[gpu]) if name in environ}
    if not given:
        return Finding(AREA, "masks", OK, "no variable hides a GPU")
    if gpu == ROCM:
        try:
            flags.check_visible(environ)
        except UserError as error:
            loser = next(
                n for n in (*reversed(HIP_MASKS), "ROCR_VISIBLE_DEVICES") if environ.get(n)
            )
            return Finding(AREA, "masks", WRONG, str(error).partition(";")[0], f"unset {loser}")
    for name, value in given.items():
        words, left = _listed(value), _left_before(view, gpu, name, total)
        if name == JAX_MASKS[gpu] and words == ["all"]:
            continue
        numbers = [int(w) for w in words if re.fullmatch(r"-?\d+", w)]
        bad = [n for n in numbers if n < 0 or (left and n >= left)]
        if not words or bad or (not numbers and {w.lower() for w in words} <= HIDING):
            found = f"{name}={value or chr(34) * 2} hides all GPUs"
            if bad and min(bad) >= 0:
                found = f"{name}={value} names GPU {bad[0]} of {left}, numbered from 0"
            return Finding(AREA, "masks", WRONG, found, f"unset {name}")
        if len(set(words)) < len(words):
            found = f"{name}={value} names a GPU twice"
            mend = f"export {name}={shlex.quote(','.join(dict.fromkeys(words)))}"
            return Finding(AREA, "masks", WRONG, found, mend)
    shown = ", ".join(f"{n}={v}" for n, v in given.items())
    seen = expected(view, gpu)
    if 1 < seen < total:
        found = f"{shown} leaves {seen} of {total} GPUs: a part of a node, most of whose links idle"
        return Finding(AREA, "masks", WARNING, found, f"unset {next(iter(given))}")
    else:
        return Finding(AREA, "masks", OK, shown)


HIDING = {"nodevfiles", "none", "void", "-1"}


def _listed(mask: str) -> list[str]:
    return [word.strip() for word in mask.split(",") if word.strip()]


def _left_before(view: View, gpu: str, name: str, total: int) -> int:
    """GPUs among which a mask's numbers count: those that the masks before it leave."""
    if name == JAX_MASKS[gpu]:
        return expected(view, gpu)
    before = _listed(view.environ.get("ROCR_VISIBLE_DEVICES", ""))
    return len(before) if gpu == ROCM and name in HIP_MASKS and before else total


def masked(environ: Mapping[str, str], gpu: str) -> list[str]:
    return [name for name in (*MASKS[gpu], JAX_MASKS[gpu]) if name in environ]
