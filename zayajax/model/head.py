"""Embedding in, logits and loss out. The vocabulary is the largest axis of the model: the loss
walks over chunks of tokens, so that `[tokens, vocabulary]` is never there at once.

Shape letters: T tokens, t a chunk of them, D embed, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp

from zayajax.model.common import einsum32

CHUNK_LOGITS = 2**28  # float32 numbers in one chunk of logits: 1 GiB


@jax.custom_vjp
def embed(table_VD, tokens_BS):
    """Rows of the table. Its gradient is summed in float32: in bfloat16 the row of a frequent
    token would stop growing after a few hundred of its occurrences."""
    return table_VD[tokens_BS]


def _embed_forward(table_VD, tokens_BS):
    return table_VD[tokens_BS], (table_VD, tokens_BS)


def _embed_backward(saved, d_BSD):
    table_VD, tokens_BS = saved
    grad_VD = jnp.zeros_like(table_VD, dtype=jnp.float32)
    grad_VD = grad_VD.at[tokens_BS].add(d_BSD.astype(jnp.float32))
    return grad_VD.astype(table_VD.dtype), None


embed.defvjp(_embed_forward, _embed_backward)


def logits(x_BSD, table_VD, bias_V):
    """float32 `[B, S, V]`."""
    out = einsum32("bsd,vd->bsv", x_BSD, table_VD)
    return out if bias_V is None else out + bias_V


@jax.named_scope("loss")
def nll_sum(x_TD, table_VD, bias_V, targets_T, weights_T, chunk: int | None = None):
    """Weighted SUM of the negative log-likelihoods: micro-batches and devices just add up.

    `chunk`: tokens at a time, by default as many as keep the logits near 1 GiB.
    """
    chunk = chunk or max(1, CHUNK_LOGITS // table_VD.shape[0])
    return _nll_sum(chunk, x_TD, table_VD, bias_V, targets_T, weights_T)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll_sum(chunk, x_TD, table_VD, bias_V, targets_T, weights_T):
    def one(total, chunk):
        x_tD, targets_t, weights_t = chunk
        scores_tV, lse_t = _scores(x_tD, table_VD, bias_V)
        right_t = jnp.take_along_axis(scores_tV, targets_t[:, None], axis=1)[:, 0]
        return total + jnp.sum(weights_t * (lse_t - right_t)), None

    chunks = _chunks(chunk, x_TD, targets_T, weights_T)
    return jax.lax.scan(one, jnp.zeros_like(weights_T, shape=()), chunks)[0]


def _nll_forward(chunk, *args):
    return _nll_sum(chunk, *args), args


def _nll_backward(chunk, args, d_total):
    x_TD, table_VD, bias_V, targets_T, weights_T = args

    def one(grads, chunk):
        d_table_VD, d_bias_V = grads
        x_tD, targets_t, weights_t = chunk
        scores_tV, lse_t = _scores(x_tD, table_VD, bias_V)
        p_tV = jnp.exp(scores_tV - lse_t[:, None])
        hit_tV = targets_t[:, None] == jnp.arange(p_tV.shape[1])
        d_tV = (p_tV - hit_tV) * (weights_t * d_total)[:, None]
        if bias_V is not None:
            d_bias_V += d_tV.sum(0)
        d_tV = d_tV.astype(table_VD.dtype)
        # Summed over the chunks in float32, rounded once.
        d_table_VD += einsum32("tv,td->vd", d_tV, x_tD)
        return (d_table_VD, d_bias_V), jnp.einsum("tv,vd->td", d_tV, table_VD)

    # Of a missing bias (None) there is no gradient: tree.map passes it by.
    grads = jax.tree.map(partial(jnp.zeros_like, dtype=jnp.float32), (table_VD, bias_V))
    chunks = _chunks(chunk, x_TD, targets_T, weights_T)
    (d_table_VD, d_bias_V), d_x = jax.lax.scan(one, grads, chunks)
    d_x_TD = d_x.reshape(-1, d_x.shape[-1])[: x_TD.shape[0]].astype(x_TD.dtype)
    return d_x_TD, d_table_VD.astype(table_VD.dtype), d_bias_V, None, None


_nll_sum.defvjp(_nll_forward, _nll_backward)


def _scores(x_tD, table_VD, bias_V):
    scores_tV = einsum32("td,vd->tv", x_tD, table_VD)
    scores_tV = scores_tV if bias_V is None else scores_tV + bias_V
    return scores_tV, jax.nn.logsumexp(scores_tV, axis=-1)


def _chunks(size, *arrays):
    """[T, ...] to [chunks, size, ...]; filled up with zeros, hence weight 0."""
    size = min(size, arrays[0].shape[0])

    def one(x):
        x = jnp.pad(x, ((0, -x.shape[0] % size),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, size, *x.shape[1:])

    return tuple(map(one, arrays))
