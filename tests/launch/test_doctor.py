"""`zayajax doctor`: each thing that can be wrong, on a machine that is made to have it."""

import errno
import json
import shlex

import pytest
from healthy import (
    GiB,
    both,
    cpu,
    cuda,
    environ,
    files,
    having,
    limits,
    packages,
    raises,
    ran,
    rocm,
    room,
    said,
)

from zayajax.launch.doctor import OK, UNSEEN, WARNING, WRONG, diagnose
from zayajax.launch.doctor.view import Package, Ran


def look(machine, folder, **options):
    found = diagnose(machine, runs=folder / "runs", **options)
    for row in found.rows:  # of any finding, on any machine
        amiss = row["verdict"] in (WARNING, WRONG)
        assert amiss == bool(row["mend"]), row
        assert "\n" not in f"{row['found']}{row['mend']}", row
    assert found.ok == (not any(row["verdict"] == WRONG for row in found.rows))
    json.dumps(list(found.rows))
    return found


@pytest.mark.parametrize("healthy", [cpu, rocm, cuda])
def test_nothing_is_amiss_where_nothing_is(healthy, tmp_path):
    found = look(healthy(tmp_path), tmp_path)
    assert [r for r in found.rows if r["verdict"] in (WARNING, WRONG)] == []


TAKEN = OSError(errno.EADDRINUSE, "Address already in use")
ELSEWHERE = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
LOOPBACK = having(resolve=lambda name: ["127.0.1.1"])
ROCM_VERSION = "opt/rocm/.info/version"
DRIVER = "proc/driver/nvidia/version"
UNKNOWN = (
    "F1201 1 parse_flags_from_env.cc:234] Unknown flags in XLA_FLAGS: --xla_gpu_bad=4 --xla_no"
)
NO_VALUE = "E1201 1 command_line_flags.cc:63] Couldn't interpret value many for flag xla_gpu_some."
NIC = "sys/class/infiniband/ionic_0/ports/1"
ON_CPU = said("cpu", 1)
TRACE = "Traceback (most recent call last):\n  File x\nRuntimeError: no GPU to be had\nbye"
# Each: a machine, what breaks it, what is looked at, the verdict, what is found, what mends it.
PACKAGES = [
    (cpu, having(packages=[]), "jax", WRONG, "not installed", "pip install -e ."),
    (cpu, having(packages=packages(jaxlib="0.12.1")), "jax", WRONG, "together", "jaxlib==0.12.0"),
    (cpu, having(packages=packages(jaxlib="0.11.2")), "jax", WRONG, "together", "jaxlib==0.12.0"),
    (cpu, having(packages=packages(jax="0.9", jaxlib="0.9")), "jax", WRONG, "0.10 to", "-e ."),
    (
        cpu,
        having(packages=[*packages(), Package("jaxlib", "0.10.2", "/other")]),
        *("one jaxlib", WRONG, "/other", "pip uninstall -y jaxlib && pip install jaxlib==0.12.0"),
    ),
    (
        rocm,
        having(packages=packages(), plugins=frozenset()),
        *("plugin", WRONG, "no plugin", "pip install -e '.[rocm]'"),
    ),
    (
        cuda,
        having(packages=packages(), plugins=frozenset(), environ={"JAX_PLATFORMS": "cpu"}),
        *("plugin", UNSEEN, "JAX_PLATFORMS", None),
    ),
    (
        rocm,
        having(packages=packages("rocm7", jax="0.12.1", jaxlib="0.12.1")),
        *("jax-rocm7-plugin", WRONG, "one release", "pip install -e '.[rocm]'"),
    ),
    (
        rocm,
        having(packages=packages("rocm7")[:-1]),
        *("jax-rocm7-plugin", WRONG, "pjrt not installed", "pip install -e '.[rocm]'"),
    ),
    (
        cuda,
        having(packages=packages("cuda13", jax="0.12.1", jaxlib="0.12.1")),
        *("jax-cuda13-plugin", WRONG, "one release", "jax-cuda13-plugin==0.12.1 jax-cuda13-pjrt=="),
    ),
    (
        rocm,
        having(packages=packages("rocm7", "cuda13")),
        *("one plugin", WRONG, "all", "pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt"),
    ),
    (
        cuda,
        having(packages=packages("cuda12", "cuda13")),
        *("one plugin", WRONG, "all", "pip uninstall -y jax-cuda12-plugin jax-cuda12-pjrt"),
    ),
    (
        rocm,
        having(packages=packages("cuda13"), plugins=frozenset({"xla_cuda13"})),
        *("one plugin", WRONG, "GPUs are ROCM's", "pip install -e '.[rocm]'"),
    ),
    (rocm, files({ROCM_VERSION: None}), "ROCm", WRONG, "no ROCm in /opt/rocm", "amdgpu-install"),
    (rocm, files({ROCM_VERSION: "6.4.1"}), "ROCm", WRONG, "ROCm 6.4.1", "ROCM_PATH=/opt/rocm-7"),
    (
        rocm,
        both(
            files({ROCM_VERSION: None}),
            having(packages=[*packages("rocm7"), Package("rocm-sdk-core", "7.13.0", "/")]),
        ),
        *("ROCm", OK, "ROCm 7.13.0", None),
    ),
    (
        cuda,
        files({DRIVER: "NVRM version: Kernel Module  535.1.2  x"}),
        *("NVIDIA driver", WRONG, "CUDA 13 needs 580", "jax[cuda12]"),
    ),
    (cuda, files({DRIVER: "what?"}), "NVIDIA driver", UNSEEN, "cannot be read", None),
    (
        cuda,
        having(
            packages=[*packages("cuda13"), Package("nvidia-cudnn-cu13", "9", "/")],
            environ={"LD_LIBRARY_PATH": ":/opt/none:/opt/rocm"},
        ),
        *("NVIDIA driver", OK, "580", None),
    ),
    (
        cuda,
        both(
            files({"opt/cuda/libcudnn.so.8": ""}),
            having(
                packages=[*packages("cuda13"), Package("nvidia-cudnn-cu13", "9", "/")],
                environ={"LD_LIBRARY_PATH": "/opt/none:/opt/cuda"},
            ),
        ),
        *("CUDA libraries", WARNING, "libcudnn.so.8 of /opt/cuda", "unset LD_LIBRARY_PATH"),
    ),
]
NO_ACCESS = having(may_use=lambda path: path.name == "kfd")
GPUS = [
    (rocm, files({"dev/kfd": None}), "driver", WRONG, "/dev/kfd", "sudo modprobe amdgpu"),
    (
        rocm,
        files({"dev/kfd": None, ".dockerenv": ""}),
        *("driver", WRONG, "/dev/kfd", "docker run --device=/dev/kfd"),
    ),
    (rocm, files({"dev/dri/renderD130": None}), "driver", WRONG, "8 AMD GPUs", "amdgpu"),
    (rocm, NO_ACCESS, "access", WRONG, "ada may not use /dev/dri", "usermod -aG render,video ada"),
    (
        rocm,
        files({"proc/sys/kernel/numa_balancing": "1"}),
        *("NUMA balancing", WARNING, "pages", "sudo sysctl -w kernel.numa_balancing=0"),
    ),
    (rocm, files({"proc/cmdline": "quiet"}), "IOMMU", WARNING, "iommu=pt", "iommu=pt"),
    (
        rocm,
        environ(HSA_OVERRIDE_GFX_VERSION="9.4.2"),
        *("architecture", WARNING, "9.4.2", "unset HSA_OVERRIDE_GFX_VERSION"),
    ),
    (
        rocm,
        files({"sys/class/drm/card3/device/mem_info_vram_used": str(100 * GiB)}),
        *("memory", WARNING, "100 GiB of 1 GPUs (card3", "rocm-smi"),
    ),
    (cuda, files({"dev/nvidiactl": None}), "driver", WRONG, "no driver", "modprobe nvidia"),
    (cuda, files({"dev/nvidia-uvm": None}), "driver", WRONG, "nvidia-uvm", "nvidia-modprobe -u"),
    (
        cpu,
        both(files({"dev/dxg": ""}), having(plugins={"xla_cuda13"}, packages=packages("cuda13"))),
        *("driver", OK, "Windows' driver", None),
    ),
    (cuda, NO_ACCESS, "access", WRONG, "/dev/nvidia0", "usermod"),
    (
        rocm,
        environ(HIP_VISIBLE_DEVICES="0,1", CUDA_VISIBLE_DEVICES="2"),
        *("masks", WRONG, "contradict", "unset CUDA_VISIBLE_DEVICES"),
    ),
    (
        rocm,
        environ(ROCR_VISIBLE_DEVICES="4,5", HIP_VISIBLE_DEVICES="4,5"),
        *("masks", WRONG, "leaves 2 GPUs", "unset HIP_VISIBLE_DEVICES"),
    ),
    (rocm, environ(ROCR_VISIBLE_DEVICES=""), "masks", WRONG, '"" hides', "unset ROCR"),
    (rocm, environ(ROCR_VISIBLE_DEVICES="8"), "masks", WRONG, "GPU 8 of 8", "unset ROCR"),
    (rocm, environ(GPU_DEVICE_ORDINAL="1,1"), "masks", WRONG, "twice", "GPU_DEVICE_ORDINAL=1"),
    (
        rocm,
        environ(ROCR_VISIBLE_DEVICES="3", JAX_ROCM_VISIBLE_DEVICES="3"),
        *("masks", WRONG, "JAX_ROCM_VISIBLE_DEVICES=3 names GPU 3 of 1", "unset JAX_ROCM"),
    ),
    (rocm, environ(JAX_ROCM_VISIBLE_DEVICES="all"), "masks", OK, "all", None),
    (cuda, environ(CUDA_VISIBLE_DEVICES="-1"), "masks", WRONG, "hides all", "unset CUDA"),
    (cuda, environ(CUDA_VISIBLE_DEVICES="none"), "masks", WRONG, "hides all", "unset CUDA"),
    (cuda, environ(CUDA_VISIBLE_DEVICES="GPU-1a,GPU-2b"), "masks", WARNING, "2 of 8", "unset CUDA"),
    (cuda, environ(CUDA_VISIBLE_DEVICES="5"), "masks", OK, "5", None),
]
JAX = [
    (cpu, environ(JAX_PLATFORMS="cpuu"), "JAX_PLATFORMS", WRONG, "cpuu", "JAX_PLATFORMS=cpu"),
    (cpu, environ(JAX_PLATFORMS="rocm"), "JAX_PLATFORMS", WRONG, "no plugin", "-e '.[rocm]'"),
    (cpu, environ(JAX_PLATFORMS=" "), "JAX_PLATFORMS", WRONG, "none of those", "unset"),
    (cpu, environ(JAX_PLATFORMS="gpu"), "JAX_PLATFORMS", WRONG, "no plugin", "unset"),
    (cpu, environ(XLA_FLAGS="/no/such"), "XLA_FLAGS", WRONG, "no file", "unset XLA_FLAGS"),
    (
        cpu,
        both(environ(XLA_FLAGS="--xla_gpu_bad=4 --xla_a=1 --xla_no"), ran(-6, "", UNKNOWN)),
        *("XLA_FLAGS", WRONG, "--xla_gpu_bad", "export XLA_FLAGS=--xla_a=1"),
    ),
    (
        cpu,
        both(environ(XLA_FLAGS="--xla_gpu_some=many"), ran(-6, "", NO_VALUE)),
        *("XLA_FLAGS", WRONG, "many is no value for --xla_gpu_some", "unset XLA_FLAGS"),
    ),
    (
        rocm,
        environ(XLA_FLAGS="--xla_gpu_enable_triton_gemm=true", GPU_MAX_HW_QUEUES="4"),
        *("XLA_FLAGS", WARNING, "GPU_MAX_HW_QUEUES", "unset XLA_FLAGS GPU_MAX_HW_QUEUES"),
    ),
    (cpu, environ(XLA_FLAGS="--xla_dump_to=x"), "XLA_FLAGS", OK, "and --xla_dump_to", None),
    (cpu, ran(None, "", ""), "start", WRONG, "did not import jax within 60 s", "import jax"),
    (cpu, ran(1, "", TRACE), "start", WRONG, "(status 1): RuntimeError: no GPU", "import jax"),
    (rocm, ran(-11, said(until="import"), ""), "start", WRONG, "signal 11", "AMD_LOG_LEVEL"),
    (
        cuda,
        ran(None, said("gpu", 8, ["H200"], until="product"), ""),
        *("start", WRONG, "did not add up over the devices", "zayajax bench collectives"),
    ),
    (
        rocm,
        ran(0, said("gpu", 8, ["MI300X"], product=[3]), ""),
        *("product", WRONG, "device 3", "rvs"),
    ),
    (
        cuda,
        ran(0, said("gpu", 8, ["H200"], sum=[1, 2]), ""),
        *("sum over devices", WRONG, "1, 2", "dcgmi diag"),
    ),
    (rocm, ran(None, said("gpu", 8, ["MI300X"]), ""), "start", WRONG, "then did not end", "bench"),
    (rocm, ran(-6, said("gpu", 8, ["MI300X"]), ""), "start", WRONG, "signal 6", "bench"),
    (cpu, ran(0, "words\n[1]\n" + ON_CPU, ""), "sum over devices", UNSEEN, "one device", None),
    (rocm, ran(0, ON_CPU, ""), "devices", WRONG, "on the CPU", "JAX_PLATFORMS=rocm"),
    (
        rocm,
        having(run=lambda *_: Ran(0, ON_CPU, ""), plugins=frozenset(), packages=packages()),
        *("devices", WRONG, "on the CPU", "pip install -e '.[rocm]'"),
    ),
    (
        cuda,
        both(environ(CUDA_VISIBLE_DEVICES="-1"), ran(0, ON_CPU, "")),
        *("devices", WRONG, "on the CPU", "unset CUDA_VISIBLE_DEVICES"),
    ),
    (
        rocm,
        both(environ(JAX_PLATFORMS="cpu"), ran(0, ON_CPU, "")),
        *("devices", WARNING, "by JAX_PLATFORMS=cpu", "unset JAX_PLATFORMS"),
    ),
    (rocm, ran(0, said("gpu", 7, ["MI300X"]), ""), "devices", WRONG, "shows 8", "rocminfo"),
]
NETWORK = [
    (
        cpu,
        having(resolve=raises(OSError("?"))),
        "own name",
        WRONG,
        "no address",
        "'10.0.0.7 node7'",
    ),
    (cpu, LOOPBACK, "own name", WARNING, "127.0.1.1", "--coordinator 10.0.0.7:"),
    (cpu, both(LOOPBACK, environ(**SLURM)), "coordinator", WRONG, "loopback", "10.0.0.7:"),
    (cpu, environ(ZAYAJAX_COORDINATOR="a:1"), "coordinator", WRONG, "missing", "--process I"),
    (
        cpu,
        both(environ(**SLURM), having(listen=raises(TAKEN))),
        "coordinator",
        WRONG,
        "61440",
        "ss",
    ),
    (cpu, environ(**SLURM), "coordinator", OK, "n1:", None),
    (
        cpu,
        files({"sys/class/net/eth0/speed": "400000"}),
        *("interfaces", WARNING, "MTU 1500 of eth0", "ip link set eth0 mtu 9000"),
    ),
    (
        cpu,
        environ(NCCL_SOCKET_IFNAME="eno1,eth"),
        *("NCCL_SOCKET_IFNAME", WRONG, "no eno1", "NCCL_SOCKET_IFNAME=eth"),
    ),
    (cpu, environ(NCCL_SOCKET_IFNAME="=eth"), "NCCL_SOCKET_IFNAME", WRONG, "no eth", "=eth0"),
    (cpu, environ(NCCL_SOCKET_IFNAME="^eth"), "NCCL_SOCKET_IFNAME", WRONG, "leaves none", "=eth0"),
    (cpu, environ(NCCL_SOCKET_IFNAME="^docker"), "NCCL_SOCKET_IFNAME", OK, "eth0", None),
    (rocm, environ(NCCL_IB_HCA="ionic_0:1,ionic_9"), "NCCL_IB_HCA", WRONG, "ionic_9", "=ionic_0"),
    (cuda, environ(NCCL_IB_HCA="mlx5_0"), "NCCL_IB_HCA", WRONG, "has none", "unset NCCL_IB_HCA"),
    (rocm, files({f"{NIC}/state": "1: DOWN"}), "RDMA", WARNING, "1 of 8", "rdma link show ionic_0"),
    (rocm, environ(NCCL_IB_DISABLE="1"), "NCCL_IB_DISABLE", WARNING, "TCP", "unset NCCL_IB"),
    (rocm, environ(NCCL_P2P_DISABLE="1"), "NCCL_P2P_DISABLE", WARNING, "host's", "unset NCCL_P2P"),
    (rocm, environ(NCCL_CROSS_NIC="2"), "NCCL_CROSS_NIC", WARNING, "rail", "NCCL_CROSS_NIC=0"),
    (rocm, environ(NCCL_IB_GID_INDEX="3"), "NCCL_IB_GID_INDEX", WRONG, "no such", "INDEX=1"),
    (
        rocm,
        both(files({f"{NIC}/gids/3": "fe80::1"}), environ(NCCL_IB_GID_INDEX="3")),
        *("NCCL_IB_GID_INDEX", WARNING, "1 is usual", "INDEX=1"),
    ),
    (rocm, environ(NCCL_IB_GID_INDEX="1"), "NCCL_IB_GID_INDEX", OK, "fe80", None),
]
AT = [
    # What breaks a machine that is asked about --coordinator, and as above.
    ("nonsense", having(), WRONG, "HOST:PORT", "--coordinator 10.0.0.7:"),
    ("head:5000", having(resolve=raises(OSError(1, "unknown"))), WRONG, "unknown", "getent hosts"),
    ("head:5000", LOOPBACK, WARNING, "127.0.1.1", "--coordinator 10.0.0.7:5000"),
    ("[::1]:5000", having(resolve=lambda name: ["::1"]), WARNING, "::1", "10.0.0.7:5000"),
    ("head:5000", having(listen=raises(TAKEN)), WRONG, "port 5000", "ss -ltnp 'sport = :5000'"),
    ("head:80", having(listen=raises(PermissionError(13, "no"))), WRONG, "80", "head:61440"),
    ("head:5000", having(listen=raises(ELSEWHERE)), WARNING, "already", "head:61440"),
    (
        "head:5000",
        having(listen=raises(ELSEWHERE), connect=raises(ConnectionRefusedError())),
        *(OK, "nothing listens there yet", None),
    ),
    (
        "head:5000",
        having(listen=raises(ELSEWHERE), connect=raises(TimeoutError("timed out"))),
        *(WRONG, "timed out", "ip route get 10.0.0.7"),
    ),
]
MOUNTS = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:5 / {} rw,x - tmpfs tmpfs rw\nnonsense\n"
LIMITS = [
    (rocm, room(1 / 16, 1 / 16), "/dev/shm", WRONG, "64 MiB", "docker run --shm-size=8g"),
    (rocm, having(room=raises(OSError(2, "gone"))), "/dev/shm", WRONG, "gone", "mount -t tmpfs"),
    (rocm, having(room=raises(OSError(2, "gone"))), "room", UNSEEN, "gone", None),
    (cpu, files({"runs": "a file"}), "folder", WRONG, "runs is no folder", "--run-dir"),
    (rocm, room(8, 0.5), "/dev/shm", WARNING, "512 MiB", "ls -lS /dev/shm"),
    (rocm, limits(memlock=8 << 20), "locked memory", WRONG, "8 MiB", "memlock unlimited"),
    (cpu, limits(nofile=1024), "open files", WARNING, "1024", "ulimit -n 2048"),
    (cpu, limits(nofile=None), "open files", OK, "any number", None),
    (cpu, having(cores=1), "cores", WARNING, "8 emulated devices on 1 cores", "--mesh.gpus 4"),
    (
        cpu,
        environ(XLA_FLAGS="--xla_force_host_platform_device_count=512"),
        *("cores", WARNING, "512 emulated", "--mesh.gpus"),
    ),
    (cpu, environ(JAX_NUM_CPU_DEVICES="64"), "cores", WARNING, "64 emulated", "--mesh.gpus"),
    (
        cpu,
        files({"sys/fs/cgroup/cpu.max": "50000 100000"}),
        "cores",
        WARNING,
        "0.5 cores",
        "--mesh",
    ),
    (cpu, files({"sys/fs/cgroup/cpu.max": "max 100000"}), "cores", OK, "8 cores", None),
    (cpu, files({"proc/loadavg": "40.1 1 1 1/1 1"}), "cores", WARNING, "load 40.1", "top"),
    (rocm, having(cores=4), "cores", WARNING, "4 cores for 8 GPUs", "--cpus-per-task=16"),
    (cpu, files({"proc/meminfo": "MemAvailable: 1000000 kB"}), "memory", WARNING, "977 MiB", "ps"),
    (cpu, files({"proc/meminfo": "?"}), "memory", UNSEEN, "does not say", None),
    (
        cpu,
        files({"sys/fs/cgroup/memory.max": str(GiB), "sys/fs/cgroup/memory.current": "0"}),
        *("memory", WARNING, "1 GiB of this container's", "ps"),
    ),
    (
        cpu,
        having(attempt=lambda folder: {"write": "Permission denied"}),
        *("folder", WRONG, "cannot be written", "sudo chown ada"),
    ),
    (
        cpu,
        having(attempt=lambda folder: {"write": None, "rename": "x", "lock": None}),
        *("folder", WRONG, "rename", "--run-dir"),
    ),
    (
        cpu,
        having(attempt=lambda folder: {"write": None, "rename": None, "lock": "no locks"}),
        *("folder", WRONG, "does not lock", "flock"),
    ),
    (
        cpu,
        lambda m: files({"proc/self/mountinfo": MOUNTS.format(m.root)})(m),
        *("folder", WARNING, "in memory (tmpfs)", "--run-dir"),
    ),
    (cpu, room(100, 0.2), "room", WRONG, "205 MiB", "du"),
    (cpu, room(100, 50, files=3), "room", WRONG, "3 more files", "du"),
    (rocm, room(100, 50), "room", WARNING, "two checkpoints of ZAYA1-8B are 136 GiB", "--run-dir"),
]


