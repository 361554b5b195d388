import json
import sys

import jax
import numpy as np
import pytest
import scripts
from batches import small_model

from zayajax.planning.traced.trace import Collective

CFG = small_model(experts=16, layers=3)
T = 64


@pytest.fixture(scope="module")
def script():
    return scripts.load("part_node")


@pytest.fixture(scope="module")
def rows(script):
    return script.modelled(CFG, T)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_every_group_moves_every_number_to_its_place(script, n):
    script.check(n, jax.devices())


@pytest.mark.parametrize("n", [2, 8])
def test_any_routing_gives_what_dense_gives_at_the_worst_capacity(script, n):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(8 * T, CFG.hidden)).astype(np.float32)
    gain = rng.normal(size=CFG.experts).astype(np.float32)
    fn = script.routed(script.mesh_of(n, jax.devices()), buckets=())
    gain_or_skip = np.append(gain, np.float32(0))  # a token that skips its expert gets 0
    for choice in (np.full(8 * T, 5), rng.integers(0, CFG.experts + 1, 8 * T)):
        got = jax.block_until_ready(fn(x, choice.astype(np.int32), gain))
        np.testing.assert_array_equal(got, x * gain_or_skip[choice][:, None])


def test_a_link_carries_an_nth_and_the_time_is_that_of_one_link(script, rows):
    for name, of_one in rows.items():
        whole = of_one[-1]
        assert whole["point_to_point_penalty"] == whole["switch_penalty"] == 1, name
        for row in of_one:
            n = row["n"]
            assert row["links"] == n - 1
            assert row["point_to_point"] == row["on_link"] / script.LINK
            # (n - 1) of n parts leave the GPU, over as many links, or over one seven times as fast.
            assert row["switch"] == pytest.approx(row["point_to_point"] * (n - 1) / 7)
            # Rounding: counts and maxima of the plan are small, yet not n-ths of each other.
            assert row["on_link"] * n == pytest.approx(row["message"], rel=0.05), name
            assert row["point_to_point_penalty"] == pytest.approx(8 / n, rel=0.05), name


def test_messages_are_those_of_the_formulas(script, rows):
    room = {n: min(T, -(-5 * T // (4 * n))) for n in (2, 4, 8)}  # 1.25 of the even share
    for row, gather in zip(rows["exchange"], rows["weight gather"], strict=True):
        n = row["n"]
        # There and back in bfloat16; the plan: one maximum, and what goes to each expert.
        assert row["message"] == 2 * n * room[n] * CFG.hidden * 2 + 4 + 4 * CFG.experts
        D, H, N, K = CFG.hidden, CFG.heads, CFG.kv_heads, CFG.head_dim
        weights = D * (H + 2 * N) * K + H * K * D + 2 * (H + N) * K * K
        assert gather["message"] == 2 * weights


def test_a_step_sends_the_tokens_five_times(script, rows):
    one = rows["exchange"][-1]["message"] - 4 - 4 * CFG.experts
    assert rows["experts, forward and backward"][-1]["message"] - 4 - 4 * CFG.experts == 5 * one / 2


def test_a_higher_degree_holds_fewer_experts_and_feeds_each_more(script, rows):
    found = script.degrees(CFG, T, rows["experts, forward and backward"])
    assert [r["experts"] for r in found] == [8, 4, 2]
    assert [r["rows"] for r in found] == [8, 16, 32]
    for r in found:
        assert r["weights"] == r["experts"] * 3 * CFG.hidden * CFG.expert_hidden * 2


def test_a_collective_without_a_known_share_is_not_guessed(script):
    odd = Collective("pgather", "", "", "float32", 8, "part", 1, False)
    with pytest.raises(KeyError, match="pgather"):
        script.cost([odd], 2)


def test_the_command_prints_tables_or_json(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["part_node.py", "--json"])
    monkeypatch.setattr(script, "check", lambda n, devices: None)  # done above
    script.main()
    result = json.loads(capsys.readouterr().out)
    # Times of emulated devices mean nothing.
    assert result["measured"] == [] and result["tokens"] == 16384
    assert [r["n"] for r in result["operations"]["exchange"]] == [2, 4, 8]
    shown = script.show(result)
    assert "| exchange | 2 | 167.8 | 83.9 | 1 of 7 | 1.836 (4.00x) | 0.262 (0.57x) |" in shown
    assert "Measured" not in shown
    timed = [{"operation": "exchange", "n": 2, "median": 0.002, "p10": 0.001, "p90": 0.003}]
    assert "| exchange | 2 | 2.000 | 1.000 | 3.000 |" in script.show(result | {"measured": timed})


def test_the_timing_code_runs_where_there_is_no_gpu_to_time(script):
    rows = script.measured(CFG, 16, jax.devices(), (2,), repeats=2)
    assert [(r["operation"], r["n"]) for r in rows] == [("exchange", 2), ("weight gather", 2)]
    assert all(0 < r["p10"] <= r["median"] <= r["p90"] for r in rows)
