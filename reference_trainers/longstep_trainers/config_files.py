"""Settings from files and flags, and back into a file.

`--config` names a YAML file, or one that comes with the package (`--config demo`); dotted flags override it wherever
they stand. Names are checked before jsonargparse reads the values, so that an unknown one is answered with the nearest,
and one that stands twice is no accident that the last one wins.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import platform
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any, TypeVar

from longstep.errors import ConfigError, did_you_mean, require
from longstep_trainers.config import RunConfig

__all__ = [
    "dump_config",
    "find_config",
    "load_config",
    "package_versions",
    "packaged_configs",
    "parse_config",
    "require_same_run",
    "save_config",
]

_log = logging.getLogger(__name__)

_FREE_FORM = "env.kwargs"
"""The key below which any name is allowed: the environment's constructor decides."""
_FIXED = ("model.", "env.name", "env.kwargs", "seed")
"""Keys that a run cannot change when it goes on."""
_FREE = ("output_dir", "resume", "log_level", "train.total_steps")
"""Keys that say nothing about what is learnt how."""
_OWN_FLAGS = ("help", "print_config")
_PACKAGES = ("longstep", "numpy", "gymnasium", "torch", "transformers", "tokenizers", "peft")

_Config = TypeVar("_Config")


def parse_config(arguments: Sequence[str], *, prog: str = "longstep train") -> RunConfig:
    """The settings that a command line gives: defaults, then each `--config` in order, then the flags.

    Args:
        arguments: `--config NAME` and `--dotted.key value` or `--dotted.key=value`.
        prog: The command, as help and errors name it.

    Raises:
        ConfigError: A name is unknown, a value has the wrong type or cannot work, a file cannot be read.
        SystemExit: `--help` or `--print_config` was asked for and shown.
    """
    configs, flags = _split(arguments)
    paths = [find_config(name) for name in configs]
    for path in paths:
        _check_file(path)
    _check_flags(flags, prog)
    needs_help = "-h" in flags or "--help" in flags
    parser = _parser(prog, with_help=needs_help)
    try:
        values = parser.parse_args([*(f"--config={path}" for path in paths), *flags])
    except argparse.ArgumentError as error:
        raise ConfigError(_explain(str(error), prog)) from None
    settings = {key: value for key, value in values.as_dict().items() if key != "config"}
    settings["env"]["kwargs"] |= _file_kwargs(paths, flags)
    return _build(RunConfig, settings)


def _file_kwargs(paths: Sequence[Path], flags: Sequence[str]) -> dict[str, Any]:
    """The environment's arguments as the files have them, without those that a flag sets.

    jsonargparse reads a text under a key of any type as YAML once more: `symbols: "#."` would become a comment.
    """
    given: dict[str, Any] = {}
    for path in paths:
        env = _read_yaml(path).get("env") or {}
        given |= env.get("kwargs") or {}
    set_by_flags = {word.removeprefix("--").partition("=")[0] for word in flags}
    if _FREE_FORM in set_by_flags:
        return {}
    return {
        name: value for name, value in given.items() if f"{_FREE_FORM}.{name}" not in set_by_flags
    }


def load_config(path: str | Path) -> RunConfig:
    """The settings of one YAML file, or of one that comes with the package."""
    return parse_config([f"--config={path}"])


def find_config(name: str) -> Path:
    """The file that `name` means: a path as given, or the name of a packaged file without its ending.

    Raises:
        ConfigError: There is neither.
    """
    if Path(name).is_file():
        return Path(name)
    packaged = packaged_configs()
    if name in packaged:
        return packaged[name]
    raise ConfigError(
        f"expected a YAML file or the name of a packaged one, got `{name}` at `--config`; "
        f"{did_you_mean(name, packaged)}"
    )


