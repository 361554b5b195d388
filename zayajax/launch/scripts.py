"""What starts a run on many nodes: a batch script for Slurm, a JobSet for Kubernetes.

Each node runs `zayajax launch` for its share, and the cluster's engine starts nodes again. When and
where a job runs is the engine's own.
"""

import math
import re
import shlex
from collections.abc import Sequence

import jinja2

from zayajax.errors import Exit, UserError
from zayajax.launch.cluster import port_of

JOB = "nodes"  # of the JobSet: its pods are NAME-nodes-0-INDEX
# Seconds beside faults.grace until the engine kills, for the signal's way and the last words.
MARGIN = 60.0


def slurm(
    argv: Sequence[str],
    *,
    nodes: int,
    gpus: int,
    processes: int,
    name: str = "zayajax",
    time: str = "1-00:00:00",
    grace: float = 300.0,
    setup: str = "",
    options: Sequence[str] = (),
) -> str:
    """A script for `sbatch`.

    Args:
      argv: `train CONFIG ...`, what `zayajax launch -- ` is given.
      gpus: of a node.
      processes: on a node.
      time: limit of the job as Slurm writes it, such as 12:00:00 or 2-00:00:00.
      grace: `faults.grace`, seconds in which the run saves.
      setup: shell lines before, such as `source .venv/bin/activate`.
      options: others of `zayajax launch`, such as --hang 120.
    """
    _check(argv, nodes, gpus, processes, setup)
    if not re.fullmatch(r"[A-Za-z0-9_.+-]+", name):
        raise UserError(f"{name!r}: is no name of a Slurm job; use letters, digits, - and _")
    if not re.fullmatch(r"\d+|(\d+-)?\d+(:\d+){1,2}|\d+-\d+", time):
        raise UserError(f"{time!r}: is no time of Slurm's; use such as 12:00:00 or 2-00:00:00")
    launch = ["zayajax", "launch", "--processes", processes, "--gpus", gpus, "--nodes", nodes]
    launch += options
    return _render("slurm.sh", argv, nodes, gpus, grace, setup, launch, name=name, time=time)


def kubernetes(
    argv: Sequence[str],
    *,
    nodes: int,
    gpus: int,
    processes: int,
    image: str,
    claim: str,
    mount: str = "/runs",
    vendor: str = "amd",
    name: str = "zayajax",
    grace: float = 300.0,
    restarts: int = 100,
    setup: str = "",
    options: Sequence[str] = (),
) -> str:
    """A JobSet for `kubectl apply`. As `slurm`, and beside that:

    Args:
      image: of the container, with zayajax in it.
      claim: a persistent volume claim that all nodes can write to, for the run's folder.
      mount: where it is seen; `--run-dir` should be below.
      vendor: "amd" or "nvidia", whose GPUs the nodes have.
      restarts: how many times all pods may start again.
    """
    _check(argv, nodes, gpus, processes, setup)
    # A pod is called NAME-nodes-0-INDEX, and a label of DNS has at most 63 characters.
    longest = 63 - len(f"-{JOB}-0-{nodes - 1}")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > longest:
        raise UserError(
            f"{name!r}: is no name for pods; use at most {longest} small letters, digits and -, "
            "a letter first"
        )
    if vendor not in ("amd", "nvidia"):
        raise UserError(f"{vendor!r}: whose GPUs are these? amd or nvidia")
    if not mount.startswith("/"):
        raise UserError(f"{mount!r}: has to be an absolute path")
    if restarts < 0:
        raise UserError(f"{restarts} restarts: must not be negative")
    for what, value in (("image", image), ("claim", claim), ("mount", mount)):
        if not value or not value.isprintable():
            raise UserError(f"{what} {value!r}: is empty, or has a character that cannot be shown")
    launch = ["zayajax", "launch", "--processes", processes, "--gpus", gpus, "--nodes", nodes]
    launch += options
    launch += ["--coordinator", f"{name}-{JOB}-0-0.{name}:{port_of(name)}", "--node"]
    return _render(
        "jobset.yaml",
        argv,
        nodes,
        gpus,
        grace,
        setup,
        launch,
        tail=' "$JOB_COMPLETION_INDEX"',
        # In arguments of a container, $(NAME) is replaced and $$( stands for itself.
        escape=lambda text: text.replace("$(", "$$("),
        name=name,
        job=JOB,
        image=image,
        claim=claim,
        mount=mount,
        resource=f"{vendor}.com/gpu",
        restarts=restarts,
        mistake=int(Exit.MISTAKE),
    )


def again(argv: Sequence[str]) -> list[str]:
    """`train ...` as it goes on after it was started once: `--fresh` would delete the run.
    `--init-from` counts only where there is no checkpoint yet."""
    return [*(word for word in argv if word not in ("--fresh", "--resume")), "--resume"]


def _check(argv, nodes, gpus, processes, setup):
    if not argv or argv[0] != "train":
        raise UserError(f"{shlex.join(argv) or 'nothing'}: has to be `train CONFIG ...`")
    for what, n in (("nodes", nodes), ("gpus", gpus), ("processes", processes)):
        if n < 1:
            raise UserError(f"--{what}: must be positive, and is {n}")
    if gpus % processes:
        raise UserError(
            f"--processes: {processes} processes on a node cannot share its {gpus} GPUs evenly; "
            "use as many as there are GPUs, or one"
        )
    for word in (*argv, *setup.split("\n")):
        if not word.isprintable():
            raise UserError(f"{word!r}: has a character that cannot be shown, or a line's end")


def _render(template, argv, nodes, gpus, grace, setup, launch, tail="", escape=str, **more) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("zayajax.launch"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(
        nodes=nodes,
        gpus=gpus,
        before=math.ceil(grace + MARGIN),
        setup=escape(setup),
        first=escape(shlex.join(argv)),
        again=escape(shlex.join(again(argv))),
        launch=shlex.join(map(str, launch)) + tail,
        **more,
    )
