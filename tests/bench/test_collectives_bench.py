"""Measured collectives on eight emulated devices: right, in the right units, and said when not."""

import dataclasses
import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from zayajax import cli
from zayajax.bench import collectives as bench
from zayajax.errors import UserError
from zayajax.planning.fabric import OPS, bus_factor

KEYS = {
    *("op", "span", "group_size", "bytes", "seconds", "seconds_quartiles"),
    *("algorithm_bandwidth", "bus_bandwidth", "modelled_seconds"),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setitem(bench.EFFORTS, "cpu", bench.Effort(4096, repeats=2, calls=1, warm_up=1))


@pytest.mark.parametrize(
    "nodes, groups",
    [
        (1, [("partial", 2), ("partial", 4), ("node", 8)]),
        (2, [("partial", 2), ("node", 4), ("rail", 2), ("world", 8)]),
        (8, [("rail", 8)]),
    ],
)
def test_all_operations_are_measured_for_each_group(nodes, groups):
    table = bench.measure(1024, nodes=nodes)
    assert [(r["op"], r["span"], r["group_size"]) for r in table.rows] == [
        (op, *group) for op in OPS for group in groups
    ]
    for row in table.rows:
        assert set(row) == KEYS
        low, high = row["seconds_quartiles"]
        assert 0 < low <= row["seconds"] <= high
        assert row["algorithm_bandwidth"] * row["seconds"] == pytest.approx(row["bytes"])
        factor = bus_factor(row["op"], row["group_size"])
        assert row["bus_bandwidth"] == pytest.approx(factor * row["algorithm_bandwidth"])
        assert row["modelled_seconds"] > 0
    assert json.loads(json.dumps(list(table.rows))) == list(table.rows)
    assert jax.__version__ in repr(table) and "8 devices (cpu)" in repr(table)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_wrong_number_is_counted(op, n):
    (group,) = (g for g in bench._groups(jax.devices(), 1) if g.size == n)
    run, wrong = bench.programs(op, group.mesh, 64)
    output = np.array(run(bench._input(op, group.mesh, 64)))
    sharding = jax.sharding.NamedSharding(group.mesh, jax.P(bench.AXES))
    assert np.sum(wrong(jax.device_put(output, sharding))) == 0
    spoilt = np.random.default_rng(n).choice(output.size, 5, replace=False)
    output[spoilt] += 1
    assert np.sum(wrong(jax.device_put(output, sharding))) == 5


def test_a_wrong_result_is_never_timed(monkeypatch):
    monkeypatch.setitem(bench.OPERATIONS, "permute", lambda n, gpu, x: x)
    with pytest.raises(RuntimeError, match=r"permute over 2 devices .*: .* wrong numbers"):
        bench.measure(1024)


@pytest.mark.parametrize("op", OPS)
def test_operations_are_there_for_gpus(op):
    """Nothing runs: that they lower is what a machine without a GPU can tell."""
    (group,) = (g for g in bench._groups(jax.devices(), 1) if g.size == 8)
    run = bench.mapped(lambda x: bench.OPERATIONS[op](8, True, x), group.mesh)
    x = jax.ShapeDtypeStruct((8 * 64,), "float32")
    lowered = run.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    name = {"broadcast": "collective_broadcast", "permute": "collective_permute"}.get(op, op)
    assert f"stablehlo.{name}" in lowered


@pytest.mark.parametrize("text, size", [("1MiB", 2**20), (" 64 kib", 2**16), (4096, 4096)])
def test_sizes_are_read(text, size):
    assert bench.parse_bytes(text) == size
    found = bench._sizes(size)
    assert found[-1] == size and found[0] >= 1024 and found == sorted(set(found))


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5MiB", "12 parsecs", "8", 0, "1TB"])
def test_what_is_no_size_is_said(text, capsys):
    assert cli.main(["bench", "collectives", f"--largest={text}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("zayajax: --largest") and said.count("\n") == 1


def test_one_device_has_nothing_to_measure(monkeypatch, capsys):
    @dataclasses.dataclass
    class Alone:
        device_kind: str = "NVIDIA H200"
        platform: str = "gpu"

    monkeypatch.setattr(jax, "devices", lambda: [Alone()])
    assert cli.main(["bench", "collectives"]) == 2
    assert "there is one (NVIDIA H200): nothing to measure" in capsys.readouterr().err
    with pytest.raises(UserError, match="takes two devices"):
        bench.measure()


def test_the_command_prints_rows_for_programs(capsys):
    assert cli.main(["bench", "collectives", "--largest", "1KiB", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(OPS) * 3 and set(rows[0]) == KEYS


PROCESS = """
import sys
import jax

address, process = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, 2, int(process))
from zayajax.bench import collectives as bench

bench.EFFORTS["cpu"] = bench.Effort(1024, repeats=2, calls=1, warm_up=1)
table = bench.measure(nodes=2)
assert "2 processes" in repr(table)
assert all(row["modelled_seconds"] is None for row in table.rows)
print(*dict.fromkeys((row["span"], row["group_size"]) for row in table.rows))
"""


def test_two_processes_measure_the_rail_between_them():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    # Counted on the host: one host stands for two nodes.
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(i)],
            env=env | {"LOCAL_RANK": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outs = [p.communicate(timeout=120) for p in started]
    finally:
        for p in started:
            p.kill()
    for p, (out, err) in zip(started, outs, strict=True):
        assert p.returncode == 0, err[-2000:]
        assert "('node', 2) ('rail', 2) ('world', 4)" in out
