"""One process's share of a run: steps, evaluations, checkpoints, and what goes wrong between."""

import collections
import dataclasses
import importlib.metadata
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P

from zayajax import checkpoint, optim
from zayajax.config import to_tree
from zayajax.data import pipeline
from zayajax.errors import ReplicasDiffer, UserError
from zayajax.exchange import capacities
from zayajax.generate import decode
from zayajax.layout import WORLD
from zayajax.machine import peak_flops
from zayajax.mesh import by_path
from zayajax.model.flops import train_flops_per_token
from zayajax.report import write_report
from zayajax.report.goodput import goodput
from zayajax.training import folder, guard, recheck
from zayajax.training.display import Progress
from zayajax.training.feed import Feed, Requests
from zayajax.training.keeper import Keeper
from zayajax.training.metrics import MetricsLog, exchange_metrics, load_metrics
from zayajax.training.step import REQUESTS, Program

# A line carries the load of every expert at most this many times a run: 40 layers of 17 classes
# would fill gigabytes, and the report's heat map has no more columns than this.
LOAD_LINES = 2000
PROMPT, TEMPERATURE = 48, 0.8  # of the samples: tokens, and how far from the most likely


# From one checkpoint: more bad batches in a row than this many times `faults.bad_steps`, and it is
# not the data.
RETURNS = 3


class Started(NamedTuple):
    """A step that the device works on."""

    step: int
    row: int  # of the batch after it
    tokens: int
    batch: dict
    metrics: dict


