"""What each kind sends, from the traced program of 16 x 8 devices; and what remat sends again."""

from functools import partial

import jax
import pytest
from batches import arrays_in, small_model
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
from spread import KINDS, merging

from zayajax.layout import GPU, NODE, WORLD
from zayajax.model.zaya import REMAT, Decoder
from zayajax.planning.traced.trace import collectives

NODES, GPUS = 16, 8
R = NODES * GPUS
MESH = AbstractMesh((NODES, GPUS), WORLD, axis_types=(AxisType.Auto,) * 2)
B, S, U, H, N, K = 2, 3, 8, 4, 2, 4  # of one rank
KV = 2 * B * U * N * K  # numbers of K and V that a rank has


def program(kind, gradient=False, dtype="float32", U=U, remat="none"):
    """A jitted function on the mesh, over all its ranks, and its abstract arguments."""
    few = kind.startswith("tree")  # queries, the same on all ranks

    def run(q, k, v, q_ints, k_ints):
        def scalar(q, k, v):
            pairs = ((q_ints, k_ints),) * 2
            out, lse = KINDS[kind](q, k, v, *pairs, 9, (GPU, NODE))
            return out.astype("float32").sum() + lse.sum()

        scalar = jax.checkpoint(scalar, policy=REMAT[remat]) if remat != "none" else scalar
        return jax.grad(scalar, (0, 1, 2))(q, k, v) if gradient else scalar(q, k, v)[None]

    split = P(None, WORLD)
    queries, k_ints = (P(), split) if few else (split, P())
    rows, of_keys = (S, (B, R * U)) if few else (R * S, (R, B, U))
    shapes = (B, rows, H, K), (B, R * U, N, K), (B, R * U, N, K)
    args = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    args += [jax.ShapeDtypeStruct(s, "int32") for s in ((B, rows), of_keys)]
    mapped = jax.shard_map(
        run,
        mesh=MESH,
        in_specs=(queries, split, split, queries, k_ints),
        out_specs=(queries, split, split) if gradient else P(None if few else WORLD),
    )
    return jax.jit(mapped), args


def traffic(kind, **kwargs):
    fn, args = program(kind, **kwargs)
    with merging(kind):
        found = collectives(fn, *args)
    return [(c.op, c.scope, c.span, c.bytes, c.times) for c in found]


def test_a_gather_is_one_message_a_level_and_scattered_in_the_reverse_order():
    forward = [
        ("all_gather", "kv", "rail", 4 * NODES * KV, 1),
        ("all_gather", "kv", "node", 4 * R * KV, 1),
    ]
    back = [("reduce_scatter", *rest) for _, *rest in reversed(forward)]
    assert traffic("gather") == forward
    assert traffic("gather", gradient=True) == forward + back


def test_a_ring_sends_keys_and_values_round_once_and_their_gradients_home():
    """2 b t d elements a hop, K and V not repeated to the query heads (arXiv 2408.04093)."""

    def moved(found):
        # Round the node, then one hop along the rail: none leaves its rail.
        assert {row[:3] for row in found} == {("ppermute", "ring", s) for s in ("node", "rail")}
        return sum(size * times for *_, size, times in found)

    hop = 4 * KV
    forward, both = (moved(traffic("ring", gradient=g)) for g in (False, True))
    assert forward == (R - 1) * hop
    assert both - forward == (R - 1) * hop + R * hop
    on_rails = [times for *_, span, _, times in traffic("ring") if span == "rail"]
    assert sum(on_rails) == 16 - 1
    # In the dtype of k, gradients too.
    assert moved(traffic("ring", gradient=True, dtype="bfloat16")) == both // 2


@pytest.mark.parametrize("U", [8, 64])
def test_a_tree_sends_the_same_for_any_number_of_keys(U):
    """An all-reduce of b d + 2 b n_heads elements a level (arXiv 2408.04093), or one all-gather."""
    bd, bn = B * S * H * K, B * S * H
    sums = [
        (op, "tree", span, 4 * n, 1)
        for span in ("node", "rail")
        for op, n in (("pmax", bn), ("psum", bd + bn))
    ]
    gathers = [
        ("all_gather", "tree", span, 4 * n * (bd + bn), 1)
        for span, n in (("node", GPUS), ("rail", NODES))
    ]
    back = [("psum", "tree", span, 4 * bd, 1) for span in ("node", "rail")]
    for kind, forward in (("tree by sums", sums), ("tree by gather", gathers)):
        assert traffic(kind, U=U) == forward
        assert traffic(kind, U=U, gradient=True) == forward + back


def forward_passes(jaxpr):
    """How often scores are searched for their maximum: once a block in the forward pass alone."""
    found = [eqn for *_, eqn in arrays_in(jaxpr) if eqn.primitive.name == "reduce_max"]
    return sum(eqn.invars[0].aval.ndim == 5 for eqn in found)


@pytest.mark.parametrize("kind", KINDS)
def test_remat_by_names_computes_no_attention_twice(kind):
    def of(remat):
        fn, args = program(kind, gradient=True, remat=remat)
        with merging(kind):
            passes = forward_passes(fn.trace(*args).jaxpr.jaxpr)
            return passes, len(collectives(fn, *args))

    passes, sent = of("none")
    assert of("full")[0] == 2 * passes
    again, sent_again = of("names")
    assert again == passes
    # Nor does it send twice, gathered keys excepted: they are R times what a rank has to keep.
    assert sent_again - sent == (2 if kind == "gather" else 0)


def test_nor_does_a_layer_of_the_model():
    model = jax.eval_shape(partial(Decoder, small_model()), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 16), "int32")

    def passes(remat):
        def scalar(model, tokens):
            return model.hidden(tokens, remat=remat)[0].sum()

        return forward_passes(jax.make_jaxpr(jax.grad(scalar))(model, tokens).jaxpr)

    assert (passes("none"), passes("names"), passes("full")) == (1, 1, 2)