def ticking(*readings):
    return having(clocks=iter(readings).__next__)


CLOCKS = [
    (cpu, ticking((5.0, 1.8e9), (4.0, 1.8e9)), "clocks", WRONG, "went back by 1 s", "dmesg"),
    (cpu, ticking((5.0, 5.0), (6.0, 6.0)), "clocks", WRONG, "before 2026", "timedatectl"),
    (cpu, ticking((5.0, 1.8e9), (6.0, 1.8e9 + 61)), "clocks", WARNING, "+60.0 s", "chronyc"),
]


@pytest.mark.parametrize(
    "machine, breaks, name, verdict, found, mend",
    [*PACKAGES, *GPUS, *JAX, *NETWORK, *LIMITS, *CLOCKS],
)
def test_each_thing_that_can_be_wrong(machine, breaks, name, verdict, found, mend, tmp_path):
    check(look(breaks(machine(tmp_path)), tmp_path), name, verdict, found, mend)


@pytest.mark.parametrize("coordinator, breaks, verdict, found, mend", AT)
def test_a_coordinator_that_is_named(coordinator, breaks, verdict, found, mend, tmp_path):
    diagnosis = look(breaks(cpu(tmp_path)), tmp_path, coordinator=coordinator)
    check(diagnosis, "coordinator", verdict, found, mend)


