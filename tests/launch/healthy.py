"""Machines with nothing amiss, for the tests of `zayajax doctor`, and ways to break them."""

import dataclasses
import json
import time

from zayajax.launch.doctor import view
from zayajax.launch.doctor.view import Package, Ran, Room

GiB = 1 << 30


def write(root, path, text=""):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def said(platform="cpu", count=8, kinds=("cpu",), until="sum", **wrong):
    stages = {
        "import": {"jax": "0.12.0"},
        "devices": {"platform": platform, "count": count, "kinds": list(kinds)},
        "product": {"wrong": wrong.get("product", [])},
        "sum": {"wrong": wrong.get("sum", [])},
    }
    names = list(stages)[: list(stages).index(until) + 1] if until else []
    return "".join(json.dumps({"stage": n, "seconds": 1.0} | stages[n]) + "\n" for n in names)


def packages(*plugins, jax="0.12.0", jaxlib="0.12.0"):
    found = {"jax": jax, "jaxlib": jaxlib}
    for name in plugins:
        found |= {f"jax-{name}-plugin": "0.12.0", f"jax-{name}-pjrt": "0.12.0"}
    return [Package(n, v, "/nowhere") for n, v in found.items()]


def cpu(root):
    """A laptop with nothing amiss."""
    write(root, "proc/meminfo", "MemTotal: 16000000 kB\nMemAvailable:   12000000 kB\n")
    write(root, "proc/loadavg", "0.50 0.40 0.30 1/100 1234\n")
    write(root, "proc/self/mountinfo", "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n")
    write(root, "sys/class/net/eth0/mtu", "1500")
    write(root, "sys/class/net/eth0/operstate", "up")
    write(root, "sys/class/net/lo/mtu", "65536")
    return view.View(
        environ={},
        root=root,
        python="3.12.3",
        packages=packages(),
        plugins=frozenset(),
        user="ada",
        host="node7",
        address="10.0.0.7",
        cores=8,
        limits={"memlock": None, "nofile": 65536},
        run=lambda command, environ, limit: Ran(0, said(), ""),
        resolve=lambda name: ["10.0.0.7"],
        listen=lambda address, port: None,
        connect=lambda address, port, limit: None,
        may_use=lambda path: True,
        room=lambda folder: Room(4000 * GiB, 3000 * GiB, None),
        attempt=lambda folder: {"write": None, "rename": None, "lock": None},
        clocks=lambda: (time.monotonic(), 1.8e9 + time.monotonic()),
    )


def rocm(root):
    """A node of eight MI300X and eight Pollara NICs, with nothing amiss."""
    base = cpu(root)
    for i in range(8):
        write(root, f"sys/bus/pci/devices/0000:0{i}:00.0/vendor", "0x1002")
        write(root, f"sys/bus/pci/devices/0000:0{i}:00.0/class", "0x120000")
        topology = f"sys/class/kfd/kfd/topology/nodes/{i}/properties"
        write(root, topology, "simd_count 1216\ngfx_target_version 90402\n")
        write(root, f"dev/dri/renderD{128 + i}")
        write(root, f"sys/class/drm/card{i}/device/mem_info_vram_total", str(192 * GiB))
        write(root, f"sys/class/drm/card{i}/device/mem_info_vram_used", str(GiB // 4))
        nic = f"sys/class/infiniband/ionic_{i}/ports/1"
        write(root, f"{nic}/state", "4: ACTIVE")
        write(root, f"{nic}/gids/1", "fe80:0000:0000:0000:0290:fcff:fe00:0001")
        write(root, f"sys/class/net/rail{i}/speed", "400000")
        write(root, f"sys/class/net/rail{i}/mtu", "9000")
        write(root, f"sys/class/net/rail{i}/operstate", "up")
    write(root, "dev/kfd")
    write(root, "sys/module/amdgpu/version", "6.16.6")
    write(root, "opt/rocm/.info/version", "7.2.0")
    write(root, "proc/sys/kernel/numa_balancing", "0")
    write(root, "proc/cmdline", "quiet iommu=pt")
    (root / "sys/kernel/iommu_groups/0").mkdir(parents=True)
    mi300x = said("gpu", 8, ["AMD Instinct MI300X"])
    return dataclasses.replace(
        base,
        packages=packages("rocm7"),
        plugins=frozenset({"xla_rocm7"}),
        cores=128,
        run=lambda command, environ, limit: Ran(0, mi300x, ""),
    )


def cuda(root):
    """A node of eight NVIDIA GPUs, with nothing amiss."""
    base = cpu(root)
    for i in range(8):
        write(root, f"sys/bus/pci/devices/0000:0{i}:00.0/vendor", "0x10de")
        write(root, f"sys/bus/pci/devices/0000:0{i}:00.0/class", "0x030200")
        write(root, f"dev/nvidia{i}")
    write(root, "dev/nvidiactl")
    write(root, "dev/nvidia-uvm")
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025"
    write(root, "proc/driver/nvidia/version", version)
    h200 = said("gpu", 8, ["NVIDIA H200"])
    return dataclasses.replace(
        base,
        packages=packages("cuda13"),
        plugins=frozenset({"xla_cuda13"}),
        cores=128,
        run=lambda command, environ, limit: Ran(0, h200, ""),
    )


def having(**fields):
    return lambda m: dataclasses.replace(m, **fields)


def environ(**variables):
    return having(environ=variables)


def limits(**changes):
    return having(limits={"memlock": None, "nofile": 65536} | changes)


def files(texts):
    """Writes files; those of None are removed."""

    def change(m):
        for path, text in texts.items():
            (m.root / path).unlink() if text is None else write(m.root, path, text)
        return m

    return change


def both(one, other):
    return lambda m: other(one(m))


def ran(*ended):
    return having(run=lambda command, environ, limit: Ran(*ended))


def raises(error):
    def fail(*_):
        raise error

    return fail


def room(total, free, files=None):
    return having(room=lambda folder: Room(int(total * GiB), int(free * GiB), files))
