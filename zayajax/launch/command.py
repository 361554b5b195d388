"""The command `zayajax launch`: its options, and what they come to."""

import os
import re
from pathlib import Path

from zayajax.errors import UserError
from zayajax.settings import Config

# Seconds in which a process has started Python and JAX, beyond meeting the others: an assumption.
STARTING = 120.0


def add(commands):
    """The parser of `launch`, among those of the other commands."""
    launch = commands.add_parser(
        "launch",
        help="train in several processes, and go on when one fails",
        usage="zayajax launch [options] -- train CONFIG ...",
    )
    launch.add_argument("--processes", type=int, default=1, metavar="P", help="on each node [1]")
    launch.add_argument("--gpus", type=int, metavar="G", help="of a node [as CONFIG has it]")
    launch.add_argument("--nodes", type=int, metavar="N", help="[as Slurm or Kubernetes has it]")
    launch.add_argument("--node", type=int, metavar="I", help="which this is, from 0 [likewise]")
    launch.add_argument("--coordinator", metavar="HOST:PORT", help="on node 0 [likewise]")
    launch.add_argument("--restarts", type=int, metavar="R", help="with no new checkpoint [10]")
    launch.add_argument("--hang", type=float, metavar="S", help="seconds unheard of; 0: any [60]")
    scripts = launch.add_argument_group("scripts", "printed for a cluster of N nodes, not run")
    either = scripts.add_mutually_exclusive_group()
    either.add_argument("--slurm", type=int, metavar="N", help="a batch script for sbatch")
    either.add_argument("--kubernetes", type=int, metavar="N", help="a JobSet for kubectl")
    scripts.add_argument("--name", help="of the job [as the run's folder]")
    scripts.add_argument("--setup", metavar="LINES", help="of shell, before it starts")
    scripts.add_argument("--time", help="slurm: limit of the job [1-00:00:00]")
    scripts.add_argument("--image", help="kubernetes: of the container, with zayajax in it")
    scripts.add_argument("--claim", help="kubernetes: persistent volume claim of the run's folder")
    scripts.add_argument("--mount", help="kubernetes: where the claim is seen [/runs]")
    scripts.add_argument("--vendor", choices=("amd", "nvidia"), help="kubernetes: of GPUs [amd]")
    return launch


def launch(args, run_dir: Path, config: Config, join_timeout: float) -> int | None:
    """Runs this node's share of the job, or prints what starts it on a cluster.

    Args:
      args: as `add` has them, and `words`, the arguments of what is launched.
      run_dir, config, join_timeout: of the `train` among these.
    """
    from zayajax.launch.supervisor import Job, supervise

    nodes, node, coordinator = _node(args)
    gpus = args.gpus if args.gpus is not None else -(-config.mesh.devices // max(nodes, 1))
    given = {k: getattr(args, k) for k in ("restarts", "hang") if getattr(args, k) is not None}
    job = Job(
        arguments=tuple(args.words),
        run_dir=run_dir,
        processes=args.processes,
        gpus=gpus,
        node=node,
        nodes=nodes,
        coordinator=coordinator,
        start=join_timeout + STARTING,
        grace=config.faults.grace,
        **given,
    )
    if nodes * gpus != config.mesh.devices:
        raise UserError(
            f"{gpus} GPUs on each of {nodes} nodes (--gpus, --nodes) are {nodes * gpus}, and the "
            f"config asks for mesh.nodes * mesh.gpus = {config.mesh.devices}"
        )
    written = _script(args, job)
    if written is None:
        return supervise(job)
    print(written, end="")


def _script(args, job) -> str | None:
    """What starts the job on a cluster, if that is asked for."""
    kinds = {"slurm": ("time",), "kubernetes": ("image", "claim", "mount", "vendor")}
    kind = next((k for k in kinds if getattr(args, k) is not None), None)
    names = ("name", "setup", *(n for own in kinds.values() for n in own))
    given = {n: value for n in names if (value := getattr(args, n)) is not None}
    for name in given:
        if kind is None or name not in ("name", "setup", *kinds[kind]):
            owner = next((k for k, own in kinds.items() if name in own), "slurm or --kubernetes")
            raise UserError(f"--{name}: goes with --{owner} N; leave it out")
    if kind is None:
        return None
    for name in ("image", "claim"):
        if name in kinds[kind] and name not in given:
            raise UserError(f"--kubernetes: the pods need an image and a claim; name the --{name}")
    from zayajax.launch import scripts

    own = [
        w
        for k in ("restarts", "hang")
        if getattr(args, k) is not None
        for w in (f"--{k}", f"{getattr(args, k):g}")
    ]
    # Kubernetes takes no other characters.
    name = re.sub("[^a-z0-9]+", "-", job.run_dir.name.lower()).strip("-")
    return getattr(scripts, kind)(
        job.arguments,
        nodes=job.nodes,
        gpus=job.gpus,
        processes=job.processes,
        grace=job.grace,
        options=own,
        **{"name": name} | given,
    )


def _node(args) -> tuple[int, int, str | None]:
    """How many nodes, which is this, and where they meet: as asked, else as the cluster says."""
    asked = args.nodes, args.node, args.coordinator
    script = next((n for n in (args.slurm, args.kubernetes) if n is not None), None)
    if script is not None:
        if asked != (None, None, None):
            raise UserError(
                "--slurm and --kubernetes take the number of nodes themselves, and each node finds "
                "its place; leave out --nodes, --node and --coordinator"
            )
        return script, 0, "as the script finds it"
    if asked == (None, None, None):
        from zayajax.launch.cluster import node_of

        found = node_of(os.environ)
        return found.nodes, found.node, found.coordinator
    nodes = args.nodes if args.nodes is not None else 1
    if nodes > 1 and args.node is None:
        raise UserError(f"--nodes {nodes}: say which of them this is, with --node")
    return nodes, args.node or 0, args.coordinator
