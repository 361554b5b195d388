"""Every process ends with one sentence, whoever else is there, dies, or talks nonsense."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest
from hypothesis import given, settings, strategies as st
from joining import PROCESS, free_port, outcomes, started

from zayajax import cli
from zayajax.errors import UserError
from zayajax.launch import cluster as c, distributed as d, rollcall

# Seconds. Processes that start together come up to one apart on two busy cores.
SHORT, AMPLE = 3.0, 60.0


def cards(n, timeout=AMPLE, address=None, **more):
    address = address or f"localhost:{free_port()}"
    base = dict(coordinator=address, processes=n, timeout=timeout, cpu_devices=1, **more)
    return [base | {"process": i} for i in range(n)]


def said(processes, *words, timeout=AMPLE):
    """All end with status 2 and the same sentence, which has these words."""
    found = outcomes(processes, timeout)
    for code, text, err in found:
        assert code == 2 and text.startswith("said ") and "\n" not in text, (text, err[-1500:])
        for word in words:
            assert word in text, text
    return {text for _, text, _ in found}


WORK = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
sharding = NamedSharding(Mesh(np.array(jax.devices()), "d"), P("d"))
x = jax.make_array_from_callback((4,), sharding, lambda i: np.arange(4.0)[i])
assert jax.jit(jnp.sum, out_shardings=NamedSharding(sharding.mesh, P()))(x) == 6
value = d.together(lambda: os.getpid(), "think")
assert value == (os.getpid() if jax.process_index() == 0 else None)

def bad():
    raise UserError("nothing is right")

for wrong, kind in ((bad, UserError), (lambda: 1 / 0, (RuntimeError, ZeroDivisionError))):
    try:
        d.together(wrong, "divide")
    except kind as error:
        assert "nothing is right" in str(error) or "division" in str(error)
    else:
        raise AssertionError
assert d.as_first([jax.process_index(), "x"]) == [0, "x"]
import time
try:
    d.together(lambda: time.sleep(1.5), "sleep", timeout=0.5)
    assert jax.process_index() == 0
except UserError as error:
    assert jax.process_index() == 1 and str(error) == "process 0 did not sleep within 0.5 s"
d.together(lambda: None, "end")
import signal
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


@pytest.mark.smoke
def test_two_join_sum_and_work_for_each_other():
    """Through a proxy that answers nobody, as far as the environment goes."""
    proxies = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "grpc_proxy")}
    both = cards(2)
    for card in both:
        card |= {"cpu_devices": 2, "body": WORK}
    with started(both, proxies, PROCESS) as processes:
        for code, text, err in outcomes(processes):
            assert code == 0 and text.endswith("2 4"), (text, err[-1500:])


def test_sigterm_is_not_jaxs():
    body = "import time; print('joined', flush=True); time.sleep(60)"
    both = [card | {"body": body} for card in cards(2)]
    with started(both, code=PROCESS) as processes:
        for p in processes:
            while (line := p.stdout.readline()) != "joined\n":
                assert line or p.poll() is None, p.stderr.read()[-1500:]
        for p in processes:
            p.send_signal(signal.SIGTERM)
        assert [p.wait(10) for p in processes] == [-signal.SIGTERM] * 2


def test_who_is_missing_is_named_to_all():
    some = cards(9, SHORT)
    some = [card | {"host": f"h{i % 2}"} for i, card in enumerate(some) if i in (0, 3)]
    with started(some) as processes:
        (text,) = said(processes, "ranks 1-2, 4-8 of 9 did not join within 3 s")
    assert "present: rank 0 on h0; rank 3 on h1" in text


def test_who_came_long_before_waits_for_the_last_word():
    early, late = cards(3)[1], cards(3)[0]
    early |= {"timeout": 1.5, "coordinator": late["coordinator"]}
    late |= {"timeout": 3.0}
    with started([late, early]) as processes:
        assert len(said(processes, "rank 2 of 3 did not join within 3 s")) == 1


def test_process_0_never_comes():
    with started(cards(2, 1.0)[1:]) as processes:
        said(processes, "process 1 did not reach process 0", "within 1 s", "refused", "loopback")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([{}, {"facts": {"config": "b"}}], ["config", "a in rank 0", "b in rank 1"]),
        ([{}, {"processes": 3}], ["one of 2 processes", "one of 3"]),
        ([{}, {"process": 0, "coordinator": None}], None),
    ],
)
def test_what_differs_is_named_to_all(more, words):
    pair = cards(2, facts={"config": "a"})
    pair = [card | new for card, new in zip(pair, more, strict=True)]
    if words is None:  # two processes 0 of one host: the second finds the port taken
        pair = [card | {"coordinator": pair[0]["coordinator"], "timeout": SHORT} for card in pair]
        with started(pair) as processes:
            texts = said(processes)
        assert sum("cannot listen" in text for text in texts) == 1
        return
    with started(pair) as processes:
        assert len(said(processes, *words)) == 1


def test_two_of_one_rank_are_told():
    three = cards(3)
    with started([three[0], three[1], three[1]]) as processes:
        assert len(said(processes, "two processes say that they are process 1", "pid ")) == 1


def test_several_hosts_cannot_have_a_loopback_coordinator():
    with started([card | {"host": f"h{i}"} for i, card in enumerate(cards(2))]) as processes:
        said(processes, "loopback", "2 hosts", "/etc/hosts")
    with pytest.raises(UserError, match="loopback address, and the processes are on 2 hosts"):
        d.join(c.Cluster("127.0.0.1:1", 2, 1, hosts=2))  # known before


NOISE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00" * 100_000,
    b"{}\n",
    b"[1]\n",
    b"[" * 60_000 + b"\n",
]
NOISE += [
    b'{"zayajax": 1, "rank": "1", "processes": 2, "same": {}, "pid": 1}\n',
    b'{"rank": NaN}\n',
]


def test_garbage_on_the_port_disturbs_nobody():
    two = cards(2, SHORT + 25)
    with started(two[:1]) as first:
        port, deadline = int(two[0]["coordinator"].rpartition(":")[2]), time.monotonic() + 30
        for noise in NOISE:
            while True:
                try:
                    caller = socket.create_connection(("localhost", port), timeout=5)
                    break
                except OSError:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            with caller:
                caller.sendall(noise)
        open_end = socket.create_connection(("localhost", port))  # says nothing, and stays
        with open_end, started(two[1:]) as second:
            for code, text, err in outcomes([*first, *second]):
                assert code == 0 and text == "joined 1 [0, 1]", (text, err[-1500:])


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"zayajax": }\n', None]
)
def test_something_else_at_the_address(answer):
    with socket.create_server(("localhost", 0)) as other:

        def serve():
            while True:
                try:
                    caller, _ = other.accept()
                except OSError:
                    return
                if answer is None:
                    held.append(caller)
                    continue
                caller.sendall(answer)
                caller.close()

        held = []
        threading.Thread(target=serve, daemon=True).start()
        address = f"localhost:{other.getsockname()[1]}"
        two = cards(2, 1.0, address)
        with started(two) as processes:
            texts = said(processes)
        other.shutdown(socket.SHUT_RDWR)
    assert any("cannot listen at port" in text for text in texts)
    assert any("process 1 did not reach process 0" in text for text in texts)


def test_an_address_that_is_none():
    with started(cards(2, 1.0, "no-such-host.invalid:1234")[1:]) as processes:
        said(processes, "process 1 did not reach", "no-such-host.invalid")


def test_one_that_dies_in_the_roll_call_is_named():
    four = cards(4, SHORT)
    with started(four[:2]) as processes:
        port = int(four[0]["coordinator"].rpartition(":")[2])
        dying = _raw(port, {"rank": 2, "processes": 4, "pid": 4242})
        time.sleep(random.random())
        dying.close()
        words = "ranks 2-3 of 4 did not join", "came and ended: 2 (other, pid 4242)"
        assert len(said(processes, *words)) == 1


def _raw(port, card):
    card = {"zayajax": 1, "processes": 3, "host": "other", "name": "other", "same": {}} | card
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            caller = socket.create_connection(("localhost", port), timeout=5)
        except OSError:
            time.sleep(0.1)
            continue
        caller.sendall(json.dumps(card).encode() + b"\n")
        return caller
    raise AssertionError("process 0 did not listen")


def test_one_that_dies_between_the_roll_call_and_jax():
    """It says that it is there, and JAX then waits for it in vain."""
    two = cards(2, SHORT)
    same = d._same({})
    port = int(two[0]["coordinator"].rpartition(":")[2])
    with started(two[:1], code=PROCESS) as processes:
        card = {"rank": 1, "pid": 1, "processes": 2, "host": "localhost", "name": "other"}
        card |= {"same": same, "masks": {}, "local": None, "space": ""}
        host = {"host": d.machine_id()} if d.machine_id() else {}
        with _raw(port, card | host) as caller:
            with caller.makefile("rb") as lines:
                assert b"left" in next(lines) and b"peers" in next(lines)
        code, text, err = outcomes(processes)[0]
        assert code == 2 and "JAX did not connect them" in text, (code, text, err[-1500:])


SLURM = dict(SLURM_JOB_ID="70000", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="16", SLURM_PROCID="9")
SLURM |= dict(SLURM_STEP_NODELIST="gpu[03-04]", SLURM_STEP_NUM_NODES="2", SLURM_NODEID="1")
MPI = dict(OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_LOCAL_SIZE="2")
OURS = dict(ZAYAJAX_COORDINATOR="h:1", ZAYAJAX_PROCESSES="2", ZAYAJAX_PROCESS="1")


@pytest.mark.parametrize(
    ("environ", "options", "want"),
    [
        ({}, (), None),
        ({}, ("h:1", 2, 1), ("h:1", 2, 1, None)),
        ({}, (None, 1, None), None),
        (OURS, (), ("h:1", 2, 1, None)),
        (OURS | SLURM, (), ("h:1", 2, 1, 2)),
        (OURS, ("g:2", None, 0), ("g:2", 2, 0, None)),
        (OURS | {"ZAYAJAX_PROCESSES": "1", "ZAYAJAX_PROCESS": "0"}, (), None),
        (SLURM, (), (f"gpu03:{61440 + 70000 % 4096}", 16, 9, 2)),
        (SLURM, ("x:5", None, None), ("x:5", 16, 9, 2)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, (), None),
        # A notebook inside `salloc`, and a batch script before any srun.
        (dict(SLURM_JOB_ID="7", SLURM_NTASKS="16", SLURM_JOB_NODELIST="a,b"), (), None),
        (dict(SLURM_JOB_ID="7", SLURM_NTASKS="16", SLURM_PROCID="0"), (), None),
        (MPI | {"PMIX_NAMESPACE": "prterun-head-7@1"}, (), ("head", 4, 3, None)),
        (
            MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.1,10.1.0.1:34"},
            (),
            ("10.0.0.1", 4, 3, None),
        ),
        (MPI | SLURM | {"SLURM_JOB_NODELIST": "n[7,9]"}, (), ("n7", 4, 3, None)),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (), ("127.0.0.1", 4, 3, 1)),
        ({"JOB_COMPLETION_INDEX": "3"}, (), None),  # of pods that may have nothing to do with it
        ({"JOB_COMPLETION_INDEX": "3"}, ("h:1", 4, None), ("h:1", 4, 3, None)),
    ],
)
def test_clusters_are_found(environ, options, want):
    found = c.find(environ, *options)
    if want is None:
        assert found is None
        return
    address, *rest = want
    assert [found.processes, found.process, found.hosts] == rest
    host, port = c.split_address(found.coordinator)
    assert found.coordinator == address or (host == address and port >= c.FIRST_PORT)


@pytest.mark.parametrize(
    ("environ", "options", "words"),
    [
        ({}, ("h:1", None, None), "number of processes .* this process's number .* missing"),
        ({}, (None, 2, 0), "coordinator .* missing"),
        ({}, ("h:1", 2, 2), "process 2 is none of 2"),
        ({}, ("h:1", 2, -1), "process -1 is none of 2"),
        ({}, ("h:1", 0, 0), "0 processes"),
        ({}, ("h", 2, 0), "HOST:PORT"),
        ({}, ("h:port", 2, 0), "HOST:PORT"),
        ({}, ("h:٣", 2, 0), "HOST:PORT"),
        ({}, ("h:70000", 2, 0), "1 to 65535"),
        ({}, ("::1:5", 2, 0), "IPv6"),
        ({"ZAYAJAX_PROCESSES": "2"}, (), "ZAYAJAX_.*missing"),
        (OURS | {"ZAYAJAX_PROCESS": "x"}, (), "ZAYAJAX_PROCESS: 'x' is no number"),
        (SLURM | {"SLURM_STEP_NODELIST": "n[3-"}, (), "node list"),
        (SLURM | {"SLURM_PROCID": "16"}, (), "Slurm: process 16"),
        (MPI, (), "coordinator .* missing"),
    ],
)
def test_what_cannot_be_is_one_sentence(environ, options, words):
    with pytest.raises(UserError, match=rf"^[^\n]*{words}"):
        c.find(environ, *options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--coordinator h:1", "--processes and --process"),
        ("--coordinator h:1 --processes 2 --process 5", "process 5 is none of 2"),
        ("--coordinator h:1 --processes 2 --process 0 --join-timeout 0", "--join-timeout"),
        ("--processes two", "invalid int value"),
    ],
)
def test_the_command_says_it_in_one_sentence(options, words, capsys):
    try:
        status = cli.main(["train", "configs/tiny.toml", *options.split()])
    except SystemExit as end:  # argparse's own
        status = end.code
    assert status == 2 and words in capsys.readouterr().err


def test_no_time_to_wait_is_refused():
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="--join-timeout"):
            c.find({}, "h:1", 2, 0, timeout=seconds)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("n[08-11,3],gpu5", ["n08", "n09", "n10", "n11", "n3", "gpu5"]),
        ("r[1-2]n[01-02].x", ["r1n01.x", "r1n02.x", "r2n01.x", "r2n02.x"]),
    ],
)
def test_node_lists(text, hosts):
    assert c.expand_hosts(text) == hosts


@given(st.text("n[]0123-,", max_size=12))
@settings(max_examples=300, deadline=None)
def test_any_node_list_is_hosts_or_one_sentence(text):
    try:
        hosts = c.expand_hosts(text)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert hosts and not any(set("[],") & set(host) or not host for host in hosts)


def test_a_nodes_place(monkeypatch):
    step = SLURM | {"SLURM_STEP_NUM_TASKS": "2"}
    assert c.node_of(step) == (1, 2, c.find(SLURM).coordinator)
    with pytest.raises(UserError, match="one task a node"):
        c.node_of(SLURM)
    assert c.node_of({}) == c.node_of(SLURM | {"SLURM_STEP_NUM_NODES": "1"}) == (0, 1, None)
    monkeypatch.setattr(socket, "getfqdn", lambda name: f"{name}.run.space.svc.cluster.local")
    pod = {"JOB_COMPLETION_INDEX": "12", "HOSTNAME": "run-nodes-0-12", "ZAYAJAX_NODES": "16"}
    node, nodes, address = c.node_of(pod)
    assert (node, nodes) == (12, 16)
    assert address.startswith("run-nodes-0-0.run.space.svc.cluster.local:")
    assert c.node_of(pod | {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "run-nodes-0-0"})[2] == address


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_in_words(numbers):
    found = set()
    for span in rollcall.ranks(list(numbers)).split(" ", 1)[1].split(", "):
        first, _, last = span.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers


def peers(n, masks=None, local=None, space=""):
    some = [dict(rank=10 + i, name="h", masks={}, local=None, space=space) for i in range(n)]
    for i, card in enumerate(some):
        card |= {"masks": masks[i]} if masks else {}
        card |= {"local": local[i]} if local else {}
    return some


def test_gpus_of_a_host_are_shared_by_its_processes(monkeypatch):
    monkeypatch.setattr(d.flags, "gpus", lambda *_: 8)

    def devices(some, i):
        return d._local_devices(some, some[i]["rank"], d.flags.ROCM)

    assert devices(peers(1), 0) is None
    for n in (2, 4, 8):
        assert [x for i in range(n) for x in devices(peers(n), i)] == [*range(8)]
    assert devices(peers(2, local=["1", "0"]), 0) == [4, 5, 6, 7]  # as its launcher counts
    assert devices(peers(2, [{"V": "0"}, {"V": "1"}]), 0) is None  # each has its own
    assert devices(peers(2, space="a") + peers(2, space="b")[:1], 0) == [0, 1, 2, 3]
    with pytest.raises(UserError, match="3 processes on h cannot share its 8 GPUs"):
        devices(peers(3), 0)
    monkeypatch.setattr(d.flags, "gpus", lambda *_: 1)
    assert devices(peers(8), 3) is None


def test_join_comes_before_any_use_of_jax():
    assert jax.device_count() == 8
    with pytest.raises(UserError, match="restart Python"):
        d.join(c.Cluster("localhost:1", 2, 0))


def test_together_starts_no_jax():
    code = "from zayajax.launch.distributed import together; together(lambda: 0, 'x'); "
    code += "import jax; assert not jax._src.xla_bridge.backends_are_initialized()"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_alone_nobody_is_asked():
    assert d.together(lambda: 5, "count") == 5 and d.as_first(5) == 5
    d.join(c.Cluster("localhost:1", 1, 0))
    assert os.environ.get("no_grpc_proxy") is None
