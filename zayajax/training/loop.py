"""A run from its config to its report: text, mesh, state, steps, evaluations, checkpoints."""

import collections
import dataclasses
import importlib.metadata
import math
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P

from zayajax import checkpoint, config as configs, optim, weights
from zayajax.config import to_tree
from zayajax.data import corpus as corpora, pipeline, tokenizer as tokenizers
from zayajax.errors import UserError
from zayajax.exchange import capacities
from zayajax.generate import decode
from zayajax.layout import WORLD
from zayajax.machine import peak_flops
from zayajax.mesh import by_path, emulate, make_mesh
from zayajax.model.flops import train_flops_per_token
from zayajax.report import write_report
from zayajax.settings import SHAPES, Config, ModelConfig
from zayajax.training import folder
from zayajax.training.display import Progress
from zayajax.training.feed import Feed
from zayajax.training.metrics import MetricsLog, exchange_metrics, load_metrics
from zayajax.training.state import TrainState
from zayajax.training.step import Program, build

# A line carries the load of every expert at most this many times a run: 40 layers of 17 classes
# would fill gigabytes, and the report's heat map has no more columns than this.
LOAD_LINES = 2000
EMULATED = 64  # devices on one CPU: each step of more takes minutes
PROMPT, TEMPERATURE = 48, 0.8  # of the samples: tokens, and how far from the most likely


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out of a run."""

    run_dir: Path
    step: int
    loss: float | None  # of the last training step, nats a token
    held_out_loss: float | None  # of the last evaluation
    state: TrainState


def train(
    config: Config,
    run_dir: str | Path = "runs/run",
    *,
    resume: bool = False,
    fresh: bool = False,
    init_from: str | Path | None = None,
    show: bool = True,
) -> Result:
    """Trains until `train.steps`. Same as the command `zayajax train`.

    Args:
      run_dir: everything is written there. A folder with a run in it needs `resume` or `fresh`.
      resume: goes on from the newest complete checkpoint; without one, starts at step 0.
      init_from: weights to start from: a run, a checkpoint, or what transformers saved.
      show: the progress display.

    Raises UserError for whatever is wrong with the arguments, before any device work.
    """
    run_dir, init_from = Path(run_dir), init_from and Path(init_from)
    folder.check(run_dir, resume=resume, fresh=fresh, init_from=init_from)
    config = configs.absolute(config)
    words = tokenizers.load(config.data.tokenizer)
    changes = init_from and same_shape(init_from, config.model)
    text = corpora.open_corpus(config.data, words, config.model.vocab, run_dir / folder.DATA)
    emulate(config.mesh.devices)
    mesh = make_mesh(config.mesh.nodes, config.mesh.gpus)
    if mesh.devices.flat[0].platform == "cpu" and mesh.size > EMULATED:
        raise UserError(
            f"mesh.nodes * mesh.gpus = {mesh.size}, and a CPU stands for at most {EMULATED} GPUs; "
            "set them to the machine at hand"
        )
    program = build(config, mesh)
    params = init_from and weights.read(init_from, program.state.params)
    if fresh:  # only now, when nothing is wrong with what was asked for
        folder.clear(run_dir)
    with checkpoint.Checkpoints(run_dir, config.checkpoint.keep) as saved:
        run = _Run(config, run_dir, program, words, text, saved, show)
        for change in changes or ():
            run.say(f"other than where the weights come from: model.{change}")
        run.start(resume, params)
        run.steps()
        return run.finish()


def same_shape(source: Path, model: ModelConfig) -> list[str]:
    """What else differs in the settings of the weights at `source`; UserError if they don't fit."""
    theirs = weights.config_of(source)
    if wrong := configs.changes(theirs, model, SHAPES):
        raise UserError(
            f"{source}: is of another model: {', '.join(f'model.{c}' for c in wrong)}; "
            "set these to what they were"
        )
    return configs.changes(theirs, model)


