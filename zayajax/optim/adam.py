"""Adam (Kingma and Ba 2015, arXiv 1412.6980), as `optax.scale_by_adam`, with two things more: its
moments rest in any dtype, and a step may be passed over."""

import jax
import jax.numpy as jnp
import optax


def scale_by_adam(
    beta1: float, beta2: float, eps: float = 1e-8, state_dtype="float32"
) -> optax.GradientTransformationExtraArgs:
    """Gradients to m / (sqrt(v) + eps), float32, both moments corrected for their start at zero.

    `update` takes a boolean `skip`, with which moments and count stay as they are, bit for bit, and
    the result is without meaning. It is computed from what is kept, not from what might have been:
    whoever reads old moments beside the new ones would make XLA copy all of them.

    Args:
      state_dtype: of the moments at rest.
    """

    def init(params):
        def zeros():
            return jax.tree.map(lambda x: jnp.zeros_like(x, dtype=state_dtype), params)

        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros(), zeros())

    def update(grads, state, params=None, *, skip=False, **_):
        del params
        count = jnp.where(skip, state.count, optax.safe_increment(state.count))
        steps = count.astype(jnp.float32)

        def moment(beta, old, new):
            old = old.astype(jnp.float32)
            return jnp.where(skip, old, beta * old + (1 - beta) * new.astype(jnp.float32))

        mu = jax.tree.map(lambda m, g: moment(beta1, m, g), state.mu, grads)
        nu = jax.tree.map(lambda v, g: moment(beta2, v, g * g), state.nu, grads)

        def direction(m, v):
            return (m / (1 - beta1**steps)) / (jnp.sqrt(v / (1 - beta2**steps)) + eps)

        def at_rest(tree):
            return jax.tree.map(lambda x: x.astype(state_dtype), tree)

        state = optax.ScaleByAdamState(count, at_rest(mu), at_rest(nu))
        return jax.tree.map(direction, mu, nu), state

    return optax.GradientTransformationExtraArgs(init, update)
