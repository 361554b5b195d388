"""The config: what is written is what is read, and every mistake is one sentence with its place."""

import dataclasses
from pathlib import Path

import pytest

from zayajax import config as configs
from zayajax.errors import UserError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))
TINY = Path(__file__).parent.parent / "configs" / "tiny.toml"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_what_is_written_is_what_is_read(path, tmp_path):
    config = configs.load(path)
    copy = tmp_path / "copy.toml"
    copy.write_text(configs.to_toml(config))
    assert configs.load(copy) == config
    assert configs.build(configs.to_tree(config)) == config


@pytest.mark.parametrize("text", ['a "quoted" \\ path', "tab\tnewline\n", "ünïcode/文"])
def test_any_string_survives(text, tmp_path):
    config = configs.load(TINY, {"data.corpus": text})
    copy = tmp_path / "copy.toml"
    copy.write_text(configs.to_toml(config))
    assert configs.load(copy).data.corpus == text


def test_there_are_few_settings_and_each_is_described():
    assert len(configs.keys()) < 75
    for key in configs.keys():
        assert f"--{key} " in configs.describe()


MISTAKES = {
    "optim.horizn": ("10", "did you mean optim.horizon?"),
    "train.horizon": ("10", "did you mean optim.horizon?"),
    "trian.steps": ("10", "did you mean train.steps?"),
    "model.steps": ("10", "did you mean train.steps?"),
    "mesh.batch": ("10", "did you mean train.batch?"),
    "optim.beta2": ("1.0", "below 1"),
    "train.seed": ("99999999999999999999", "must be in"),
    "train.steps": ("ten", 'must be a whole number, and is "ten"'),
    "train.batch": ("12", "12 sequences do not divide over 8 devices"),
    "train.micro_batches": ("3", "do not divide over 8 devices in 3 micro-batches"),
    "model.heads": ("3", "3 query heads do not divide over 2 kv_heads"),
    "model.experts": ("12", "12 experts do not divide over the 8 GPUs of a node"),
    "model.rope_fraction": ("0.3", "not whole pairs"),
    "model.sliding_layers": ("[9]", "layers go from 0 to 2"),
    "model.sliding_window": ("1.5", "must be a whole number"),
    "model.norm_eps": ("inf", "must be finite"),
    "model.layers": ("-1", "must be positive"),
    "model.skip": ("one", 'must be one of "identity", "zero"'),
    "model.tied_head": ("1", "must be true or false"),
    "mesh.layout": ("decode", 'must be one of "pretrain", "context"'),
    "mesh.zero": ("2", "must be one of 1, 3"),
    "mesh.gpus": ("3", "with --mesh.gpus 3: model.experts: 8 experts do not divide"),
    "mesh.nodes": ("0", "must be positive"),
    "data.held_out": ("1.0", "must be in"),
    "optim.warmup": ("9999", "must be in"),
    "optim.weight_decay": ("-1.0", "must not be negative"),
    "train.sequence": ("1", "must be at least 2"),
    "checkpoint.every": ("0", "must be positive"),
    "checkpoint.keep": ("-1", "must not be negative"),
    "checkpoint.minutes": ("-1", "must not be negative"),
    "faults.bad_steps": ("0", "must be positive"),
    "faults.stall": ("-2", "must not be negative"),
}


@pytest.mark.parametrize("key", MISTAKES)
def test_a_mistake_on_the_command_line_is_named(key):
    value, reason = MISTAKES[key]
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        configs.load(TINY, {key: value})
    assert reason in str(error.value)
    assert key.split(".")[1] in str(error.value)


WIDE = {"mesh.nodes": "2", "mesh.layout": "context-wide"}
SPLIT_ROWS = [
    ({"mesh.layout": "context", "train.sequence": "120"}, r"two chunks for each of 8 .* of 16$"),
    (WIDE | {"train.sequence": "112"}, r"each of 16 devices .* use a multiple of 32$"),
    (WIDE | {"train.sequence": "32"}, r"chunks of 1 tokens are .* the 2 that .* at least 64$"),
    ({"mesh.layout": "context", "model.cca_time1": "9"}, r"chunks of 8 tokens .* the 9 that"),
    ({"mesh.nodes": "3", "mesh.layout": "context"}, r"8 sequences do not divide over 3 nodes; use"),
    (
        {"mesh.attention": "ring"},
        r"is 'ring', but layout 'pretrain' splits no sequence here; leave",
    ),
    ({"mesh.layout": "context", "mesh.gpus": "1", "mesh.attention": "ring"}, "splits no sequence"),
    (WIDE | {"train.micro_batches": "3"}, r"8 sequences do not divide in 3 micro-batches .* of 3$"),
    ({"mesh.gpus": "1", "mesh.exchange": "ragged"}, r"is 'ragged', but on one GPU a node no token"),
]


