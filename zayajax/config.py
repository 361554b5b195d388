"""The settings as text: read from TOML and the command line, written as TOML.

`load("configs/tiny.toml", {"train.steps": "10"})` is the only way from text to a `Config`. Every
mistake is a `UserError` that names the file, the line and the key.
"""

import dataclasses
import difflib
import math
import re
import tomllib
import typing
from collections.abc import Collection, Mapping
from pathlib import Path

from zayajax import degrees
from zayajax.errors import UserError
from zayajax.settings import (
    REQUIRED,
    Config,
    ConfigError,
    ModelConfig,
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
            known = _known(key, value)
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
        # Two keys that do not go together, one of them given here.
        if overrides and _is_valid(text):
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
            for name in value if isinstance(value, Mapping) else ():
                _refuse_degree(f"{key}.{name}", value[name])
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


def changes(old: ModelConfig, new: ModelConfig, among: Collection[str] = ()) -> list[str]:
    """What differs, in words; of the settings named, or of all."""
    names = [f.name for f in dataclasses.fields(new) if not among or f.name in among]
    pairs = ((name, getattr(old, name), getattr(new, name)) for name in names)
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
    for name, value in values.items():
        _known(f"{section}.{name}", value)
    missing = [n for n, f in fields.items() if f.default is REQUIRED and n not in values]
    if missing:
        raise ConfigError(f"{section}.{missing[0]}", "is required and missing")
    return cls(**{n: _typed(f"{section}.{n}", fields[n], v) for n, v in values.items()})


def _known(key: str, value):
    if key not in (known := keys()):
        _refuse_degree(key, value)
        raise ConfigError(key, f"unknown key{_nearest(key, known)}")
    section, name = key.split(".")
    return next(f for f in dataclasses.fields(sections()[section]) if f.name == name)


def _refuse_degree(key: str, value):
    if why := degrees.refusal(key.rpartition(".")[2], value):
        raise ConfigError(key, why)


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
