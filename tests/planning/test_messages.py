"""What a step sends by arithmetic is what its traced program sends, message by message."""

from collections import Counter

import pytest
from plans import ODD, TINY, ZAYA1, changed

from zayajax.mesh import abstract_mesh
from zayajax.planning.arithmetic.inventory import parameters
from zayajax.planning.arithmetic.traffic import messages
from zayajax.planning.audit import OPS, trace_step
from zayajax.planning.traced.trace import sent

SCOPES = {"bucket": "exchange", "gather": "weights in", "scatter": "weights out"}
PARTS = {"exchange", "halo", "kv", "ring", "weights in", "weights out", "deal"}

CASES = [
    (TINY, {}),
    (TINY, {"remat": "full", "micro_batches": 2, "batch": 16}),
    (ZAYA1, {"nodes": 16}),
    (ZAYA1, {"nodes": 128, "zero": 3, "micro_batches": 2, "batch": 2048}),
    (ZAYA1, {"nodes": 16, "layout": "context", "remat": "full"}),
    (ZAYA1, {"nodes": 16, "layout": "context", "remat": "none", "attention": "ring"}),
    (ZAYA1, {"nodes": 4, "layout": "context-wide", "batch": 32}),
    (ZAYA1, {"nodes": 16, "layout": "context-wide", "batch": 32, "attention": "ring"}),
    # Their gradients go home in several hops.
    (ZAYA1, {"nodes": 2, "layout": "context-wide", "batch": 4, "attention": "ring"}),
    (ZAYA1, {"nodes": 4, "layout": "context-wide", "batch": 8, "attention": "ring"}),
    (ODD, {"nodes": 3, "layout": "context-wide", "attention": "ring", "sequence": 3072}),
    (ODD, {"nodes": 5, "reduce_dtype": "bfloat16"}),
    (ODD, {"nodes": 2, "layout": "context", "matrices": "adamw", "zero": 3}),
    (ODD, {"nodes": 3, "gpus": 1}),
]


@pytest.mark.parametrize(("base", "settings"), CASES, ids=lambda x: repr(x)[:60])
def test_messages_are_those_of_the_program(base, settings):
    config = changed(base, **settings)
    counts, sizes = Counter(), Counter()
    for c in sent(trace_step(config, abstract_mesh(config.mesh.nodes, config.mesh.gpus)).line):
        part = SCOPES.get(c.scope, c.scope)
        # A group of one GPU sends nothing; nor does a branch of the exchange that is not taken.
        if part in PARTS and c.group > 1 and c.even:
            key = part, OPS[c.op], c.span
            counts[key] += c.times
            sizes[key] += c.times * c.bytes
    ours, bytes_ = Counter(), Counter()
    for m in messages(config, parameters(config)):
        ours[m.part, m.op, m.span] += m.times
        bytes_[m.part, m.op, m.span] += m.times * m.bytes
    assert ours == counts
    assert dict(bytes_) == {k: pytest.approx(v, rel=1e-6) for k, v in sizes.items()}
