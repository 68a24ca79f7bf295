"""`RemoteVectorEnv`: many environments in worker processes, with the interface of `GroupVectorEnv`.

Commands go to each worker in one message and results come back in one, so that a step costs little more than its share
of two messages. Workers do not wait for each other. A worker that dies or hangs is replaced, its environments are built
again from seeds and actions, and the state keys are compared; see `recovery`.

Who steps many environments sends a `CommandBatch` and reads the columns of the `ResultBatch` that comes: a step then costs
a few microseconds here, of which the records would be most.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from longstep.commands import EnvCommand, EnvResult, ResultBatch, check_commands
from longstep.errors import ConfigError
from longstep.lockstep import LockstepEnv
from longstep_bindings.curve import ClientKeys
from longstep_bindings.envs.agents import LocalAgent
from longstep_bindings.envs.attendant import Attendant
from longstep_bindings.envs.branching import repeat, up_to
from longstep_bindings.envs.link import Link, LinkSettings
from longstep_bindings.envs.places import LocalPlace, Place, ServerPlace
from longstep_bindings.envs.process import WorkerSettings
from longstep_bindings.envs.recovery import History
from longstep_bindings.envs.session import OPEN_MARGIN_S
from longstep_bindings.envs.shares import Share, next_share_number
from longstep_bindings.envs.spec import EnvSpec, as_spec
from longstep_bindings.terms import Terms

__all__ = ["RemoteVectorEnv"]


class RemoteVectorEnv(LockstepEnv):
    """Environments in worker processes of this machine, or at servers (`connect`).

    Same seeds and same actions give the same results as in process, byte for byte. What an environment puts in its info
    must be able to cross (see `longstep_bindings.wire`); what cannot is that slot's error.

    >>> from longstep.commands import EnvCommand
    >>> from longstep.types import Task
    >>> with RemoteVectorEnv("longstep/KeyDoor-v0", 4, num_workers=2) as envs:
    ...     envs.send([EnvCommand(slot=3, command_id=1, task=Task(env_id="longstep/KeyDoor-v0", seed=7))])
    ...     [(result.slot, result.error) for result in envs.recv()]
    ...     observations, infos = envs.reset(seeds=[7, 8], group_size=2)
    ...     observations[0] == observations[1]
    [(3, None)]
    True
    """

    def __init__(
        self,
        env: str | EnvSpec | Callable[..., Any],
        num_envs: int,
        *,
        num_workers: int = 2,
        env_kwargs: Mapping[str, Any] | None = None,
        step_timeout_s: float = 60.0,
        reset_timeout_s: float = 120.0,
        start_timeout_s: float = 60.0,
        max_restarts: int = 20,
        max_retries: int = 1,
        agent_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the workers; each makes its first environment, so that what is wrong with it raises here.

        Args:
            env: A registered id, a spec, or a function or class that a worker can import by its name.
            num_envs: Number of slots, at least 1. Neighbouring slots share a worker.
            num_workers: Processes; no more are started than there are slots.
            env_kwargs: Arguments of the environments, beside those of a spec.
            step_timeout_s: Seconds that a step may take. A worker past that is killed and replaced.
            reset_timeout_s: Seconds that making and resetting an environment may take.
            start_timeout_s: Seconds until a new worker must be reachable.
            max_restarts: Times that one worker is replaced; `recv` raises EnvError at one more.
            max_retries: Times that a command is done again after its environment took the worker down; at one more,
                that is its result's error. 0 reports a hanging step at its deadline.
            agent_kwargs: Arguments of the LLMAgentEnv that is put here around each environment whose worker cannot do
                that, being in an interpreter without longstep.

        Raises:
            ConfigError: An argument cannot be meant, or the environment refuses its own.
            RegistryError: The worker does not know the id.
            EnvError: A worker ended at once.
            DeadlineError: A worker or its first environment was not there in time.
        """
        spec = as_spec(env, env_kwargs)
        _check_counts(num_envs, num_workers)
        num_workers = min(num_workers, num_envs)
        longest_s = max(step_timeout_s, reset_timeout_s)
        settings = WorkerSettings(
            specs={spec.name: spec},
            step_timeout_s=step_timeout_s,
            reset_timeout_s=reset_timeout_s,
            start_timeout_s=start_timeout_s,
            # silence proves nothing: a step may keep the worker's interpreter busy until its deadline
            terms=Terms(num_credits=_num_credits(num_envs), lost_after_s=longest_s + 60.0),
        )
        links = LinkSettings(
            environment=None,
            max_restarts=max_restarts,
            max_retries=max_retries,
            connect_timeout_s=start_timeout_s,
            reconnect_timeout_s=start_timeout_s,
            open_timeout_s=reset_timeout_s + OPEN_MARGIN_S,
            keys=None,
        )
        places = [LocalPlace(settings) for _ in range(num_workers)]
        self._open(places, num_envs, links, agent_kwargs or {}, wrap=spec.wrap)

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        num_envs: int,
        *,
        environment: str | None = None,
        keys: ClientKeys | None = None,
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = 120.0,
        open_timeout_s: float = 120.0,
        max_restarts: int = 20,
        max_retries: int = 1,
        wrap: bool = True,
        agent_kwargs: Mapping[str, Any] | None = None,
    ) -> Self:
        """Environments at servers, see `EnvServer`.

        Args:
            addresses: Of the workers of one server or of several; the slots are spread over them.
            num_envs: Number of slots, at least one for each address.
            environment: What to ask for; None is the only one that the server has.
            keys: CURVE keys; required for an address off this machine.
            connect_timeout_s: How long a server may take to answer.
            reconnect_timeout_s: How long a server that was lost may take to be back; `recv` raises EnvError after that.
            open_timeout_s: How long it may take to make the first environment.
            max_restarts: Times that one worker may be lost; see the constructor.
            max_retries: See the constructor.
            wrap: Put an LLMAgentEnv here around each environment that is raw at the server. False gives raw results.
            agent_kwargs: Arguments of these.

        Raises:
            DeadlineError: No server answered, or it does not know the client's key.
            RegistryError: The server has no such environment.
            ConfigError: An argument cannot be meant.
        """
        addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        _check_counts(num_envs, len(addresses))
        links = LinkSettings(
            environment=environment,
            max_restarts=max_restarts,
            max_retries=max_retries,
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            open_timeout_s=open_timeout_s,
            keys=keys,
        )
        self = cls.__new__(cls)
        places = [ServerPlace(address) for address in addresses]
        self._open(places, num_envs, links, agent_kwargs or {}, wrap=wrap)
        return self

    def _open(
        self,
        places: Sequence[Place],
        num_envs: int,
        settings: LinkSettings,
        agent_kwargs: Mapping[str, Any],
        *,
        wrap: bool,
    ) -> None:
        self._num_envs = num_envs
        self._busy: set[int] = set()
        self._in_episode = [False] * num_envs
        self._ready: dict[int, ResultBatch] = {}
        """What `recv` gives next, by number of the share."""
        self._arrived: dict[int, ResultBatch] = {}
        """What agents have yet to take; nothing ever without agents."""
        self._attendant = Attendant()
        self._is_closed = False
        self._links: list[Link] = []
        self._agents: list[LocalAgent] = []
        atexit.register(self.close)
        try:
            for place, slots in zip(places, _spread(num_envs, len(places)), strict=True):
                self._links.append(self._link(place, slots, settings))
            for link in self._links:
                link.wait_ready()
            self._use_agents(agent_kwargs, wrap=wrap)
        except BaseException:
            self.close()
            raise

    def _link(self, place: Place, slots: range, settings: LinkSettings) -> Link:
        return Link(
            place,
            slots,
            settings,
            self._attendant.wake,
            arrived=self._ready,
            in_episode=self._in_episode,
        )

    def _use_agents(self, agent_kwargs: Mapping[str, Any], *, wrap: bool) -> None:
        """Learn what the workers serve; if that is raw and is not to stay so, put agents around it here."""
        traits = self._links[0].traits
        self.env_id: str | None = traits.get("env_id")
        """The id that tasks name; None when any will do."""
        self.kind = traits["kind"]
        """`agent` when results have prompts, `raw` when they are the environment's own."""
        self._link_of = [link for link in self._links for _ in link.slots]
        if not wrap or self.kind == "agent":
            return
        self.kind = "agent"
        self._agents = [LocalAgent(agent_kwargs, traits) for _ in range(self._num_envs)]
        self._in_episode = [False] * self._num_envs
        for link in self._links:
            link.arrived = self._arrived

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until there may be something to `_take`."""
        self._attendant.wait([link.client for link in self._links], timeout_s)

    # -- commands and results: what Rollout uses ----------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        """Number of slots."""
        return self._num_envs

    def send(self, commands: Sequence[EnvCommand]) -> None:
        """Send commands to their workers, one message to each, without waiting for anything.

        An interrupt passes through; the commands that a worker has got by then are answered, others were not taken.

        Raises:
            ConfigError: Unknown or busy slot, task of another environment, step outside an episode, not exactly one of
                `task` and `action`, or the environments are closed. None of `commands` was taken.
        """
        if self._is_closed:
            raise ConfigError("expected open environments, these were closed")
        self._busy = check_commands(
            commands, busy=self._busy, in_episode=self._in_episode, env_id=self.env_id
        )
        if self._agents:
            commands = list(self._to_send(commands))
        try:
            for link, share in self._shares(commands):
                link.send(share)
        except BaseException:  # interrupted: what was taken is answered, the rest was not taken
            self._busy = self._slots_to_answer()
            raise

    def _slots_to_answer(self) -> set[int]:
        batches = [*self._ready.values(), *self._arrived.values()]
        slots = {slot for batch in batches for slot in batch.slots}
        return slots.union(*(link.slots_under_way() for link in self._links))

    def _to_send(self, commands: Sequence[EnvCommand]) -> Iterator[EnvCommand]:
        """What agents make of commands; those that need no worker are answered at once."""
        for command in commands:
            outgoing = self._agents[command.slot].outgoing(command)
            if isinstance(outgoing, EnvCommand):
                yield outgoing
            else:
                self._answer(next_share_number(), [outgoing])

    def _shares(self, commands: Sequence[EnvCommand]) -> list[tuple[Link, Share]]:
        """Each worker's share of the commands."""
        share = Share.of(commands)
        if not share.slots:
            return []
        link = self._link_of[share.slots[0]]
        if link.slots.start <= min(share.slots) and max(share.slots) < link.slots.stop:
            return [(link, share)]
        parts: list[tuple[Link, Share]] = []
        for link in self._links:
            first, end = link.slots.start, link.slots.stop
            if part := share.pick([first <= slot < end for slot in share.slots]):
                parts.append((link, part))
        return parts

    def recv(self, min_ready: int = 1, timeout_s: float | None = None) -> ResultBatch:
        """Results that are ready, in any order.

        Args:
            min_ready: Wait for this many, or for all that are under way if those are fewer.
            timeout_s: Longest wait; then what is there is returned, perhaps nothing. None waits for ever.

        Raises:
            EnvError: A worker went down more often than `max_restarts`, and no result is left to be returned.
        """
        end_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._take()
        while not self._are_ready(min_ready):
            self._check_links()
            left_s = None if end_at is None else max(0.0, end_at - time.monotonic())
            self._wait(left_s)
            self._take()
            if left_s == 0.0:
                break
        ready = list(self._ready.items())
        results = ResultBatch.join([batch for _, batch in ready])
        self._busy.difference_update(results.slots)
        for number, _ in ready:
            del self._ready[number]
        return results

    def _are_ready(self, num_results: int) -> bool:
        """Whether so many results are ready, or all that are under way."""
        wanted = min(num_results, len(self._busy))
        if wanted <= 1:
            return wanted < 1 or bool(self._ready)
        return sum(map(len, list(self._ready.values()))) >= wanted

    def close(self) -> None:
        """End the workers and everything they started, or say goodbye to the servers. Idempotent."""
        self._is_closed = True
        atexit.unregister(self.close)
        for link in self._links:
            link.begin_close()
        for link in self._links:
            link.close()
        self._attendant.close()
        self._busy.clear()
        self._ready.clear()
        self._episodes = None

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    # -- beyond VectorEnv ---------------------------------------------------------------------------------------------

    @property
    def num_restarts(self) -> int:
        """Workers that were replaced so far."""
        return sum(link.num_restarts for link in self._links)

    @property
    def worker_pids(self) -> list[int | None]:
        """Process ids of this machine's workers; None where one is being replaced, and for servers."""
        return [getattr(link.place, "pid", None) for link in self._links]

    def fork(self, slot: int, *, into: int, at_step: int | None = None) -> EnvResult:
        """Branch a trajectory: have another slot stand where one stood, and give what is to be seen there.

        From there both do the same with the same actions. The last state of a running episode is copied where the
        environment offers `snapshot` and `restore` and both slots share a worker. Any other is reached by the
        episode's seed and actions, its state keys compared; the episode may be over, until its slot is reset.

        Args:
            slot: Whose trajectory.
            into: Another slot, which may be in an episode of its own; that ends.
            at_step: Steps taken before the branch; 0 is the state after the reset. None is the last state.

        Returns:
            The result of the last reset or step on the way there, with the prompt that comes next. Its `error` says
            when the state was not reached.

        Raises:
            ConfigError: A slot has a command under way, the trajectory does not reach so far, or there is none.
        """
        for busy in {slot, into} & self._busy:
            raise ConfigError(f"expected no command under way in slot {busy}; call `recv` first")
        if slot == into or not {slot, into} <= set(range(self._num_envs)):
            raise ConfigError(
                f"expected two slots below {self._num_envs}, got {slot} and {into} at `fork`"
            )
        history = self._history(slot)
        if history is None:
            raise ConfigError(
                f"expected slot {slot} to have a trajectory; it was not reset, or failed"
            )
        before = up_to(history, at_step)
        stands_there = len(before.actions) == len(history.actions) and self._in_episode[slot]
        result = None
        if stands_there and not self._agents and self._link_of[slot] is self._link_of[into]:
            result = self._link_of[slot].copy(slot, into)
        if result is None:
            result = repeat(before, into, do=self._one, history_of=self._history)
        self._look_at(ResultBatch.of([result]))
        return result

    def _history(self, slot: int) -> History | None:
        if self._agents:
            return self._agents[slot].history
        return self._link_of[slot].journal.history(slot)

    def _one(self, command: EnvCommand) -> EnvResult:
        """The result of one command; those of others stay for `recv`."""
        self.send([command])
        while True:
            self._take()
            for number, batch in list(self._ready.items()):
                if command.command_id in batch.command_ids:
                    return self._pick(number, batch.command_ids.index(command.command_id))
            failure = self._link_of[command.slot].failure
            if failure is not None:
                raise failure
            self._wait(None)

    def _pick(self, number: int, index: int) -> EnvResult:
        """One result of a ready batch."""
        batch = self._ready[number]
        self._busy.discard(batch.slots[index])
        if len(batch) == 1:
            del self._ready[number]
        else:
            self._ready[number] = ResultBatch.join([batch[:index], batch[index + 1 :]])
        return batch[index]

    # -- private ------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        for link in self._links:
            if link.inbox:
                link.take()
        for number, results in list(self._arrived.items()) if self._arrived else ():
            self._answer(number, [self._agents[told.slot].incoming(told) for told in results])
            del self._arrived[number]

    def _answer(self, number: int, results: Sequence[EnvResult]) -> None:
        """Take what agents made of a batch of results, or of commands that they answered themselves."""
        for slot in [result.slot for result in results]:
            self._in_episode[slot] = self._agents[slot].in_episode
        self._ready[number] = ResultBatch.of(results)

    def _check_links(self) -> None:
        for link in self._links:
            if link.failure is not None and not self._ready:
                raise link.failure


def _spread(num_slots: int, num_parts: int) -> list[range]:
    bounds = [index * num_slots // num_parts for index in range(num_parts + 1)]
    return list(map(range, bounds, bounds[1:]))


def _check_counts(num_envs: int, num_workers: int) -> None:
    if num_envs < 1:
        raise ConfigError(f"expected `num_envs` of at least 1, got {num_envs}")
    if num_workers < 1:
        raise ConfigError(f"expected at least 1 worker, got {num_workers}")


def _num_credits(num_envs: int) -> int:
    """Requests in flight: a blocking environment's commands travel alone."""
    return min(4096, max(64, 2 * num_envs))
