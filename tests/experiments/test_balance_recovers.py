import base64

import numpy as np
import scripts

from zayajax import load_config

STEPS = 200


def test_experts_even_out_from_a_bad_start_and_after_the_text_has_changed():
    """configs/tiny.toml with narrower experts, on a quarter of the tokens and one device."""
    balance = scripts.load("balance")
    changes = {"mesh.gpus": "1", "train.batch": "4", "train.sequence": "64"}
    changes |= {"model.expert_hidden": "64"}
    changes |= {"train.steps": str(2 * STEPS), "optim.horizon": str(2 * STEPS)}
    config = load_config(balance.TINY, changes)
    corpora = [balance.texts(100), balance.texts(100, base64.b64encode)]
    h_SL = np.asarray(list(balance.entropies(config, corpora, STEPS)))
    assert h_SL.shape == (2 * STEPS, config.model.layers)
    first, second = h_SL.mean(axis=1).reshape(2, STEPS)
    assert first[0] < 0.2  # nearly all tokens to one expert of each layer
    assert second[:10].min() < 0.8  # other text, other experts
    for h in (first, second):
        assert h.max() > 0.95
        # And it stays: 256 tokens a step make single steps noisy.
        assert h[-20:].mean() > 0.92
