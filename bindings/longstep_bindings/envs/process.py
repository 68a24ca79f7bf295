"""Worker processes on this machine, seen from the process that starts them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from longstep.errors import ConfigError, EnvError
from longstep_bindings.curve import ServerKeys
from longstep_bindings.envs.board import Board, new_board_file
from longstep_bindings.envs.service import Suspect
from longstep_bindings.envs.spec import EnvSpec
from longstep_bindings.launch import Child
from longstep_bindings.readiness import await_address, ended_text
from longstep_bindings.terms import Terms
from longstep_bindings.transport import tidy_ipc
from longstep_bindings.wire import encode

__all__ = ["WorkerProcess", "WorkerSettings"]

_BOOT = """\
import sys
sys.path[:] = sys.argv[1:]
del sys.argv[1:]
from longstep_bindings.envs.worker import main
main()
"""
_STANDALONE = Path(__file__).parent / "standalone.py"
_LATE_S = 0.25
"""How long after a deadline an environment is left alone: it may just be done."""
_SILENT_S = 10.0
"""Silence after which a worker that rests counts as stopped; a busy machine may keep it waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What all workers of one owner have in common."""

    specs: Mapping[str, EnvSpec]
    """What they serve, by name."""
    step_timeout_s: float = 60.0
    """Seconds that a step may take; a worker past that is killed."""
    reset_timeout_s: float = 120.0
    """Seconds that making and resetting an environment may take."""
    start_timeout_s: float = 60.0
    """Seconds until a new worker must be reachable."""
    end_grace_s: float = 2.0
    """Seconds that a worker gets to close its environments before it is killed."""
    terms: Terms = field(default_factory=Terms)
    keys: ServerKeys | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not self.specs:
            raise ConfigError("expected at least one environment to serve, got none")
        for name in ("step_timeout_s", "reset_timeout_s", "start_timeout_s"):
            if not 0.0 < getattr(self, name) < 1e7:
                raise ConfigError(
                    f"expected seconds above 0 as `{name}`, got {getattr(self, name)}"
                )


def _command(specs: Mapping[str, EnvSpec]) -> list[str]:
    """What to run: a worker in this interpreter, or the standalone server in one of the environment's own."""
    foreign = [spec for spec in specs.values() if spec.python is not None or spec.requirements]
    if not foreign:
        return [sys.executable, "-c", _BOOT, *map(os.path.abspath, sys.path)]
    wants = {(spec.python, spec.requirements) for spec in specs.values()}
    if len(wants) > 1:
        raise ConfigError(
            "expected all environments of one server to have the same `python` and `requirements`; "
            "start a server for each"
        )
    from longstep_bindings.envs.interpreter import build_interpreter

    return [str(build_interpreter(foreign[0])), str(_STANDALONE), "--worker"]


class WorkerProcess:
    """One worker, started at construction and reachable when that returns."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        address: str | None = None,
        suspects: Sequence[Suspect] = (),
        closing: threading.Event | None = None,
    ) -> None:
        """Args:
        settings: What to serve and how.
        address: Where; None is a private ipc address.
        suspects: What this worker's predecessor was executing when it went down.
        closing: Once set, a start that is not done is given up.

        Raises:
            EnvError: It ended at once.
            DeadlineError: It was not reachable in time.
            LongstepError: It said why it cannot serve.
        """
        self._settings = settings
        command = _command(settings.specs)
        board_fd = new_board_file()
        self._board = Board(os.dup(board_fd))
        ready, ready_fd = os.pipe()
        keys = settings.keys
        orders = {
            "specs": {name: spec.to_plain() for name, spec in settings.specs.items()},
            "address": address,
            "parent_pid": os.getpid(),
            "ready_fd": ready_fd,
            "board_fd": board_fd,
            "step_timeout_s": settings.step_timeout_s,
            "reset_timeout_s": settings.reset_timeout_s,
            "suspects": [list(suspect) for suspect in suspects],
            "terms": asdict(settings.terms),
            "keys": keys and [keys.own.public, keys.own.secret, sorted(keys.allowed)],
        }
        try:
            self._child = Child(
                command,
                stdin=encode(orders)[0],
                environ={
                    name: value
                    for spec in settings.specs.values()
                    for name, value in spec.environ.items()
                },
                pass_fds=(ready_fd, board_fd),
            )
        finally:
            os.close(board_fd)
            os.close(ready_fd)
        try:
            self.address = await_address(
                self._child,
                ready,
                what="a worker",
                error=EnvError,
                timeout_s=settings.start_timeout_s,
                end_grace_s=settings.end_grace_s,
                closing=closing,
            )
            """Where it can be reached."""
        except BaseException:
            self._child.end()
            self._board.close()
            raise
        finally:
            os.close(ready)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def why_down(self) -> str | None:
        """Why it is of no more use: it ended, or it is past a deadline; None while all is well."""
        if self._child.has_exited:
            return f"the worker {self._child.exit_text()}"
        now = time.monotonic()
        if any(deadline + _LATE_S < now for deadline, _, _ in self._board.running()):
            return "the worker ran past a deadline and was killed"
        if self._board.silent_s() > _SILENT_S:
            return f"the worker gave no sign of life for {_SILENT_S:g} s while it rested"
        return None

    def suspects(self) -> list[Suspect]:
        """What it is executing, or was when it ended: those past their deadline if any is, else all."""
        running, now = self._board.running(), time.monotonic()
        late = [(owner, slot) for deadline, owner, slot in running if deadline + _LATE_S < now]
        if late and not self._child.has_exited:
            return [(*who, self._too_long()) for who in late]
        why = (
            f"the worker {ended_text(self._child)}"
            if self._child.has_exited
            else "the worker was ended"
        )
        return [(owner, slot, why) for _, owner, slot in running]

    def _too_long(self) -> str:
        settings = self._settings
        return (
            f"expected a step within {settings.step_timeout_s:g} s and a reset within "
            f"{settings.reset_timeout_s:g} s, the environment took longer; its worker was killed"
        )

    def terminate(self) -> None:
        """Ask it to close its environments and end."""
        self._child.terminate()

    def end(self, grace_s: float = 0.0) -> None:
        """End it, and what it started; after `grace_s` by force. Idempotent."""
        self._child.end(grace_s)
        with suppress(ValueError):  # closed before
            self._board.close()
        tidy_ipc(self.address)
