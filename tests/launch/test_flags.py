"""Ours go before theirs, nothing of theirs changes, and every flag is known to XLA."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from zayajax.errors import UserError
from zayajax.launch import flags as f

NAMES = [s.name for s in f.SETTINGS] + ["--xla_dump_to", "OTHER"]
VALUES = st.sampled_from(["", "0", "true", "'a b'", '"c d"', "/x=y"])


@st.composite
def environments(draw):
    names = draw(st.lists(st.sampled_from(NAMES), max_size=6))
    given = [(name, draw(VALUES)) for name in names]
    environ = {n: v for n, v in given if not n.startswith("--")}
    theirs = " ".join(f"{n}={v}" for n, v in given if n.startswith("--"))
    return environ | ({"XLA_FLAGS": theirs} if theirs else {})


def arguments():
    return st.fixed_dictionaries(
        dict(platform=st.sampled_from(f.PLATFORMS), nodes=st.integers(1, 3))
        | dict(deterministic=st.booleans(), kind=st.sampled_from(["gfx942", "gfx950"]))
    )


@given(environments(), arguments(), arguments())
@settings(max_examples=200, deadline=None)
def test_theirs_stays_and_the_last_call_counts(theirs, first, second):
    once, twice = dict(theirs), dict(theirs)
    table = f.prepare(once, **second)
    f.prepare(twice, **first)
    again = f.prepare(twice, **second)
    assert once == twice and table.rows == again.rows
    for name, value in theirs.items():
        assert once[name] == value or (name == "XLA_FLAGS" and once[name].endswith(" " + value))
    whose = {row["name"]: row["whose"] for row in table.rows}
    given = f._names(theirs.get("XLA_FLAGS", "")) | theirs
    for row in table.rows:  # the last of a repeated flag is theirs
        name = row["name"]
        now = f._names(once.get("XLA_FLAGS", "")) if name.startswith("--") else once
        assert now[name] == row["value"], row
        assert (row["whose"] == f.OURS) == (name not in given)
        assert row["whose"] != f.OURS or (row["why"] and row["source"])
    assert set(whose) >= set(f._names(theirs.get("XLA_FLAGS", "")))


def test_the_short_form_counts():
    environ = {"XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_dump_to=x"}
    table = f.prepare(environ, platform=f.ROCM, kind="gfx942")
    ours = sum(row["whose"] == f.OURS for row in table.rows)
    assert table.line.endswith(f"{ours} ours, 1 yours, 1 yours instead of ours")
    assert "gfx942" in repr(table) and "\n" not in table.line


def test_conditions(tmp_path):
    def names(**given):
        return {row["name"] for row in f.prepare({}, **given).rows}

    rocm = dict(platform=f.ROCM, kind="gfx942")
    assert names(**rocm, nodes=2) - names(**rocm) == {"NCCL_CROSS_NIC"}
    assert "HSA_NO_SCRATCH_RECLAIM" not in names(platform=f.ROCM, kind="gfx950")
    assert names(**rocm, deterministic=True) - names(**rocm) == {"--xla_gpu_deterministic_ops"}
    kept = {"--xla_gpu_per_fusion_autotune_cache_dir"}
    assert names(**rocm, folder=tmp_path) - names(**rocm) == kept
    assert not kept & names(**rocm, folder=tmp_path, deterministic=True)
    assert all(name.startswith("--xla_cpu") for name in names(platform=f.CPU, deterministic=True))


def test_flags_of_a_file_are_kept(tmp_path):
    (tmp_path / "flags").write_text("--xla_gpu_autotune_level=2\n--xla_dump_to=x\n")
    environ = {"XLA_FLAGS": str(tmp_path / "flags")}
    f.prepare(environ, platform=f.ROCM, kind="gfx942")
    assert f._names(environ["XLA_FLAGS"])["--xla_gpu_autotune_level"] == "2"
    with pytest.raises(UserError, match=r"no flag .* and no file"):
        f.prepare({"XLA_FLAGS": "xla_dump_to=x"}, platform=f.CPU)


def test_xla_knows_every_flag(tmp_path):
    """It ends the process at one that it does not know, whatever it computes on."""
    words = {}
    for platform in f.PLATFORMS:
        environ, folder = {}, tmp_path / "a run"
        f.prepare(environ, platform=platform, folder=folder, nodes=2)
        words[platform] = environ["XLA_FLAGS"]
        f.prepare(environ, platform=platform, deterministic=True)
        words[platform] += " " + environ["XLA_FLAGS"]
    assert (folder / f.AUTOTUNE).is_dir()
    env = os.environ | {"XLA_FLAGS": " ".join(words.values()), "JAX_PLATFORMS": "cpu"}
    code = "import jax; print(jax.jit(lambda x: x + 1)(1.0))"
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert out.stdout.strip() == "2.0", out.stderr[-500:]


@pytest.mark.parametrize(
    ("environ", "plugins", "files", "want"),
    [
        ({}, [], [], f.CPU),
        ({}, [], ["dev/kfd"], f.CPU),  # no plugin, so JAX computes on the CPU
        ({}, ["xla_rocm7"], [], f.CPU),
        ({}, ["xla_rocm7"], ["dev/kfd"], f.ROCM),
        ({}, ["xla_cuda12"], ["dev/nvidia0"], f.CUDA),
        ({}, ["xla_cuda12", "xla_rocm7"], ["dev/nvidia0"], f.CUDA),
        ({"JAX_PLATFORMS": "cpu"}, ["xla_cuda12"], ["dev/nvidia0"], f.CPU),
        ({"JAX_PLATFORMS": "rocm,cpu"}, [], [], f.ROCM),
        ({"JAX_PLATFORMS": "gpu"}, ["xla_cuda13"], [], f.CUDA),
        ({"JAX_PLATFORMS": ""}, [], [], f.CPU),
        ({"JAX_PLATFORMS": "gpu"}, [], [], "no plugin"),
        ({"JAX_PLATFORMS": "tpu"}, [], [], "'tpu'"),
    ],
)
def test_the_platform_is_known_without_jax(environ, plugins, files, want, tmp_path):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    if want in f.PLATFORMS:
        assert f.platform(environ, plugins=plugins, root=tmp_path) == want
    else:
        with pytest.raises(UserError, match=want):
            f.platform(environ, plugins=plugins, root=tmp_path)


def topology(root, *nodes):
    for i, text in enumerate(nodes):
        folder = root / "sys/class/kfd/kfd/topology/nodes" / str(i)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(text)


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (0, None)]
)
def test_the_drivers_files_say_architecture_and_count(version, name, tmp_path):
    cpu = "simd_count 0\ngfx_target_version 0\n"
    gpu = f"simd_count {304 * 4 if version else 0}\ngfx_target_version {version}\n"
    topology(tmp_path, cpu, cpu, *[gpu] * 8)
    assert f.architecture(tmp_path) == name
    assert f.gpus(f.ROCM, {}, tmp_path) == (8 if version else 0)
    assert f.gpus(f.ROCM, {"HIP_VISIBLE_DEVICES": "3,4"}, tmp_path) == 2


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "4,5"}, "leaves 2 GPUs"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "contradict"),
        ({"ROCR_VISIBLE_DEVICES": "7", "CUDA_VISIBLE_DEVICES": "0,1"}, "names 1 of them"),
        ({"ROCR_VISIBLE_DEVICES": "6,7", "HIP_VISIBLE_DEVICES": "0, 1"}, None),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, None),
        ({"ROCR_VISIBLE_DEVICES": "GPU-a1,GPU-b2", "HIP_VISIBLE_DEVICES": "GPU-b2"}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_masks_that_fight_are_named(environ, words):
    if words is None:
        f.prepare(dict(environ), platform=f.ROCM, kind="gfx942")
        return
    with pytest.raises(UserError, match=words) as error:
        f.prepare(dict(environ), platform=f.ROCM, kind="gfx942")
    assert "\n" not in str(error.value) and all(v in str(error.value) for v in environ)
    f.prepare(dict(environ), platform=f.CUDA)  # elsewhere they mean nothing
