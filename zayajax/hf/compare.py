"""Whether a model gives the numbers that it should: its logits against a reference's.

Shape letters: B batch, S sequence, V vocabulary, L layers.
"""

import dataclasses
from pathlib import Path
from zipfile import BadZipFile

import jax
import numpy as np

from zayajax.errors import UserError
from zayajax.model import head
from zayajax.model.common import precision

LOGITS, LOSS = 1e-4, 2e-6  # largest absolute and largest relative difference of float32
KEYS = ("input_ids", "attention_mask", "position_ids", "logits", "loss", "routes")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far a model is from its reference, and where the two part."""

    logits: float  # largest absolute difference at a real token
    at: tuple[int, int]  # its row and position
    loss: float  # relative difference
    routes: int  # tokens of all layers that chose another class
    chosen: int  # tokens of all layers
    first: tuple[int, int, int] | None  # layer, row, position of the first other choice

    @property
    def passed(self) -> bool:
        # `not >` would let NaN pass.
        return self.logits <= LOGITS and self.loss <= LOSS and self.routes == 0

    def __str__(self) -> str:
        text = (
            f"logits differ by at most {self.logits:.2e} (row {self.at[0]}, position {self.at[1]}; "
            f"allowed {LOGITS:.0e}), the loss by {self.loss:.1e} of itself (allowed {LOSS:.0e}), "
            f"{self.routes} of {self.chosen} tokens took another expert"
        )
        if self.first:
            layer, row, position = self.first
            text += f", the first in layer {layer} (row {row}, position {position})"
        return text


@dataclasses.dataclass(frozen=True)
class Check:
    """What a look at a checkpoint found: its tensors, and how they compare with a reference."""

    layout: str
    tensors: int
    parameters: int
    dtypes: dict[str, int]  # tensors of each
    not_finite: tuple[str, ...]  # tensors that hold NaN or infinity
    comparison: Comparison | None = None  # None: no reference was given

    @property
    def passed(self) -> bool:
        return not self.not_finite and (self.comparison is None or self.comparison.passed)

    def __str__(self) -> str:
        dtypes = ", ".join(f"{n} {dtype}" for dtype, n in sorted(self.dtypes.items()))
        lines = [
            f"{self.layout} layout, {self.tensors} tensors ({dtypes}), {self.parameters:,} numbers"
        ]
        if self.not_finite:
            some = ", ".join(self.not_finite[:4])
            lines.append(f"{len(self.not_finite)} tensors are not finite: {some}")
        if self.comparison:
            lines.append(str(self.comparison))
        return "\n".join([*lines, "passed" if self.passed else "FAILED"])


@jax.jit
def forward(model, tokens_BS, segments_BS, positions_BS):
    """Logits `[B, S, V]` and the class that each layer's router chose `[L, B, S]`."""
    with precision(model.embed.dtype):
        x_BSD, routing = model.hidden(tokens_BS, segments_BS, positions_BS)
        return head.logits(x_BSD, *model.head_weights()), routing.choices_LBS


def loss_of(logits_BSV, tokens_BS, mask_BS) -> float:
    """Mean loss in nats over the pairs of neighbours that are both real, in float64."""
    x = np.asarray(logits_BSV, np.float64)[:, :-1]
    top = x.max(-1, keepdims=True)
    lse = np.log(np.exp(x - top).sum(-1)) + top[..., 0]
    right = np.take_along_axis(x, np.asarray(tokens_BS)[:, 1:, None], axis=-1)[..., 0]
    pairs = (mask_BS[:, 1:] * mask_BS[:, :-1]).astype(bool)
    return float((lse - right)[pairs].mean())


def read_reference(path) -> dict[str, np.ndarray]:
    """`expected.npz` with the arrays `KEYS`; UserError if it is not one."""
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [key for key in KEYS if key not in file]
            if missing:
                raise UserError(f"{path}: lacks the arrays {', '.join(missing)}")
            return {key: file[key] for key in KEYS}
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such reference") from None
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise UserError(f"{path}: cannot be read as a reference ({error})") from None


def compare(model, reference: dict[str, np.ndarray]) -> Comparison:
    """`model` in float32 with the skip rule "zero", since that is what transformers computes."""
    ids, mask, positions = (reference[k].astype(np.int32) for k in KEYS[:3])
    cfg = model.cfg
    if ids.max() >= cfg.vocab or reference["logits"].shape != (*ids.shape, cfg.vocab):
        raise UserError(
            f"the reference has logits {list(reference['logits'].shape)}, which do not fit "
            f"{list(ids.shape)} tokens and a vocabulary of {cfg.vocab}"
        )
    if reference["routes"].shape != (cfg.layers, ids.size):
        raise UserError(
            f"the reference has routes {list(reference['routes'].shape)}, which do not fit "
            f"{cfg.layers} layers and {ids.size} tokens"
        )
    logits, routes = (np.asarray(x) for x in forward(model, ids, mask, positions))
    real = mask.astype(bool)
    apart = np.abs(logits - reference["logits"]).max(-1)
    apart = np.where(real, apart, -1)
    # argmax takes NaN for the largest, as it should be here.
    at = np.unravel_index(np.argmax(apart), apart.shape)
    wanted = float(reference["loss"])
    loss = abs(loss_of(logits, ids, mask) - wanted) / abs(wanted)
    other = (routes != reference["routes"].reshape(routes.shape)) & real
    places = np.argwhere(other)
    return Comparison(
        logits=float(apart[at]),
        at=tuple(int(i) for i in at),
        loss=loss,
        routes=int(other.sum()),
        chosen=int(real.sum()) * cfg.layers,
        first=tuple(int(i) for i in places[0]) if len(places) else None,
    )
