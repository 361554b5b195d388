"""What a run is at one step: all of it is in every checkpoint."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from zayajax.mesh import by_path, map_params
from zayajax.model.zaya import Decoder
from zayajax.settings import Config
from zayajax.training.guard import Guard, init_guard


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    step: jax.Array  # batches so far: updates, and bad steps that made none
    params: Decoder  # master weights and balance biases
    opt_state: optax.OptState  # moments, those of the balance biases too
    guard: Guard  # against bad steps


def init_state(key, config: Config, tx: optax.GradientTransformation) -> TrainState:
    """The state of step 0, a pure function of the key and the config."""
    dtype = config.train.param_dtype

    def store(v):
        return v if v.get_metadata().get("keep") else v.replace(v[...].astype(dtype))

    params = map_params(store, Decoder(config.model, key))
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(by_path(params)), init_guard())
