"""Weights go from transformers to a checkpoint of ours and back, and from a run to transformers."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import runs
from safetensors import safe_open

import zayajax
from zayajax import checkpoint, hf, weights
from zayajax.cli import main
from zayajax.mesh import make_mesh
from zayajax.training.step import build

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(p.name for p in FIXTURES.iterdir() if p.is_dir())


def tensors(folder: Path) -> dict[str, tuple]:
    with safe_open(folder / "model.safetensors", "np") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
    return {name: (x.dtype.name, x.shape, x.tobytes()) for name, x in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_in_and_out_gives_the_same_bytes(name, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in (FIXTURES / name).iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    layout = "legacy" if name.startswith("legacy") else "native"
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert main(["convert", "from-hf", str(source), str(ours)]) == 0
    assert main(["convert", "to-hf", str(ours), str(back), "--layout", layout]) == 0
    assert tensors(back) == tensors(source)
    assert (back / "tokenizer_config.json").read_text() == '{"chat_template": "x"}'
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


@pytest.mark.parametrize("name", NAMES)
def test_check_compares_with_the_reference(name, tmp_path, capsys):
    reference = FIXTURES / name / "expected.npz"
    words = ["convert", "check", str(FIXTURES / name)]
    assert main(words) == 0
    assert main([*words, "--reference", str(reference)]) == 0
    assert "passed" in capsys.readouterr().out
    wrong = dict(np.load(reference))
    wrong["logits"][0, -1, 3] += 1
    np.savez(tmp_path / "wrong.npz", **wrong)
    assert main([*words, "--reference", str(tmp_path / "wrong.npz")]) == 1
    last = wrong["logits"].shape[1] - 1
    assert f"row 0, position {last};" in capsys.readouterr().out


def test_mistakes_are_one_sentence(tmp_path, capsys):
    full = FIXTURES / "full_attention"
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "config.json").write_bytes((full / "config.json").read_bytes())
    (cut / "model.safetensors").write_bytes((full / "model.safetensors").read_bytes()[:-1000])
    for words, reason in (
        (["convert", "from-hf", tmp_path / "absent", tmp_path / "x"], "absent"),
        (["convert", "from-hf", cut, tmp_path / "x"], "model.safetensors"),
        (["convert", "check", cut], "model.safetensors"),
        (["convert", "to-hf", tmp_path / "absent", tmp_path / "x"], "absent"),
        (["generate", tmp_path / "absent", "--prompt", "a"], "absent"),
        (["convert", "from-hf", full, cut], "not empty"),
    ):
        assert main(list(map(str, words))) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and reason in error
        assert not (tmp_path / "x").exists()


def test_a_run_goes_to_transformers_and_starts_another_run(tmp_path):
    corpus = runs.write_text(tmp_path / "text")
    config = runs.config(corpus, train__steps=2, train__sample_tokens=0)
    run = zayajax.train(config, tmp_path / "run", show=False)
    weights.to_hf(tmp_path / "run", tmp_path / "exported")
    assert hf.check(tmp_path / "exported").passed
    exported = hf.load(tmp_path / "exported", "float32")
    want = checkpoint.to_arrays(run.state.params)
    for name, x in checkpoint.to_arrays(exported).items():
        assert np.asarray(x).tobytes() == np.asarray(want[name]).tobytes(), name

    program = build(config, make_mesh(1, 8))
    again = weights.read(tmp_path / "exported", program.state.params)
    for v, like in zip(*map(jax.tree.leaves, (again, program.state.params)), strict=True):
        assert v.sharding == like.sharding and v.dtype == like.dtype
    phase = zayajax.train(config, tmp_path / "phase", init_from=tmp_path / "exported", show=False)
    assert phase.loss < run.loss


def test_fixtures_continue_as_transformers_does():
    for name in NAMES:
        expected = np.load(FIXTURES / name / "expected.npz")
        model = hf.load(FIXTURES / name, "float32", skip="zero")
        prompts = [
            ids[mask == 1].tolist()
            for ids, mask in zip(expected["input_ids"], expected["attention_mask"], strict=True)
        ]
        new = zayajax.generate.generate(model, prompts, max_new_tokens=12)
        np.testing.assert_array_equal(new, expected["generated"][:, -12:])
