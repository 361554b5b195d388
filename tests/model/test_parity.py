"""The model gives the numbers that transformers wrote into `fixtures/`, without transformers."""

import functools

import jax
import numpy as np
import parity_tools
import pytest

from zayajax import hf
from zayajax.hf.compare import compare, forward, read_reference

NAMES = parity_tools.NAMES


@functools.cache
def run(name):
    """The reference, and ours: loss, logits, routes, gradients by transformers' names."""
    folder = parity_tools.FIXTURES / name
    model = hf.load(folder, "float32", skip="zero")
    with np.load(folder / "expected.npz") as file:
        wanted = dict(file)
    inputs = ("input_ids", "attention_mask", "position_ids")
    ids, mask, positions = (wanted[key].astype(np.int32) for key in inputs)
    loss, logits, routes, grads = parity_tools.everything(model, ids, mask, positions)
    return wanted, float(loss), np.asarray(logits), np.asarray(routes), parity_tools.native(grads)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_loss(name):
    wanted, loss, logits, _, _ = run(name)
    real = wanted["attention_mask"].astype(bool)
    np.testing.assert_allclose(logits[real], wanted["logits"][real], rtol=0, atol=1e-4)
    assert loss == pytest.approx(float(wanted["loss"]), rel=2e-6)
    assert np.isfinite(logits).all()  # at padding too


@pytest.mark.parametrize("name", NAMES)
def test_routes(name):
    wanted, _, _, routes, _ = run(name)
    real = wanted["attention_mask"].astype(bool)
    assert (routes == wanted["routes"].reshape(routes.shape))[:, real].all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name):
    wanted, _, _, _, grads = run(name)
    norms = dict(zip(wanted["grad_names"], wanted["grad_norms"], strict=True))
    balance = {key for key in grads if key.endswith("balancing_biases")}
    assert set(norms) == set(grads) - balance
    for key, norm in norms.items():
        assert np.linalg.norm(grads[key]) == pytest.approx(norm, rel=1e-4), key
    for key in balance:  # moved by counts alone
        assert not grads[key].any()
    embed = grads["model.embed_tokens.weight"]
    np.testing.assert_allclose(embed, wanted["grad_embed"], rtol=0, atol=1e-4 * np.abs(embed).max())


@pytest.mark.parametrize("name", NAMES)
def test_check_agrees(name):
    folder = parity_tools.FIXTURES / name
    found = hf.check(folder, folder / "expected.npz")
    assert found.passed and found.comparison.routes == 0
    assert "passed" in str(found)


def test_check_says_where_they_part():
    folder = parity_tools.FIXTURES / "sliding_and_padding"
    wanted = read_reference(folder / "expected.npz")
    model = hf.load(folder, "float32", skip="zero")
    rows, columns = np.nonzero(wanted["attention_mask"])
    place = int(rows[9]), int(columns[9])
    wanted["logits"][place] += 0.5
    wanted["routes"].reshape(-1, *wanted["input_ids"].shape)[2][place] += 1
    found = compare(model, wanted)
    assert not found.passed
    assert found.at == place and found.first == (2, *place) and found.routes == 1
    assert f"row {place[0]}, position {place[1]}" in str(found)

    wanted["logits"][place] = np.nan
    assert not compare(model, wanted).passed


def test_rows_packed_into_one_give_the_same():
    """transformers does not reset convolutions and values inside a row: here a document's
    neighbours do not matter, so that a packed row gives what transformers gives to each alone."""
    folder = parity_tools.FIXTURES / "full_attention"
    wanted = read_reference(folder / "expected.npz")
    model = hf.load(folder, "float32", skip="zero")
    B, S = wanted["input_ids"].shape
    segments = np.repeat(np.arange(1, B + 1, dtype=np.int32), S)[None]
    ids = wanted["input_ids"].reshape(1, -1).astype(np.int32)
    logits, routes = forward(model, ids, segments, None)
    np.testing.assert_allclose(logits.reshape(B, S, -1), wanted["logits"], rtol=0, atol=1e-4)
    assert (np.asarray(routes).reshape(len(routes), -1) == wanted["routes"]).all()


def test_positions_are_worked_out_from_the_mask():
    folder = parity_tools.FIXTURES / "sliding_and_padding"
    wanted = read_reference(folder / "expected.npz")
    model = hf.load(folder, "float32", skip="zero")
    ids, mask = (wanted[key].astype(np.int32) for key in ("input_ids", "attention_mask"))
    real = mask.astype(bool)
    logits = jax.jit(lambda model, *inputs: model(*inputs))(model, ids, mask)
    np.testing.assert_allclose(logits[real], wanted["logits"][real], rtol=0, atol=1e-4)
