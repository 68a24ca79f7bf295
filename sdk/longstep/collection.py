"""The rollout loop: one `Collection` plays one list of tasks and is then used up; `longstep.streaming` plays on and on.

A *member* waits in the queue, is reset in a slot, then goes round between policy and environment until it stops. The
loop never waits for a member in particular: it takes all environment results there are, hands all new prompts to the
policy at once, and sends all new actions to the environments at once. See `longstep.rollout` for what it promises.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from xxhash import xxh3_64_intdigest

from longstep.commands import EnvCommand, EnvResult, VectorEnv, next_command_id
from longstep.errors import ConfigError
from longstep.member import (
    Member,
    allowed_completions,
    fault_of_completion,
    fault_of_result,
    trajectory_id_of,
)
from longstep.policy import Policy
from longstep.types import (
    Action,
    Completion,
    FinishReason,
    GenerationRequest,
    StepRecord,
    StopReason,
    Task,
    Trajectory,
)

if TYPE_CHECKING:
    from longstep.rollout import RolloutSettings

__all__ = ["Collection"]

_IDLE_S = 1.0
"""Longest wait in one call when there is nothing else to do: Ctrl-C is seen between calls."""
_BOTH_S = 0.001
"""Longest wait for a completion while an environment may answer first."""
_DRAIN_S = 5.0
"""Longest wait for environments to answer when a collection is given up."""


class Collection:
    """State of one `Rollout.collect`."""

    def __init__(
        self,
        envs: VectorEnv,
        policy: Policy,
        settings: RolloutSettings,
        tasks: Sequence[Task],
        iteration: int,
        stale: dict[int, int],
        on_step: Callable[[str, StepRecord], object] | None,
    ) -> None:
        """Args:
        stale: Command ids, by slot, that an earlier collection left unanswered; updated in place.
        iteration: Enters the sampling seeds.
        """
        self._envs, self._policy, self._settings = envs, policy, settings
        self._on_step = on_step
        self._queue = deque(
            Member(
                task,
                group,
                member,
                0,
                trajectory_id_of(settings.seed, iteration, task, group, member, 0),
            )
            for group, task in enumerate(tasks)
            for member in range(settings.group_size)
        )
        self._iteration = iteration
        self._free = [slot for slot in reversed(range(envs.num_envs)) if slot not in stale]
        self._in_flight = stale  # slot -> id of the command it has not answered
        self._live: dict[int, Member] = {}  # slot -> member
        self._asked: dict[str, Member] = {}  # request id -> member
        self._requests: list[tuple[Member, GenerationRequest]] = []  # not submitted yet
        self._commands: list[EnvCommand] = []  # not sent yet
        self._finished: list[tuple[int, int, int, Trajectory]] = []
        self._idle_s = _IDLE_S
        self._has_steps = False
        self._heard = 0.0  # when the policy last gave something, or was first asked

    def run(self) -> tuple[Trajectory, ...]:
        """Play everything."""
        try:
            while self._queue or self._live:
                self._step_environments()
                self._generate()
        except BaseException:
            self._abandon()
            raise
        self._finished.sort(key=lambda item: item[:3])
        return tuple(item[3] for item in self._finished)

    # -- environments -------------------------------------------------------------------------------------------------

    def _step_environments(self) -> None:
        """Send what is to be sent and take results until none is ready; wait only if the policy owes nothing."""
        timeout_s = 0.0 if self._asked or self._requests else self._idle_s
        while True:
            self._refill()
            while self._free and self._queue:
                self._reset(self._queue.popleft(), self._free.pop())
            if self._commands:
                self._send()
            if not self._in_flight:
                return
            results = self._envs.recv(1, timeout_s)
            if not results:
                return
            for result in results:
                self._take_result(result)
            timeout_s = 0.0

    def _refill(self) -> None:
        """Queue more members for free slots; here all of them are queued from the beginning."""

    def _send(self) -> None:
        commands, self._commands = self._commands, []
        ids = {command.slot: command.command_id for command in commands}
        self._in_flight.update(
            ids
        )  # first: an interrupt must not leave commands that nobody knows of
        try:
            self._envs.send(commands)
        except Exception as error:  # none was taken
            for slot in ids:
                del self._in_flight[slot]
            if not isinstance(error, ConfigError) or not self._has_steps:
                raise
            self._send_one_by_one(commands, error)

    def _send_one_by_one(self, commands: Sequence[EnvCommand], error: ConfigError) -> None:
        """Find the command that was refused, so that its member alone fails."""
        if len(commands) == 1:
            self._raise_or_finish(self._live[commands[0].slot], error)
            return
        for command in commands:
            self._commands = [command]
            self._send()

    def _reset(self, member: Member, slot: int) -> None:
        member.slot = slot
        self._live[slot] = member
        self._commands.append(EnvCommand(slot=slot, command_id=next_command_id(), task=member.task))

    def _take_result(self, result: EnvResult) -> None:
        slot = result.slot
        if self._in_flight.get(slot) != result.command_id:
            return  # an answer to somebody else's command
        del self._in_flight[slot]
        member = self._live.get(slot)
        if member is None:  # the slot had been left behind by an earlier collection
            self._free.append(slot)
            return
        try:
            self._advance(member, result)
        except ConfigError as error:
            self._raise_or_finish(member, error)

    def _advance(self, member: Member, result: EnvResult) -> None:
        """Take a member from a result of its environment to its next request, or to its end."""
        is_step = member.completion is not None
        error = result.error or fault_of_result(result, is_step=is_step)
        if error is not None:
            self._finish(member, StopReason.ENV_FAILURE, error)
            return
        stop = self._record(member, result) if is_step else None
        member.info = result.info
        if stop is None:
            self._ask(member)
        else:
            self._finish(member, stop)

    def _raise_or_finish(self, member: Member, error: ConfigError) -> None:
        """A wrong call raises, but only while nothing has been collected that would be lost."""
        if not self._has_steps:
            raise error
        self._finish(member, StopReason.ENV_FAILURE, f"ConfigError: {error}")

    def _record(self, member: Member, result: EnvResult) -> StopReason | None:
        """Add the step that the result completes; gives why the trajectory stops here, or None."""
        before, info, completion = member.info, result.info, member.completion
        assert completion is not None
        valid = bool(info["action_valid"])
        member.invalid_in_row = 0 if valid else member.invalid_in_row + 1
        member.success = member.success or bool(info.get("success", False))
        member.num_tokens += len(completion.prompt_token_ids) + len(completion.token_ids)
        stop = self._why_stop(member, result)
        terminated = result.terminated or stop is StopReason.INVALID_ACTION
        step = StepRecord(
            step=len(member.steps),
            prompt=before["prompt"],
            completion=completion,
            action=Action(text=info["action"], valid=valid, reason=info.get("action_reason", "")),
            observation=before.get("observation"),
            state_key=before["state_key"],
            reward=result.reward,
            raw_reward=float(info["raw_reward"]),
            terminated=terminated,
            truncated=result.truncated or (stop is not None and not terminated),
            seconds={"generate": member.generate_s, "env": result.seconds},
        )
        member.steps.append(step)
        self._has_steps = True
        member.completion = None
        if self._on_step is not None:
            self._observe(member, step)
        return stop

    def _why_stop(self, member: Member, result: EnvResult) -> StopReason | None:
        settings, num_steps = self._settings, len(member.steps) + 1
        if result.terminated:
            return StopReason.TERMINATED
        if result.truncated:
            return _why_truncated(result.info)
        invalid_limit, token_limit = settings.max_invalid_in_row, settings.max_total_tokens
        if invalid_limit is not None and member.invalid_in_row > invalid_limit:
            return StopReason.INVALID_ACTION
        if settings.max_steps is not None and num_steps >= settings.max_steps:
            return StopReason.TIME_LIMIT
        if token_limit is not None and member.num_tokens >= token_limit:
            return StopReason.BUDGET
        return None

    def _observe(self, member: Member, step: StepRecord) -> None:
        assert self._on_step is not None
        try:
            self._on_step(member.trajectory_id, step)
        except Exception as failure:
            self._on_step = None
            text = f"on_step raised {type(failure).__name__}: {failure}; it is not called again in this collect"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    # -- policy -------------------------------------------------------------------------------------------------------

    def _ask(self, member: Member) -> None:
        """Queue the request for a member's next completion."""
        settings = self._settings
        request_id = f"{member.trajectory_id}:{len(member.steps)}"
        request = GenerationRequest(
            request_id=request_id,
            prompt=member.info["prompt"],
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            stop=settings.stop,
            allowed=allowed_completions(member.info) if settings.constrain else None,
            seed=xxh3_64_intdigest(request_id.encode())
            >> 1,  # 63 bits: fits the generators of torch and numpy
            trajectory_id=member.trajectory_id,
        )
        self._requests.append((member, request))

    def _generate(self) -> None:
        """Submit new requests and take the completions that are ready."""
        if self._requests:
            self._submit()
        if not self._asked:
            return
        try:
            completions = self._policy.poll(_BOTH_S if self._in_flight else self._idle_s)
        except Exception as failure:
            if isinstance(failure, ConfigError) and not self._has_steps:
                raise  # a wrong call, and nothing would be lost
            self._give_up(f"the policy's poll raised {type(failure).__name__}: {failure}")
            return
        if completions:
            self._heard = time.monotonic()
            for completion in completions:
                if isinstance(cast(Any, completion), Completion):
                    self._take_completion(completion)
                    continue
                # Whose it is cannot be told.
                self._give_up(
                    f"expected a Completion from the policy's poll, got {completion!r:.100}"
                )
            return
        silent_s, limit_s = time.monotonic() - self._heard, self._settings.policy_timeout_s
        if limit_s is not None and silent_s > limit_s:
            self._give_up(f"expected a completion within {limit_s} s, the policy gave none")

    def _submit(self) -> None:
        requests, self._requests = self._requests, []
        now = time.monotonic()
        if not self._asked:
            self._heard = now
        for member, request in requests:
            member.asked_at = now
            self._asked[request.request_id] = member
        try:
            self._policy.submit([request for _, request in requests])
        except Exception as failure:
            if isinstance(failure, ConfigError) and not self._has_steps:
                raise  # a wrong call, and nothing would be lost
            error = f"the policy's submit raised {type(failure).__name__}: {failure}"
            for member, request in requests:
                del self._asked[request.request_id]
                self._finish(member, StopReason.POLICY_FAILURE, error)

    def _take_completion(self, completion: Completion) -> None:
        member = self._asked.pop(completion.request_id, None)
        if member is None:
            return  # late: its request was given up
        if completion.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            self._finish(
                member,
                StopReason.POLICY_FAILURE,
                completion.error or completion.finish_reason.value,
            )
            return
        fault = fault_of_completion(completion)
        if fault is not None:
            self._finish(member, StopReason.POLICY_FAILURE, fault)
            return
        member.completion = completion
        member.generate_s = time.monotonic() - member.asked_at
        command = EnvCommand(slot=member.slot, command_id=next_command_id(), action=completion.text)
        self._commands.append(command)

    def _give_up(self, error: str) -> None:
        """Fail every request that the policy owes."""
        members = list(self._asked.values())
        self._cancel()
        for member in members:
            self._finish(member, StopReason.POLICY_FAILURE, error)

    def _cancel(self) -> None:
        """Withdraw what the policy owes, if it can do that; if not, late completions are passed over."""
        cancel = getattr(self._policy, "cancel", None)
        if cancel is not None and self._asked:
            cancel(list(self._asked))
        self._asked.clear()

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _finish(self, member: Member, reason: StopReason, error: str | None = None) -> None:
        """Record a member's trajectory, free its slot, and queue it again if it failed and may be played again."""
        settings = self._settings
        group, index, attempt = member.group, member.index, member.attempt
        trajectory = Trajectory(
            trajectory_id=member.trajectory_id,
            task=member.task,
            group_id=group,
            member=index,
            steps=tuple(member.steps),
            stop_reason=reason,
            success=member.success,
            error=error,
        )
        del self._live[member.slot]
        self._free.append(member.slot)
        again = settings.failed_groups == "reroll" and attempt < settings.max_rerolls
        again = again and reason.is_failure
        if again:
            name = trajectory_id_of(
                settings.seed, self._iteration, member.task, group, index, attempt + 1
            )
            self._queue.appendleft(Member(member.task, group, index, attempt + 1, name))
        self._keep((group, index, attempt, trajectory), is_last=not again)

    def _keep(self, finished: tuple[int, int, int, Trajectory], *, is_last: bool) -> None:
        """Store a trajectory with its place; `is_last` unless the member is played again."""
        self._finished.append(finished)

    def _abandon(self) -> None:
        """Withdraw requests and let environments answer, so that both can be used again.

        A slot that does not answer in time stays in `stale`, and its answer is awaited by the next collection.
        """
        with contextlib.suppress(Exception):  # the first error is the one to tell
            self._cancel()
        deadline = time.monotonic() + _DRAIN_S
        with contextlib.suppress(Exception):
            while self._in_flight and (left_s := deadline - time.monotonic()) > 0.0:
                results = self._envs.recv(len(self._in_flight), left_s)
                for result in results:
                    if self._in_flight.get(result.slot) == result.command_id:
                        del self._in_flight[result.slot]
                if not results and deadline - time.monotonic() > 0.5 * left_s:
                    self._in_flight.clear()  # at once nothing: no command is under way


def _why_truncated(info: Mapping[str, Any]) -> StopReason:
    if info.get("over_budget"):
        return StopReason.BUDGET
    return StopReason.TIME_LIMIT if info.get("time_limit") else StopReason.TRUNCATED
