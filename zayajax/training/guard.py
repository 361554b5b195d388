"""Bad steps: which losses and gradients an update is not made of, decided inside the step.

Whatever is decided on is a sum over all devices, so that all decide alike; what has been decided is
part of the state, so that a run that goes on elsewhere decides as it would have here.
"""

import dataclasses
import enum
from collections.abc import Mapping

import jax
import jax.numpy as jnp

WARM_UP = 32  # good steps before a loss can be a spike; afterwards, those that the mean is over


class Verdict(enum.IntEnum):
    GOOD = 0
    NOT_FINITE = 1  # the loss or the norm of the gradient
    SPIKE = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guard:
    """What is known of the steps so far: scalars, the same on every device."""

    mean: jax.Array  # of the losses of good steps, nats a token, float32
    variance: jax.Array  # float32
    seen: jax.Array  # good steps, int32
    bad_in_row: jax.Array  # up to the last step, int32
    skipped: jax.Array  # bad steps in all, int32


def init_guard() -> Guard:
    # An array each: the step takes them over, and none can be given twice.
    return Guard(
        *(jnp.zeros((), jnp.float32) for _ in range(2)),
        *(jnp.zeros((), jnp.int32) for _ in range(3)),
    )


def judge(guard: Guard, loss, grad_norm, weight, spike: float):
    """(verdict, the guard after it): int32, a `Verdict`.

    A spike is a loss of more than mean + spike * deviation, both of the good losses before it:

        a = max(1 / (n + 1), 1 / WARM_UP)    d = loss - mean
        mean += a d                          variance = (1 - a) (variance + a d^2)

    with n the good steps so far: mean and variance of all of them during the warm-up, exponential
    averages afterwards (Finch 2009, "Incremental calculation of weighted mean and variance", eq.
    124 and 143; West 1979, doi 10.1145/359146.359153). A deviation is at least float32's rounding.

    Args:
      loss, grad_norm: of the global batch, before clipping.
      weight: of the global batch; what has none, padding, says nothing about the loss.
      spike: deviations; 0: no loss is a spike.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    bad = jnp.where(finite, Verdict.GOOD, Verdict.NOT_FINITE)
    above = loss - guard.mean
    if spike:
        rounding = 8 * jnp.finfo(jnp.float32).eps * jnp.abs(guard.mean)
        deviation = jnp.maximum(jnp.sqrt(guard.variance), rounding)
        high = (above > spike * deviation) & (guard.seen >= WARM_UP)
        bad = jnp.where(finite & high, Verdict.SPIKE, bad)
    bad = bad.astype(jnp.int32)

    a = jnp.maximum(1 / (guard.seen.astype(jnp.float32) + 1), 1 / WARM_UP)
    heard = (bad == 0) & (weight > 0)
    return bad, Guard(
        mean=jnp.where(heard, guard.mean + a * above, guard.mean),
        variance=jnp.where(heard, (1 - a) * (guard.variance + a * above * above), guard.variance),
        seen=guard.seen + heard,
        bad_in_row=jnp.where(bad > 0, guard.bad_in_row + 1, 0),
        skipped=guard.skipped + (bad > 0),
    )


def line(metrics: Mapping) -> dict:
    """What a line of `metrics.jsonl` says of a bad step, from a step's metrics on the host: why it
    is bad, how many are by now, in a row and in all. Of a good one nothing."""
    if metrics["bad"] == Verdict.GOOD:
        return {}
    why = {Verdict.NOT_FINITE: "not finite", Verdict.SPIKE: "spike"}[int(metrics["bad"])]
    return {"bad": why} | {key: int(metrics[key]) for key in ("bad_in_row", "skipped")}
