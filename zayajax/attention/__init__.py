"""Attention: `(q, k, v, positions, segments) -> (out, lse)`, wherever the keys are."""

from zayajax.attention import gather, ring, tree
from zayajax.layout import Layout

OVER_SEQUENCE = {"gather": gather.attend, "ring": ring.attend}


def attend(q_BSHK, k_BUNK, v_BUNK, positions, segments, window, layout: Layout):
    """Out `[B, S, H, K]` and log-sum-exp `[B, S, H]`, as `local.attend` on a whole row.

    `positions` and `segments`: of the queries `[B, S]`, and of the keys: of this device `[B, U]`
    where the layout spreads keys alone, else of all ranks `[R, B, U]`.
    """
    if layout.keys:
        return tree.attend(q_BSHK, k_BUNK, v_BUNK, positions, segments, window, layout.keys)
    attend = OVER_SEQUENCE[layout.attention]
    return attend(q_BSHK, k_BUNK, v_BUNK, positions, segments, window, layout.sequence)
