"""`zayajax doctor` on this machine, with nothing put in anything's place."""

import dataclasses
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest
from healthy import cpu, cuda, rocm
from hypothesis import given, settings, strategies as st

from zayajax.cli import main
from zayajax.launch.doctor import OK, WARNING, WRONG, diagnose, gpus, here, network, starts, view
from zayajax.launch.flags import MASKS


@pytest.fixture
def plain(monkeypatch):
    """Without the flags of the tests themselves."""
    for name in ("XLA_FLAGS", "ZAYAJAX_FLAGS_SET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return monkeypatch


def test_the_command(plain, tmp_path, capsys):
    assert main(["doctor", "--json", "--run-dir", str(tmp_path)]) in (0, 1)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["jax"]["verdict"] == rows["product"]["verdict"] == OK
    assert rows["devices"]["verdict"] in (OK, WARNING)  # a GPU may be there
    assert rows["folder"]["verdict"] in (OK, WARNING)  # /tmp may be in memory
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_flag_ends_jax_and_the_nearest_is_named(plain, tmp_path, capsys):
    plain.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_maths=true --xla_backend_optimization_level=0")
    assert main(["doctor", "--run-dir", str(tmp_path)]) == 1
    mended = "--xla_cpu_enable_fast_math=true --xla_backend_optimization_level=0"
    text = capsys.readouterr().out
    assert f"export XLA_FLAGS='{mended}'" in text
    machine = dataclasses.replace(here(), environ={**os.environ, "XLA_FLAGS": mended})
    assert [f.verdict for f in starts.check(machine, None) if f.name == "XLA_FLAGS"] == [OK]


def test_several_devices_are_added_up(plain):
    flags = "--xla_force_host_platform_device_count=3"
    machine = dataclasses.replace(here(), environ={**os.environ, "XLA_FLAGS": flags})
    found = {f.name: f for f in starts.check(machine, None)}
    assert found["devices"].found.startswith("3 x cpu")
    assert found["sum over devices"].verdict == OK


def test_what_hangs_is_ended_with_all_that_it_started():
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}])"
    parent = f"import subprocess, sys, time; {start}; time.sleep(60)"
    began = time.monotonic()
    ended = view.run([sys.executable, "-c", parent], os.environ, 3.0)
    assert time.monotonic() - began < 20  # and not 60: a busy machine starts slowly
    assert ended.status is None
    stat = Path(f"/proc/{int(ended.out)}/stat")
    while stat.exists() and ") Z " not in stat.read_text():
        assert time.monotonic() - began < 30
        time.sleep(0.1)


def test_what_ends_says_how():
    program = "import os, sys; print('out'); print('err', file=sys.stderr); sys.stdout.flush()"
    assert view.run([sys.executable, "-c", program], os.environ, 60) == (0, "out\n", "err\n")
    assert view.run([sys.executable, "-c", "import os; os.abort()"], os.environ, 60).status == -6


def test_a_folder_is_tried_and_left_as_it_was(tmp_path, monkeypatch):
    assert view.attempt(tmp_path) == {"write": None, "rename": None, "lock": None}
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # as some network file systems do
    assert view.attempt(tmp_path)["lock"] == "two hold one lock"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "write" in view.attempt(tmp_path / "file") and view.attempt(tmp_path / "no")["write"]


def test_a_port_that_is_taken(plain):
    machine = dataclasses.replace(here(), run=lambda *_: view.Ran(0, "", ""))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        rows = diagnose(machine, coordinator=address).rows
        taken = [r for r in rows if r["name"] == "coordinator" and r["verdict"] == WRONG]
        assert "cannot be listened at" in taken[0]["found"] and "loopback" in str(rows)


@pytest.mark.parametrize("host", ["", ".", "a..b", "x" * 70, "no.such.invalid", "-", "127.0.0.1"])
def test_names_that_are_none(host):
    machine = dataclasses.replace(here(), host=host, environ={})
    for coordinator in (None, f"{host}:5000"):
        verdicts = {f.verdict for f in network.check(machine, coordinator, None)}
        assert verdicts & ({WRONG} if host != "127.0.0.1" else {WARNING})


def test_files_of_no_sense_do_not_stop_it(tmp_path):
    machine = rocm(tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(b"\xff\0 -1e999 [")
    diagnose(machine, runs=tmp_path)
    diagnose(dataclasses.replace(cpu(tmp_path / "empty"), root=tmp_path / "none"), runs=tmp_path)


NAMES = [*gpus.JAX_MASKS.values(), *MASKS["rocm"], *network.PROXIES, *network.NO_PROXY]
NAMES += ["NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_CROSS_NIC", "ROCM_PATH"]
NAMES += ["JAX_PLATFORMS", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "LD_LIBRARY_PATH"]
NAMES += ["ZAYAJAX_COORDINATOR", "ZAYAJAX_PROCESSES", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"]
WORDS = st.sampled_from(["0", "-1", "7", "eth0", "=", "^", ",", "--xla", "/", ":", " ", "rocm", ""])
VALUES = st.lists(WORDS, max_size=5).map("".join) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12
)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return [machine(tmp_path_factory.mktemp("root")) for machine in (cpu, rocm, cuda)]


@given(variables=st.dictionaries(st.sampled_from(NAMES), VALUES), which=st.integers(0, 2))
@settings(deadline=None, max_examples=150)  # seconds on a busy machine say nothing
def test_no_variable_stops_it(healthy, variables, which):
    machine = dataclasses.replace(healthy[which], environ=variables)
    for row in diagnose(machine, runs=machine.root / "runs").rows:
        assert (row["verdict"] in (WARNING, WRONG)) == bool(row["mend"]), row
        assert "\n" not in row["found"]


@pytest.mark.parametrize("plugin", [None, "rocm7", "cuda13"])
def test_a_processors_own_graphics_are_no_gpu_unless_meant(plugin, tmp_path):
    machine = cpu(tmp_path)
    device = tmp_path / "sys/bus/pci/devices/0000:00:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1002\n")
    (device / "class").write_text("0x030000\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").write_text("")
    machine = dataclasses.replace(machine, plugins=frozenset({f"xla_{plugin}"} if plugin else ()))
    assert gpus.present(machine) == ("rocm" if plugin == "rocm7" else None)
    (tmp_path / "dev/nvidia0").write_text("")  # beside a card, it is that one's turn
    assert gpus.present(machine) == ("rocm" if plugin == "rocm7" else "cuda")
