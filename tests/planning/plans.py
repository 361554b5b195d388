"""Configs of many shapes for what is planned."""

import dataclasses

from zayajax.planning.arithmetic.measured import PAPER
from zayajax.settings import Config, ConfigError, DataConfig, ModelConfig, OptimConfig, TrainConfig

TINY = Config(
    model=ModelConfig(
        vocab=272,
        layers=3,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=64,
        experts=8,
        expert_hidden=256,
        router_hidden=32,
    ),
    data=DataConfig(corpus="not read"),
    optim=OptimConfig(horizon=1),
    train=TrainConfig(steps=1, batch=8, sequence=128, compute_dtype="float32"),
)
ZAYA1 = PAPER
# Every width another, several experts a GPU, rows with a head of their own and biases.
ODD = dataclasses.replace(
    PAPER,
    model=dataclasses.replace(
        PAPER.model,
        vocab=5000,
        layers=6,
        hidden=1024,
        heads=6,
        experts=24,
        expert_hidden=1536,
        router_hidden=160,
        cca_time0=3,
        tied_head=False,
    ),
    mesh=dataclasses.replace(PAPER.mesh, nodes=1),
    train=dataclasses.replace(PAPER.train, batch=8),
)


def changed(config: Config, **settings) -> Config:
    """With other settings of the sections mesh, train and optim; by default one row a GPU."""
    sections = {"mesh": config.mesh, "train": config.train, "optim": config.optim}
    names = {k: {f.name for f in dataclasses.fields(s)} for k, s in sections.items()}
    if "batch" not in settings:
        nodes = settings.get("nodes", config.mesh.nodes)
        settings["batch"] = nodes * settings.get("gpus", config.mesh.gpus)
    parts = {
        k: dataclasses.replace(s, **{n: v for n, v in settings.items() if n in names[k]})
        for k, s in sections.items()
    }
    return dataclasses.replace(config, **parts)


def possible(config: Config, **settings) -> Config | None:
    try:
        return changed(config, **settings)
    except ConfigError:
        return None
