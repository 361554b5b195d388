"""The configuration: a tree of frozen dataclasses, read from TOML, validated where it is built.

`load("configs/tiny.toml", {"train.steps": "10"})` is the only way from text to a `Config`. Every
mistake is a `UserError` that names the file, the line and the key.
"""

import dataclasses
import difflib
import math
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path

from zayajax.errors import UserError

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The machine: whole nodes of GPUs."""

    nodes: int = setting(1, "nodes")
    gpus: int = setting(8, "GPUs in a node; every group inside a node is the whole node")
    layout: str = setting("pretrain", "what the mesh axes split", ("pretrain",))
    zero: int = setting(1, "weights are gathered once a step (1) or layer by layer (3)", (1, 3))

    def __post_init__(self):
        _positive(self, "mesh", "nodes", "gpus")

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus


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
    """AdamW, its schedule, and the balance bias."""

    learning_rate: float = setting(3e-4, "peak rate")
    horizon: int = setting(REQUIRED, "steps that the schedule spans; train.steps may stop earlier")
    warmup: int = setting(0, "steps of linear warm-up")
    schedule: str = setting("cosine", "after the warm-up", ("cosine", "wsd"))
    decay: float = setting(0.2, "wsd: the last part of the horizon, in which the rate falls")
    final_rate: float = setting(0.1, "rate at the horizon, as a fraction of the peak")
    beta1: float = setting(0.9, "decay of the first moment")
    beta2: float = setting(0.95, "decay of the second moment")
    eps: float = setting(1e-8, "added to the root of the second moment")
    weight_decay: float = setting(0.1, "of matrices; vectors, biases and scales have none")
    clip: float = setting(1.0, "largest global gradient norm")
    state_dtype: str = setting("float32", "of the moments", DTYPES)
    balance_rate: float = setting(1e-3, "rate of the router's balance bias")
    balance_skip: bool = setting(False, "also balance the skip class")

    def __post_init__(self):
        _positive(self, "optim", "learning_rate", "horizon", "eps", "clip")
        _between(self, "optim", 0, self.horizon, "warmup")
        _between(self, "optim", 0.0, 1.0, "decay", "final_rate")
        for key in ("beta1", "beta2"):
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

    every: int = setting(100, "steps between checkpoints; the last step always has one")
    keep: int = setting(3, "newest checkpoints kept")

    def __post_init__(self):
        _positive(self, "checkpoint", "every", "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A run, whole. `to_toml` and `load` are inverse."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)

    def __post_init__(self):
        gpus, devices = self.mesh.gpus, self.mesh.devices
        E, B, A = self.model.experts, self.train.batch, self.train.micro_batches
        _require(
            E % gpus == 0,
            "model.experts",
            f"{E} experts do not divide over the {gpus} GPUs of a node (mesh.gpus)",
        )
        _require(
            B % (A * devices) == 0,
            "train.batch",
            f"{B} sequences do not divide over {devices} devices"
            + (f" in {A} micro-batches (train.micro_batches)" if A > 1 else "")
            + f"; use a multiple of {A * devices}",
        )
        _require(
            self.mesh.zero != 3 or self.train.remat != "none",
            "train.remat",
            "'none' would keep every layer's gathered weights, which mesh.zero = 3 avoids; "
            "use 'names' or 'full'",
        )


def sections() -> dict[str, type]:
    return {f.name: f.type for f in dataclasses.fields(Config)}


def keys() -> list[str]:
    return [f"{s}.{f.name}" for s, cls in sections().items() for f in dataclasses.fields(cls)]


def load(path, overrides: Mapping[str, str] | None = None) -> Config:
    """Reads a TOML file; `overrides` maps `section.key` to text, as on the command line."""
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such config file") from None
    except IsADirectoryError:
        raise UserError(
            f"{path}: is a folder; name a config, such as that of a run, in it"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a config ({error})") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: is not valid TOML ({error})") from None
    overrides = dict(overrides or {})
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        try:
            known = _known(key)
        except ConfigError as error:
            raise UserError(f"--{error}") from None
        if not isinstance(tree.setdefault(section, {}), dict):
            raise UserError(f"{path}: [{section}] must be a table")
        tree[section][name] = _parse(value, known)
    try:
        return build(tree)
    except ConfigError as error:
        if error.key in overrides:
            raise UserError(f"--{error}") from None
        if overrides and _is_valid(
            text
        ):  # two keys that do not go together, one of them given here
            given = " ".join(f"--{key} {value}" for key, value in overrides.items())
            raise UserError(f"{path} with {given}: {error}") from None
        line = _line(text, error.key)
        raise UserError(f"{path}{f', line {line}' if line else ''}: {error}") from None


def _is_valid(text: str) -> bool:
    try:
        build(tomllib.loads(text))
    except ConfigError:
        return False
    return True


def build(tree: Mapping) -> Config:
    """A `Config` from nested mappings, as TOML gives them; ConfigError names the key."""
    for key, value in tree.items():
        if key not in sections():
            raise ConfigError(key, f"unknown section{_nearest(key, sections())}")
        if not isinstance(value, Mapping):
            raise ConfigError(key, "must be a table")
    return Config(**{s: _section(s, cls, tree.get(s, {})) for s, cls in sections().items()})


def absolute(config: Config) -> Config:
    """With paths that hold wherever the config is read later."""

    def path(text: str, word: str) -> str:
        return text if text == word else str(Path(text).resolve())

    corpus, tokenizer = path(config.data.corpus, "stdlib"), path(config.data.tokenizer, "bytes")
    data = dataclasses.replace(config.data, corpus=corpus, tokenizer=tokenizer)
    return dataclasses.replace(config, data=data)


def changes(old: ModelConfig, new: ModelConfig) -> list[str]:
    """What differs, in words."""
    pairs = ((f.name, getattr(old, f.name), getattr(new, f.name)) for f in dataclasses.fields(new))
    return [f"{name} was {a!r} and is {b!r}" for name, a, b in pairs if a != b]


def model_config(values: Mapping) -> ModelConfig:
    """A `ModelConfig` from plain values, as a checkpoint keeps them."""
    return _section("model", ModelConfig, values)


def to_tree(config: Config) -> dict:
    """Nested plain values, every default written out; `build` is its inverse."""
    return dataclasses.asdict(config)


def named(name: str) -> str | None:
    """The key of that name, in whichever section it is."""
    return next((key for key in keys() if key.rpartition(".")[2] == name), None)


def to_toml(config: Config) -> str:
    """Every value, defaults included, as TOML."""
    lines = []
    for section, values in to_tree(config).items():
        lines += [f"[{section}]", *(f"{k} = {_toml(v)}" for k, v in values.items()), ""]
    return "\n".join(lines)


def describe() -> str:
    """All keys with their defaults, for `--help`."""
    rows = []
    for section, cls in sections().items():
        for f in dataclasses.fields(cls):
            default = "set by CONFIG" if f.default is REQUIRED else _toml(f.default)
            choices = f.metadata["choices"]
            extra = f" ({' | '.join(map(str, choices))})" if choices else ""
            rows.append(f"  --{section}.{f.name:<20} {f.metadata['help']}{extra} [{default}]")
    return "\n".join(rows)


def _section(section: str, cls: type, values: Mapping):
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name in values:
        _known(f"{section}.{name}")
    missing = [n for n, f in fields.items() if f.default is REQUIRED and n not in values]
    if missing:
        raise ConfigError(f"{section}.{missing[0]}", "is required and missing")
    return cls(**{n: _typed(f"{section}.{n}", fields[n], v) for n, v in values.items()})


def _known(key: str):
    if key not in (known := keys()):
        raise ConfigError(key, f"unknown key{_nearest(key, known)}")
    section, name = key.split(".")
    return next(f for f in dataclasses.fields(sections()[section]) if f.name == name)


def _nearest(key: str, known) -> str:
    # A right key in the wrong section is a common slip.
    name = key.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == name]
    near += difflib.get_close_matches(key, known, n=1)
    near += difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(known)}"


def _typed(key: str, field, value):
    kind = field.type
    if kind is float and type(value) is int:
        value = float(value)
    if typing.get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        if all(type(v) is int for v in value):
            return tuple(value)
    if type(value) is not kind:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        raise ConfigError(
            key, f"must be {names.get(kind, 'a list of whole numbers')}, and is {_toml(value)}"
        )
    if kind is float and not math.isfinite(value):
        raise ConfigError(key, f"must be finite, and is {value}")
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(
            key, f"must be one of {', '.join(map(_toml, choices))}, and is {_toml(value)}"
        )
    return value


def _parse(text: str, field):
    """Command-line text as TOML would read it; bare words are strings."""
    if field.type is str:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _toml(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04x}", escaped) + '"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value) if isinstance(value, (int, float)) else str(value)


def _line(text: str, key: str) -> int | None:
    """The line of `section.key` in the source, for messages."""
    section, _, name = key.partition(".")
    here = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[\s*([^\]]+?)\s*\]", line):
            here = match[1]
            if here == section and not name:
                return number
        elif match := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            found = match[1].strip("\"'")
            if (f"{here}.{found}" if here else found) in (key, name and key):
                return number
    return None
