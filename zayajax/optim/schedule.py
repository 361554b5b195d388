"""The learning rate over the steps of `optim.horizon`."""

import optax

from zayajax.settings import OptimConfig


def learning_rate(cfg: OptimConfig) -> optax.Schedule:
    """Step (from 0) to rate: linear warm-up, then a cosine, or a plateau and a linear decay (WSD).

    The first step already moves. The last step of the horizon has `final_rate * peak`, if the
    warm-up leaves room to get there.
    """
    peak, final, after = cfg.learning_rate, cfg.final_rate, cfg.horizon - cfg.warmup
    warmup = optax.linear_schedule(0.0, peak, max(cfg.warmup, 1))
    if cfg.schedule == "cosine":
        then = optax.cosine_decay_schedule(peak, max(after, 1), alpha=final)
    else:
        steps = max(1, min(after, round(cfg.decay * cfg.horizon)))
        then = optax.linear_schedule(peak, final * peak, steps, max(0, after - steps))
    joined = optax.join_schedules([warmup, then], [cfg.warmup])
    return lambda step: joined(step + 1)