@pytest.mark.parametrize(
    "proxy, spared, verdict",
    [
        ({"https_proxy": "p"}, None, WARNING),
        ({"grpc_proxy": "p"}, "other, 10.0.0.0/9,x/y", WARNING),
        ({"http_proxy": "p"}, "other, .cluster.org", OK),
        ({"http_proxy": "p"}, "*", OK),
        ({"HTTPS_PROXY": "p", "https_proxy": ""}, None, OK),
    ],
)
def test_proxies(proxy, spared, verdict, tmp_path):
    variables = proxy | ({"no_proxy": spared} if spared else {})
    machine, host = environ(**variables)(cpu(tmp_path)), "head.cluster.org"
    listed = f"{spared},{host}" if spared else host
    mend = None if verdict == OK else f"export no_proxy={shlex.quote(listed)}"
    check(look(machine, tmp_path, coordinator=f"{host}:5000"), "proxies", verdict, "", mend)
    check(look(machine, tmp_path), "proxies", OK, "", None)  # without a coordinator
    # The first of gRPC's two variables that is set counts; and a range is of numbers.
    machine = environ(**variables, no_grpc_proxy="10.0.0.0/8")(cpu(tmp_path))
    check(look(machine, tmp_path, coordinator="10.0.0.9:5000"), "proxies", OK, "", None)


def check(diagnosis, name, verdict, found, mend):
    rows = [r for r in diagnosis.rows if r["name"] == name]
    matching = [r for r in rows if r["verdict"] == verdict and found in r["found"]]
    assert matching, rows
    assert mend is None or mend in matching[0]["mend"]
    if mend is not None:  # what a reader of text sees
        assert matching[0]["mend"] in repr(diagnosis)
