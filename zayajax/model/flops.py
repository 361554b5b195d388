"""How much arithmetic a token takes, counted alike for every system that is compared.

A product of an m x n matrix with a vector is 2mn operations; the backward pass takes twice the
forward one; recomputation does not count.
"""

from zayajax.settings import ModelConfig


def weights_in_use(cfg: ModelConfig) -> int:
    """Numbers of the matrices that one token meets: attention, one expert, router, head."""
    D, H, N, K, R = cfg.hidden, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.router_hidden
    attention = D * K * (H + N + N) + H * K * D
    attention += (H + N) * K * (K * cfg.cca_time1 + cfg.cca_time0)
    expert = 3 * D * cfg.expert_hidden
    router = D * R + 2 * R * R + R * (cfg.experts + 1)
    return cfg.layers * (attention + expert + router) + D * cfg.vocab


def train_flops_per_token(cfg: ModelConfig, sequence: int) -> float:
    """Forward and backward, causal attention over half of the row (a window: over that)."""
    full = cfg.layers - len(cfg.sliding_layers)
    keys = full * sequence / 2 + len(cfg.sliding_layers) * min(cfg.sliding_window, sequence / 2)
    return 6 * weights_in_use(cfg) + 3 * 2 * 2 * cfg.heads * cfg.head_dim * keys
