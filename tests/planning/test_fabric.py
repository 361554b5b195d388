"""The modelled time of a collective: against what is published, and against itself."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from zayajax.attention.tree import ONE_MESSAGE_BYTES
from zayajax.machine import GPUS, H100, MACHINES, MI300X, MI350X, MI355X, Wire
from zayajax.planning import fabric
from zayajax.planning.fabric import OPS, bus_bandwidth, bus_factor, collective_table, seconds
from zayajax.planning.published import CURVES

MIB, GIB = 2**20, 2**30
every = pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
both = pytest.mark.parametrize("machine", (MI300X, MI300X.switched(), H100), ids=("p2p", "sw", "h"))


def cases(machine):
    return itertools.product(OPS, fabric.groups(machine))


@pytest.mark.parametrize("curve", CURVES, ids=lambda c: f"{c.label()} {c.span}")
def test_published_points_are_met(curve):
    # What the issue asks for: 8 % within a node of MI300X, 15 % elsewhere.
    within = 0.08 if (curve.machine, curve.group) == ("MI300X", 8) else 0.15
    assert curve.source and curve.points
    for size, error in curve.errors():
        assert abs(error) < within, (size, error)


def test_the_points_of_the_issue_are_among_the_published():
    node, world = CURVES[0], CURVES[1]
    assert {size for size, _ in node.points} >= {MIB << k for k in range(9)} | {GIB, 16 * GIB}
    rates = dict(world.bandwidths())
    for size, gigabytes in ((256 * MIB, 294), (GIB, 341), (16 * GIB, 357)):
        assert rates[size] == pytest.approx(1e9 * gigabytes, rel=0.005)


def test_it_is_fitted_with_four_constants_and_no_table():
    fields = dataclasses.fields(Wire)
    assert len(fields) == 4
    for machine in MACHINES:
        assert all(isinstance(x, float) for x in machine.inside.numbers())
    # Two protocols of time = constant + size / rate: at most one kink, so second differences of an
    # even grid vanish but around it.
    grid = np.linspace(MIB, 64 * MIB, 200)
    times = [seconds(MI300X, "all_reduce", size, "node", 8) for size in grid]
    bends = np.abs(np.diff(times, 2)) > 1e-9 * max(times)
    assert 1 <= bends.sum() <= 2


@pytest.mark.parametrize("op", [op for op in OPS if op != "permute"])
def test_large_messages_follow_the_links_of_the_group(op):
    rates = [bus_bandwidth(MI300X, op, 64 * GIB, "partial", n) for n in (2, 4, 8)]
    np.testing.assert_allclose(np.divide(rates, rates[0]), (1, 3, 7), rtol=0.01)
    switched = [bus_bandwidth(MI300X.switched(), op, 64 * GIB, "partial", n) for n in (2, 4, 8)]
    np.testing.assert_allclose(switched, rates[-1], rtol=0.01)


def test_a_permute_has_one_link_or_the_whole_switch():
    rate = MI300X.inside.rate * MI300X.pairwise
    for n in (2, 4, 8):
        assert bus_bandwidth(MI300X, "permute", 64 * GIB, "node", n) == pytest.approx(
            rate, rel=0.01
        )
        switched = bus_bandwidth(MI300X.switched(), "permute", 64 * GIB, "node", n)
        assert switched == pytest.approx(7 * rate, rel=0.01)


def test_an_all_to_all_is_slower_where_it_was_measured():
    for machine, gigabytes in ((MI350X, 349), (MI355X, 361)):
        got = bus_bandwidth(machine, "all_to_all", 8 * GIB, "node", 8)
        assert got == pytest.approx(1e9 * gigabytes, rel=0.01)


@every
def test_time_grows_with_size_and_without_jumps(machine):
    rng = np.random.default_rng(0)
    sizes = np.sort(2 ** rng.uniform(0, 36, 200))
    for op, (span, n) in cases(machine):
        times = np.array([seconds(machine, op, size, span, n) for size in sizes])
        assert (np.diff(times) > 0).all(), (op, span, n)
        beside = np.array([seconds(machine, op, size * (1 + 1e-9), span, n) for size in sizes])
        np.testing.assert_allclose(beside, times, rtol=1e-8)
        assert times[0] > 0


@every
def test_one_gpu_costs_nothing(machine):
    for op, span in itertools.product(OPS, ("partial", "node", "rail", "world")):
        assert seconds(machine, op, GIB, span, 1) == 0


@both
def test_a_sum_to_all_is_a_scatter_and_a_gather(machine):
    for span, n in fabric.groups(machine):
        for size in fabric.SIZES:
            parts = sum(
                seconds(machine, op, size, span, n) for op in ("reduce_scatter", "all_gather")
            )
            whole = seconds(machine, "all_reduce", size, span, n)
            assert whole <= parts * (1 + 1e-9)
            if not (machine.reduced_rate and span in ("partial", "node")):  # by the switch itself
                assert whole == pytest.approx(parts)


@both
@pytest.mark.parametrize("op", OPS)
def test_spans_compare_as_their_wires_do(machine, op):
    def rate(span, n):
        return bus_bandwidth(machine, op, 64 * GIB, span, n)

    gpus = machine.gpus
    if machine.point_to_point and op != "permute":
        assert rate("partial", 2) < rate("partial", 4) < rate("node", gpus)
    for nodes in (2, 16, 128):
        # All NICs of a node, or one of them; rel: latency of a ring that is as long.
        assert rate("world", nodes * gpus) >= rate("rail", nodes) * (1 - 1e-9)
        assert rate("rail", nodes) <= machine.nic
    assert seconds(machine, op, MIB, "world", gpus) == seconds(machine, op, MIB, "node", gpus)


@every
def test_no_wire_is_faster_than_its_data_sheet(machine):
    for op, (span, n) in cases(machine):
        load = fabric.carried(machine, op, GIB, span, n)
        sheet = machine.nic if span in ("rail", "world") else machine.link
        if not (op == "all_reduce" and machine.reduced_rate):  # the switch sends less
            assert load / seconds(machine, op, GIB, span, n) <= sheet


@pytest.mark.parametrize("op", ("all_reduce", "all_gather", "all_to_all", "broadcast"))
def test_more_nodes_wait_longer_by_the_logarithm(op):
    waits = [seconds(MI300X, op, 1, "rail", 2**k) for k in range(1, 8)]
    np.testing.assert_allclose(np.diff(waits), waits[0], rtol=1e-4)
    shift = [seconds(MI300X, "permute", 1, "rail", 2**k) for k in range(1, 8)]
    assert len(set(shift)) == 1


def test_bytes_of_a_shift_and_an_exchange_between_nodes():
    n, size = 32, 1024.0
    assert fabric.carried(MI300X, "permute", size, "world", n) == size
    # 24 of 32 destinations are on other nodes, behind the GPU's own NIC.
    assert fabric.carried(MI300X, "all_to_all", size, "world", n) == size * 24 / 32
    assert fabric.carried(MI300X, "all_gather", size, "world", n) == size * 31 / 32 / 8
    assert fabric.carried(MI300X, "all_gather", size, "rail", n) == size * 31 / 32


def test_factors_are_those_of_rccl_tests():
    assert bus_factor("all_reduce", 8) == 2 * 7 / 8
    assert {bus_factor(op, 8) for op in ("reduce_scatter", "all_gather", "all_to_all")} == {7 / 8}
    assert bus_factor("broadcast", 8) == bus_factor("permute", 8) == 1


@pytest.mark.parametrize("machine", GPUS, ids=lambda m: m.name)
def test_the_table_has_all_rows_and_is_short_to_read(machine):
    table = collective_table(machine)
    keys = {(r["op"], r["span"], r["group_size"], r["bytes"]) for r in table.rows}
    assert len(keys) == len(table.rows)
    assert {r["op"] for r in table.rows} == set(OPS)
    assert {r["bytes"] for r in table.rows} == {2**k for k in range(10, 35)}
    groups = {(r["span"], r["group_size"]) for r in table.rows}
    assert {("partial", 2), ("partial", 4), ("node", 8), ("rail", 128), ("world", 1024)} <= groups
    for row in table.rows:
        assert set(row) == {"op", "span", "group_size", "bytes", "seconds", "bus_bandwidth"}
        assert all(type(x) in (str, int, float) for x in row.values())
        assert row["seconds"] > 0 and math.isfinite(row["bus_bandwidth"])
    assert len(repr(table).splitlines()) < 80
    assert all(len(cells) == len(table.columns) for cells in table.cells())
    assert "Assumed" in repr(table) and "Source" in table._repr_html_()


@pytest.mark.parametrize("machine", GPUS, ids=lambda m: m.name)
def test_tree_attention_merges_in_one_message_where_that_costs_less(machine):
    K = 128  # numbers of a head, beside one log-sum-exp
    for span, n in fabric.groups(machine):
        if span in ("node", "rail"):
            for gathered in (n * 4 * (K + 1), ONE_MESSAGE_BYTES, 7e6):
                two = seconds(machine, "all_reduce", gathered / n / (K + 1), span, n)
                two += seconds(machine, "all_reduce", gathered / n, span, n)
                assert seconds(machine, "all_gather", gathered, span, n) < two
    turned = seconds(machine, "all_gather", 64e6, "node", 8)
    assert turned > 2 * seconds(machine, "all_reduce", 8e6, "node", 8)