@pytest.mark.parametrize(("changes", "reason"), SPLIT_ROWS)
def test_a_row_is_split_into_whole_chunks_or_refused(changes, reason):
    with pytest.raises(UserError, match=reason):
        configs.load(TINY, changes)


def test_rows_that_are_split_need_not_divide_over_all_devices():
    for changes in ({"mesh.layout": "context", "train.batch": "1"}, WIDE | {"train.batch": "1"}):
        configs.load(TINY, changes)
    with pytest.raises(UserError, match="do not divide over 8 devices"):
        configs.load(TINY, {"train.batch": "1"})


DEGREES = {
    ("mesh.expert_parallel", "2"): ("64 of the node's 448 GB/s", "experts span mesh.gpus"),
    ("mesh.context_parallel", "4"): ("192 of the node's 448", 'layout = "context" splits'),
    ("mesh.ep", "2"): ("64 of the node's 448 GB/s", 'mesh.layout = "pretrain"'),
    ("mesh.tp", "4"): ("192 of the node's 448", "no tensor parallelism"),
    ("mesh.expert_model_parallel_size", "8"): ("the whole node, as every group is", "pretrain"),
    ("mesh.context_parallel_degree", "16"): ("more than a node", "context-wide"),
    ("mesh.ici_expert_parallelism", "-1"): ("mesh.gpus", "pretrain"),
    ("mesh.dcn_data_parallelism", "2"): ("mesh.nodes is the number of nodes",),
    ("mesh.sequence_parallel", "true"): ("all of it (mesh.gpus) or one GPU", "context"),
    ("mesh.data_parallel_shard_degree", "4"): ("192 of the node's 448", "stored weights"),
    ("mesh.virtual_pipeline_model_parallel_size", "2"): ("no pipeline stages",),
    ("parallelism.tensor_parallel_degree", "2"): ("64 of the node's 448 GB/s",),
}


@pytest.mark.parametrize(("key", "value"), DEGREES)
def test_a_degree_is_refused_with_the_reason(key, value, tmp_path):
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        configs.load(TINY, {key: value})
    assert str(error.value).startswith(f"--{key}: ") and "unknown" not in str(error.value)
    section, name = key.split(".")
    head, _, tail = TINY.read_text().partition("[mesh]\n")
    lines = [*head.splitlines(), f"[{section}]", f"{name} = {value}"]
    path = tmp_path / "degree.toml"
    path.write_text("\n".join([*lines, "" if section == "mesh" else "[mesh]", tail]))
    with pytest.raises(UserError) as in_file:
        configs.load(path)
    assert str(in_file.value).startswith(f"{path}, line {len(lines)}: {key}: ")
    for reason in DEGREES[key, value]:
        assert reason in str(error.value) and reason in str(in_file.value)


@pytest.mark.parametrize("key", ["mesh.experts", "mesh.sequence", "model.kv_head", "mesh.gpu"])
def test_what_only_looks_like_a_degree_keeps_its_nearest_key(key):
    with pytest.raises(UserError, match="unknown key; did you mean"):
        configs.load(TINY, {key: "2"})


def test_a_mistake_in_the_file_has_its_line(tmp_path):
    lines = TINY.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("horizon"))
    lines[at] = "horizn = 480"
    path = tmp_path / "wrong.toml"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError) as error:
        configs.load(path)
    assert f"{path}, line {at + 1}: optim.horizn: unknown key" in str(error.value)
    lines[at] = 'horizon = "long"'
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=f"line {at + 1}: optim.horizon: must be a whole number"):
        configs.load(path)
    del lines[at]
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"optim.horizon: is required and missing"):
        configs.load(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[model", "not valid TOML"), ("model = 3", "must be a table"), ("", "required and missing")],
)
def test_a_file_that_is_no_config(text, reason, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=reason):
        configs.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        configs.load(path)
    with pytest.raises(UserError, match="there is no such config file"):
        configs.load(tmp_path / "absent.toml")


def test_built_in_python_it_is_checked_too():
    config = configs.load(TINY)
    with pytest.raises(UserError, match="do not divide"):
        dataclasses.replace(config, train=dataclasses.replace(config.train, batch=3))
    with pytest.raises(UserError, match="gathered weights"):
        configs.load(TINY, {"mesh.zero": "3", "train.remat": "none"})
