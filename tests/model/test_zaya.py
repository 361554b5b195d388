import math
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import (
    arrays_in,
    assert_close,
    documents,
    normal,
    random_batch,
    random_model,
    small_config,
    small_model,
)

from zayajax import config
from zayajax.mesh import by_path
from zayajax.model import head
from zayajax.model.cca import CCA
from zayajax.model.common import Packing, rms_norm
from zayajax.model.router import Router
from zayajax.model.zaya import Decoder
from zayajax.training import step

# Untied: the gradient of a row of the embedding then says whether its token was looked at.
SHAPES = {
    "plain": dict(layers=2, tied_head=False),
    "windows": dict(
        layers=3,
        heads=2,
        kv_heads=1,
        cca_time0=1,
        cca_time1=4,
        attention_bias=True,
        sliding_layers=(0, 2),
        sliding_window=3,
        skip="zero",
        tied_head=False,
    ),
    "far taps": dict(
        layers=2, kv_heads=4, cca_time0=4, cca_time1=1, attention_bias=True, tied_head=False
    ),
    "odd heads": dict(
        layers=1,
        heads=3,
        kv_heads=3,
        cca_time0=3,
        cca_time1=3,
        rope_fraction=1.0,
        sliding_layers=(0,),
        sliding_window=2,
        tied_head=False,
        head_bias=True,
    ),
}
B, S, V = 2, 16, 48


@cache
def setting(name):
    cfg = small_model(**SHAPES[name])
    return cfg, random_model(cfg, seed=len(name))


@jax.jit
def run(model, batch, mask_BS):
    """Logits, counts, and gradients of a function of the logits where `mask_BS` is set."""

    def scalar(model):
        x_BSD, routing = model.hidden(batch["tokens"], batch["segments"], batch["positions"])
        logits_BSV = head.logits(x_BSD, *model.head_weights())
        # The same function of a document wherever it stands.
        mix_BSV = jnp.cos(1.3 * (batch["positions"][..., None] * V + jnp.arange(V)))
        return jnp.sum(jnp.where(mask_BS[..., None], mix_BSV * logits_BSV, 0)), (
            logits_BSV,
            routing,
        )

    grads, (logits, routing) = jax.grad(scalar, has_aux=True)(model)
    return logits, routing, grads


def row_batch(left, seed=0):
    """Each token appears once in its row, so that its embedding's gradient is its own."""
    batch = random_batch(seed, B, S, V, left=left, longest=7)
    rng = np.random.default_rng(seed)
    batch["tokens"] = np.stack([rng.permutation(V)[:S] for _ in range(B)]).astype(np.int32)
    return {k: batch[k] for k in ("tokens", "segments", "positions")}


def masked(like, *where):
    mask_BS = np.zeros(like["tokens"].shape, bool)
    mask_BS[where] = True
    return mask_BS


def alone(batch, b, where):
    """The same shapes, with one document and padding of other tokens."""
    n = where.stop - where.start
    out = {k: np.zeros_like(v) for k, v in batch.items()}
    out["tokens"][:] = 1
    out["tokens"][b, :n] = batch["tokens"][b, where]
    out["segments"][b, :n] = 1
    out["positions"][b, :n] = np.arange(n)
    return out, slice(n)


# The largest error of float32 sums in another order, in tensors whose largest element is 1.
TOL = 2e-5


