"""Import and export of transformers' checkpoints: exact cover, same bytes back, little memory."""

import json
import shutil
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import parity_tools
import pytest
from safetensors.numpy import load_file, save_file

from zayajax import hf
from zayajax.errors import UserError
from zayajax.hf import convert, files, names
from zayajax.mesh import by_path, is_param, make_mesh, stored_specs
from zayajax.model.zaya import Decoder
from zayajax.settings import ModelConfig

FIXTURES, NAMES = parity_tools.FIXTURES, parity_tools.NAMES
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ZAYA_8B = dict(
    vocab=262272,
    hidden=2048,
    heads=8,
    kv_heads=2,
    head_dim=128,
    experts=16,
    expert_hidden=2048,
    router_hidden=256,
)
SMALL = dict(
    vocab=64,
    layers=3,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    experts=8,
    expert_hidden=24,
    router_hidden=16,
)


def abstract(cfg):
    return jax.eval_shape(lambda: Decoder(cfg, jax.random.key(0)))


def random_model(cfg, seed=0) -> Decoder:
    model, rng = abstract(cfg), np.random.default_rng(seed)
    leaves = [
        v.replace(jax.numpy.asarray(rng.standard_normal(v.shape, np.float32)))
        for v in by_path(model).values()
    ]
    return jax.tree.unflatten(jax.tree.structure(model, is_leaf=is_param), leaves)


def stored(folder) -> dict:
    """Dtype, shape and bytes of each tensor in a checkpoint."""
    with files.Weights(folder) as weights:
        return {k: (*info, weights.read(k).tobytes()) for k, info in weights.info.items()}


def arrays(model) -> dict[str, np.ndarray]:
    return {path: np.asarray(v[...]) for path, v in by_path(model).items()}


def same(a: dict, b: dict):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def copy(name, to, **changes):
    """A fixture with other config keys; None removes one."""
    shutil.copytree(FIXTURES / name, to)
    raw = json.loads((to / "config.json").read_text()) | changes
    raw = {k: v for k, v in raw.items() if v is not None}
    (to / "config.json").write_text(json.dumps(raw))
    return to


def retensor(folder, change):
    """The checkpoint's tensors, changed by a function of their dict."""
    tensors = load_file(folder / files.SINGLE)
    change(tensors)
    save_file(tensors, folder / files.SINGLE, {"format": "pt"})
    return folder


# ---- names


@pytest.mark.parametrize(
    ("layers", "layout", "count"),
    [(40, "native", 1283), (60, "native", 1923), (40, "legacy", 2483)],
)
def test_released_models_have_that_many_tensors(layers, layout, count):
    cfg = ModelConfig(layers=layers, **ZAYA_8B)
    plan = names.tensors(cfg, layout)
    assert len(plan) == len({t.name for t in plan}) == count
    numbers = sum(int(np.prod(v.shape)) for v in by_path(abstract(cfg)).values())
    assert sum(int(np.prod(t.shape)) for t in plan) == numbers


