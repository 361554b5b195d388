"""One table decides: every parameter is in it once, and what it says is what happens."""

from functools import partial

import jax
import numpy as np
import pytest
from batches import small_config, small_model
from flax import nnx

from zayajax import optim
from zayajax.mesh import by_path
from zayajax.model.common import Balance
from zayajax.model.zaya import Decoder
from zayajax.optim import table

ALL = dict(attention_bias=True, head_bias=True, tied_head=False)
MATRICES = {"q", "k", "v_now", "v_late", "o", "down", "fc1", "fc2", "out", "gate_up"}


def parameters(**changes):
    return by_path(jax.eval_shape(partial(Decoder, small_model(**changes)), jax.random.key(0)))


def test_every_parameter_has_a_row_and_every_row_a_parameter():
    named = parameters(**ALL)
    groups = table.groups(named)
    assert {table.rule(path) for path in named} == set(table.TABLE)
    found = {path for path, group in groups.items() if group == table.MATRICES}
    assert {path.split(".")[-1] for path in found} == MATRICES
    assert all(path.startswith("layers.") for path in found) and len(found) == len(MATRICES) + 1
    for path, v in named.items():
        if path in found:
            M, m, n = table.stack_shape(table.matrix(path), v.shape)
            assert M * m * n == v.size and min(m, n) > 1 and M % 3 == 0
            assert len(v.axes) + 1 == v.ndim  # of one layer; experts are matrices of their own
        else:
            assert table.matrix(path) == ""
    assert groups["layers.router.balance_bias"] == table.BALANCE


@pytest.mark.parametrize(
    "path", ["layers.attn.gate", "layers.experts.q", "q", "embedding", "layers"]
)
def test_a_parameter_without_a_row_is_refused(path):
    with pytest.raises(ValueError, match=f"{path}: no row of optim.table.TABLE"):
        optim.build(small_config().optim).init(
            {path: nnx.Param(np.ones((2, 2)), axes=(None, None))}
        )


def test_the_balance_rule_is_for_balance_biases_alone():
    for path, kind in {"layers.router.balance_bias": nnx.Param, "embed": Balance}.items():
        with pytest.raises(ValueError, match=path):
            table.groups({path: kind(np.ones(3), axes=(None,))})


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_the_text_says_what_each_gets(matrices):
    cfg = small_config(optim__matrices=matrices, optim__weight_decay=0.25).optim
    text = optim.describe(cfg, parameters(**ALL))
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert len(lines) == len(table.TABLE) + 1
    assert lines["layers.attn.o"] == f"layers.attn.o 3 of 32 x 16 {matrices} 0.25".split()
    assert lines["layers.experts.down"][1:] == f"24 of 8 x 16 {matrices} 0.25".split()
    assert lines["layers.attn.grouped"][-2:] == ["adamw", "0.25"]
    assert lines["embed"] == "embed 48 x 16 adamw 0".split()
    assert lines["layers.router.balance_bias"][-2:] == ["balance", "0"]
    assert lines["layers.norm_* (2)"][2:] == f"{2 * 3 * 16} in all adamw 0".split()
    assert "head" not in optim.describe(cfg, parameters()).split()