def close_parameters(got, want, tol=TOL):
    """Where a gradient cancels out to rounding, relative to the largest of all."""
    largest = max(np.abs(x).max() for x in jax.tree.leaves(want) if x.size)
    for path, g in by_path(got).items():
        w = by_path(want)[path]
        assert g.shape == w.shape and np.isfinite(g[...]).all(), path
        if w.size:
            error = np.abs(np.asarray(g[...]) - np.asarray(w[...])).max()
            assert error <= tol * max(np.abs(w[...]).max(), 1e-2 * largest), (path, error)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.smoke] * (n == "windows")) for n in SHAPES]
)
def test_packing_does_not_leak(name, left):
    """Logits and gradients of a document are the same alone and between its neighbours."""
    _, model = setting(name)
    batch = row_batch(left, seed=5)
    found = list(documents(batch["segments"]))
    lengths = [where.stop - where.start for _, where in found]
    assert 1 in lengths and max(lengths) > 4 and len(lengths) > 4
    for b, where in found:
        logits, _, grads = run(model, batch, masked(batch, b, where))
        bare, at = alone(batch, b, where)
        logits_alone, _, grads_alone = run(model, bare, masked(bare, b, at))
        assert_close(logits[b, where], logits_alone[b, at], TOL)
        close_parameters(grads, grads_alone)


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_is_seen_of_later_tokens_and_other_documents(name):
    """Exactly: the gradient of what must not be seen is 0, not small."""
    _, model = setting(name)
    batch = row_batch(left=True, seed=1)
    for b, where in documents(batch["segments"]):
        t = (where.start + where.stop - 1) // 2
        embed = np.asarray(run(model, batch, masked(batch, b, t))[2].embed[...])
        used = np.zeros(V, bool)
        used[batch["tokens"][b, where.start : t + 1]] = True
        assert not embed[~used].any()
        assert embed[batch["tokens"][b, t]].any()
        if t > where.start:  # the value shift alone sees the token before
            assert embed[batch["tokens"][b, t - 1]].any()


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("name", SHAPES)
def test_what_padding_holds_does_not_matter(name, left):
    _, model = setting(name)
    batch = row_batch(left, seed=2)
    real = batch["segments"] > 0
    assert not real.all()
    other = batch | {"tokens": np.where(real, batch["tokens"], 7)}
    (logits, routing, grads), (other_logits, other_routing, other_grads) = (
        run(model, x, real) for x in (batch, other)
    )
    np.testing.assert_array_equal(logits[real], other_logits[real])
    np.testing.assert_array_equal(routing.counts_LC, other_routing.counts_LC)
    jax.tree.map(np.testing.assert_array_equal, grads, other_grads)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("spread", [0.0, 0.2], ids=["start", "trained"])
def test_gradients_are_finite_at_padding(name, spread):
    """With the first biases, q and k are exactly 0 there, and have no direction."""
    cfg, _ = setting(name)
    model = random_model(cfg, seed=3, spread=spread)
    batch = row_batch(left=True, seed=3)
    batch["segments"][0] = batch["positions"][0] = 0  # a row of padding alone
    real = batch["segments"] > 0
    for mask_BS in (real, ~real, np.ones_like(real)):
        logits, _, grads = run(model, batch, mask_BS)
        assert np.isfinite(logits).all()
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", ["plain", "windows"])
def test_counts_are_exact_and_leave_padding_out(name):
    cfg, model = setting(name)
    batch = row_batch(left=False, seed=2)
    real = batch["segments"] > 0
    _, routing, _ = run(model, batch, real)
    assert routing.counts_LC.dtype == routing.choices_LBS.dtype == np.int32
    C = cfg.experts + 1
    want = [np.bincount(choice[real], minlength=C) for choice in np.asarray(routing.choices_LBS)]
    np.testing.assert_array_equal(routing.counts_LC, want)
    assert routing.counts_LC.shape == (cfg.layers, C) and len(np.unique(want)) > 1


@pytest.mark.parametrize("B, S", [(1, 1), (1, 7), (3, 5)])
def test_tokens_alone_are_one_document_a_row(B, S):
    _, model = setting("windows")
    tokens = np.random.default_rng(S).integers(0, V, (B, S), dtype=np.int32)
    got = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    assert got.shape == (B, S, V) and got.dtype == np.float32
    for b in range(B):
        padded = {k: np.zeros((2, 16), np.int32) for k in ("tokens", "segments", "positions")}
        padded["tokens"][0, -S:] = tokens[b]
        padded["segments"][0, -S:] = 1
        padded["positions"][0, -S:] = np.arange(S)
        assert_close(got[b], run(model, padded, padded["segments"] > 0)[0][0, -S:], TOL)


