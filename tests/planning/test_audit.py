"""The audit of real steps, and the mistakes that it is there to find, planted in them."""

import dataclasses
import json
import math
from functools import cache, partial

import jax
import pytest
from batches import small_config

from zayajax import exchange, mesh as meshes
from zayajax.cli import main
from zayajax.config import to_toml
from zayajax.errors import UserError
from zayajax.layout import GPU
from zayajax.machine import MI300X
from zayajax.planning import audit as audits, fabric
from zayajax.planning.audit import audit

KEYS = {"op", "scope", "dtype", "span", "group_size", "bytes", "count", "seconds"}
NODES, GPUS, MICRO, LAYERS, S = 4, 8, 2, 3, 12


def config(**changes):
    rows = NODES * GPUS * MICRO
    wide = dict(model__hidden=128, train__micro_batches=MICRO, train__compute_dtype="bfloat16")
    wide |= dict(mesh__nodes=NODES, mesh__gpus=GPUS, train__batch=rows)
    return small_config(**wide | changes)


def found(step="train", **changes):
    return _found(step, json.dumps(changes))


@cache
def _found(step, changes):
    return audit(config(**json.loads(changes)), step=step)


LONG = dict(train__sequence=1024)
LAYOUTS = {
    "pretrain": {},
    "context": dict(mesh__layout="context", **LONG),
    "context-wide": dict(mesh__layout="context-wide", **LONG),
    "ring": dict(mesh__layout="context", mesh__attention="ring", **LONG),
    # Gradients go home over as many GPUs as there are nodes: in one ring, whatever that is.
    "wide ring": dict(mesh__layout="context-wide", mesh__attention="ring", **LONG),
    "zero 3": dict(mesh__zero=3),
    "sliding": dict(model__sliding_layers=[0, 2], model__sliding_window=4),
    "one node": dict(mesh__nodes=1),
    "one GPU a node": dict(mesh__gpus=1),
    "adamw": dict(optim__matrices="adamw"),
    "ragged": dict(mesh__exchange="ragged"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", audits.STEPS)
def test_every_layout_passes(layout, step):
    got = found(step, **LAYOUTS[layout])
    assert got.verdict == "ok" and got.ok
    rows = got.collectives.rows
    # One group a node or a rail; the world, and part of a node, nowhere.
    sizes = {("node", GPUS), ("rail", NODES)}
    if layout == "one node":
        sizes = {("node", GPUS)}
    if layout == "one GPU a node":
        sizes = {("rail", NODES)}
    assert {(r["span"], r["group_size"]) for r in rows} <= sizes
    assert rows and json.loads(json.dumps(got.to_json())) == got.to_json()
    for row in rows:
        assert KEYS <= row.keys() and row["op"] in fabric.OPS
        at = (row["op"], row["bytes"], row["span"], row["group_size"])
        assert row["seconds"] == fabric.seconds(MI300X, *at) > 0
        assert row["seconds_switched"] == fabric.seconds(MI300X.switched(), *at)
        assert 0 <= row["hidden"] <= row["seconds"] * (1 + 1e-9)
        assert (row["count"] == 0) == (row["if_skewed"] is not None)
    assert got.footprint["fits"]


@pytest.mark.smoke
def test_a_balanced_step_takes_the_smallest_capacity():
    rows = found().collectives.rows
    tokens = MICRO * S * NODES * GPUS // (NODES * GPUS) // MICRO  # of a micro-batch on each GPU
    sent = [r for r in rows if r["scope"] == "exchange" and r["dtype"] == "bfloat16"]
    runs = [r for r in sent if r["count"]]
    rooms = exchange.capacities(tokens, GPUS)
    # To the experts and back; in the backward pass the tokens, their gradient, and one back.
    assert [r["count"] for r in runs] == [MICRO * LAYERS] * 5
    assert {r["bytes"] for r in runs} == {GPUS * rooms[0] * 128 * 2}
    assert {r["bytes"] for r in sent} == {GPUS * room * 128 * 2 for room in rooms}
    assert {r["if_skewed"] for r in sent if not r["count"]} == {MICRO * LAYERS}


def test_more_than_a_group_of_one_is_listed_and_no_other():
    one = found(mesh__nodes=1).collectives.rows
    assert {r["span"] for r in one} == {"node"}
    assert {r["scope"] for r in one} == {r["scope"] for r in found().collectives.rows}
    alone = audit(config(mesh__nodes=1, mesh__gpus=1, train__batch=MICRO))
    assert alone.ok and not alone.collectives.rows
    assert "verdict: ok" in repr(alone) and alone.plot()


# Mistakes, planted in what the step really calls, through the command.


@pytest.fixture
def command(tmp_path, capsys):
    def run(*words, **changes):
        path = tmp_path / "planted.toml"
        path.write_text(to_toml(config(**changes)))
        status = main(["audit", str(path), *words, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_the_command_passes_what_is_right(command):
    status, got = command("--nodes", "2")
    assert (status, got["verdict"]) == (0, "ok")
    assert {r["group_size"] for r in got["collectives"]} == {2, 8}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mesh.gpus", "4"], "(4 - 1) x 64"),
        (["--nodes", "2", "--mesh.nodes", "3"], "--nodes 2: --mesh.nodes is 3; leave one out"),
        (
            ["--layout", "context", "--mesh.layout", "pretrain"],
            "--layout context: --mesh.layout is",
        ),
    ],
)
def test_no_setting_of_the_mesh_is_ignored(words, said, tmp_path, capsys):
    path = tmp_path / "planted.toml"
    path.write_text(to_toml(config()))
    assert main(["audit", str(path), *words]) == 2
    assert said in capsys.readouterr().err


def test_one_gpu_a_node_can_be_asked_for(command):
    status, got = command("--nodes", "2", "--mesh.gpus", "1")
    assert status == 0 and {(r["span"], r["group_size"]) for r in got["collectives"]} == {
        ("rail", 2)
    }


def planted(monkeypatch, fn, module=exchange, name="all_to_all"):
    """`fn(real, *args)` stands in for a function that the step calls."""
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: fn(real, *args, **kwargs))


def test_a_group_of_part_of_a_node_is_caught(command, monkeypatch):
    def halves(real, x_RT, axes):
        with jax.named_scope("exchange"):
            halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
            parts = [
                jax.lax.all_to_all(x, GPU, 0, 0, tiled=True, axis_index_groups=halves)
                for x in (x_RT[:4], x_RT[4:])
            ]
            return jax.numpy.concatenate(parts)

    planted(monkeypatch, halves)
    status, got = command()
    assert status == 1
    assert "moe/exchange: all_to_all (partial)" in got["verdict"]
    parts = [r for r in got["collectives"] if r["span"] == "partial"]
    assert parts and {r["group_size"] for r in parts} == {4}


def test_a_permute_between_neighbours_is_caught(command, monkeypatch):
    def swapped(real, x_RT, axes):
        pairs = [(i, i ^ 1) for i in range(GPUS)]
        with jax.named_scope("neighbours"):
            x_RT = jax.lax.ppermute(x_RT, GPU, pairs)
        return real(x_RT, axes)

    planted(monkeypatch, swapped)
    status, got = command()
    assert status == 1 and "neighbours: permute (partial)" in got["verdict"]


def test_groups_that_are_the_whole_node_are_none(command, monkeypatch):
    def spelt_out(real, x_RT, axes):
        with jax.named_scope("exchange"):
            every = [list(range(GPUS))]
            return jax.lax.all_to_all(x_RT, GPU, 0, 0, tiled=True, axis_index_groups=every)

    planted(monkeypatch, spelt_out)
    assert command()[0] == 0


def test_a_weight_collective_in_a_loop_is_caught_under_zero_1(command, monkeypatch):
    """As zero 3 gathers: each layer's weights, inside the loop over layers."""
    real = meshes.places

    def layer_by_layer(params, mesh, layout, zero=1):
        return real(params, mesh, layout, 3)

    monkeypatch.setattr("zayajax.training.step.places", layer_by_layer)
    monkeypatch.setattr("zayajax.training.step.usable", _usable_layer_by_layer)
    status, got = command()
    assert status == 1
    assert "gather: all_gather" in got["verdict"] and "inside a loop" in got["verdict"]
    assert "moe" not in got["verdict"]  # activations have business there


def _usable_layer_by_layer(params, at):
    train = at.config.train
    model = meshes.gather(params, at.where, train.compute_dtype)
    return model, meshes.layer_gather(at.where.layers, train.compute_dtype, train.reduce_dtype)


def test_a_shared_weights_gradient_in_a_loop_is_caught(command, monkeypatch):
    """Left out: the cast that makes gathered weights each device's own. Then the transpose of each
    use of one sums its gradient over the mesh, in each layer of each micro-batch."""
    monkeypatch.setattr(jax.lax, "pcast", lambda x, axes, to: x)
    try:
        status, got = command()
    except TypeError:
        pytest.skip("this version of JAX refuses the program itself")
    assert status == 1 and "all_reduce" in got["verdict"] and "inside a loop" in got["verdict"]


def test_what_automatic_sharding_infers_is_caught(command, monkeypatch):
    """A sum over a split array outside the step's `shard_map`: compiled, it needs an all-reduce."""

    def with_more(real, config, mesh=None):
        program = real(config, mesh)

        @partial(jax.jit, donate_argnums=0)
        def step(state, batch):
            state, metrics = program.train_step(state, batch)
            total = sum(x.sum() for x in jax.tree.leaves(state.params) if x.ndim > 1)
            return state, metrics | {"total": total}

        return program._replace(train_step=step)

    small = dict(mesh__nodes=1, model__hidden=16, model__layers=1, optim__matrices="adamw")
    assert command("--compile", **small)[0] == 0
    planted(monkeypatch, with_more, audits, "build")
    assert command(**small)[0] == 0  # not in the traced program
    status, got = command("--compile", **small)
    assert status == 1
    assert "reduce_sum" in got["verdict"] and "inferred by XLA" in got["verdict"]


@pytest.mark.parametrize(
    ("changes", "step", "words"),
    [
        ({}, "backward", "one of train, eval, decode"),
        (dict(mesh__gpus=4), "train", "(4 - 1) x 64"),
        (dict(mesh__gpus=2), "eval", "use mesh.gpus = 8"),
    ],
)
def test_what_is_no_step_or_no_node_is_refused(changes, step, words):
    with pytest.raises(UserError) as error:
        audit(config(**changes), step=step)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_compiling_for_more_devices_than_there_are_is_refused():
    with pytest.raises(UserError, match="restart Python"):
        audit(config(), compile=True)


# Memory by kind.


def state_bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_weights_and_moments_are_what_one_device_stores():
    got, cfg = found().footprint, config()
    state = audits.build(cfg).state
    axes = meshes.stored_axes(state.params, meshes.abstract_mesh(cfg.mesh.nodes, cfg.mesh.gpus))
    sizes = {"node": NODES, "gpu": GPUS}
    parts = {path: math.prod(sizes[a] for dim in dims for a in dim) for path, dims in axes.items()}
    params = meshes.by_path(state.params)
    assert got["weights"] == sum(4 * v.size // parts[path] for path, v in params.items())
    whole = {"weights": state_bytes(state.params), "moments": state_bytes(state.opt_state)}
    # On one GPU all of it is there, to the byte, and nothing has to be gathered in float32.
    alone = dict(mesh__nodes=1, mesh__gpus=1, train__batch=2, train__compute_dtype="float32")
    got = audit(config(**alone)).footprint
    assert got["weights"] == whole["weights"]
    scalars = 4 + state_bytes(state.guard)  # the number of the step, and what is known of losses
    assert got["moments"] == whole["moments"] + scalars and scalars == 24
    assert got["gathered"] == 0


def test_gathered_copies_and_gradients_by_their_shapes():
    cfg = config()
    params = meshes.by_path(audits.build(cfg).state.params)
    here = {p: v.size // (GPUS if "experts" in p else 1) for p, v in params.items()}
    keep = {p for p, v in params.items() if v.get_metadata().get("keep")}
    split = {p for p, v in params.items() if p not in keep or "router" in p}
    got = found().footprint
    narrow = sum(2 * n for p, n in here.items() if p not in keep)
    router = sum(4 * here[p] for p in keep & split if params[p].ndim > 2)
    assert narrow <= got["gathered"] <= narrow + router
    own = narrow + sum(4 * here[p] for p in keep)
    assert got["gradients"] == own + 4 * sum(here.values())
    # A loop of one micro-batch sums nothing.
    assert found(train__micro_batches=1).footprint["gradients"] == own
    # Layer by layer, two of three are never there.
    assert found(mesh__zero=3).footprint["gathered"] < 0.6 * got["gathered"]
    for step in ("eval", "decode"):
        assert found(step).footprint["gradients"] == 0
        assert found(step).footprint["gathered"] == got["gathered"]


def test_activations_by_remat_and_by_batch():
    deep = dict(model__layers=12, **LONG)
    by_remat = found(**deep).footprint["activations_by_remat"]
    assert list(by_remat) == ["none", "names", "full"]
    assert by_remat["none"] > by_remat["names"] > by_remat["full"] > 0
    for remat, size in by_remat.items():
        other = found(train__remat=remat, **deep).footprint
        assert other["activations"] == size and other["activations_by_remat"] == by_remat
    twice = found(train__batch=4 * NODES * GPUS, **deep).footprint
    assert twice["activations"] == pytest.approx(2 * by_remat["names"], rel=0.1)
    assert "none" not in found(mesh__zero=3).footprint["activations_by_remat"]


def test_what_does_not_fit_is_said_and_is_no_offence():
    small = dataclasses.replace(MI300X, hbm=type(MI300X.hbm)(2**16, "a test"))
    got = audit(config(), small)
    assert not got.footprint["fits"] and got.ok
    assert "WARNING: does not fit the 64 KiB" in repr(got)
    assert "fits the" in repr(found()) and "WARNING" not in repr(found())


def test_it_can_be_read():
    got = found()
    text = repr(got)
    assert max(map(len, text.splitlines())) <= 120
    for scope in ("gather", "exchange", "scatter", "deal", "metrics", "norm"):
        assert f"\n{scope} " in text
    assert "<table>" in got._repr_html_() and "verdict: ok" in got._repr_html_()
    (axes,) = got.plot().axes
    drawn = sum(bar.get_width() for bar in axes.patches)
    rows = got.collectives.rows
    assert drawn == pytest.approx(1e3 * sum(r["count"] * r["seconds"] for r in rows))
