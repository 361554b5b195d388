"""A config on more or fewer nodes than it names."""

import dataclasses
from fractions import Fraction

from zayajax.errors import UserError
from zayajax.machine import Machine
from zayajax.settings import Config, ConfigError


def at_scale(
    config: Config, nodes: int | None = None, gpus: int | None = None, layout: str | None = None
) -> Config:
    """`config` on `nodes` nodes of `gpus` GPUs, by default those that it names.

    Each GPU keeps the tokens that it has there: the batch grows and shrinks with the GPUs. Raises
    UserError where that is no config, with the reason.
    """
    nodes = config.mesh.nodes if nodes is None else nodes
    gpus = config.mesh.gpus if gpus is None else gpus
    batch = batch_at(config, nodes, gpus)
    mesh = dataclasses.replace(
        config.mesh, nodes=nodes, gpus=gpus, layout=layout or config.mesh.layout
    )
    train = dataclasses.replace(config.train, batch=batch)
    try:
        return dataclasses.replace(config, mesh=mesh, train=train)
    except ConfigError as error:
        raise UserError(f"on {nodes} nodes of {gpus} GPUs: {error}") from None


def batch_at(config: Config, nodes: int, gpus: int) -> int:
    """Sequences a step with which each GPU has as many tokens as in `config`."""
    if nodes < 1:
        raise UserError(f"--nodes: must be positive, and is {nodes}")
    same = Fraction(config.train.batch * nodes * gpus, config.mesh.devices)
    if same.denominator > 1:
        raise UserError(
            f"{config.train.batch} sequences on {config.mesh.devices} GPUs are {float(same):g} on "
            f"{nodes * gpus}; say how many there are with --train.batch"
        )
    return int(same)


def check_node(config: Config, machine: Machine):
    """Raises UserError where the config's nodes are neither this machine's nor single GPUs."""
    gpus = config.mesh.gpus
    if gpus not in (1, machine.gpus):
        raise UserError(
            f"mesh.gpus = {gpus}: a node of {machine.name} has {machine.gpus} GPUs, and "
            f"{machine.share(gpus)}; use mesh.gpus = {machine.gpus}"
        )