def packaged_configs() -> dict[str, Path]:
    """The files that come with the package, by name."""
    folder = Path(str(resources.files("longstep_trainers"))) / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def dump_config(config: RunConfig) -> str:
    """The settings as YAML, every key of them, in the order of the dataclasses."""
    yaml = require("yaml", extra="trainers", needed_by="longstep_trainers.config_files")
    values = dataclasses.asdict(config)
    values["train"]["adam_betas"] = list(config.train.adam_betas)  # plain YAML has no tuples
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)


def save_config(config: RunConfig, path: str | Path) -> Path:
    """Write the settings, with the versions of the packages as a comment, so that `--config` reads the file back."""
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {versions}\n{dump_config(config)}", encoding="utf-8")
    return path


def require_same_run(config: RunConfig, saved: str | Path, *, log: bool = True) -> None:
    """Raise where settings cannot go on with a run that was started with those of a file; log what else differs.

    Model, environment and seed make a run what it is. Whatever else was changed is taken for a decision.

    Args:
        config: The settings to go on with.
        saved: The `config.yaml` of the run. One that is missing, or of a version with other keys, tells nothing.
        log: False where it was logged before.

    Raises:
        ConfigError: Model, environment or seed differ.
    """
    try:
        before = load_config(saved)
    except ConfigError as error:
        if log:
            _log.warning(
                "the settings of the run that is gone on with cannot be compared: %s", error
            )
        return
    old, new = _values(before), _values(config)
    changed = [key for key in new if old[key] != new[key] and not key.startswith(_FREE)]
    fixed = [key for key in changed if key.startswith(_FIXED)]
    if fixed:
        key = fixed[0]
        raise ConfigError(
            f"expected the settings of the run that is gone on with, got {new[key]!r} instead of {old[key]!r} at `{key}`; "
            f"take `--config {saved}`, or another `output_dir` for another run"
        )
    for key in changed if log else ():
        _log.warning("`%s` goes on with %r instead of %r", key, new[key], old[key])


def _values(config: RunConfig) -> dict[str, Any]:
    """The settings by dotted key."""
    return {
        key: functools.reduce(getattr, key.split("."), config)
        for key, kind in _known().items()
        if kind is not None
    }


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages whose numbers a run depends on; those not installed are left out."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of `--config`, and everything else."""
    configs: list[str] = []
    flags: list[str] = []
    rest = iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--config":
            value = value if equals else next(rest, "")
            if not value or value.startswith("--"):
                raise ConfigError(
                    f"expected a file or a name, got `{value}` at `--config`; name one of "
                    + ", ".join(f"`{known}`" for known in packaged_configs())
                )
            configs.append(value)
        else:
            flags.append(re.sub("^--log-level", "--log_level", word))
    return configs, flags


def _keys(config: type, prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Every dotted key with its type as written; None for a group of keys."""
    for name, kind in typing.get_type_hints(config).items():
        if dataclasses.is_dataclass(kind):
            yield f"{prefix}{name}", None
            yield from _keys(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            written = next(f.type for f in dataclasses.fields(config) if f.name == name)
            yield f"{prefix}{name}", str(written)


@functools.cache
def _known() -> Mapping[str, str | None]:
    return dict(_keys(RunConfig))


def _check_flags(flags: Sequence[str], prog: str) -> None:
    """Raise for the first flag whose name is unknown."""
    for word in flags:
        name = word.removeprefix("--").partition("=")[0].rstrip("+")
        if word.startswith("--") and name not in _OWN_FLAGS:
            _check_key(name, f"the command line of `{prog}`")


def _check_file(path: Path) -> None:
    """Raise for the first key of a file that is unknown, or where a group of keys is something else."""
    _check_mapping(_read_yaml(path), "", path)


def _read_yaml(path: Path) -> Any:
    """What a YAML file says; raises where it is none, or where a key stands twice."""
    yaml = require("yaml", extra="trainers", needed_by="longstep_trainers.config_files")
    try:
        text = path.read_text(encoding="utf-8")
        _require_unique_keys(yaml.compose(text, _yaml_loader()), "", path, set())
        return yaml.load(text, _yaml_loader())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"expected YAML, got a file that is none at `{path}`: {error}") from None


@functools.cache
def _yaml_loader() -> Any:
    """YAML's safe loader, but that `1e-3` is a number, and a date a text, as for jsonargparse."""
    yaml = require("yaml", extra="trainers", needed_by="longstep_trainers.config_files")

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, regex) for tag, regex in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    number = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


