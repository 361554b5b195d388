"""Memory by arithmetic is what the traced program has."""

import dataclasses

import pytest
from plans import ODD, TINY, ZAYA1, changed

from zayajax.machine import MI300X
from zayajax.planning.arithmetic.estimate import memory
from zayajax.planning.arithmetic.inventory import parameters
from zayajax.planning.audit import audit

# The issue asks for 10 %. Below a twentieth of the total, activations may be off by more.
CLOSE, SMALL = 0.1, 0.05

UNTIED = dataclasses.replace(ZAYA1, model=dataclasses.replace(ZAYA1.model, tied_head=False))
HALF = {"param_dtype": "bfloat16", "state_dtype": "bfloat16", "matrices": "adamw"}
CASES = [
    (TINY, {}),
    (TINY, {"nodes": 2, "layout": "context-wide", "batch": 16}),
    (TINY, {"gpus": 1, "batch": 4, "remat": "full"}),
    (TINY, {"nodes": 128, "zero": 3, "micro_batches": 2, "batch": 2048}),
    (TINY, {"layout": "context", "attention": "ring", "remat": "none"}),
    (ODD, {"remat": "none", "batch": 16, "micro_batches": 2}),
    (ODD, {"nodes": 16, "compute_dtype": "float32", "remat": "full"}),
    (ODD, {"nodes": 4, "layout": "context", "remat": "names", "batch": 64}),
    (ODD, {"matrices": "adamw", "param_dtype": "bfloat16", "state_dtype": "bfloat16"}),
    (ZAYA1, {"nodes": 1, "batch": 32}),
    (ZAYA1, {"nodes": 16, "layout": "context", "zero": 3, "batch": 512}),
    (ZAYA1, {"nodes": 128, "remat": "none", "batch": 4096}),
    (ZAYA1, {"nodes": 128, "zero": 3, "batch": 4096, "micro_batches": 4}),
    (ZAYA1, {"nodes": 16, "layout": "context-wide", "sequence": 2**20, "batch": 1}),
    (ZAYA1, {"nodes": 1, "gpus": 1, "batch": 2}),
    # Nothing divides by three: all of it is summed as one message.
    (ZAYA1, {"nodes": 3, "gpus": 1, "batch": 6}),
    # Few tokens: the tables' gradients are fullest.
    (UNTIED, {"nodes": 1, "layout": "context", "zero": 3, "remat": "full", "batch": 2, **HALF}),
    (UNTIED, {"nodes": 4, "layout": "context", "zero": 3, "remat": "full", "batch": 4}),
    (ZAYA1, {"nodes": 1, "layout": "context", "batch": 4, "micro_batches": 4}),
    (ZAYA1, {"nodes": 3, "zero": 3, "layout": "context", "reduce_dtype": "bfloat16", "batch": 3}),
    (ZAYA1, {"nodes": 2, "layout": "context", "reduce_dtype": "bfloat16", "batch": 2}),
]


@pytest.mark.parametrize(("base", "settings"), CASES, ids=lambda x: repr(x)[:60])
def test_memory_agrees_with_audit(base, settings):
    config = changed(base, **settings)
    ours, traced = memory(config, parameters(config)).kinds(), audit(config, MI300X).to_json()
    theirs = traced["memory"]
    # These follow from shapes alone.
    for kind in ("weights", "moments", "gathered", "gradients"):
        assert ours[kind] == pytest.approx(theirs[kind], rel=1e-3, abs=64), kind
    assert ours["total"] == pytest.approx(theirs["total"], rel=CLOSE)
    if theirs["activations"] > SMALL * theirs["total"]:
        assert ours["activations"] == pytest.approx(theirs["activations"], rel=CLOSE)
    for remat, bytes_ in theirs["activations_by_remat"].items():
        other = changed(base, **settings | {"remat": remat})
        found = memory(other, parameters(other)).activations
        if bytes_ > SMALL * theirs["total"]:
            assert found == pytest.approx(bytes_, rel=CLOSE), remat
