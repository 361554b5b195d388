"""The training step, written for one device: each of its collectives is in this source.

`build` makes it one `jax.shard_map` under one `jax.jit`; without a mesh, only the latter.

Shape letters: B sequences of this device, S sequence, L layers, C router classes (of rooms:
capacities of the exchange), V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from zayajax import optim
from zayajax.layout import LAYOUTS, LOCAL, WORLD, Layout
from zayajax.mesh import (
    gather,
    global_norm,
    layer_gather,
    places,
    scatter,
    stored_axes,
    stored_specs,
    total,
)
from zayajax.model import head
from zayajax.model.common import precision
from zayajax.model.zaya import Decoder
from zayajax.optim import balance
from zayajax.optim.schedule import learning_rate
from zayajax.settings import Config, MeshConfig
from zayajax.training import recheck
from zayajax.training.guard import judge
from zayajax.training.state import TrainState, init_state

REQUESTS = "requests"


class Program(NamedTuple):
    """The compiled functions of a run on one mesh, and where their arguments live."""

    init: Callable  # key -> state
    train_step: Callable  # (state, batch) -> (state, metrics); the state is donated
    eval_step: Callable  # (params, batch) -> sums: loss, weight, counts_LC, rooms_LC
    next_logits: Callable  # (params, tokens_BS, segments_BS, index_B) -> [B, V] float32
    compare: Callable | None  # (params, batch) -> `recheck.pair_losses`; None without replicas
    state: TrainState  # abstract, with shardings: what a checkpoint is restored against
    batch_sharding: NamedSharding | None


class Setting(NamedTuple):
    """What the step depends on beside its arguments."""

    config: Config
    layout: Layout
    where: Decoder  # the `mesh.Place` of each parameter
    tx: optax.GradientTransformation


def usable(params: Decoder, at: Setting):
    """The weights as the model uses them, and what fetches a layer's inside the loop."""
    train = at.config.train
    model = gather(params, at.where, train.compute_dtype)
    if at.config.mesh.zero == 1:
        return model, lambda block: block
    where = at.where.layers
    return model, layer_gather(where, train.compute_dtype, train.reduce_dtype)


def loss_sums(model: Decoder, fetch, batch, at: Setting):
    """The weighted SUM of losses over the tokens at hand, and all sums that metrics need."""
    x_BSD, routing = model.hidden(
        batch["tokens"],
        batch["segments"],
        batch["positions"],
        layout=at.layout,
        remat=at.config.train.remat,
        fetch=fetch,
    )
    x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
    targets_T, weights_T = batch["targets"].reshape(-1), batch["weights"].reshape(-1)
    loss = head.nll_sum(x_TD, *model.head_weights(), targets_T, weights_T)
    sums = {"counts_LC": routing.counts_LC, "rooms_LC": routing.rooms_LC}
    return loss, sums | {"loss": loss, "weight": weights_T.sum()}


def gradients(params: Decoder, batch, *, at: Setting):
    """Gradients of the mean loss of the global batch, stored as the parameters; and the sums."""
    cfg, A = at.config, at.config.train.micro_batches
    model, fetch = usable(params, at)
    batch, requests = _split(batch)

    def micro_step(grads, micro_batch):
        loss = partial(loss_sums, fetch=fetch, batch=micro_batch, at=at)
        new, sums = jax.grad(loss, has_aux=True)(model)
        return jax.tree.map(jnp.add, grads, new), sums

    zeros = jax.tree.map(partial(jnp.zeros_like, dtype=jnp.float32), model)
    micro_batches = jax.tree.map(lambda x: x.reshape(A, -1, x.shape[-1]), batch)
    grads, sums = jax.lax.scan(micro_step, zeros, micro_batches)

    sums = jax.tree.map(lambda x: x.sum(0), sums)
    sums = _everywhere(sums, requests, at)
    weight = _positive(sums["weight"])
    grads = scatter(grads, at.where, cfg.train.reduce_dtype)
    return jax.tree.map(lambda g: g / weight, grads), sums


def train_step(state: TrainState, batch, *, at: Setting):
    """One update, or none where the batch is bad (`guard.judge`); its metrics."""
    cfg = at.config
    grads, sums = gradients(state.params, batch, at=at)
    norm, loss = global_norm(grads, at.where), sums["loss"] / _positive(sums["weight"])
    bad, guard = judge(state.guard, loss, norm, sums["weight"], cfg.faults.spike)
    grads = jax.tree.map(lambda g: g * jnp.minimum(1, cfg.optim.clip / norm), grads)
    bias = grads.layers.router.balance_bias
    excess = balance.excess(sums["counts_LC"], cfg.optim.balance_skip)
    grads.layers.router.balance_bias = bias.replace(excess)

    params, opt_state = optim.apply(at.tx, grads, state.opt_state, state.params, bad > 0)
    metrics = sums | {"loss": loss, "grad_norm": norm, "bad": bad}
    metrics |= {"bad_in_row": guard.bad_in_row, "skipped": guard.skipped}
    metrics["learning_rate"] = learning_rate(cfg.optim)(state.step)
    return TrainState(state.step + 1, params, opt_state, guard), metrics


