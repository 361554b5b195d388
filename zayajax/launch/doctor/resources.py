"""Limits, memory, the disk of a run, and clocks."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from zayajax.launch.doctor.view import OK, UNSEEN, WARNING, WRONG, Finding, Room, View
from zayajax.settings import MeshConfig
from zayajax.tables import duration, size

GiB = 1 << 30
# NCCL's user guide asks this of containers; Docker gives 64 MiB.
SHARED = GiB
# Process 0 of 1,024 holds a connection to each other one; a shell's usual 1,024 files are too few.
FILES = 2048
# `zayajax audit --compile` for 1,024 GPUs takes this much (README).
MEMORY = 2.6 * GiB
# zayajax's demo runs 8 on 2 cores; that more are too many is an assumption.
DEVICES_A_CORE = 4
# One checkpoint of ZAYA1-8B: weights and moments of eight GPUs (README, the table of one node).
CHECKPOINT = 8 * (4.12 + 4.38) * GiB
# What any run needs for its data, checkpoints and page: an assumption.
LEAST = GiB
# jax 0.10, the oldest that zayajax runs on, is of 2026.
NEWER_THAN = 1767225600.0  # 2026-01-01, in seconds since 1970
STEPPED = 1.0  # seconds by which the wall clock may leave the monotonic one while doctor works


def limits(view: View, gpu: str | None, gpus: int) -> Iterator[Finding]:
    area = "limits"
    yield _shared(view, area, gpu, gpus)
    yield _locked(view, area)
    files = view.limits["nofile"]
    if files is not None and files < FILES:
        found = f"{files} files a process; process 0 of 1,024 needs {FILES}"
        yield Finding(area, "open files", WARNING, found, f"ulimit -n {FILES}")
    else:
        yield Finding(area, "open files", OK, f"{files or 'any number of'} files a process")
    yield _cores(view, area, gpu, gpus)
    yield _memory(view, area)


def _shared(view: View, area: str, gpu: str | None, gpus: int) -> Finding:
    name = "/dev/shm"
    if gpu is None:
        return Finding(area, name, UNSEEN, "only GPUs pass messages through it")
    try:
        room = view.room(view.root / "dev/shm")
    except OSError as error:
        found = f"cannot be used ({error.strerror})"
        return Finding(area, name, WRONG, found, "sudo mount -t tmpfs -o size=8g tmpfs /dev/shm")
    found = f"{size(room.free)} of {size(room.total)} free"
    contained = "docker run --shm-size=8g --ulimit memlock=-1 ..."
    if room.total < SHARED:
        mend = contained if room.total <= 64 << 20 else "sudo mount -o remount,size=8g /dev/shm"
        verdict = WRONG if gpus > 1 else WARNING
        return Finding(area, name, verdict, f"{found}; several GPUs need {size(SHARED)}", mend)
    if room.free < SHARED:
        mend = "ls -lS /dev/shm  # what ended runs have left can go"
        return Finding(area, name, WARNING, f"{found}; several GPUs need {size(SHARED)}", mend)
    return Finding(area, name, OK, found)


def _locked(view: View, area: str) -> Finding:
    name, limit = "locked memory", view.limits["memlock"]
    if not view.names("sys/class/infiniband"):
        return Finding(area, name, UNSEEN, "no RDMA NIC, for which memory is locked")
    if limit is None:
        return Finding(area, name, OK, "no limit")
    mend = "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/rdma.conf"
    found = f"at most {size(limit)}, and RDMA locks all that it sends"
    return Finding(area, name, WRONG, found, mend)


def usable_cores(view: View) -> float:
    """Cores of this process, by its affinity and its container's quota."""
    quota = re.fullmatch(r"(\d+) (\d+)", view.read("sys/fs/cgroup/cpu.max") or "")
    return min(view.cores, int(quota[1]) / int(quota[2])) if quota else view.cores


def _cores(view: View, area: str, gpu: str | None, gpus: int) -> Finding:
    cores = usable_cores(view)
    if gpu is not None:
        found = f"{cores:g} cores for {gpus} GPUs"
        if cores < gpus:
            found += ", whose processes each keep one busy"
            return Finding(area, "cores", WARNING, found, f"srun --cpus-per-task={2 * gpus} ...")
        return Finding(area, "cores", OK, found)
    devices = MeshConfig().gpus
    if forced := re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", view.environ.get("XLA_FLAGS", "")
    ):
        devices = int(forced[-1])
    elif view.environ.get("JAX_NUM_CPU_DEVICES", "").isdecimal():
        devices = int(view.environ["JAX_NUM_CPU_DEVICES"])
    load = _load(view)
    found = f"{devices} emulated devices on {cores:g} cores, load {load:g}"
    if devices > DEVICES_A_CORE * cores:
        return Finding(
            area, "cores", WARNING, f"{found}: they wait for each other", "--mesh.gpus 4"
        )
    if load > 2 * cores:
        found += ": others keep them busy, and collectives may time out"
        return Finding(area, "cores", WARNING, found, "top  # end what need not run")
    return Finding(area, "cores", OK, found)


