"""What the tests against transformers' numbers share."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from zayajax.hf.names import sizes, tensors
from zayajax.mesh import by_path
from zayajax.model import head

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("full_attention", "legacy_layout", "sliding_and_padding")


# Compiled once and run once: optimisation would cost more than it saves.
@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def everything(model, tokens_BS, mask_BS, positions_BS):
    """Loss, logits, routes and gradients in one program: compiled once a model."""

    def loss(model):
        x_BSD, routing = model.hidden(tokens_BS, mask_BS, positions_BS)
        pairs = (mask_BS[:, 1:] * mask_BS[:, :-1]).reshape(-1).astype(jnp.float32)
        x_TD, targets = x_BSD[:, :-1].reshape(-1, x_BSD.shape[-1]), tokens_BS[:, 1:].reshape(-1)
        total = head.nll_sum(x_TD, *model.head_weights(), targets, pairs)
        logits = head.logits(x_BSD, *model.head_weights())
        return total / pairs.sum(), (logits, routing.choices_LBS)

    (value, (logits, routes)), grads = jax.value_and_grad(loss, has_aux=True)(model)
    return value, logits, routes, grads


def native(model) -> dict[str, np.ndarray]:
    """A tree of weights or gradients by transformers' names, each as it lies there."""
    leaves, lengths = by_path(model), sizes(model.cfg)
    host = {path: np.asarray(v[...]) for path, v in leaves.items()}
    plan = tensors(model.cfg, "native")
    return {t.name: t.axes.give(host[t.path][t.index], lengths) for t in plan}
