import math
import os
import subprocess
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import assert_close, random_model, small_model
from jax.sharding import NamedSharding, PartitionSpec as P

from zayajax import mesh as m
from zayajax.errors import UserError
from zayajax.layout import LOCAL, PRETRAIN, WORLD
from zayajax.mesh import abstract_mesh, by_path, gather, global_norm, places, scatter
from zayajax.model.zaya import Decoder

CFG = small_model(layers=2, attention_bias=True, head_bias=True, tied_head=False)
MESHES = [(2, 4), (1, 8), (8, 1)]


@cache
def decoder(**changes):
    return jax.eval_shape(partial(Decoder, small_model(**changes)), jax.random.key(0))


def shards(tree, mesh):
    """{path: (shape, shape on one device, spec)}"""
    specs = by_path(m.stored_specs(tree, mesh))
    specs = {path: s.get_value() for path, s in specs.items()}
    return {
        path: (v.shape, NamedSharding(mesh, specs[path]).shard_shape(v.shape), specs[path])
        for path, v in by_path(tree).items()
    }


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (128, 8)])
def test_each_device_holds_its_part_of_every_large_array(shape):
    n = math.prod(shape)
    cfg = dict(
        vocab=128, hidden=1024, head_dim=64, experts=16, expert_hidden=32, router_hidden=1024
    )
    found = shards(decoder(**cfg), abstract_mesh(*shape))
    large = {p: v for p, v in found.items() if math.prod(v[0]) >= 2**16 and "grouped" not in p}
    assert {"embed", "layers.experts.down", "layers.attn.q", "layers.router.down"} <= set(large)
    for path, (whole, part, _) in large.items():
        assert math.prod(part) * n == math.prod(whole), path
    whole, part, _ = found["layers.attn.grouped"]  # 64 channels: over the node alone
    assert math.prod(whole) == math.prod(part) * (n if 64 % n == 0 else shape[1])


def test_a_dimension_takes_the_axes_that_divide_it_from_the_left():
    def embed(hidden, shape):
        return shards(decoder(hidden=hidden), abstract_mesh(*shape))["embed"]

    assert embed(32, (2, 4))[1:] == ((48, 4), P(None, ("gpu", "node")))
    assert embed(32, (3, 4))[1] == (48, 8)  # over the node alone
    assert embed(36, (2, 8))[1] == (48, 36)  # whole, though 2 would divide it
    assert embed(36, (1, 4))[1] == (48, 9)


def test_stacked_layers_stay_whole_in_front():
    found = shards(decoder(), abstract_mesh(2, 4))
    assert found["layers.experts.gate_up"][2] == P(None, ("gpu",), ("node",), None)
    assert found["layers.experts.down"][2] == P(None, ("gpu",), None, ("node",))
    assert found["layers.attn.o"][2] == P(None, None, None, ("gpu", "node"))
    assert found["layers.norm_attn"][1] == (3, 16) and found["gamma"][1] == (2, 8)
    # The annotation counts from the end: one layer of the stack has the same.
    layer = jax.eval_shape(lambda t: jax.tree.map(lambda w: w[0], t.layers.experts), decoder())
    assert shards(layer, abstract_mesh(2, 4))["down"][2] == P(("gpu",), None, ("node",))


def test_places_follow_from_storage_and_layout():
    at = by_path(places(decoder(), abstract_mesh(2, 4), PRETRAIN, zero=3))
    at = {path: v.get_value() for path, v in at.items()}
    embed, experts, norm = at["embed"], at["layers.experts.down"], at["layers.norm_attn"]
    assert (embed.gathered, embed.split, embed.repeated) == (
        ((-1, ("gpu", "node")),),
        ("gpu", "node"),
        (),
    )
    assert (experts.gathered, experts.repeated) == (((-1, ("node",)),), ())  # no gather over gpu
    assert (norm.gathered, norm.split, norm.repeated) == ((), (), ("node", "gpu"))
    assert experts.in_layer and not embed.in_layer and not norm.in_layer
    at = by_path(places(decoder(), abstract_mesh(2, 4), PRETRAIN, zero=1))
    assert not any(v.get_value().in_layer for v in at.values())
    for v in by_path(places(decoder(), None, LOCAL)).values():
        assert v.get_value() == m.Place()


def on_mesh(fn, mesh, params, out_specs):
    specs = m.stored_specs(params, mesh)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(specs,), out_specs=out_specs))(params)


@pytest.mark.parametrize("shape", MESHES)
def test_gather_then_scatter_sums_what_each_device_had(shape):
    mesh, params = m.make_mesh(*shape), random_model(CFG)
    where = places(params, mesh, PRETRAIN)

    def there_and_back(params):
        back = scatter(gather(params, where, "float32"), where)
        return back, global_norm(params, where)

    specs = m.stored_specs(params, mesh)
    got, norm = jax.block_until_ready(on_mesh(there_and_back, mesh, params, (specs, P())))
    for path, v in by_path(params).items():
        n = shape[0] if ".experts." in path else 8  # each GPU of a node has other experts
        assert_close(by_path(got)[path][...], n * v[...], 1e-6)
    flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)]).astype(np.float64)
    np.testing.assert_allclose(norm, np.linalg.norm(flat), rtol=1e-6)


@pytest.mark.parametrize("shape", MESHES)
def test_gathered_weights_are_the_whole_ones_in_the_right_order(shape):
    mesh, params = m.make_mesh(*shape), random_model(CFG)
    where = places(params, mesh, PRETRAIN)

    def first_and_all(params):
        used = gather(params, where, "bfloat16")
        return jax.tree.map(lambda x: x[None, None], used)

    got = jax.block_until_ready(on_mesh(first_and_all, mesh, params, P(*WORLD)))
    for path, v in by_path(params).items():
        x = by_path(got)[path][...]
        keep = bool(v.get_metadata().get("keep"))
        assert x.dtype == (jnp.float32 if keep else jnp.bfloat16), path
        want = v[...].astype(x.dtype)
        for node in range(shape[0]):
            for gpu in range(shape[1]):
                part = want
                if ".experts." in path:
                    n = CFG.experts // shape[1]
                    part = want[:, gpu * n : (gpu + 1) * n]
                np.testing.assert_array_equal(x[node, gpu], part)


def test_without_a_mesh_gather_only_casts():
    params = random_model(CFG)
    where = places(params, None, LOCAL)
    used = gather(params, where, "bfloat16")
    assert used.embed.dtype == jnp.bfloat16 and used.layers.router.fc1.dtype == jnp.float32
    back = scatter(used, where)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(back))
    assert_close(back, params, 1e-2)


def test_too_few_devices_is_said_in_one_sentence():
    with pytest.raises(UserError, match=r"2 x 8 devices \(mesh.nodes, mesh.gpus\).*there are 8"):
        m.make_mesh(2, 8)
    assert m.make_mesh(1, 4).devices.size == 4  # part of what there is


def test_devices_can_be_emulated_only_before_the_start():
    assert jax.device_count() == 8
    m.emulate(8)
    m.emulate(2)
    with pytest.raises(UserError, match=r"8 of the 9 devices .* restart Python"):
        m.emulate(9)


def test_emulated_devices_in_a_new_process():
    code = "from zayajax.mesh import emulate, make_mesh; emulate(6); print(make_mesh(2, 3).size)"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert out.stdout.strip() == "6", out.stderr
