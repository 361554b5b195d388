"""What a resumed run may not change: other numbers would come out, or none at all."""

import json
from collections.abc import Mapping
from pathlib import Path

from zayajax.config import to_tree
from zayajax.errors import UserError
from zayajax.settings import Config

FIXED = (  # the text itself is compared by its fingerprint, wherever it lies
    "model.",
    "data.held_out",
    "data.text_field",
    "train.seed",
    "train.sequence",
    "train.param_dtype",
    "optim.matrices",
    "optim.momentum",
    "optim.state_dtype",
)


# Where and when a run saves, and how it watches over itself: not a word about these. What of
# `faults.` decides which steps count changes the numbers.
FREE = (
    "checkpoint.",
    "faults.recheck_every",
    "faults.stall",
    "faults.patience",
    "faults.grace",
)


def require_compatible(
    record: Mapping, config: Config, data: str, tokenizer: str, source: Path
) -> list[str]:
    """UserError where a resumed run would not be the same run; returns other changes, in words.

    `data` and `tokenizer` are the fingerprints of the text and of what made tokens of it.
    """
    saved, live = (_flat(c) for c in (record["config"], to_tree(config)))
    changes = [
        f"{k}: {saved.get(k)!r} -> {live.get(k)!r}"
        for k in sorted({*saved, *live})
        if saved.get(k) != live.get(k) and not k.startswith(FREE)
    ]
    if fixed := [c for c in changes if c.startswith(FIXED)]:
        raise UserError(
            f"{source}: is of another run ({'; '.join(fixed)}); go on with its own "
            f"{source.parents[1] / 'config.toml'}, or start over with --fresh"
        )
    if record["tokenizer"] != tokenizer:
        raise UserError(
            f"{source}: the tokenizer is another one (data.tokenizer: "
            f"{saved['data.tokenizer']!r} then, {live['data.tokenizer']!r} now); restore it, or "
            "start a new phase in another folder with --init-from"
        )
    if record["data"] != data:
        raise UserError(
            f"{source}: the text has changed since (data.corpus); restore it, or start a new phase "
            "in another folder with --init-from"
        )
    return changes


def _flat(tree: Mapping) -> dict:
    plain = json.loads(json.dumps(tree))  # tuples and lists alike
    return {f"{s}.{k}": v for s, values in plain.items() for k, v in values.items()}