def _split(batch) -> tuple[dict, dict]:
    """The rows, and what processes ask of each other (`feed.Feed.put`), where there is anything."""
    rows = {name: x for name, x in batch.items() if name != REQUESTS}
    return rows, {REQUESTS: batch[REQUESTS].sum(0)} if REQUESTS in batch else {}


def _everywhere(sums: dict, requests: dict, at: Setting) -> dict:
    """Sums over all devices. Requests travel along with what a step sums anyway, so that all
    processes learn of one at the same step."""
    with jax.named_scope("metrics"):
        return total(sums | requests, at.layout.tokens)


def _positive(weight):
    return jnp.where(weight > 0, weight, 1)  # a batch of padding has loss 0 and moves nothing


def eval_step(params: Decoder, batch, *, at: Setting):
    model, fetch = usable(params, at)
    batch, requests = _split(batch)
    _, sums = loss_sums(model, fetch, batch, at)
    return _everywhere(sums, requests, at)


def compare(params: Decoder, batch, *, at: Setting, axis: str):
    """The losses that `recheck.find_suspects` takes, of a first row."""
    model, fetch = usable(params, at)
    rows, _ = _split(batch)
    return recheck.pair_losses(lambda rows: loss_sums(model, fetch, rows, at)[0], rows, axis)


def next_logits(params: Decoder, tokens_BS, segments_BS, index_B, *, at: Setting):
    """Logits after token `index_B` of each row, `[B, V]`, float32."""
    model, fetch = usable(params, at)
    x_BSD, _ = model.hidden(tokens_BS, segments_BS, layout=at.layout, fetch=fetch)
    x_B1D = jnp.take_along_axis(x_BSD, index_B[:, None, None], axis=1)
    return head.logits(x_B1D, *model.head_weights())[:, 0]


def layout_of(config: MeshConfig, mesh: Mesh) -> Layout:
    """The layout that a config names, with its ways to attend and to exchange."""
    way = config.exchange
    if way == "ragged" and isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu":
        way = "emulated"
    layout = LAYOUTS[config.layout]
    return dataclasses.replace(layout, attention=config.attention, exchange=way)


def build(config: Config, mesh: Mesh | None = None) -> Program:
    """Everything a run calls, for this mesh. No other function of the run calls `jax.jit`."""
    # The first state is the same on every mesh; how it is updated is not.
    init = partial(init_state, config=config, tx=optim.build(config.optim))
    abstract = jax.eval_shape(init, jax.random.key(0))
    tx = optim.build(config.optim, stored_axes(abstract.params, mesh))
    layout = LOCAL if mesh is None else layout_of(config.mesh, mesh)
    # Prompts are spread over all devices, each whole, whatever the training does with its rows.
    by_prompt = layout if mesh is None else dataclasses.replace(layout, batch=WORLD, sequence=())

    def exact(fn, layout):
        """Traced under the precision that the compute dtype promises, backward passes too."""
        at = Setting(config, layout, places(abstract.params, mesh, layout, config.mesh.zero), tx)

        def run(*args):
            with precision(config.train.compute_dtype):
                return fn(*args, at=at)

        return run

    step, evaluate = exact(train_step, layout), exact(eval_step, layout)
    logits = exact(next_logits, by_prompt)
    if mesh is None:
        step = jax.jit(step, donate_argnums=0)
        rest = jax.jit(evaluate), jax.jit(logits), None, abstract, None
        return Program(jax.jit(init), step, *rest)

    specs = stored_specs(abstract, mesh)
    rows, prompts, whole = P(layout.batch, layout.sequence), P(by_prompt.batch), P()
    state_at = jax.tree.map(partial(NamedSharding, mesh), specs)

    def on_mesh(fn, in_specs, out_specs, **options):
        at = partial(jax.tree.map, partial(NamedSharding, mesh))
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped, in_shardings=at(in_specs), out_shardings=at(out_specs), **options)

    axis = recheck.replica_axis(config.mesh)
    pairs = axis and exact(partial(compare, axis=axis), layout)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, state_at
    )
    return Program(
        # The only program that XLA partitions: each device draws its own shards.
        init=jax.jit(init, out_shardings=state_at),
        train_step=on_mesh(step, (specs, rows), (specs, whole), donate_argnums=0),
        eval_step=on_mesh(evaluate, (specs.params, rows), whole),
        next_logits=on_mesh(logits, (specs.params, prompts, prompts, prompts), prompts),
        compare=axis and on_mesh(pairs, (specs.params, rows), whole),
        state=state,
        batch_sharding=NamedSharding(mesh, rows),
    )
