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
    assert len(configs.keys()) < 60
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
    "mesh.layout": ("ring", 'must be one of "pretrain"'),
    "mesh.zero": ("2", "must be one of 1, 3"),
    "mesh.gpus": ("3", "with --mesh.gpus 3: model.experts: 8 experts do not divide"),
    "mesh.nodes": ("0", "must be positive"),
    "data.held_out": ("1.0", "must be in"),
    "optim.warmup": ("9999", "must be in"),
    "optim.weight_decay": ("-1.0", "must not be negative"),
    "train.sequence": ("1", "must be at least 2"),
    "checkpoint.keep": ("0", "must be positive"),
}


@pytest.mark.parametrize("key", MISTAKES)
def test_a_mistake_on_the_command_line_is_named(key):
    value, reason = MISTAKES[key]
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        configs.load(TINY, {key: value})
    assert reason in str(error.value)
    assert key.split(".")[1] in str(error.value)


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
