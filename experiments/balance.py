"""Does the balance bias even out the experts, from a bad start and after the text has changed?

    python experiments/balance.py [--steps 200] [--rate 5e-3] [--gpus 8]

configs/tiny.toml, with routers that send every token to one expert at first. Half way the text is
another: the same files, but in base64. Prints the entropy of the load by layer: 1 is even. What it
found: experiments/README.md.
"""

import argparse
import base64
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

import zayajax
from zayajax.data import sources
from zayajax.data.corpus import Documents
from zayajax.data.pipeline import Rows, batches
from zayajax.mesh import emulate, make_mesh
from zayajax.settings import Config
from zayajax.training.feed import Feed
from zayajax.training.metrics import entropy_by_layer
from zayajax.training.step import build

TINY = Path(__file__).parent.parent / "configs" / "tiny.toml"
FAVOURITE, LEAD = 3, 0.1
ENOUGH = 0.95


def texts(count: int, encode=lambda text: text) -> Documents:
    """The first files of Python's standard library, as bytes."""
    found = (text.encode() for _, text in sources.find("stdlib", "text").texts())
    return Documents.of(np.frombuffer(encode(next(found)), np.uint8) for _ in range(count))


def entropies(config: Config, corpora: list[Documents], steps: int) -> Iterator[list[float]]:
    """Of each layer, after each of `steps` steps on every corpus in turn."""
    program = build(config, make_mesh(config.mesh.nodes, config.mesh.gpus))
    train = config.train
    feed = Feed(program.batch_sharding, train.batch, train.sequence)
    state = program.init(jax.random.key(train.seed))
    state = dataclasses.replace(state, params=favour(state.params))
    for corpus in corpora:
        rows = Rows(corpus, train.sequence, train.seed)
        text = batches(rows, 0, train.batch, rows_of_batch=feed.rows, order=feed.order)
        for _ in range(steps):
            state, metrics = program.train_step(state, feed.put(next(text)))
            yield entropy_by_layer(jax.device_get(metrics["counts_LC"]))


def favour(params):
    """All routers start by giving one expert about twice the probability of any other: enough to
    get every token. The hidden state that `out` sees is positive on average."""
    out = params.layers.router.out
    params.layers.router.out = out.replace(out[...].at[:, :, FAVOURITE].add(LEAD))
    return params


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="on each text")
    parser.add_argument("--rate", default="5e-3", help="optim.balance_rate")
    parser.add_argument("--gpus", type=int, default=8, help="1 on a single GPU")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be positive")
    emulate(args.gpus)
    horizon = str(2 * args.steps)
    changes = {"mesh.gpus": str(args.gpus), "train.steps": horizon, "optim.horizon": horizon}
    changes |= {"optim.warmup": str(min(100, args.steps)), "optim.balance_rate": args.rate}
    config = zayajax.load_config(TINY, changes)
    corpora = [texts(200), texts(200, base64.b64encode)]
    layers = range(config.model.layers)
    print("| step | text | " + " | ".join(f"layer {i}" for i in layers) + " |")
    print("|---|---|" + "---|" * len(layers))
    names, passed = ("Python", "base64"), {}
    for i, h_L in enumerate(entropies(config, corpora, args.steps)):
        text, step = names[i // args.steps], i % args.steps + 1
        if np.mean(h_L) > ENOUGH:
            passed.setdefault(text, step)
        if step in (1, 5, 10, 20) or step % 50 == 0:
            print(f"| {step} | {text} | " + " | ".join(f"{h:.3f}" for h in h_L) + " |")
    for text in names:
        when = f"at step {passed[text]}" if text in passed else f"not in {args.steps} steps"
        print(f"{text}: the mean of the layers passes {ENOUGH} {when}")


if __name__ == "__main__":
    main()
