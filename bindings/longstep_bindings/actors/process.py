"""Actor processes on this machine, seen from the process that starts them."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longstep.errors import PolicyError
from longstep_bindings.actors.spec import ActorSpec
from longstep_bindings.curve import ServerKeys
from longstep_bindings.launch import Child
from longstep_bindings.readiness import await_address
from longstep_bindings.transport import tidy_ipc
from longstep_bindings.wire import encode

__all__ = ["ActorPlace", "ActorProcess", "StartSettings"]

_BOOT = """\
import sys
sys.path[:] = sys.argv[1:]
del sys.argv[1:]
from longstep_bindings.actors.worker import main
main()
"""
_END_GRACE_S = 5.0
_TAIL_BYTES = 20_000
_TAIL_LINES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSettings:
    """How actors are started and served."""

    start_timeout_s: float
    """Seconds until the model must be loaded."""
    max_in_flight: int
    lost_after_s: float
    keys: ServerKeys | None = None


class ActorProcess:
    """One actor, started at construction and reachable when that returns."""

    def __init__(
        self,
        spec: ActorSpec,
        settings: StartSettings,
        *,
        log: Path,
        address: str | None = None,
        closing: threading.Event | None = None,
    ) -> None:
        """Args:
            spec: What to start.
            settings: How.
            log: File that its output is appended to.
            address: Where it serves; None is a private ipc address.
            closing: Once set, a start that is not done is given up.

        Raises:
            PolicyError: It ended at once.
            DeadlineError: It was not reachable in time.
            LongstepError: It said why it cannot serve.
        """
        self._log = log
        output = _open_log(log)
        self.address = ""
        """Where it can be reached."""
        ready, ready_fd = os.pipe()
        keys = settings.keys
        orders = {
            "engine": spec.engine,
            "model": spec.model,
            "options": dict(spec.options),
            "address": address,
            "parent_pid": os.getpid(),
            "ready_fd": ready_fd,
            "max_in_flight": settings.max_in_flight,
            "lost_after_s": settings.lost_after_s,
            "keys": keys and [keys.own.public, keys.own.secret, sorted(keys.allowed)],
        }
        try:
            self._log_start = os.fstat(output).st_size
            self._child = Child(
                _command(spec),
                stdin=encode(orders)[0],
                environ=spec.environ,
                pass_fds=(ready_fd,),
                output=output,
            )
        except OSError as error:
            os.close(ready)
            raise PolicyError(
                f"expected an interpreter for an actor, got `{spec.python or sys.executable}`: {error}"
            ) from None
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(output)
            os.close(ready_fd)
        try:
            self.address = await_address(
                self._child,
                ready,
                what="an actor",
                error=PolicyError,
                timeout_s=settings.start_timeout_s,
                end_grace_s=_END_GRACE_S,
                closing=closing,
                tail=self.tail,
            )
        except BaseException:
            self._child.end()
            raise
        finally:
            os.close(ready)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def tail(self) -> str:
        """The last lines of its output, to be appended to an error; empty when it said nothing."""
        with suppress(OSError), self._log.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(self._log_start, size - _TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
            if lines:
                return "\nthe end of its output:\n  " + "\n  ".join(lines)
        return ""

    def why_down(self) -> str | None:
        """Why it is of no more use: it ended; None while all is well."""
        if not self._child.has_exited:
            return None
        return f"the actor {self._child.exit_text()}{self.tail()}"

    def terminate(self) -> None:
        """Ask it to close its engine and end."""
        self._child.terminate()

    def end(self, grace_s: float = 0.0) -> None:
        """End it, and what it started; after `grace_s` by force. Idempotent."""
        self._child.end(grace_s)
        tidy_ipc(self.address)


def _open_log(log: Path) -> int:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PolicyError(
            f"expected to write the actor's output to `{log}`, got {error}; choose another `log_folder`"
        ) from None


def _command(spec: ActorSpec) -> list[str]:
    if spec.python is None:
        return [sys.executable, "-c", _BOOT, *map(os.path.abspath, sys.path)]
    return [spec.python, "-m", "longstep_bindings.actors.worker"]


class ActorPlace:
    """Actor processes of this machine, one after the other; a `Place`."""

    starts = True

    def __init__(
        self, spec: ActorSpec, settings: StartSettings, *, log: Path, address: str | None = None
    ) -> None:
        """Args:
        spec: What to start.
        settings: How.
        log: Where the output of each goes.
        address: Where each of them serves; None is a private address of each one's own.
        """
        self.spec, self.log = spec, log
        self._settings, self._address = settings, address
        self._closing = threading.Event()
        self._actor: ActorProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the actor; None while there is none."""
        return self._actor.pid if self._actor else None

    def open(self) -> str:
        """Start an actor; gives its address once it is ready."""
        self._actor = ActorProcess(
            self.spec,
            self._settings,
            log=self.log,
            address=self._address,
            closing=self._closing,
        )
        return self._actor.address

    def why_down(self) -> str | None:
        """Whether it ended."""
        return self._actor.why_down() if self._actor else "there is no actor"

    def drop(self) -> None:
        """Kill it."""
        if self._actor is not None:
            self._actor.end()
            self._actor = None

    def begin_close(self) -> None:
        """Ask it to end; one that is being started is given up."""
        self._closing.set()
        actor = self._actor
        if actor is not None:
            actor.terminate()

    def close(self) -> None:
        """Wait for its end, or kill it."""
        if self._actor is not None:
            self._actor.end(_END_GRACE_S)
            self._actor = None
