"""Text from a model, one token after another, each from the whole text so far.

Shape letters: B prompts, S tokens of the buffer, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zayajax.errors import UserError
from zayajax.model import head
from zayajax.model.common import precision
from zayajax.model.zaya import Decoder

NextLogits = Callable[[np.ndarray, np.ndarray, np.ndarray], jax.Array]


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Iterable[int] = (),
) -> list[list[int]]:
    """The new tokens of each prompt, on one device.

    Prompts are lists of token ids of any lengths. Temperature 0 takes the most likely token, else
    one is drawn. A prompt ends after a token of `stop`, which is its last.
    """

    def next_logits(tokens_BS, segments_BS, index_B):
        return _next_logits(model, tokens_BS, segments_BS, index_B)

    vocab = model.cfg.vocab
    return decode(
        next_logits, prompts, max_new_tokens, vocab, temperature=temperature, seed=seed, stop=stop
    )


@jax.jit
def _next_logits(model: Decoder, tokens_BS, segments_BS, index_B):
    with precision(model.embed.dtype):
        x_BSD, _ = model.hidden(tokens_BS, segments_BS)
        x_B1D = jnp.take_along_axis(x_BSD, index_B[:, None, None], axis=1)
        return head.logits(x_B1D, *model.head_weights())[:, 0]


def decode(
    next_logits: NextLogits,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    vocab: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Iterable[int] = (),
) -> list[list[int]]:
    """`generate` for whoever brings `(tokens_BS, segments_BS, index_B) -> logits [B, V]`."""
    lengths_B = np.asarray([len(p) for p in prompts], np.int32)
    if not len(prompts) or lengths_B.min() < 1:
        raise UserError("every prompt needs at least one token")
    if any(not 0 <= t < vocab for p in prompts for t in p):
        raise UserError(f"a prompt has a token outside the vocabulary of {vocab}")
    if not (max_new_tokens >= 0 and temperature >= 0 and seed >= 0):  # NaN is refused too
        raise UserError("max_new_tokens, temperature and seed must not be negative")
    # Filled up on the right: a causal model does not see what follows.
    tokens_BS = np.zeros((len(prompts), lengths_B.max() + max_new_tokens), np.int32)
    for row, prompt in zip(tokens_BS, prompts, strict=True):
        row[: len(prompt)] = prompt
    rng, stop = np.random.default_rng(seed), set(stop)
    new = [[] for _ in prompts]
    open_B = np.ones(len(prompts), bool)
    for _ in range(max_new_tokens):
        segments_BS = (np.arange(tokens_BS.shape[1]) < lengths_B[:, None]).astype(np.int32)
        logits_BV = np.asarray(next_logits(tokens_BS, segments_BS, lengths_B - 1))
        chosen_B = _choose(logits_BV, temperature, rng)
        for b in np.flatnonzero(open_B):
            tokens_BS[b, lengths_B[b]] = chosen_B[b]
            new[b].append(int(chosen_B[b]))
        lengths_B = lengths_B + open_B.astype(np.int32)
        open_B &= ~np.isin(chosen_B, list(stop))
        if not open_B.any():
            break
    return new


def _choose(logits_BV, temperature: float, rng: np.random.Generator):
    if temperature == 0:
        return logits_BV.argmax(axis=1)
    # The largest of scores with Gumbel noise is a draw from their softmax.
    return (logits_BV / temperature + rng.gumbel(size=logits_BV.shape)).argmax(axis=1)
