"""An interpreter of its own for an environment: the Python it needs with the packages it needs, built once and kept.

`build_interpreter(spec)` gives the path of a Python. Each combination of an interpreter and requirements is one virtual
environment in the cache folder: `$LONGSTEP_CACHE`, else `$XDG_CACHE_HOME/longstep`, else `~/.cache/longstep`. It is made
with uv if that is on PATH, else with venv and pip, under a file lock, so that processes that want the same one at once
build it once. It counts from the moment its file `ready` is renamed into place; what a killed process left half built
is removed by the next one. (The folder itself is never renamed: console scripts hold its path.)

pyzmq and msgpack, which `standalone.py` needs, are installed beside the requirements. Nothing is ever updated: to have
newer releases of loose requirements, delete the folder.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longstep.errors import ConfigError, DeadlineError, EnvError

if TYPE_CHECKING:
    from longstep_bindings.envs.spec import EnvSpec

__all__ = ["build_interpreter", "cache_folder", "find_python"]

STANDALONE_REQUIREMENTS = ("msgpack>=1.0.8", "pyzmq>=25.1")
_VERSION = re.compile(r"\d+(\.\d+){0,2}")
_ASK_S = 30.0
_LOCK_AGAIN_S = 0.1
_QUESTION = "import sys; print('.'.join(map(str, sys.version_info[:3])), sys.implementation.name)"
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Runs a program that gets SIGTERM when the thread that started it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Python:
    """An interpreter that was asked for its version."""

    path: Path
    version: str
    implementation: str


def cache_folder() -> Path:
    """Where interpreters are kept; `$LONGSTEP_CACHE` moves it."""
    own = os.environ.get("LONGSTEP_CACHE")
    if own:
        return Path(own).absolute() / "interpreters"
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "longstep" / "interpreters"


def build_interpreter(spec: EnvSpec, *, timeout_s: float = 900.0) -> Path:
    """The Python in which the environment of `spec` can run, built if this is the first time it is asked for.

    Args:
        spec: Its `python` (a path, a version such as "3.10", None for the running interpreter's) and `requirements`.
        timeout_s: How long building, and waiting for another process that builds the same, may take.

    Raises:
        ConfigError: There is no such interpreter, or a requirement is an option.
        EnvError: The installer failed; the message holds all it said.
        DeadlineError: It took longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    requirements = _check_requirements(spec.requirements)
    base = _ask(_given(spec.python))
    folder = cache_folder() / _key(base, requirements)
    python = folder / "bin" / "python"
    if _is_ready(folder):
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / f"{folder.name}.lock", deadline):
        if not _is_ready(folder):
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _build(folder, base, requirements, deadline)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    return python


def find_python(version: str) -> Path:
    """The first interpreter of a version such as "3.10" or "3.10.13" on PATH, or among those pyenv keeps.

    Raises:
        ConfigError: There is none; the message lists those that were found.
    """
    found: dict[str, str] = {}
    for candidate in _candidates():
        try:
            python = _ask(candidate)
        except ConfigError:  # such as a pyenv shim of a version that is not active
            continue
        if f"{python.version}.".startswith(f"{version}.") and python.implementation == "cpython":
            return python.path
        found.setdefault(str(python.path), python.version)
    told = ", ".join(f"{known} at {path}" for path, known in found.items()) or "none"
    raise ConfigError(
        f"expected a Python {version} on PATH, got none; found: {told}. Install it, or give `python` a path"
    )


def _given(python: str | None) -> Path:
    """The interpreter that `EnvSpec.python` means."""
    if python is None:
        return Path(sys.executable)
    if _VERSION.fullmatch(python):
        return find_python(python)
    path = shutil.which(os.path.expanduser(python))
    if path is None:
        raise ConfigError(
            f"expected the path of a Python or a version such as 3.10, got `{python}`, which cannot be executed"
        )
    return Path(path).absolute()


def _candidates() -> Iterator[Path]:
    """Programs named like Python in the folders of PATH and pyenv, each once."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    kept = sorted(glob.glob(str(pyenv / "versions" / "*" / "bin")), reverse=True)
    seen: set[Path] = set()
    for folder in [*os.get_exec_path(), *kept]:
        for path in sorted(Path(folder).glob("python[0-9]*")):
            is_python = re.fullmatch(r"python\d(\.\d+)?", path.name) and os.access(path, os.X_OK)
            if is_python and path.resolve() not in seen:
                if folder.endswith("shims"):  # all of them resolve to themselves
                    continue
                seen.add(path.resolve())
                yield path


def _ask(path: Path) -> _Python:
    command = [str(path), "-I", "-c", _QUESTION]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
        version, implementation = answer.stdout.split()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise ConfigError(f"expected a Python at {path}, got: {said.strip()}") from None
    return _Python(path=path, version=version, implementation=implementation)


def _check_requirements(requirements: Sequence[str]) -> tuple[str, ...]:
    for requirement in requirements:
        if not requirement.strip() or requirement.lstrip().startswith("-"):
            raise ConfigError(
                f"expected a requirement such as `numpy<2`, got {requirement!r}; "
                "set options in the configuration of pip or uv"
            )
    return (
        *sorted({requirement.strip() for requirement in requirements}),
        *STANDALONE_REQUIREMENTS,
    )


def _key(base: _Python, requirements: Sequence[str]) -> str:
    parts = [base.implementation, base.version, str(base.path.resolve()), *requirements]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return f"{base.implementation}-{base.version}-{digest[:24]}"


def _is_ready(folder: Path) -> bool:
    return (folder / "ready").exists() and os.access(folder / "bin" / "python", os.X_OK)


@contextmanager
def _lock(path: Path, deadline: float) -> Iterator[None]:
    """Hold the file lock; the kernel lets go of it when the process ends, however it does."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"expected another process to be done with {path.name} in time, "
                        "it is still at it; wait, or give more time"
                    ) from None
                time.sleep(_LOCK_AGAIN_S)
        yield


def _build(folder: Path, base: _Python, requirements: Sequence[str], deadline: float) -> None:
    python = folder / "bin" / "python"
    uv = shutil.which("uv")
    if uv:
        commands = [
            [uv, "venv", "--quiet", "--python", str(base.path), str(folder)],
            [uv, "pip", "install", "--python", str(python), "--", *requirements],
        ]
    else:
        commands = [
            [str(base.path), "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--no-input", "--", *requirements],
        ]
    for command in commands:
        _install(command, deadline)
    record = {"python": str(base.path), "version": base.version, "requirements": list(requirements)}
    (folder / "ready.part").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "ready.part").rename(folder / "ready")


def _install(command: Sequence[str], deadline: float) -> None:
    """Run one command of the installer; its output in full is the error's message."""
    tied = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid())]
    clean = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    try:
        done = subprocess.run(
            [*tied, *command] if sys.platform == "linux" else command,
            env=clean,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=max(0.1, deadline - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace") if error.stdout else ""
        raise DeadlineError(
            f"expected `{' '.join(command)}` to end in time, it was stopped; give more time. It said:\n{said}"
        ) from None
    if done.returncode:
        raise EnvError(
            f"expected `{' '.join(command)}` to succeed, got exit status {done.returncode}; "
            f"correct `requirements` or `python`. It said:\n{done.stdout}"
        )


_MISLEADING = frozenset(
    ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "VIRTUAL_ENV")
)
"""Variables that would make an installer look or install elsewhere."""