def test_positions_follow_from_segments():
    cfg = small_model()
    for left in (False, True):
        batch = random_batch(4, 3, 12, V, left=left)
        real = batch["segments"] > 0
        got = Packing(cfg, jnp.asarray(batch["segments"]), None).positions_BS
        np.testing.assert_array_equal(np.asarray(got)[real], batch["positions"][real])


def test_scan_equals_a_loop_over_layers():
    cfg, model = setting("windows")
    batch = row_batch(left=False, seed=5)

    def loop(model, batch):
        packing = Packing(cfg, batch["segments"], batch["positions"])
        x = (model.embed[...][batch["tokens"]] + model.input_bias[...]) * model.input_scale[...]
        state, counts = jnp.zeros((B, S, cfg.router_hidden)), []
        for i in range(cfg.layers):
            block = jax.tree.map(lambda w, i=i: w[i], model.layers)
            sliding = i in cfg.sliding_layers
            rotation = tuple(r[int(sliding)] for r in packing.rotations)
            window = cfg.sliding_window if sliding else None
            gamma = model.gamma[...][i - 1] if i else jnp.zeros(cfg.router_hidden)
            x, state, routing = block(x, state, gamma, packing, rotation, window)
            counts.append(routing.counts_LC)
        x = rms_norm(x, model.norm_out[...], cfg.norm_eps, jnp.float32)
        return head.logits(x, *model.head_weights()), jnp.stack(counts)

    logits, counts = jax.jit(loop)(model, batch)
    got, routing, _ = run(model, batch, batch["segments"] > 0)
    assert_close(got, logits, TOL)
    np.testing.assert_array_equal(routing.counts_LC, counts)


@pytest.mark.parametrize("t0, t1", [(1, 1), (2, 2), (1, 3), (4, 2), (3, 4)])
def test_convolutions_stand_behind_one_padding_for_both(t0, t1):
    """As in transformers: padded once by t0 - 1 + t1 - 1, then two VALID cross-correlations."""
    cfg = small_model(cca_time0=t0, cca_time1=t1, heads=2, kv_heads=1, layers=1)
    cca: CCA = jax.tree.map(lambda w: w[0], random_model(cfg).layers.attn)
    n, (J, K) = 6, cca.depthwise_bias.shape
    x_SJK = np.random.default_rng(0).normal(size=(n, J, K)).astype(np.float32)
    packing = Packing(cfg, jnp.asarray([[1, 1] + [2] * n + [0]]), None)
    x_BSJK = np.concatenate([np.ones((2, J, K)), x_SJK, np.zeros((1, J, K))])[None]
    (x_BncJK,) = packing.extend(jnp.asarray(x_BSJK, jnp.float32))
    got = cca.convolve(x_BncJK, packing)[0, 2:-1]

    padded = np.concatenate([np.zeros((t0 - 1 + t1 - 1, J, K)), x_SJK])
    depth = np.stack(
        [(padded[i : i + t0] * cca.depthwise[...]).sum(0) for i in range(n + t1 - 1)]
    ) + np.asarray(cca.depthwise_bias[...])
    want = np.stack(
        [np.einsum("ijc,ijck->jk", depth[i : i + t1], cca.grouped[...]) for i in range(n)]
    ) + np.asarray(cca.grouped_bias[...])
    assert_close(got, want)


@pytest.mark.parametrize("skip", ["identity", "zero"])
def test_a_token_that_skips_adds_itself_or_nothing(skip):
    cfg = small_model(layers=1, skip=skip)
    block = jax.tree.map(lambda w: w[0], random_model(cfg).layers)
    packing = Packing(cfg, jnp.ones((1, 6), jnp.int32), None)
    h, p = normal(0, (1, 6, cfg.hidden)), jnp.linspace(0.1, 0.9, 6)[None]
    E = cfg.experts
    choice = jnp.asarray([[0, E, 3, E, E, E - 1]])
    y, every = (block.moe(h, c, p, packing)[0][0] for c in (choice, choice % E))
    skips = np.asarray(choice[0] == E)
    want = (p[..., None] * h)[0] if skip == "identity" else jnp.zeros((6, cfg.hidden))
    assert_close(y[skips], want[skips]) if skip == "identity" else assert_no(y[skips])
    assert_close(y[~skips], every[~skips])
    assert np.abs(y[~skips]).min(axis=-1).all()


