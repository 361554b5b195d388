"""Every notebook runs as a reader runs it; what was committed with it is fit to be read."""

import json
import os
import re
import sys
from pathlib import Path

import jax
import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

import zayajax

NOTEBOOKS = sorted((Path(__file__).parents[2] / "experiments").glob("*.ipynb"))
# Begins at a root (/home/..., ~/..., C:\...) and has a folder in it: 2/3 and 4 / 8 are none.
ABSOLUTE_PATH = re.compile(r"""(?:^|[\s"'(=:\[])(?:/|~/|[A-Za-z]:\\+)[\w.-]+[/\\]""")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell):
    """What a cell puts out: of each kind once, and tables word for word."""
    kinds, tables = set(), []
    for output in cell.outputs:
        data = output.get("data", {})
        kinds |= {output.output_type, *data}
        tables += [text for kind, text in data.items() if kind == "text/markdown"]
    return kinds, tables


def execute(notebook, folder: Path, scratch: Path):
    """In a kernel that is this very Python, whatever kernels and profiles the user has."""
    manager = AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        connection_file=str(scratch / "kernel.json"),
    )
    assert manager.kernel_spec.argv[0] == sys.executable
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "PYTHONPATH": str(Path(zayajax.__file__).parents[1]),
        "IPYTHONDIR": str(scratch),
    }
    env.pop("XLA_FLAGS", None)  # how many devices there are, a notebook says itself
    client = NotebookClient(
        notebook, km=manager, timeout=120, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=env, cleanup_kc=True)


@each_notebook
def test_it_runs_in_a_fresh_kernel_and_shows_what_was_committed(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    committed = [shown(cell) for cell in code_cells(notebook)]
    execute(notebook, path.parent, tmp_path)
    assert [shown(cell) for cell in code_cells(notebook)] == committed


@each_notebook
def test_it_was_committed_after_one_run_from_top_to_bottom(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
    assert path.stat().st_size < 700_000


@each_notebook
def test_its_outputs_and_metadata_tell_nothing_of_the_machine(path):
    notebook = nbformat.read(path, as_version=4)
    texts = [json.dumps(notebook.metadata)]
    for cell in notebook.cells:
        assert not cell.metadata  # times of execution, the state of somebody's editor
        for output in cell.get("outputs", []):
            data = {kind: x for kind, x in output.get("data", {}).items() if "image" not in kind}
            texts += [output.get("text", ""), *map(str, data.values())]
    assert not [text for text in texts if ABSOLUTE_PATH.search(text)]


@each_notebook
def test_its_links_lead_to_files(path):
    notebook = nbformat.read(path, as_version=4)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)#]+)", prose) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_an_absolute_path_is_told_from_a_fraction():
    hostile = ["/home/someone/x.py", 'File "/opt/a/b"', "~/x/y", r"at C:\Users\x", "in (/tmp/a/b)"]
    harmless = ["2/3", "4 / 8 devices", "tree / gather = 0.2", "a/b.py", "https://arxiv.org/abs/1"]
    assert all(map(ABSOLUTE_PATH.search, hostile))
    assert not any(map(ABSOLUTE_PATH.search, harmless))