def _require_unique_keys(node: Any, prefix: str, path: Path, seen: set[int]) -> None:
    """Raise for the first key that stands twice in its mapping; `seen` are nodes that aliases may lead to again."""
    if node is None or isinstance(node.value, str) or id(node) in seen:
        return
    seen.add(id(node))
    lines: dict[str, int] = {}
    for entry in node.value:
        if not isinstance(entry, tuple):  # of a list
            _require_unique_keys(entry, prefix, path, seen)
            continue
        key, line = str(entry[0].value), entry[0].start_mark.line + 1
        if key in lines:
            raise ConfigError(
                f"expected each key once, got `{prefix}{key}` at line {lines[key]} and again at line {line} of `{path}`; "
                "remove one"
            )
        lines[key] = line
        _require_unique_keys(entry[1], f"{prefix}{key}.", path, seen)


def _check_mapping(content: Any, prefix: str, path: Path) -> None:
    if not isinstance(content, dict):
        place = prefix.rstrip(".") or "the top"
        raise ConfigError(
            f"expected a mapping of keys, got `{content}` at `{place}` of `{path}`; "
            "write `key: value` lines"
        )
    for name, value in content.items():
        key = f"{prefix}{name}"
        _check_key(key, f"`{path}`")
        if key in _known() and _known()[key] is None:
            _check_mapping(value, f"{key}.", path)


def _check_key(key: str, place: str) -> None:
    known = _known()
    if key in known or key.startswith(f"{_FREE_FORM}."):
        return
    near = did_you_mean(key, known)
    if not near.startswith("did"):  # the right name under a wrong group
        by_last_word = {name.rpartition(".")[2]: name for name in known}
        near = did_you_mean(key.rpartition(".")[2], by_last_word)
        for word, name in by_last_word.items():
            near = near.replace(f"`{word}`", f"`{name}`")
    if not near.startswith("did"):
        near = "`longstep train --help` lists the keys"
    raise ConfigError(f"expected a known key, got `{key}` at {place}; {near}")


def _parser(prog: str, *, with_help: bool) -> Any:
    jsonargparse = require("jsonargparse", extra="trainers", needed_by=prog)
    if with_help:  # reading the strings under the fields takes a while
        jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config FILE] [--dotted.key VALUE ...]",
        description="Train a model on an environment.",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML file, or a packaged one's name")
    parser.add_class_arguments(RunConfig)
    return parser


def _explain(message: str, prog: str) -> str:
    """One line in place of jsonargparse's several."""
    found = re.match(r'Parser key "([^"]+)":\s*(.*)', message, re.DOTALL)
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    if not found or not value or found[1] not in _known():
        return f"expected `--dotted.key VALUE`, got a command line that is not: {message}"
    kind = (_known()[found[1]] or "a mapping").replace("None", "null")
    kind = re.sub(r"Literal\[(.*?)\]", r"one of \1", kind)
    return (
        f"expected {kind}, got {value[1].strip()} at `{found[1]}`; `{prog} --help` explains the key"
    )


def _build(config: type[_Config], values: Mapping[str, Any]) -> _Config:
    """A dataclass from nested mappings; its own checks say what cannot work."""
    arguments = {
        name: _build(typing.cast(type, kind), values[name])
        if dataclasses.is_dataclass(kind)
        else values[name]
        for name, kind in typing.get_type_hints(config).items()
    }
    return config(**arguments)