class _Run:
    """One process's share of a run."""

    def __init__(self, config, run_dir, program: Program, words, text, saved, show: bool):
        self.config, self.run_dir, self.program = config, run_dir, program
        self.words, self.text, self.saved = words, text, saved
        self.lead = jax.process_index() == 0
        self.show = show and self.lead
        train = config.train
        self.feed = Feed(program.batch_sharding, train.batch, train.sequence)
        tokens = train.batch * train.sequence // (train.micro_batches * config.mesh.devices)
        self.rooms = np.asarray(capacities(tokens, config.mesh.gpus)) * config.mesh.gpus / tokens
        self.flops = train_flops_per_token(config.model, train.sequence)
        peak = peak_flops(jax.devices()[0].device_kind)
        self.peak = peak and peak * config.mesh.devices
        self.part = {"rows_of_batch": self.feed.rows, "order": self.feed.order}
        held_out = (text.held_out, train.sequence, train.batch, train.eval_batches, train.seed)
        self.held_out = pipeline.held_out_batches(*held_out, **self.part) if held_out[0] else []
        self.loss = self.held_out_loss = None

    def start(self, resume: bool, params):
        """Restores or makes the state, and says which. `params`: weights to start from, or None."""
        self.state, self.step, self.row, self.tokens = None, 0, 0, 0
        train, held_out = self.text.train, self.text.held_out
        self.say(
            f"text: {len(train):,} documents of {int(train.lengths.sum()):,} tokens, "
            f"and {len(held_out):,} held out"
        )
        if any(self.text.skipped.values()):
            left_out = ", ".join(f"{n} {what}" for what, n in self.text.skipped.items() if n)
            self.say(f"{self.config.data.corpus}: files or lines left out: {left_out}")
        self.say(optim.describe(self.config.optim, by_path(self.program.state.params)))
        if resume:
            found = self.saved.restore(self.program.state, self.same_run, self.say)
            if found is None:
                self.say(f"{self.run_dir}: no complete checkpoint, starting at step 0")
            else:
                self.state, record = found
                self.step, self.row, self.tokens = (record[k] for k in ("step", "row", "tokens"))
                self.say(f"resuming at step {self.step}")
        # Metrics of a run that goes on are cut back to here; of one that starts over, all of them.
        self.cut = (self.step if self.state else -1) if resume else None
        if self.state is None:
            self.state = self.program.init(jax.random.key(self.config.train.seed))
            if params is not None:
                self.state = dataclasses.replace(self.state, params=params)  # moments stay zero
        if self.step >= self.config.train.steps:
            steps = self.config.train.steps
            self.say(f"nothing to do: at step {self.step}, and train.steps is {steps}")
        elif self.lead:
            folder.write_config(self.run_dir, self.config)

    def same_run(self, record: dict, source: Path):
        """Refuses the checkpoint of another run, and says what else has changed."""
        data = self.text.fingerprint
        for change in checkpoint.require_compatible(record, self.config, data, source):
            self.say(f"changed since the checkpoint: {change}")

    def steps(self) -> TrainState:
        """All training steps that are left, with evaluations and checkpoints on the way."""
        train, every = self.config.train, self.config.checkpoint.every
        rows = pipeline.Rows(
            self.text.train, train.sequence, train.seed, self.run_dir / folder.DATA
        )
        batches = pipeline.batches(rows, self.row, train.batch, **self.part)
        # On emulated devices one step may be in flight: several can starve each other of threads.
        # Elsewhere the metrics of the step before are fetched, so that the device never waits.
        ahead = 0 if jax.default_backend() == "cpu" else 1
        pending = collections.deque()
        log = MetricsLog(self.run_dir, self.cut, enabled=self.lead)
        with log as self.log, Progress(train.steps, self.step, enabled=self.show) as self.progress:
            if self.step == 0 and train.eval_every:
                self.evaluate()
            self.mark = time.perf_counter()
            while self.step < train.steps:
                pending.append(self.dispatch(next(batches)))
                last = self.step == train.steps
                evaluates = train.eval_every and (last or self.step % train.eval_every == 0)
                saves = last or self.step % every == 0
                while len(pending) > (0 if evaluates or saves else ahead):
                    self.write(*pending.popleft())
                if evaluates:
                    self.evaluate()
                if saves:
                    self.save()
                self.saved.check()
            self.saved.wait()
        return self.state

    def dispatch(self, batch):
        """Starts one step; returns what `write` takes once it has ended."""
        train = self.config.train
        self.state, metrics = self.program.train_step(self.state, self.feed.put(batch))
        self.step, self.row = self.step + 1, self.row + train.batch
        self.tokens += train.batch * train.sequence
        return self.step, self.tokens, metrics

    def write(self, step: int, tokens: int, metrics):
        """Waits for a step to end and writes its line."""
        train = self.config.train
        metrics = jax.device_get(metrics)
        seconds, self.mark = time.perf_counter() - self.mark, time.perf_counter()
        rate = train.batch * train.sequence / seconds
        loads = load_metrics(metrics["counts_LC"]) | exchange_metrics(
            metrics["rooms_LC"], self.rooms
        )
        if step % max(1, train.steps // LOAD_LINES):
            del loads["expert_load"]
        self.loss = float(metrics["loss"])
        line = {
            "step": step,
            "kind": "train",
            "loss": self.loss,
            "tokens": tokens,
            "tokens_per_second": rate,
            "mfu": rate * self.flops / self.peak if self.peak else None,
            "step_seconds": seconds,
            "learning_rate": float(metrics["learning_rate"]),
            "grad_norm": float(metrics["grad_norm"]),
            **loads,
        }
        self.log.write(line)
        self.progress.update(line)

    def evaluate(self):
        """Loss on held-out text, written down; nothing where no text was held out."""
        started = time.perf_counter()
        total = weight = 0.0
        for batch in self.held_out:
            sums = self.program.eval_step(self.state.params, self.feed.put(batch))
            sums = jax.device_get(sums)
            total, weight = total + float(sums["loss"]), weight + float(sums["weight"])
        if weight:
            self.held_out_loss = total / weight
            line = {"step": self.step, "kind": "eval", "loss": self.held_out_loss}
            line |= {"tokens": self.tokens, "seconds": time.perf_counter() - started}
            self.log.write(line)
            self.progress.update(line)
        self.mark = time.perf_counter()

    def save(self):
        if not math.isfinite(self.loss):
            raise UserError(
                f"the loss of step {self.step} is {self.loss}, and no checkpoint is made of that; "
                "go on from the last one with a lower optim.learning_rate"
            )
        record = {"row": self.row, "tokens": self.tokens, "data": self.text.fingerprint}
        record |= {"config": to_tree(self.config), "versions": versions()}
        self.saved.save(self.step, self.state, record)
        self.mark = time.perf_counter()

    def finish(self) -> Result:
        """Samples and report."""
        if self.config.train.sample_tokens:
            text = self.sample()
            if self.lead:
                (self.run_dir / folder.SAMPLES).write_text(text)
        if self.lead:
            report = write_report(self.run_dir)
            self.say(f"report: {report}")
        return Result(self.run_dir, self.step, self.loss, self.held_out_loss, self.state)

    def sample(self) -> str:
        """One continuation a device, of the beginnings of held-out documents."""
        documents = self.text.held_out if self.text.held_out.lengths.any() else self.text.train
        count = self.config.mesh.devices
        some = np.flatnonzero(documents.lengths)  # a tokenizer may make nothing of a text
        prompts = [documents[int(some[i % len(some)])][:PROMPT].tolist() for i in range(count)]
        by_row = NamedSharding(self.program.batch_sharding.mesh, P(WORLD))

        def next_logits(tokens_BS, segments_BS, index_B):
            arrays = (tokens_BS, segments_BS, index_B.astype(np.int32))
            arrays = (jax.make_array_from_callback(x.shape, by_row, x.__getitem__) for x in arrays)
            logits_BV = self.program.next_logits(self.state.params, *arrays)
            return multihost_utils.process_allgather(logits_BV, tiled=True)

        stop = [] if self.words.eos is None else [self.words.eos]
        new = decode(
            next_logits,
            prompts,
            self.config.train.sample_tokens,
            self.config.model.vocab,
            temperature=TEMPERATURE,
            seed=self.config.train.seed,
            stop=stop,
        )
        lines = [f"step {self.step}, temperature {TEMPERATURE}"]
        for i, (prompt, tokens) in enumerate(zip(prompts, new, strict=True), 1):
            begin, end = self.words.decode(prompt), self.words.decode(tokens)
            lines += [f"--- {i}: the prompt, then [...]", f"{begin}[...]{end}"]
            if i == 1:
                self.say(f"sample ({begin!r} is the prompt):\n{begin}{end}")
        return "\n".join(lines) + "\n"

    def say(self, text: str):
        if self.show:
            print(text, flush=True)


def versions() -> dict[str, str]:
    """Of what decides the numbers of a run."""
    names = ("zayajax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {name: importlib.metadata.version(name) for name in names}