def assert_no(x):
    assert not np.asarray(x).any()


def test_padding_visits_no_expert():
    """It would take the room of tokens in the exchange."""
    cfg = small_model(layers=1)
    block = jax.tree.map(lambda w: w[0], random_model(cfg).layers)
    packing = Packing(cfg, jnp.asarray([[0, 0, 1, 1, 2, 0]]), None)
    h, choice = normal(0, (1, 6, cfg.hidden)), jnp.arange(6)[None]
    y = np.asarray(block.moe(h, choice, jnp.ones((1, 6)), packing)[0])[0]
    np.testing.assert_array_equal(y.any(axis=-1), packing.real_BS[0])


def test_ties_go_to_the_lowest_index():
    cfg = small_model(layers=1)
    router: Router = jax.tree.map(lambda w: w[0], random_model(cfg).layers.router)
    h, none = normal(0, (1, 5, cfg.hidden)), jnp.zeros((1, 5, cfg.router_hidden))
    router.out = router.out.replace(jnp.zeros_like(router.out[...]))
    for bias, want in ((jnp.zeros(9), 0), (jnp.zeros(9).at[0].set(-1), 1), (jnp.arange(9) // 4, 8)):
        router.balance_bias = router.balance_bias.replace(bias * 1.0)
        choice, p, _ = router(h, none, jnp.zeros(cfg.router_hidden))
        np.testing.assert_array_equal(choice, want)
        assert_close(p, np.full((1, 5), 1 / 9))  # the bias chooses, and is not in the weight


def test_the_balance_bias_has_no_gradient_and_the_router_state_has():
    _, model = setting("plain")
    batch = row_batch(left=False, seed=5)
    grads = run(model, batch, batch["segments"] > 0)[2]
    assert_no(grads.layers.router.balance_bias[...])
    assert np.asarray(grads.gamma[...]).any() and np.asarray(grads.layers.router.out[...]).any()


def traced(cfg, B, S):
    """Equations of the forward and backward pass in bfloat16, with the remat of a run."""
    model = random_model(cfg, dtype="bfloat16")
    batch = {k: jax.ShapeDtypeStruct((B, S), v.dtype) for k, v in random_batch(0, 1, 4, 4).items()}

    def loss(model, batch):
        x, _ = model.hidden(batch["tokens"], batch["segments"], remat="names")
        x_TD = x.reshape(-1, x.shape[-1])
        rows = (batch[k].reshape(-1) for k in ("targets", "weights"))
        return head.nll_sum(x_TD, *model.head_weights(), *rows)

    return list(arrays_in(jax.jit(jax.grad(loss)).trace(model, batch).jaxpr.jaxpr))


def test_the_router_is_float32_under_bfloat16():
    products = 0
    for _, dtype, eqn in traced(small_model(), 2, 12):
        if "router" not in str(eqn.source_info.name_stack):
            continue
        if eqn.primitive.name == "dot_general":
            products += 1
            highest = (jax.lax.Precision.HIGHEST,) * 2
            assert eqn.params["precision"] == highest
        # The gradient of the hidden state leaves in the dtype in which it came, and is summed.
        edges = ("convert_element_type", "add_any")
        assert dtype != jnp.bfloat16 or eqn.primitive.name in edges, eqn
    assert products >= 4 * 3  # each matrix: forward, and two in the backward pass


@pytest.mark.smoke
def test_bfloat16_is_rounded_not_wrong():
    """It must also run everywhere: XLA for CPU knows few products of bfloat16 with float32 sums."""
    cfg, model = setting("plain")
    batch = row_batch(left=True, seed=1)
    half = random_model(cfg, seed=len("plain"), dtype="bfloat16")
    real = batch["segments"] > 0
    got, want = (run(m, batch, real) for m in (half, model))
    assert got[0].dtype == jnp.float32 and got[2].layers.attn.q.dtype == jnp.bfloat16
    # A token near a tie may take another expert.
    error = np.abs(got[0][real] - want[0][real]).max(axis=-1)
    assert np.median(error) < 0.03 * np.abs(want[0]).max()
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(got[2]))


T = 13
CHUNKS = [1, 3, T - 1, T, T + 5, None]


@cache
def loss_and_gradients(chunk):
    def loss(weights, targets_T, weights_T):
        x_TD, table_VD, bias_V = weights
        if chunk == "plain":
            scores = head.logits(x_TD[None], table_VD, bias_V)[0]
            log_p = jax.nn.log_softmax(scores)[jnp.arange(T), targets_T]
            return -jnp.sum(weights_T * log_p)
        return head.nll_sum(x_TD, table_VD, bias_V, targets_T, weights_T, chunk)

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("with_bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_chunked_loss_equals_the_plain_one(chunk, with_bias):
    rng = np.random.default_rng(0)
    weights = normal(0, (T, 8)), normal(1, (11, 8)), normal(2, (11,)) if with_bias else None
    targets = rng.integers(0, 11, T, dtype=np.int32)
    mask = rng.integers(0, 2, T).astype(np.float32)
    args = weights, targets, mask
    assert_close(loss_and_gradients(chunk)(*args), loss_and_gradients("plain")(*args))
    loss, grads = loss_and_gradients(chunk)(weights, targets, 0 * mask)
    assert loss == 0 and not any(np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_the_gradient_of_a_frequent_token_is_summed_in_float32():
    tokens, n = jnp.zeros((4, 512), jnp.int32).at[:, ::2].set(3), 1024
    table = jnp.ones((5, 2), jnp.bfloat16)
    grad = jax.jit(jax.grad(lambda table: head.embed(table, tokens).astype(jnp.float32).sum()))
    assert grad(table).dtype == jnp.bfloat16
    np.testing.assert_array_equal(grad(table)[:, 0], [n, 0, 0, n, 0])  # bfloat16 stops at 256
    # XLA for CPU widens a bfloat16 sum by itself, so ask the program too.
    sums = [d for _, d, e in arrays_in(grad.trace(table).jaxpr.jaxpr) if "scatter" in str(e)]
    assert sums and set(sums) == {jnp.dtype("float32")}


def test_a_long_row_needs_no_square_and_no_whole_logits(monkeypatch):
    S, V = 2048, 1009
    cfg = small_config(
        train__batch=2,
        train__sequence=S,
        train__compute_dtype="bfloat16",
        model__vocab=V,
        model__sliding_layers=[1],
        model__sliding_window=700,
    )
    batch = {k: jax.ShapeDtypeStruct((2, S), v.dtype) for k, v in random_batch(0, 1, 4, 4).items()}

    def shapes():
        program = step.build(cfg)
        jaxpr = program.train_step.trace(program.state, batch).jaxpr.jaxpr
        return {shape for shape, *_ in arrays_in(jaxpr)}

    def whole(shape):
        return V in shape and math.prod(shape) >= S * V

    assert any(map(whole, shapes()))  # 2 x 2048 x 1009 fit into one chunk
    monkeypatch.setattr(head, "CHUNK_LOGITS", 256 * V)
    found = shapes()
    assert not any(map(whole, found)) and (256, V) in found
    assert [s for s in found if sum(n >= S for n in s) > 1] == []


def test_zaya1_8b_has_exactly_its_parameters():
    path = Path(__file__).parents[2] / "configs" / "zaya1_8b.toml"
    model = jax.eval_shape(partial(Decoder, config.load(path).model), jax.random.key(0))
    assert sum(v.size for v in by_path(model).values()) == 8_840_489_464