def _load(view: View) -> float:
    found = re.match(r"\d+\.\d+", view.read("proc/loadavg") or "")
    return float(found[0]) if found else 0.0


def _memory(view: View, area: str) -> Finding:
    name, text = "memory", view.read("proc/meminfo") or ""
    available = re.search(r"MemAvailable:\s+(\d+) kB", text)
    if available is None:
        return Finding(area, name, UNSEEN, "/proc/meminfo does not say")
    free, of = int(available[1]) * 1024, "this machine's"
    most, used = (view.read(f"sys/fs/cgroup/memory.{key}") or "" for key in ("max", "current"))
    if most.isdecimal() and used.isdecimal() and int(most) - int(used) < free:
        free, of = int(most) - int(used), "this container's"
    found = f"{size(free)} of {of} free"
    if free < MEMORY:
        mend = "ps --sort=-rss -eo rss,pid,user,args | head  # who has it"
        return Finding(area, name, WARNING, found, mend)
    return Finding(area, name, OK, found)


def disk(view: View, folder: Path, gpu: str | None) -> Iterator[Finding]:
    """Of the folder of runs, or where it would be made."""
    area, there = "disk", folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        yield Finding(area, "folder", WRONG, f"{there} is no folder", "--run-dir FOLDER/NAME")
        return
    tried = view.attempt(there)
    words = {
        "write": "cannot be written",
        "rename": "does not rename, so no checkpoint can be finished",
        "lock": "does not lock, so two runs in one folder would not be noticed",
    }
    failed, quoted = [name for name, error in tried.items() if error], shlex.quote(str(there))
    for name in failed:
        mend = f"--run-dir FOLDER/NAME  # on another disk; df {quoted}"
        if tried[name] == "Permission denied":
            mend = f"sudo chown {view.user} {quoted}"
        elif name == "lock":
            mend = f"sudo mount -o remount,flock {quoted}  # Lustre; NFS: from version 4"
        yield Finding(area, "folder", WRONG, f"{there}: {words[name]} ({tried[name]})", mend)
    kind = _file_system(view, there)
    if kind in ("tmpfs", "ramfs") and not failed:
        found = f"{there} is in memory ({kind}), and gone after a restart of this machine"
        yield Finding(area, "folder", WARNING, found, "--run-dir FOLDER/NAME  # on a disk")
    elif not failed:
        yield Finding(
            area, "folder", OK, f"{there} ({kind or 'of unknown type'}): writes, renames, locks"
        )
    try:
        room = view.room(there)
    except OSError as error:
        yield Finding(area, "room", UNSEEN, f"{there}: {error.strerror}")
        return
    yield _room(area, there, room, gpu)


def _room(area: str, there: Path, room: Room, gpu: str | None) -> Finding:
    found = f"{size(room.free)} of {size(room.total)} free"
    mend = f"du -xhd1 {shlex.quote(str(there))} | sort -h  # what can go"
    if room.free < LEAST or (room.files is not None and room.files < 1000):
        if room.free >= LEAST:
            found = f"{room.files} more files fit"
        return Finding(area, "room", WRONG, found, mend)
    if gpu is not None and room.free < 2 * CHECKPOINT:
        found += f"; two checkpoints of ZAYA1-8B are {size(2 * CHECKPOINT)}"
        return Finding(area, "room", WARNING, found, "--run-dir FOLDER/NAME  # on a larger disk")
    return Finding(area, "room", OK, found)


def _file_system(view: View, folder: Path) -> str | None:
    """Its type, by the mount that is nearest above it."""
    best, kind = -1, None
    for line in (view.read("proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) < 5 or not rest:
            continue
        point = Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), words[4]))
        # Of two mounts at one place the later one lies on top.
        if folder.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), rest.split()[0]
    return kind


def clocks(before: tuple[float, float], after: tuple[float, float]) -> Iterator[Finding]:
    """Whether both went on alike.

    Args:
      before, after: readings of both clocks, with all other checks in between.
    """
    passed, wall = after[0] - before[0], after[1] - before[1]
    if passed < 0:
        found = f"the monotonic clock went back by {duration(-passed)}"
        yield Finding("clocks", "clocks", WRONG, found, "dmesg | grep -i clocksource")
    elif after[1] < NEWER_THAN:
        found = "the wall clock is before 2026"
        yield Finding("clocks", "clocks", WRONG, found, "sudo timedatectl set-ntp true")
    elif abs(wall - passed) > STEPPED:
        found = f"the wall clock was set by {wall - passed:+.1f} s within {passed:.0f} s"
        yield Finding("clocks", "clocks", WARNING, found, "chronyc tracking")
    else:
        yield Finding("clocks", "clocks", OK, f"agree over {duration(passed)}")
