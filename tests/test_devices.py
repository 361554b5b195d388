"""Whatever order devices come in, rows of the mesh are hosts and columns are rails."""

import dataclasses
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from zayajax import devices as d
from zayajax.devices import Seat, arrange
from zayajax.errors import UserError

MI300X, H200, OTHER = "AMD Instinct MI300X", "NVIDIA H200", "Some GPU"


@dataclasses.dataclass(frozen=True)
class Fake:
    id: int
    process_index: int
    device_kind: str = MI300X
    platform: str = "gpu"


def machines(hosts=1, gpus=8, kind=MI300X, platform="gpu", per_process=None, ranks=False):
    """{device: seat}, already in the right order: host by host, then by local rank."""
    per_process = per_process or gpus
    found = {}
    for host in range(hosts):
        for i in range(gpus):
            process = host * gpus // per_process + i // per_process
            rank = str(i // per_process) if ranks else None
            device = Fake(len(found), process, kind, platform)
            found[device] = Seat(f"id {host}", f"h{host}", i % per_process, rank, "LOCAL_RANK")
    return found


def arranged(found, nodes, gpus):
    return arrange(list(found), list(found.values()), nodes, gpus)


def refused(found, nodes, gpus, *words):
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        arranged(found, nodes, gpus)
    for word in words:
        assert word in str(error.value), error.value


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_order_of_devices_ends_in_the_same_rails(data):
    hosts, gpus = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 4, 8]))
    per_process = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if gpus % n == 0]))
    ranks = data.draw(st.booleans())
    found = machines(hosts, gpus, H200, per_process=per_process, ranks=ranks)
    want = np.array(list(found), object).reshape(hosts, gpus)
    if ranks:  # then processes need not be numbered in the order of their local ranks
        shuffle = data.draw(st.permutations(range(gpus // per_process)))
        n = len(shuffle)
        new = {f: f.process_index // n * n + shuffle[f.process_index % n] for f in found}
        moved = {f: dataclasses.replace(f, process_index=p) for f, p in new.items()}
        found = {moved[f]: seat for f, seat in found.items()}
        want = np.array(list(found), object).reshape(hosts, gpus)
    mixed = dict(data.draw(st.permutations(list(found.items()))))
    np.testing.assert_array_equal(arranged(mixed, hosts, gpus), want)
    np.testing.assert_array_equal(arranged(mixed, hosts * gpus, 1), want.reshape(-1, 1))


@given(st.permutations(range(8)), st.permutations(range(8)))
@settings(max_examples=30, deadline=None)
def test_unmasked_processes_keep_the_hardware_order(first, second):
    """A process a GPU, each sees its index: processes may be numbered anyhow on each host."""
    seats = [Seat(f"h{h}", f"h{h}", i) for h, order in enumerate((first, second)) for i in order]
    found = arrange([Fake(p, p) for p in range(16)], seats, 2, 8)
    for device, rail in zip(found.flat, [*range(8)] * 2, strict=True):
        assert seats[device.id].hardware == rail
    assert [x.process_index // 8 for x in found[:, 0]] == [0, 1]


def test_a_part_of_a_node_is_refused_with_its_bandwidth():
    refused(machines(1, 4), 1, 4, "192 of", "(of which 4 can be seen)")
    for visible in (2, 8):  # a mask that hides the rest changes nothing
        refused(machines(1, visible), 1, 2, "mesh.gpus = 2", "64 of the node's 448 GB/s")
    refused(machines(2, 8), 4, 4, "192 of the node's 448", "mesh.gpus = 8", "mesh.nodes = 2")
    refused(machines(2, 8), 4, 4, "mesh.gpus = 1 with mesh.nodes = 16")
    refused(machines(1, 8, "AMD Instinct MI355X"), 1, 2, "76.8 of the node's 537.6")
    refused(machines(1, 8), 2, 1, "64 of the node's 448")  # by another name
    assert arranged(machines(1, 8), 1, 1).shape == (1, 1)
    assert arranged(machines(1, 4), 4, 1).shape == (4, 1)


def test_behind_a_switch_a_node_is_still_whole():
    refused(machines(1, 8, H200), 1, 4, "4 of the 8 devices of host h0", "keeps the node's 450")
    refused(machines(1, 8, OTHER), 2, 4, "is not known", "mesh.gpus = 8")
    for n in (1, 2, 4, 8):  # as many as the host shows are its node
        assert arranged(machines(1, n, H200), 1, n).shape == (1, n)
    for nodes in (1, 2, 8):
        assert arranged(machines(1, 8, H200), nodes, 1).shape == (nodes, 1)


def test_emulated_devices_are_cut_into_nodes():
    found = machines(1, 8, "cpu", "cpu")
    for shape in [(1, 4), (2, 4), (2, 3), (8, 1), (4, 2)]:
        ids = [x.id for x in arranged(found, *shape).flat]
        assert ids == list(range(shape[0] * shape[1]))
    two = machines(2, 4, "cpu", "cpu")
    assert [x.id for x in arranged(two, 4, 2)[:, 0]] == [0, 2, 4, 6]
    refused(two, 1, 8, "does not divide the 4 devices of host h0")


def test_what_is_no_such_machine_is_said():
    refused(machines(1, 4, H200), 1, 8, "1 x 8 devices", "there are 4 (NVIDIA H200)")
    refused(machines(2, 4, H200), 1, 8, "host h0 has 4 devices", "mesh.gpus = 4")
    refused(machines(2, 8), 1, 8, "2 hosts (h0, h1)", "has to be 16")
    refused(machines(2, 8), 3, 8, "3 x 8 devices", "there are 16", "2 hosts (h0, h1)")
    refused(machines(2, 8), 8, 1, "2 processes have 16", "has to be 16")
    refused(machines(2, 8), 1, 16, "host h0 has 8 devices", "mesh.gpus = 8 with mesh.nodes = 2")
    uneven = dict(list(machines(2, 8).items())[:-1])
    refused(uneven, 2, 8, "different numbers of devices (h0: 8, h1: 7)")


def test_two_hosts_of_one_name_are_two():
    found = {x: dataclasses.replace(s, name="localhost") for x, s in machines(2, 8).items()}
    assert arranged(found, 2, 8).shape == (2, 8)
    uneven = dict(list(found.items())[:-1])
    refused(uneven, 2, 8, "localhost (process 0): 8, localhost (process 1): 7")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (("0", "1", "1", "3"), "two processes have the same local rank"),
        (("0", "1", "2", "4"), "local rank 3 is missing among 4 processes"),
        (("0", "1", "2", None), "process 7 has no local rank"),
        (("0", "1", "2", "-1"), "'-1' is no local rank"),
        (("0", "1", "2", "²"), "'²' is no local rank"),
    ],
)
def test_wrong_local_ranks_name_the_host(ranks, words):
    found = machines(2, 4, H200, per_process=1, ranks=True)
    new = dict(zip(list(found)[4:], ranks, strict=True))
    found = {x: dataclasses.replace(s, rank=new.get(x, s.rank)) for x, s in found.items()}
    refused(found, 2, 4, "host h1: ", words, "LOCAL_RANK")


def test_local_ranks_that_contradict_the_hardware_are_refused():
    found = machines(1, 2, H200, per_process=1, ranks=True)
    seats = [dataclasses.replace(s, hardware=1 - i) for i, s in enumerate(found.values())]
    refused(dict(zip(found, seats, strict=True)), 1, 2, "host h0", "LOCAL_RANK", "1: 0, 0: 1")


def test_a_single_process_needs_no_launcher(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    found = d.seats(jax.devices())
    assert [s.hardware for s in found] == list(range(8))
    assert len({s.host for s in found}) == 1 and found[0].rank is None


@pytest.mark.parametrize(
    "seat",
    [
        Seat("h" * 64, "h" * 64, 7, "9" * 32, max(d.LOCAL_RANKS, key=len)),
        Seat("文" * 64, "文" * 64, 0),
    ],
)
def test_any_seat_fits_its_message(seat):
    assert len(d._encode(seat)) == d.SEAT_BYTES


# What each process does: say the mesh, and sum over each axis what no two devices share.
PROCESS = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

address, processes, process, devices, nodes, gpus, host = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", int(devices))
jax.distributed.initialize(address, int(processes), int(process))
from zayajax.layout import WORLD
from zayajax.mesh import make_mesh

mesh = make_mesh(int(nodes), int(gpus), host)
print("mesh", [[x.process_index for x in row] for row in mesh.devices])
ids = [[x.id for x in row] for row in mesh.devices]
assert all(row == sorted(row) for row in ids), ids
order = {x: i for i, x in enumerate(jax.devices())}
value = np.array([[2.0 ** order[x] for x in row] for row in mesh.devices], np.float32)
sharding = NamedSharding(mesh, P(*WORLD))
x = jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P(*WORLD), out_specs=(P("node", None), P(None, "gpu")))
def sums(x):
    return jax.lax.psum(x, "gpu"), jax.lax.psum(x, "node")

for total, axis in zip(sums(x), (1, 0)):
    want = value.sum(axis, keepdims=True)  # exact: powers of two tell which devices were summed
    for shard in total.addressable_shards:
        np.testing.assert_array_equal(shard.data, want[shard.index])
print("sums")
"""


def run_processes(hosts, devices, nodes, gpus):
    """(return code, stdout, stderr) of a process for each letter of `hosts`."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    # All have the local rank 0 of the machine that starts them: under `host` it counts for nothing.
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"LOCAL_RANK": "0"}
    started = []
    for i, (host, n) in enumerate(zip(hosts, devices, strict=True)):
        args = map(str, (address, len(hosts), i, n, nodes, gpus, host))
        command = [sys.executable, "-c", PROCESS, *args]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, env=env, **pipes))
    try:
        outs = [p.communicate(timeout=120) for p in started]
    finally:
        for p in started:
            p.kill()
    return [(p.returncode, *out) for p, out in zip(started, outs, strict=True)]


@pytest.mark.parametrize(
    ("hosts", "devices", "mesh"),
    [
        ("ab", 4, [[0] * 4, [1] * 4]),
        ("abab", 1, [[0, 2], [1, 3]]),  # a process a GPU, dealt to hosts in turn
    ],
)
def test_real_processes_find_the_hosts_and_sum_along_the_axes(hosts, devices, mesh):
    for code, out, err in run_processes(hosts, [devices] * len(hosts), len(mesh), len(mesh[0])):
        assert code == 0, err[-2000:]
        lines = out.splitlines()  # Gloo prints some, too
        assert f"mesh {mesh}" in lines and "sums" in lines, out


def test_real_processes_of_unequal_hosts_all_say_so():
    for code, _, err in run_processes("ab", [2, 1], 1, 2):
        assert code != 0 and "different numbers of devices (a: 2, b: 1)" in err, err[-2000:]
