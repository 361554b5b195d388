"""What has been measured, beside what the plan's arithmetic says of it.

Nothing here is fitted: the rates of `roofline.REACHED` come from single operations.
"""

import dataclasses

from zayajax.machine import H200, MI300X
from zayajax.planning.arithmetic.candidates import Candidate, candidates, evaluate
from zayajax.planning.arithmetic.experts import Degree, one_batch
from zayajax.planning.arithmetic.inventory import parameters
from zayajax.settings import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from zayajax.tables import Column, Table, duration

# ZAYA1-8B as it was pretrained: arXiv 2511.17127.
ZAYA1 = ModelConfig(
    vocab=262272,
    layers=40,
    hidden=2048,
    heads=8,
    kv_heads=2,
    head_dim=128,
    experts=16,
    expert_hidden=2048,
    router_hidden=256,
    rope_theta=1e4,
)
PAPER = Config(
    model=ZAYA1,
    data=DataConfig(corpus="not read"),
    optim=OptimConfig(horizon=1),
    train=TrainConfig(steps=1, batch=4096, sequence=4096),
    mesh=MeshConfig(nodes=128, gpus=8, layout="pretrain", zero=1),
)
PAPER_SECONDS = 2.5  # an iteration, arXiv 2511.17127, the appendix on storage
# Tokens a second on one H200: README, "On GPUs" (jax 0.11.2, 2026-12-01).
SLICE = {"adamw": 44700, "muon": 35600}


def slice_config(matrices: str) -> Config:
    """Four layers of that model, with its whole vocabulary, on one GPU."""
    train = dataclasses.replace(PAPER.train, batch=4, param_dtype="bfloat16")
    return Config(
        model=dataclasses.replace(ZAYA1, layers=4),
        data=PAPER.data,
        optim=dataclasses.replace(PAPER.optim, matrices=matrices, state_dtype="bfloat16"),
        train=train,
        mesh=MeshConfig(nodes=1, gpus=1),
    )


def slices() -> Table:
    """The package's own runs on one H200, predicted and measured."""
    rows = []
    for matrices, measured in SLICE.items():
        config = slice_config(matrices)
        found = evaluate(config, H200, parameters(config))
        rate = found.tokens_per_second
        row = {"run": f"4 layers, {matrices}", "measured": measured, "predicted": rate}
        rows.append(row | {"ratio": rate / measured})
    columns = (
        Column("run", "one H200, 4 x 4,096 tokens", left=True),
        Column("measured", "tokens/s measured", "{:,.0f}".format),
        Column("predicted", "predicted", "{:,.0f}".format),
        Column("ratio", "ratio", "{:.2f}".format),
    )
    return Table("this package, measured", columns, rows)


def paper() -> Table:
    """One iteration of ZAYA1's pretraining on 128 x 8 MI300X, by parts, beside what it took.

    In the package's layout, with experts over the node; and as the paper says, data parallel and
    ZeRO-1, with all experts on every GPU.
    """
    here = _fastest()
    there = Degree.of(one_batch(PAPER, 4), 1)
    there = dataclasses.replace(
        there, config=dataclasses.replace(there.config, train=here.config.train)
    )
    ours, theirs = here.timing, there.timing(MI300X)
    rows = []
    for part in {**ours.arithmetic, **theirs.arithmetic}:
        rows.append(_row(part, ours.arithmetic, theirs.arithmetic))
    for part in {**ours.sent, **theirs.sent}:
        rows.append(_row(part, ours.sent, theirs.sent))
    for part in {**ours.optimizer, **theirs.optimizer}:
        rows.append(_row(part, ours.optimizer, theirs.optimizer))
    rows.append({"part": "predicted", "seconds": ours.step, "paper_seconds": theirs.step})
    rows.append({"part": "measured", "seconds": None, "paper_seconds": PAPER_SECONDS})
    columns = (
        Column("part", "part of an iteration", left=True),
        Column("seconds", "experts over the node", duration),
        Column("paper_seconds", "as the paper ran", duration),
    )
    kernel = theirs.step - theirs.arithmetic["attention"] * (1 - 39 / 234)
    notes = (
        f"Predicted {theirs.step:.2f} s of {PAPER_SECONDS} s: {theirs.step / PAPER_SECONDS:.0%}. "
        "No factor is fitted. Not in it: launches and the host, data, checkpoints, the slowest of "
        "1,024 GPUs, uneven routing; nor is it published what was recomputed (here remat "
        f"{here.config.train.remat!r}, the fastest that fits).",
        "Most uncertain are the rates, which are an H200's as parts of its best product: "
        f"attention, {theirs.arithmetic['attention']:.2f} s at XLA's 39 TFLOP/s there (at the 234 "
        f"of its best kernel an iteration would take {kernel:.2f} s), and the head, "
        f"{theirs.arithmetic['head']:.2f} s; then messages over 128 nodes, published for two.",
    )
    return Table(
        "ZAYA1-8B, 128 x 8 MI300X, 4,096 x 4,096 tokens an iteration", columns, rows, notes
    )


def _row(part: str, ours: dict, theirs: dict) -> dict:
    return {"part": part, "seconds": ours.get(part, 0.0), "paper_seconds": theirs.get(part, 0.0)}


def _fastest() -> Candidate:
    found, _ = candidates(PAPER, MI300X)
    allowed = [
        c
        for c in found
        if c.fits and c.config.mesh.layout == "pretrain" and c.config.mesh.zero == 1
    ]
    return max(allowed, key=lambda c: c.tokens_per_second)