@pytest.mark.parametrize("layout", names.LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_table_covers_the_model(name, layout):
    """Each place of each parameter once, in its shape; and so with every switch of the config."""
    for switches in ({}, dict(tied_head=False, head_bias=True, attention_bias=True, layers=1)):
        cfg = ModelConfig(**(SMALL | switches))
        shapes = {path: v.shape for path, v in by_path(abstract(cfg)).items()}
        places = {}
        for t in names.tensors(cfg, layout):
            assert t.axes.shape_here(names.sizes(cfg)) == shapes[t.path][len(t.index) :]
            places.setdefault(t.path, []).append(t.index)
        for path, shape in shapes.items():
            depth = len(places[path][0]) if path in places else 1
            assert sorted(places.get(path, [])) == list(np.ndindex(*shape[:depth])), path


@pytest.mark.parametrize("text", sorted({row.axes for row in names.TABLE}))
def test_axes_are_inverse(text):
    axes, rng = names.Axes(text), np.random.default_rng(0)
    for _ in range(5):
        sizes = {a: int(rng.integers(1, 6)) for a in "dhnjkcwtuefgrqzv"} | {"1": 1}
        there = rng.standard_normal(axes.shape_there(sizes))
        here = axes.bring(there, sizes)
        assert here.shape == axes.shape_here(sizes)
        np.testing.assert_array_equal(axes.give(here, sizes), there)


# ---- in and out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_lie_as_the_model_wants_them(name, dtype):
    cfg = hf.config(FIXTURES / name)
    model = hf.load(FIXTURES / name, dtype)
    assert model.cfg == cfg
    wanted_by_path = by_path(abstract(cfg))
    for path, v in by_path(model).items():
        wanted, keep = wanted_by_path[path], v.get_metadata().get("keep")
        assert v.shape == wanted.shape and v.dtype == ("float32" if keep else dtype), path
        assert type(v) is type(wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_source", [True, False])
def test_the_same_bytes_come_back(name, with_source, tmp_path):
    """Through both layouts, and from the one into the other and back."""
    source = FIXTURES / name
    layout = "legacy" if name == "legacy_layout" else "native"
    model = hf.load(source, "float32")
    hf.save(model, tmp_path / "same", layout, source if with_source else None)
    assert stored(tmp_path / "same") == stored(source)
    for i, other in enumerate(["native", "legacy", "native"]):
        hf.save(model, tmp_path / str(i), other, source if with_source else None)
        assert hf.config(tmp_path / str(i)) == hf.config(source)
        model = hf.load(tmp_path / str(i), "float32")
    hf.save(model, tmp_path / "again", layout)
    assert stored(tmp_path / "again") == stored(source)


def test_layouts_hold_the_same_model():
    native, legacy = (hf.load(FIXTURES / name, "float32") for name in NAMES[:2])
    same(arrays(native), arrays(legacy))


@pytest.mark.parametrize("layout", names.LAYOUTS)
@pytest.mark.parametrize("biases", ["float32", "bfloat16"])
def test_bfloat16_checkpoints(layout, biases, tmp_path):
    """What is kept in float32 here goes back as it was; without a source, biases are float32."""

    def round_off(tensors):
        for name, x in tensors.items():
            if biases == "bfloat16" or "balancing" not in name:
                tensors[name] = x.astype(BFLOAT16)

    folder = "legacy_layout" if layout == "legacy" else "full_attention"
    source = retensor(copy(folder, tmp_path / "source", dtype="bfloat16"), round_off)
    model = hf.load(source)
    hf.save(model, tmp_path / "out", layout, source)
    assert stored(tmp_path / "out") == stored(source)
    assert hf.dtype(source) == "bfloat16"
    hf.keep_companions(source, tmp_path / "kept")  # as good as the source itself
    hf.save(model, tmp_path / "later", layout, tmp_path / "kept")
    assert stored(tmp_path / "later") == stored(source)
    hf.save(model, tmp_path / "bare", layout)
    bare = {name: dtype for name, (_, dtype, _) in stored(tmp_path / "bare").items()}
    assert {n for n, d in bare.items() if d != BFLOAT16} == {n for n in bare if "balancing" in n}
    same(arrays(hf.load(tmp_path / "bare")), arrays(model))
    for folder in ("out", "bare"):
        raw = json.loads((tmp_path / folder / "config.json").read_text())
        assert raw.get("dtype", raw.get("torch_dtype")) == "bfloat16"
    # Another dtype than the source's: that of the model, or the one asked for.
    hf.save(hf.load(source, "float32"), tmp_path / "wide", layout, source)
    assert {dtype for _, dtype, _ in stored(tmp_path / "wide").values()} == {np.dtype(np.float32)}


def test_large_checkpoints_are_sharded(tmp_path):
    source = FIXTURES / "full_attention"
    hf.save(hf.load(source, "float32"), tmp_path, source=source, shard_bytes=10**5)
    found = sorted(p.name for p in tmp_path.iterdir())
    index = json.loads((tmp_path / files.INDEX).read_text())
    assert found == ["config.json", *sorted(set(index["weight_map"].values())), files.INDEX]
    assert index["metadata"]["total_size"] == 4 * hf.check(source).parameters
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    assert stored(tmp_path) == stored(source)
    same(arrays(hf.load(tmp_path)), arrays(hf.load(source)))


def test_what_belongs_to_the_weights_travels(tmp_path):
    source = copy("legacy_layout", tmp_path / "source", our_own_key={"a": [1]}, eos_token_id=106)
    texts = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    texts += ("generation_config.json", "special_tokens_map.json")
    for name in texts:
        (source / name).write_text(f"{name} é\n")
    (source / "pytorch_model.bin").write_text("not this one")
    model = hf.load(source, "float32")
    for layout in names.LAYOUTS:
        to = tmp_path / layout
        hf.save(model, to, layout, source)
        assert {p.name for p in to.iterdir()} == {*texts, "config.json", files.SINGLE}
        for name in texts:
            assert (to / name).read_bytes() == (source / name).read_bytes()
        raw = json.loads((to / "config.json").read_text())
        assert raw["our_own_key"] == {"a": [1]} and raw["eos_token_id"] == 106
        assert ("ffn_hidden_size" in raw) == (layout == "legacy") != ("layer_types" in raw)
    assert raw == json.loads((source / "config.json").read_text())  # the same layout: as it was
    with pytest.raises(UserError, match="already holds weights"):
        hf.save(model, to, "legacy")
    (source / "config.json").write_text('{"model_type": "llama"}')  # only its tokenizer is taken
    hf.save(model, tmp_path / "other", source=source)
    assert hf.config(tmp_path / "other") == model.cfg
    assert (tmp_path / "other" / "tokenizer.json").exists()


# ---- meshes and memory


@pytest.mark.parametrize("chunk", [convert.CHUNK, 1])
@pytest.mark.parametrize("shape", [(1, 8), (2, 4)])
@pytest.mark.parametrize("name", NAMES)
def test_a_mesh_changes_nothing(name, shape, chunk, tmp_path, monkeypatch):
    """chunk 1: layer by layer into the donated array and out of it, as of a large model."""
    single = hf.load(FIXTURES / name)
    alone = arrays(single)
    hf.save(single, tmp_path / "alone")
    monkeypatch.setattr(convert, "CHUNK", chunk)
    same(arrays(hf.load(FIXTURES / name)), alone)
    mesh = make_mesh(*shape)
    model = hf.load(FIXTURES / name, mesh=mesh)
    same(arrays(model), alone)
    specs = by_path(stored_specs(model, mesh))
    for path, v in by_path(model).items():
        assert v[...].sharding.is_equivalent_to(
            jax.sharding.NamedSharding(mesh, specs[path].get_value()), v.ndim
        ), path
    embed = model.embed[...]
    assert embed.addressable_shards[0].data.shape[1] == embed.shape[1] // 8
    hf.save(model, tmp_path / "mesh")
    assert stored(tmp_path / "mesh") == stored(tmp_path / "alone")


@pytest.mark.parametrize("layout", names.LAYOUTS)
def test_memory_holds_a_few_tensors(layout, tmp_path, monkeypatch):
    sizes = SMALL | dict(layers=8, hidden=128, expert_hidden=256, vocab=4096)
    model = random_model(ModelConfig(**sizes))
    numbers = sum(v[...].size for v in by_path(model).values())
    one = 8 * 128 * 512 * 4  # gate and up of one layer's experts, the largest, in float32
    monkeypatch.setattr(convert, "CHUNK", one)
    assert 4 * numbers > 10 * one

    def peak(action):
        tracemalloc.start()
        try:
            result = action()
            return result, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peaks = {}
    _, peaks["save"] = peak(lambda: hf.save(model, tmp_path, layout))
    again, peaks["load"] = peak(lambda: hf.load(tmp_path, "float32"))
    split, peaks["mesh"] = peak(lambda: hf.load(tmp_path, "float32", mesh=make_mesh(2, 4)))
    same(arrays(model), arrays(again))
    same(arrays(model), arrays(split))
    # Small parameters may stay on the host: a CPU is its own device, and shares them.
    assert max(peaks.values()) < 4 * one, peaks


# ---- what is refused


def refused(folder, *words):
    with pytest.raises(UserError) as error:
        hf.load(folder)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message
    with pytest.raises(UserError):
        hf.check(folder)


def test_names_that_do_not_fit(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.self_attn.qk_norm.temp"]
        tensors["model.layers.9.self_attn.qk_norm.temp"] = np.ones(2, np.float32)
        tensors["model.norm.weight"] = np.ones(47, np.float32)

    refused(
        retensor(copy("full_attention", tmp_path / "a"), change),
        *("1 missing: model.layers.1.self_attn.qk_norm.temp", "1 unknown: model.layers.9"),
        "1 of another shape: model.norm.weight (is [47], must be [48])",
    )

    def shift(tensors):  # as if a tensor had been skipped
        tensors["model.layers.2.mlp.gate.router_states_scale"] = np.ones(15, np.float32)

    refused(retensor(copy("full_attention", tmp_path / "b"), shift), "[15]", "[16]")


def test_the_head_is_there_if_and_only_if_it_is_untied(tmp_path):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    refused(retensor(copy("full_attention", tmp_path / "tied"), add), "1 unknown: lm_head.weight")
    untied = copy("full_attention", tmp_path / "untied", tie_word_embeddings=False)
    refused(untied, "1 missing: lm_head.weight")
    assert hf.load(retensor(untied, add)).head is not None
    biased = copy("full_attention", tmp_path / "biased", lm_head_bias=True)
    refused(biased, "1 missing: lm_head.bias")


def test_files_that_are_broken(tmp_path):
    whole = (FIXTURES / "full_attention" / files.SINGLE).read_bytes()
    broken = dict(cut=whole[:-100], header=whole[:8] + b"?" * 50 + whole[58:], empty=b"")
    for name, data in broken.items():
        folder = copy("full_attention", tmp_path / name)
        (folder / files.SINGLE).write_bytes(data)
        refused(folder, str(folder / files.SINGLE), "no whole safetensors file")
    folder = copy("full_attention", tmp_path / "none")
    (folder / files.SINGLE).unlink()
    refused(folder, "holds neither model.safetensors nor")
    (folder / files.INDEX).write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    refused(folder, "model-1.safetensors", "does not exist")
    (folder / files.INDEX).write_text("{")
    refused(folder, files.INDEX, "cannot be read as an index")

    def integers(tensors):
        tensors["model.norm.weight"] = np.ones(48, np.int8)

    refused(retensor(copy("full_attention", tmp_path / "int8"), integers), "stored as I8")


def test_numbers_that_are_not_finite(tmp_path):
    def spoil(tensors):
        tensors["model.norm.weight"][3] = np.nan

    found = hf.check(retensor(copy("full_attention", tmp_path / "a"), spoil))
    assert not found.passed and found.not_finite == ("model.norm.weight",)
    assert "model.norm.weight" in str(found)
    assert hf.check(FIXTURES / "full_attention").passed
    with pytest.raises(UserError, match=r"nothing\.npz"):
        hf.check(FIXTURES / "full_attention", tmp_path / "nothing.npz")


def test_arguments_are_checked(tmp_path):
    model = hf.load(FIXTURES / "full_attention")
    with pytest.raises(UserError, match="dtype must be one of"):
        hf.load(FIXTURES / "full_attention", "int8")
    with pytest.raises(UserError, match="layout must be one of"):
        hf.save(model, tmp_path, "newest")
    with pytest.raises(UserError, match="skip"):
        hf.load(FIXTURES / "full_attention", skip="never")
