"""A run from its config to its report: processes, folder, text, mesh, state, and then `Run`."""

import contextlib
import dataclasses
import hashlib
import os
import time
from pathlib import Path

import jax

from zayajax import checkpoint, config as configs, weights
from zayajax.data import corpus as corpora, tokenizer as tokenizers
from zayajax.errors import UserError
from zayajax.launch import distributed, flags
from zayajax.mesh import emulate, make_mesh
from zayajax.settings import SHAPES, Config, ModelConfig
from zayajax.training import folder
from zayajax.training.interrupts import Interrupts
from zayajax.training.keeper import Keeper
from zayajax.training.run import Run, say
from zayajax.training.state import TrainState
from zayajax.training.step import build

EMULATED = 64  # devices on one CPU: each step of more takes minutes
SEEN = 30.0  # seconds until all processes see a new folder on a shared file system


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out of a run."""

    run_dir: Path
    step: int
    loss: float | None  # of the last training step, nats a token
    held_out_loss: float | None  # of the last evaluation
    state: TrainState
    stopped: int | None = None  # the status to end with, where a signal came first


def train(
    config: Config,
    run_dir: str | Path = "runs/run",
    *,
    resume: bool = False,
    fresh: bool = False,
    init_from: str | Path | None = None,
    show: bool = True,
    cluster: distributed.Cluster | None = None,
    command: bool = False,
) -> Result:
    """Trains until `train.steps`. Same as the command `zayajax train`.

    Args:
      run_dir: everything is written there. A folder with a run in it needs `resume` or `fresh`.
      resume: goes on from the newest complete checkpoint; without one, starts at step 0.
      init_from: weights to start from: a run, a checkpoint, or what transformers saved. With
        `resume`, only where there is no checkpoint yet.
      show: the progress display.
      cluster: the processes that this one joins, all of which call this function with the same
        arguments and see the same `run_dir`; None where it is alone.
      command: the process is this run's own. Ctrl-C saves and ends the run (otherwise it is a
        KeyboardInterrupt), and the watchdog ends the process when it stalls.

    SIGTERM saves and ends the run, at most `faults.grace` seconds later; before the first step has
    ended it ends the process at once.

    Raises UserError for whatever is wrong with the arguments, before any device work.
    """
    run_dir, init_from = Path(run_dir), init_from and Path(init_from)
    config = configs.absolute(config)
    show = show and (cluster is None or cluster.process == 0)
    with contextlib.ExitStack() as stack:
        stops = stack.enter_context(Interrupts(config.faults.grace, keyboard=command))
        chosen = flags.prepare(
            os.environ,
            platform=flags.platform(os.environ),
            nodes=config.mesh.nodes,
            deterministic=config.faults.deterministic,
            folder=run_dir,
        )
        if cluster:
            _join(cluster, config)
            # A launcher starts processes again with `resume`, at times beside one that still waits
            # for them as it was first started.
            resume, fresh = distributed.as_first((resume, fresh), timeout=cluster.timeout)
        stack.callback(folder.discard, run_dir, made=not run_dir.exists())
        asked = dict(resume=resume, fresh=fresh, init_from=init_from)
        distributed.together(lambda: folder.check(run_dir, **asked), "check the folder")
        distributed.together(lambda: stack.enter_context(folder.taken(run_dir)), "take the folder")
        _see(run_dir)
        keeper = stack.enter_context(
            Keeper(
                run_dir,
                config.faults,
                config.checkpoint,
                stops,
                process=cluster.process if cluster else 0,
                processes=cluster.processes if cluster else 1,
                command=command,
            )
        )
        with keeper.phase("startup"):
            words, text = _read(config, run_dir)
            changes = init_from and same_shape(init_from, config.model)
            if not cluster:
                emulate(config.mesh.devices)
            mesh = make_mesh(config.mesh.nodes, config.mesh.gpus)
            _check_emulated(mesh)
            program = build(config, mesh)
            params = init_from and weights.read(init_from, program.state.params)
            if fresh:  # only now, when nothing is wrong with what was asked for
                distributed.together(lambda: folder.clear(run_dir), "clear the folder")
            keeper.open_ledger()
            saved = stack.enter_context(
                checkpoint.Checkpoints(run_dir, config.checkpoint.keep, config.faults.patience)
            )
            for line in (_settings(chosen), *_differences(changes)):
                say(line, show)
            run = Run(config, run_dir, program, words, text, saved, keeper, show)
            run.start(resume, params)
        run.steps()
        keeper.done()
        if run.stopped:
            return Result(run_dir, run.step, run.loss, run.held_out_loss, run.state, stops.status)
        run.finish()
        return Result(run_dir, run.step, run.loss, run.held_out_loss, run.state)


def _join(cluster: distributed.Cluster, config: Config):
    if config.mesh.devices % cluster.processes:
        raise UserError(
            f"{cluster.processes} processes do not share mesh.nodes * mesh.gpus = "
            f"{config.mesh.devices} devices evenly"
        )
    settings = hashlib.sha256(configs.to_toml(config).encode()).hexdigest()[:16]
    distributed.join(
        cluster,
        cpu_devices=config.mesh.devices // cluster.processes,
        facts={"config": settings},
    )


def _see(run_dir: Path):
    """UserError where this process does not see the folder that process 0 has made."""
    until = time.monotonic() + SEEN
    while not (run_dir / folder.LOCK).exists():
        if time.monotonic() > until:
            raise UserError(
                f"{run_dir}: process {jax.process_index()} does not see the folder that process 0 "
                "has made; name one on a file system that all share with --run-dir"
            )
        time.sleep(0.1)


def _read(config: Config, run_dir: Path):
    """(tokenizer, text). One process makes the tokens, the others find them."""
    words = tokenizers.load(config.data.tokenizer)

    def read():
        return corpora.open_corpus(config.data, words, config.model.vocab, run_dir / folder.DATA)

    distributed.together(read, "read data.corpus", timeout=config.faults.patience)
    return words, read()


def _check_emulated(mesh):
    if mesh.devices.flat[0].platform == "cpu" and mesh.size > EMULATED:
        raise UserError(
            f"mesh.nodes * mesh.gpus = {mesh.size}, and a CPU stands for at most {EMULATED} GPUs; "
            "set them to the machine at hand"
        )


def same_shape(source: Path, model: ModelConfig) -> list[str]:
    """What else differs in the settings of the weights at `source`; UserError if they don't fit."""
    theirs = weights.config_of(source)
    if wrong := configs.changes(theirs, model, SHAPES):
        raise UserError(
            f"{source}: is of another model: {', '.join(f'model.{c}' for c in wrong)}; "
            "set these to what they were"
        )
    return configs.changes(theirs, model)


def _settings(chosen: flags.Prepared) -> str:
    """What XLA was started with: in full where it matters."""
    return chosen.line if jax.default_backend() == "cpu" else str(chosen)


def _differences(changes: list[str] | None) -> list[str]:
    return [f"other than where the weights come from: model.{c}" for c in changes or ()]