class Run:
    """Made by `loop.train`; `start`, `steps` and, where these came to the end, `finish`."""

    def __init__(
        self, config, run_dir, program: Program, words, text, saved, keeper: Keeper, show: bool
    ):
        self.config, self.run_dir, self.program = config, run_dir, program
        self.words, self.text, self.saved, self.keeper = words, text, saved, keeper
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
        # On emulated devices one step may be in flight: several can starve each other of threads.
        # Elsewhere the metrics of the step before are fetched, so that the device never waits.
        self.ahead = 0 if jax.default_backend() == "cpu" else 1
        self.pending = collections.deque()
        self.asked = Requests()  # how many processes asked, as the last ended step says
        self.bad_in_row, self.owed = 0, False
        self.returns = collections.Counter()
        self.stopped = False

    def start(self, resume: bool, params):
        """Restores or makes the state, and says which. `params`: weights to start from, or None."""
        self.state, self.step, self.row, self.tokens, self.evaluated = None, 0, 0, 0, False
        found = resume and self.saved.restore(self.program.state, self.same_run, self.say)
        train, held_out = self.text.train, self.text.held_out
        self.say(
            f"text: {len(train):,} documents of {int(train.lengths.sum()):,} tokens, "
            f"and {len(held_out):,} held out"
        )
        if any(self.text.skipped.values()):
            left_out = ", ".join(f"{n} {what}" for what, n in self.text.skipped.items() if n)
            self.say(f"{self.config.data.corpus}: files or lines left out: {left_out}")
        self.say(optim.describe(self.config.optim, by_path(self.program.state.params)))
        if found:
            self.stand_at(*found)
            self.say(f"resuming at step {self.step}")
            self.keeper.resumed(self.step)
        elif resume:
            self.say(f"{self.run_dir}: no complete checkpoint, starting at step 0")
            self.keeper.resumed(0)
        # Metrics of a run that goes on are cut back to here; of one that starts over, all of them.
        self.cut = (self.step if self.state else -1) if resume else None
        if self.state is None:
            with self.keeper.compiling("init"):
                self.state = self.program.init(jax.random.key(self.config.train.seed))
            if params is not None:
                self.state = dataclasses.replace(self.state, params=params)  # moments stay zero
        if self.config.faults.recheck_every and (why := recheck.why_not(self.config.mesh)):
            self.say(why)
        if self.step >= self.config.train.steps:
            steps = self.config.train.steps
            self.say(f"nothing to do: at step {self.step}, and train.steps is {steps}")
        elif self.lead:
            folder.write_config(self.run_dir, self.config)

    def stand_at(self, state, record: dict):
        """Goes on from a checkpoint."""
        self.state, self.evaluated = state, record["evaluated"]
        self.step, self.row, self.tokens = (record[k] for k in ("step", "row", "tokens"))

    def same_run(self, record: dict, source: Path):
        """Refuses the checkpoint of another run, and says what else has changed."""
        prints = self.text.fingerprint, self.words.fingerprint
        for change in checkpoint.require_compatible(record, self.config, *prints, source):
            self.say(f"changed since the checkpoint: {change}")

    def steps(self):
        """All training steps that are left, with evaluations and checkpoints on the way; fewer
        where a process was asked to stop."""
        train = self.config.train
        self.read_from(self.row)
        words = dict(evaluated=self.evaluated, enabled=self.lead, say=self.say)
        self.log = MetricsLog(self.run_dir, self.cut, **words)
        self.progress = Progress(train.steps, self.step, enabled=self.show)
        with self.log, self.progress, self.keeper.phase("step"):
            self.mark = time.perf_counter()
            if self.evaluates() and not self.evaluated:  # a signal came before or meanwhile
                self.evaluate()
            while self.step < train.steps and not self.stopped:
                self.advance()
            with self.keeper.phase("save"):
                self.saved.wait()

    def read_from(self, row: int):
        train, data = self.config.train, self.run_dir / folder.DATA
        rows = pipeline.Rows(self.text.train, train.sequence, train.seed, data)
        self.row, self.batches = row, pipeline.batches(rows, row, train.batch, **self.part)

    def evaluates(self) -> bool:
        every, last = self.config.train.eval_every, self.step == self.config.train.steps
        return bool(every) and (last or self.step % every == 0)

    def advance(self):
        """One step, and all that its end calls for."""
        self.dispatch()
        last = self.step == self.config.train.steps
        # One that is owed, too: what is saved, and whether it is bad, is known only of ended steps.
        due = last or self.owed or self.step % self.config.checkpoint.every == 0
        rechecks = self.is_recheck()
        self.end_steps(0 if due or rechecks or self.evaluates() else self.ahead)
        if any(self.asked):
            self.end_steps(0)
        if self.asked.failed:
            self.saved.wait()  # raises it, in all processes
        if self.bad_in_row >= self.config.faults.bad_steps:
            return self.go_back()
        if rechecks:
            self.recheck()
        if self.evaluates() and not self.asked.stop:
            self.evaluate()
        self.stopped = bool(self.asked.stop)
        # What bad steps in a row lead back to must be older than the first of them.
        self.owed |= due
        wanted = self.owed or self.asked.save
        if last or self.stopped or (wanted and not self.bad_in_row):
            self.save(temporary=not self.owed)

    def dispatch(self):
        """Starts one step."""
        train = self.config.train
        with self.keeper.phase("data"):
            batch = self.feed.put(next(self.batches), self.requests())
        with self.keeper.compiling("train_step"):
            self.state, metrics = self.program.train_step(self.state, batch)
        self.step, self.row = self.step + 1, self.row + train.batch
        self.tokens += train.batch * train.sequence
        self.evaluated = False
        self.keeper.dispatched(self.step)
        self.pending.append(Started(self.step, self.row, self.tokens, batch, metrics))

    def requests(self) -> Requests:
        return self.keeper.requests(failed=self.saved.failed)

    def end_steps(self, ahead: int):
        """Waits until only so many are in flight, or too many in a row were bad."""
        while len(self.pending) > ahead and self.bad_in_row < self.config.faults.bad_steps:
            self.ended = self.pending.popleft()
            self.write(self.ended)

    def write(self, started: Started):
        """Waits for a step to end and writes its line."""
        train = self.config.train
        metrics = jax.device_get(started.metrics)
        self.keeper.finished(started.step)
        seconds, self.mark = time.perf_counter() - self.mark, time.perf_counter()
        rate = train.batch * train.sequence / seconds
        loads = load_metrics(metrics["counts_LC"]) | exchange_metrics(
            metrics["rooms_LC"], self.rooms
        )
        if started.step % max(1, train.steps // LOAD_LINES):
            del loads["expert_load"]
        self.loss = float(metrics["loss"])
        self.asked = Requests(*metrics[REQUESTS].tolist())
        self.bad_in_row = int(metrics["bad_in_row"])
        line = {
            "step": started.step,
            "kind": "train",
            "loss": self.loss,
            "tokens": started.tokens,
            "tokens_per_second": rate,
            "mfu": rate * self.flops / self.peak if self.peak else None,
            "step_seconds": seconds,
            "learning_rate": float(metrics["learning_rate"]),
            "grad_norm": float(metrics["grad_norm"]),
            **guard.line(metrics),
            **loads,
        }
        self.log.write(line)
        self.progress.update(line)

    def evaluate(self):
        """Loss on held-out text, written down; nothing where no text was held out, or where a
        process is asked to stop meanwhile."""
        started = time.perf_counter()
        total = weight = 0.0
        with self.keeper.phase("eval"):
            for batch in self.held_out:
                batch = self.feed.put(batch, self.requests())
                with self.keeper.compiling("eval_step"):
                    sums = self.program.eval_step(self.state.params, batch)
                sums = jax.device_get(sums)
                total, weight = total + float(sums["loss"]), weight + float(sums["weight"])
                # At step 0 there is nothing to save yet, and the first step will carry it again.
                if sums[REQUESTS][0] and self.step:
                    self.asked = Requests(*sums[REQUESTS].tolist())
                    return
        self.evaluated = True
        if weight:
            self.held_out_loss = total / weight
            line = {"step": self.step, "kind": "eval", "loss": self.held_out_loss}
            line |= {"tokens": self.tokens, "seconds": time.perf_counter() - started}
            self.log.write(line)
            self.progress.update(line)
        self.mark = time.perf_counter()

    def save(self, *, temporary: bool):
        """Starts a checkpoint of the last step; the next one is not kept waiting for the disk."""
        record = {"row": self.row, "tokens": self.tokens, "evaluated": self.evaluated}
        record |= {"data": self.text.fingerprint, "tokenizer": self.words.fingerprint}
        record |= {"config": to_tree(self.config), "versions": versions()}
        with self.keeper.phase("save"):
            self.log.sync()  # the lines of these steps outlive whatever the checkpoint outlives
            self.saved.save(self.step, self.state, record, temporary=temporary)
        self.keeper.saved()
        self.owed = False
        self.mark = time.perf_counter()

    def go_back(self):
        """To the last checkpoint, and past the batches that were bad."""
        came_from, row, bad = self.ended.step, self.ended.row, self.bad_in_row
        self.pending.clear()
        with self.keeper.phase("save"):
            self.saved.wait()
        if not self.saved.steps():
            raise UserError(
                f"{bad} bad steps in a row up to step {came_from} (faults.bad_steps; the last loss "
                f"is {self.loss}), and there is no checkpoint to go back to; lower "
                "optim.learning_rate"
            )
        self.state = None  # two do not fit
        with self.keeper.phase("other"):  # takes as long as it does at a start
            self.stand_at(*self.saved.restore(self.program.state, self.same_run, self.say))
        self.returns[self.step] += 1
        if self.returns[self.step] > RETURNS:
            raise UserError(
                f"{bad} bad steps in a row after each of {RETURNS} returns to step {self.step}, "
                "with other text every time; go on with a lower optim.learning_rate"
            )
        self.read_from(row)
        self.bad_in_row, self.asked, self.owed = 0, Requests(), False
        self.log.cut(self.step)
        self.keeper.rolled_back(self.step)
        self.log.write({"step": self.step, "kind": "rollback", "from": came_from, "row": row})
        self.progress.rolled_back(self.step)
        self.mark = time.perf_counter()

    def is_recheck(self) -> bool:
        every = self.config.faults.recheck_every
        return bool(every) and self.program.compare is not None and self.step % every == 0

    def recheck(self):
        """Two replicas compute one loss each of the same rows; where they differ, one is broken."""
        with self.keeper.phase("other"), self.keeper.compiling("compare"):
            losses = jax.device_get(self.program.compare(self.state.params, self.ended.batch))
        suspects = recheck.find_suspects(losses, recheck.TOLERANCE[self.config.train.compute_dtype])
        self.log.write({"step": self.step, "kind": "recheck", "suspects": suspects})
        if suspects:
            raise ReplicasDiffer(
                f"step {self.step}: replicas {suspects} computed other losses than their "
                f"neighbours from the same rows ({losses[suspects].tolist()}): "
                f"{self.where(suspects)}; take them out, and go on with --resume from a checkpoint "
                "before this step"
            )
        self.mark = time.perf_counter()

    def where(self, replicas: list[int]) -> str:
        """Which devices these replicas are."""
        mesh = self.program.batch_sharding.mesh
        rows = mesh.devices if mesh.devices.shape[0] > 1 else mesh.devices.T
        return "; ".join(
            f"{r}: {', '.join(f'{d} of process {d.process_index}' for d in rows[r])}"
            for r in replicas
        )

    def finish(self):
        """Samples and report."""
        with self.keeper.phase("sample"):
            if self.config.train.sample_tokens:
                text = self.sample()
                if self.lead:
                    (self.run_dir / folder.SAMPLES).write_text(text)
        if self.lead:
            self.say(goodput(self.run_dir).sentence)
            report = write_report(self.run_dir)
            self.say(f"report: {report}")

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
        say(text, self.show)


def say(text: str, show: bool = True):
    if show and text:
        print(text, flush=True)


def versions() -> dict[str, str]:
    """Of what decides the numbers of a run."""
    names = ("zayajax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {name: importlib.metadata.version(name) for name in names}
