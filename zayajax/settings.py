"""The settings of a run: a tree of frozen dataclasses, validated where it is built.

A mistake is a `ConfigError` that names the key. `zayajax.config` reads and writes them as text.
"""

import dataclasses
import math

from zayajax.errors import UserError
from zayajax.layout import GPU, LAYOUTS, NODE, TRAINED

DTYPES = ("float32", "bfloat16")


class ConfigError(UserError):
    """A mistake at one key. `load` puts the file and the line before it."""

    def __init__(self, key: str, message: str):
        super().__init__(f"{key}: {message}")
        self.key = key


def setting(default, text: str, choices: tuple = ()):
    metadata = {"help": text, "choices": choices}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


REQUIRED = dataclasses.MISSING


def _require(ok: bool, key: str, message: str):
    if not ok:
        raise ConfigError(key, message)


def _positive(section, name: str, *keys: str):
    for key in keys:
        value = getattr(section, key)
        _require(value > 0, f"{name}.{key}", f"must be positive, and is {value}")


def _between(section, name: str, low: float, high: float, *keys: str):
    for key in keys:
        value = getattr(section, key)
        _require(low <= value <= high, f"{name}.{key}", f"must be in {low} .. {high}, is {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a ZAYA model. Widths are in channels."""

    vocab: int = setting(REQUIRED, "size of the vocabulary")
    layers: int = setting(REQUIRED, "decoder layers, each attention + experts")
    hidden: int = setting(REQUIRED, "width of the residual stream")
    heads: int = setting(REQUIRED, "query heads")
    kv_heads: int = setting(REQUIRED, "key-value heads")
    head_dim: int = setting(REQUIRED, "width of a head")
    experts: int = setting(REQUIRED, "experts a layer, one chosen per token")
    expert_hidden: int = setting(REQUIRED, "inner width of an expert")
    router_hidden: int = setting(REQUIRED, "width of the router")
    cca_time0: int = setting(2, "taps of the depthwise convolution")
    cca_time1: int = setting(2, "taps of the grouped convolution")
    rope_theta: float = setting(1e6, "rotary base of full-attention layers")
    rope_theta_sliding: float = setting(1e4, "rotary base of sliding-window layers")
    rope_fraction: float = setting(0.5, "part of each head that is rotated")
    sliding_layers: tuple[int, ...] = setting((), "layers with a sliding window, counted from 0")
    sliding_window: int = setting(0, "keys such a layer sees, the current token included")
    norm_eps: float = setting(1e-5, "added to the mean square in every RMSNorm")
    tied_head: bool = setting(True, "the head is the embedding")
    head_bias: bool = setting(False, "the head has a bias")
    attention_bias: bool = setting(False, "q, k, v and o have biases")
    skip: str = setting(
        "identity", "what a token that skips its expert adds: p * h, or 0", ("identity", "zero")
    )

    def __post_init__(self):
        sizes = [f.name for f in dataclasses.fields(self) if f.default is REQUIRED]
        _positive(self, "model", *sizes, "cca_time0", "cca_time1", "norm_eps")
        _positive(self, "model", "rope_theta", "rope_theta_sliding")
        H, N, K = self.heads, self.kv_heads, self.head_dim
        _require(H % N == 0, "model.heads", f"{H} query heads do not divide over {N} kv_heads")
        _require(
            N * K % 2 == 0,
            "model.head_dim",
            f"half of the value is delayed, so kv_heads * head_dim must be even, and is {N * K}",
        )
        _between(self, "model", 0.0, 1.0, "rope_fraction")
        R = K * self.rope_fraction
        _require(
            R % 2 == 0,
            "model.rope_fraction",
            f"{self.rope_fraction} of head_dim {K} is {R:g} channels, which are not whole pairs",
        )
        wrong = [i for i in self.sliding_layers if not 0 <= i < self.layers]
        _require(
            not wrong,
            "model.sliding_layers",
            f"names layers {wrong}, but layers go from 0 to {self.layers - 1}",
        )
        _require(
            len(set(self.sliding_layers)) == len(self.sliding_layers),
            "model.sliding_layers",
            "names a layer twice",
        )
        _require(
            self.sliding_window > 0 or not self.sliding_layers,
            "model.sliding_window",
            "must be positive where sliding_layers is set",
        )

    @property
    def rope_channels(self) -> int:
        return round(self.head_dim * self.rope_fraction)

    @property
    def halo(self) -> int:
        """Tokens before its own that a part of a row depends on, within one layer and beside
        attention: two convolutions, one after the other, and the value's shift by one."""
        return max(self.cca_time0 + self.cca_time1 - 2, 1)


# What decides the shapes of a model's arrays.
SHAPES = ("vocab", "layers", "hidden", "heads", "kv_heads", "head_dim", "experts", "expert_hidden")
SHAPES += ("router_hidden", "cca_time0", "cca_time1", "tied_head", "head_bias", "attention_bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The machine: whole nodes of GPUs."""

    nodes: int = setting(1, "nodes")
    gpus: int = setting(8, "GPUs in a node; every group inside a node is the whole node")
    layout: str = setting(
        "pretrain",
        "all GPUs split the batch; or the GPUs of a node share each row; or all GPUs do",
        TRAINED,
    )
    attention: str = setting(
        "gather",
        "how a split sequence meets its keys: all at once, or hop by hop",
        ("gather", "ring"),
    )
    exchange: str = setting(
        "even", "how tokens travel to their experts: in even blocks, or ragged", ("even", "ragged")
    )
    zero: int = setting(1, "weights are gathered once a step (1) or layer by layer (3)", (1, 3))

    def __post_init__(self):
        _positive(self, "mesh", "nodes", "gpus")

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus

    def ranks(self, axes: tuple[str, ...]) -> int:
        """Devices along these mesh axes."""
        return math.prod({NODE: self.nodes, GPU: self.gpus}[a] for a in axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text."""

    corpus: str = setting(
        REQUIRED, "a text file, a folder, a .jsonl file, or 'stdlib': Python's own source"
    )
    tokenizer: str = setting("bytes", "'bytes', or the path of a tokenizer.json")
    text_field: str = setting("text", "the field of a JSONL line that holds the text")
    held_out: float = setting(0.05, "fraction of the documents kept for evaluation")

    def __post_init__(self):
        _between(self, "data", 0.0, 0.9, "held_out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Muon for matrices, AdamW for the rest, their schedule, and the balance bias."""

    matrices: str = setting("muon", "the rule of weight matrices", ("muon", "adamw"))
    momentum: float = setting(0.95, "muon: decay of the average of gradients; 0: none is kept")
    learning_rate: float = setting(3e-4, "peak rate")
    horizon: int = setting(REQUIRED, "steps that the schedule spans; train.steps may stop earlier")
    warmup: int = setting(0, "steps of linear warm-up")
    schedule: str = setting("cosine", "after the warm-up", ("cosine", "wsd"))
    decay: float = setting(0.2, "wsd: the last part of the horizon, in which the rate falls")
    final_rate: float = setting(0.1, "rate at the horizon, as a fraction of the peak")
    beta1: float = setting(0.9, "adamw: decay of the first moment")
    beta2: float = setting(0.95, "adamw: decay of the second moment")
    eps: float = setting(1e-8, "adamw: added to the root of the second moment")
    weight_decay: float = setting(0.1, "of matrices; vectors, biases and scales have none")
    clip: float = setting(1.0, "largest global gradient norm")
    state_dtype: str = setting("float32", "of momentum and moments", DTYPES)
    balance_rate: float = setting(1e-3, "rate of the router's balance bias")
    balance_skip: bool = setting(False, "also balance the skip class")

    def __post_init__(self):
        _positive(self, "optim", "learning_rate", "horizon", "eps", "clip")
        _between(self, "optim", 0, self.horizon, "warmup")
        _between(self, "optim", 0.0, 1.0, "decay", "final_rate")
        for key in ("momentum", "beta1", "beta2"):
            beta = getattr(self, key)
            _require(0 <= beta < 1, f"optim.{key}", f"must be in 0 .. 1 and below 1, is {beta}")
        _require(
            self.weight_decay >= 0 and self.balance_rate >= 0,
            "optim.weight_decay" if self.weight_decay < 0 else "optim.balance_rate",
            "must not be negative",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run."""

    steps: int = setting(REQUIRED, "where to stop")
    batch: int = setting(REQUIRED, "sequences a step, over all devices")
    sequence: int = setting(REQUIRED, "tokens a sequence")
    micro_batches: int = setting(1, "parts of the batch whose gradients are summed one by one")
    eval_every: int = setting(100, "steps between evaluations on held-out text; 0: never")
    eval_batches: int = setting(8, "batches an evaluation")
    sample_tokens: int = setting(200, "tokens of sampled text at the end; 0: none")
    seed: int = setting(0, "of the weights and the order of the text")
    param_dtype: str = setting("float32", "of the stored weights", DTYPES)
    compute_dtype: str = setting("bfloat16", "of the matrix products", DTYPES)
    reduce_dtype: str = setting("float32", "in which gradients travel", DTYPES)
    remat: str = setting(
        "names", "what the backward pass recomputes in a layer", ("none", "names", "full")
    )

    def __post_init__(self):
        _positive(self, "train", "steps", "batch", "micro_batches", "eval_batches")
        _require(self.sequence >= 2, "train.sequence", f"must be at least 2, is {self.sequence}")
        _require(self.eval_every >= 0, "train.eval_every", "must not be negative")
        _require(self.sample_tokens >= 0, "train.sample_tokens", "must not be negative")
        _between(self, "train", 0, 2**32 - 1, "seed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where a run can go on from."""

    every: int = setting(100, "steps between permanent checkpoints; the last step always has one")
    keep: int = setting(3, "newest permanent checkpoints kept; 0: all")
    minutes: float = setting(
        5.0, "between temporary checkpoints, of which the newest is kept; 0: none"
    )

    def __post_init__(self):
        _positive(self, "checkpoint", "every")
        for key in ("keep", "minutes"):
            _require(getattr(self, key) >= 0, f"checkpoint.{key}", "must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """What a run does when something goes wrong."""

    spike: float = setting(
        0.0, "a loss this many standard deviations above the recent mean is a bad step; 0: none is"
    )
    bad_steps: int = setting(
        10, "bad steps in a row after which the run goes back to its last checkpoint"
    )
    recheck_every: int = setting(
        0, "steps between comparisons of a loss computed by two replicas; 0: never"
    )
    stall: float = setting(
        60.0, "seconds that a step may take beyond ten times the recent median; 0: any time"
    )
    patience: float = setting(
        1800.0, "seconds that anything else may take: start, compilation, evaluation, saving"
    )
    grace: float = setting(
        300.0, "seconds after SIGTERM in which a checkpoint is saved, before the run is left"
    )
    deterministic: bool = setting(
        False, "on a GPU, operations that repeat themselves bit for bit, at some cost in speed"
    )

    def __post_init__(self):
        _positive(self, "faults", "bad_steps", "patience", "grace")
        for key in ("spike", "recheck_every", "stall"):
            _require(getattr(self, key) >= 0, f"faults.{key}", "must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A run, whole. `to_toml` and `load` are inverse."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    faults: FaultsConfig = dataclasses.field(default_factory=FaultsConfig)

    def __post_init__(self):
        gpus, layout = self.mesh.gpus, LAYOUTS[self.mesh.layout]
        E, B, A = self.model.experts, self.train.batch, self.train.micro_batches
        _require(
            E % gpus == 0,
            "model.experts",
            f"{E} experts do not divide over the {gpus} GPUs of a node (mesh.gpus); use a multiple "
            f"of {gpus}, or another machine",
        )
        parts = self.mesh.ranks(layout.batch)
        over = (
            f" over {parts} {'devices' if len(layout.batch) > 1 else 'nodes'}" if parts > 1 else ""
        )
        _require(
            B % (A * parts) == 0,
            "train.batch",
            f"{B} sequences do not divide{over}"
            + (f" in {A} micro-batches (train.micro_batches)" if A > 1 else "")
            + f"; use a multiple of {A * parts}",
        )
        _require(
            self.mesh.exchange == "even" or gpus > 1,
            "mesh.exchange",
            f"is {self.mesh.exchange!r}, but on one GPU a node no token travels; leave it out",
        )
        self._require_chunks(self.mesh.ranks(layout.sequence))
        _require(
            self.mesh.attention == "gather" or self.mesh.ranks(layout.sequence) > 1,
            "mesh.attention",
            f"is {self.mesh.attention!r}, but layout {self.mesh.layout!r} splits no sequence here; "
            "leave it out, or use mesh.layout = 'context' with several GPUs",
        )
        _require(
            self.mesh.zero != 3 or self.train.remat != "none",
            "train.remat",
            "'none' would keep every layer's gathered weights, which mesh.zero = 3 avoids; "
            "use 'names' or 'full'",
        )

    def _require_chunks(self, R: int):
        S, halo = self.train.sequence, self.model.halo
        _require(
            R == 1 or S % (2 * R) == 0,
            "train.sequence",
            f"{S} tokens do not divide into two chunks for each of {R} devices (mesh.layout "
            f"{self.mesh.layout!r}); use a multiple of {2 * R}",
        )
        _require(
            R == 1 or S // (2 * R) >= halo,
            "train.sequence",
            f"chunks of {S // (2 * R)} tokens are shorter than the {halo} that the convolutions "
            f"reach back; use at least {2 * R * halo}",
        )
