"""What a step sends on 1,024 GPUs, read from its traced program: what is meant and no more."""

from functools import cache

import jax
import pytest
from batches import random_batch, small_config

from zayajax.mesh import abstract_mesh, by_path
from zayajax.planning.traced.trace import collectives, weights_in_loops
from zayajax.training.step import build

S = 12


def abstract_batch(B, S):
    return {k: jax.ShapeDtypeStruct((B, S), v.dtype) for k, v in random_batch(0, 1, 4, 4).items()}


NODES, GPUS, MICRO, LAYERS = 128, 8, 2, 3
WIDE = dict(
    mesh__nodes=NODES,
    mesh__gpus=GPUS,
    model__hidden=1024,
    train__batch=NODES * GPUS * MICRO,
    train__micro_batches=MICRO,
    train__compute_dtype="bfloat16",
)


@cache
def sent(**changes):
    cfg = small_config(**WIDE | changes)
    at = build(cfg, abstract_mesh(NODES, GPUS))
    found = collectives(
        at.train_step, at.state, abstract_batch(cfg.train.batch, cfg.train.sequence)
    )
    return at, found


def summary(found):
    return {(c.scope, c.op, c.span, c.dtype, c.times) for c in found}


LOOPS = MICRO * LAYERS
EXCHANGES = {
    ("exchange", "all_to_all", "node", "bfloat16", LOOPS),  # tokens
    ("exchange", "all_to_all", "node", "int32", LOOPS),  # how many of them
    ("bucket", "pmax", "node", "int32", LOOPS),
}


def levels(scope, op, dtypes, times=1):
    return {(scope, op, span, dtype, times) for span in ("node", "rail") for dtype in dtypes}


SUMS = levels("metrics", "psum", ["float32", "int32"]) | levels("norm", "psum", ["float32"])
SUMS |= levels("scatter", "psum", ["float32"])
DEALS = levels("deal", "all_to_all", ["bfloat16"])  # Muon's matrices


@pytest.mark.smoke
def test_weights_move_once_a_step_and_nothing_spans_the_world():
    _, found = sent()
    assert not weights_in_loops(found)
    assert summary(c for c in found if c.in_loop) == EXCHANGES
    assert summary(c for c in found if not c.in_loop) == (
        levels("gather", "all_gather", ["bfloat16", "float32"])
        | levels("scatter", "reduce_scatter", ["float32"])
        | SUMS
        | DEALS
    )


def test_an_expert_layer_sends_five_times_and_plans_once():
    """To the experts and back; for the gradient the tokens and their gradient, and one back."""
    _, found = sent()
    found = [c for c in found if c.in_loop]
    large = [c for c in found if c.scope == "exchange" and c.dtype == "bfloat16"]
    branches = sorted({c.branch for c in large})
    assert branches == [(0,), (1,), (2,), (3,)]
    for branch in branches:
        sizes = [c.bytes for c in large if c.branch == branch]
        assert len(sizes) == 5 and len(set(sizes)) == 1
    assert len(found) == 5 * len(branches) + 2
    worst = max(c.bytes for c in large)
    assert worst == GPUS * S * 1024 * 2  # every token of the micro-batch, to each rank


@pytest.mark.parametrize("zero", [1, 3])
def test_each_weight_is_gathered_whole_and_each_gradient_scattered_once(zero):
    at, found = sent(mesh__zero=zero)
    params = by_path(at.state.params)
    split = {p: v for p, v in params.items() if any(v.sharding.spec) and "experts" not in p}
    assert "embed" in split and "layers.router.down" in split and len(split) >= 10
    whole = sum(v.size * (4 if v.get_metadata().get("keep") else 2) for v in split.values())
    gathers = [c for c in found if c.op == "all_gather" and c.span == "node"]
    once = sum(c.bytes * (LAYERS if c.in_loop else 1) for c in gathers)
    inside = sum(c.bytes * LAYERS for c in gathers if c.in_loop)
    # Layer by layer, they are gathered for the backward pass once more.
    assert once - inside / 2 == whole
    scattered = [c for c in found if c.op == "reduce_scatter" and c.span == "node"]
    got = sum(c.bytes * (LAYERS if c.in_loop else 1) for c in scattered)
    assert got == 4 * sum(v.size for v in split.values())


def test_zero_3_gathers_and_scatters_layers_in_the_loop_and_nothing_else():
    _, found = sent(mesh__zero=3)
    inside = [c for c in found if c.in_loop]
    assert summary(inside) == (
        EXCHANGES
        | levels("gather", "all_gather", ["bfloat16", "float32"], LOOPS)
        | levels("scatter", "reduce_scatter", ["float32"], LOOPS)
        # Too narrow for 1,024: split over the node, summed along the rail.
        | {("scatter", "psum", "rail", "float32", LOOPS)}
    )
    assert summary(c for c in found if not c.in_loop) == (
        levels("gather", "all_gather", ["bfloat16"])
        | levels("scatter", "reduce_scatter", ["float32"])
        | SUMS
        | DEALS
    )


