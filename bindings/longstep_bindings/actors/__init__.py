"""Actors: processes that serve an engine over ZeroMQ, and the pool and the policy in front of them.

    with open_policy("out/model", engine="vllm", num_actors=2) as policy:
        batch = Rollout("longstep/KeyDoor-v0", policy, group_size=8).collect(tasks)
        policy.update_weights(model, version=1)

An actor's death loses no trajectory: its requests go to another actor, or to the one that takes its place, and their
completions say so (`Completion.resubmitted`).
"""

from longstep_bindings.actors.policy import ActorPolicy, Probe, open_policy
from longstep_bindings.actors.pool import ActorPool
from longstep_bindings.actors.server import ActorServer
from longstep_bindings.actors.spec import ActorSpec, PoolSettings
from longstep_bindings.actors.stats import ActorStats, PoolStats
from longstep_bindings.engines.served import ScoreRow

__all__ = [
    "ActorPolicy",
    "ActorPool",
    "ActorServer",
    "ActorSpec",
    "ActorStats",
    "PoolSettings",
    "PoolStats",
    "Probe",
    "ScoreRow",
    "open_policy",
]
