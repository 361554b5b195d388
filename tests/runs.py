"""A whole run, as small as it can be: two layers on eight emulated GPUs, and text made of words."""

import json
import random
from pathlib import Path

from zayajax.config import build
from zayajax.settings import Config

TREE = {
    "model": {
        "vocab": 264,
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "experts": 8,
        "expert_hidden": 32,
        "router_hidden": 8,
    },
    "mesh": {"nodes": 1, "gpus": 8},
    "optim": {"learning_rate": 1e-2, "horizon": 12, "warmup": 2},
    "train": {
        "steps": 12,
        "batch": 8,
        "sequence": 32,
        "eval_every": 6,
        "eval_batches": 2,
        "sample_tokens": 4,
        "compute_dtype": "float32",
    },
    "checkpoint": {"every": 6, "keep": 2},
}


def write_text(folder: Path, documents: int = 24, seed: int = 0) -> Path:
    """A folder of small text files."""
    rng = random.Random(seed)
    words = ["alpha", "beta", "gamma", "delta", "and", "or", "the"]
    folder.mkdir(parents=True)
    for i in range(documents):
        text = " ".join(rng.choices(words, k=rng.randint(4, 80)))
        (folder / f"{i:03}.txt").write_text(text + "\n")
    return folder


def tree(corpus: Path, **changes) -> dict:
    """The settings as nested tables; `changes` are `section__key=value`."""
    made = json.loads(json.dumps(TREE)) | {"data": {"corpus": str(corpus), "held_out": 0.2}}
    for key, value in changes.items():
        section, name = key.split("__")
        made.setdefault(section, {})[name] = value
    return made


def config(corpus: Path, **changes) -> Config:
    return build(tree(corpus, **changes))