@pytest.mark.parametrize("zero", [1, 3])
def test_gradients_may_travel_in_bfloat16(zero):
    _, found = sent(mesh__zero=zero, train__reduce_dtype="bfloat16")
    assert {c.dtype for c in found if c.op == "reduce_scatter"} == {"bfloat16"}
    assert {c.dtype for c in found if c.scope in ("norm", "metrics")} == {"float32", "int32"}


def test_evaluation_and_logits_send_no_gradients():
    at, _ = sent()
    found = collectives(at.eval_step, at.state.params, abstract_batch(NODES * GPUS, S))
    ops = {(c.scope, c.op) for c in found}
    assert ops == {
        ("gather", "all_gather"),
        ("exchange", "all_to_all"),
        ("bucket", "pmax"),
        ("metrics", "psum"),
    }
    assert not weights_in_loops(found)


# Rows that are spread over devices.

LONG, ROWS = 4096, 2  # tokens in a row, rows of a micro-batch on each device that shares them


@cache
def sent_of_split_rows(layout, **changes):
    rows = ROWS * MICRO * (NODES if layout == "context" else 1)
    long = dict(mesh__layout=layout, train__sequence=LONG, train__batch=rows)
    return sent(**long, **changes)


def spans(layout):
    return ("node",) if layout == "context" else ("node", "rail")


def of_rows(layout, mesh_loops=LOOPS):
    """Tails of chunks and compressed keys: values once a layer, and twice for the backward pass."""
    found = set()
    for span in spans(layout):
        for scope in ("halo", "kv"):
            found |= {
                (scope, "all_gather", span, "bfloat16", mesh_loops),
                (scope, "reduce_scatter", span, "bfloat16", mesh_loops),
                # Segments and positions: the same in all layers.
                (scope, "all_gather", span, "int32", MICRO),
            }
    return found


@pytest.mark.parametrize("layout", ["context", "context-wide"])
def test_split_rows_add_tails_and_keys_and_nothing_else(layout):
    _, found = sent_of_split_rows(layout)
    assert not weights_in_loops(found)
    assert summary(c for c in found if c.in_loop) == EXCHANGES | of_rows(layout)
    whole, _ = (summary(c for c in f if not c.in_loop) for _, f in (sent(), (None, found)))
    assert summary(c for c in found if not c.in_loop) == whole


@pytest.mark.parametrize("layout", ["context", "context-wide"])
def test_tails_and_keys_are_one_message_each_a_level(layout):
    at, found = sent_of_split_rows(layout)
    R = GPUS if layout == "context" else NODES * GPUS
    cca = by_path(at.state.params)
    (_, _, H, K), (_, _, N, _) = (cca[f"layers.attn.{n}"].shape for n in "qk")
    layers = [c for c in found if c.times == LOOPS and c.scope in ("halo", "kv")]
    forward = layers[: len(layers) // 3]  # once more before the backward pass, and its transpose
    assert [(c.scope, c.op) for c in forward] == [
        (scope, "all_gather") for scope in ("halo", "kv") for _ in spans(layout)
    ]
    last = {c.scope: c.bytes for c in forward}  # what has come from all ranks
    # Two chunks of each rank, two tokens of each: q and k before the convolutions, half a value.
    assert last["halo"] == R * ROWS * 2 * 2 * ((H + N) * K + N * K // 2) * 2
    # Keys and values of the whole row, N heads of them where the queries have H.
    assert last["kv"] == ROWS * LONG * 2 * N * K * 2
    assert last["kv"] < ROWS * LONG * 2 * H * K * 2


@pytest.mark.parametrize("layout", ["context", "context-wide"])
def test_the_ring_passes_keys_on_inside_nodes_or_along_rails(layout):
    R = GPUS if layout == "context" else NODES * GPUS
    _, found = sent_of_split_rows(layout, mesh__attention="ring")
    hops = [c for c in found if c.scope == "ring"]
    assert {(c.op, c.span, c.dtype) for c in hops} == {
        ("ppermute", span, "bfloat16") for span in spans(layout)
    }
    # Nothing but segments and positions is gathered.
    kv = summary(c for c in found if c.scope == "kv")
    assert kv == {("kv", "all_gather", span, "int32", MICRO) for span in spans(layout)}
    # Keys and values R - 1 hops forward, as many in the backward pass, and their gradients R.
    assert sum(c.times for c in hops) == LOOPS * (2 * (R - 1) + R)
