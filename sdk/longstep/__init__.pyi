from . import (
    actions,
    checks,
    credit,
    env,
    errors,
    memory,
    policy,
    prompt,
    recording,
    registration,
    rollout,
    spaces,
    state_key,
    tasks,
    types,
    vector,
)
from ._version import __version__
from .actions import ActionParser, ChoiceParser, JsonParser, RegexParser, TagParser, ToolCallParser
from .checks import check_env
from .env import LLMAgentEnv
from .errors import LongstepError
from .memory import (
    FrameMemory,
    KeyEventMemory,
    Memory,
    RetrievalMemory,
    SimpleMemory,
    SummaryMemory,
    WindowMemory,
)
from .policy import EnginePolicy, FunctionPolicy, Policy
from .prompt import PromptTemplate
from .recording import RolloutBatch
from .registration import EnvEntry, make, register, registry
from .rollout import Rollout
from .spaces import TextSpace
from .types import (
    Action,
    Completion,
    GenerationRequest,
    Message,
    Prompt,
    StepRecord,
    StopReason,
    Task,
    Trajectory,
)
from .vector import GroupVectorEnv, VectorEnv

__all__ = [
    "Action",
    "ActionParser",
    "ChoiceParser",
    "Completion",
    "EnginePolicy",
    "EnvEntry",
    "FrameMemory",
    "FunctionPolicy",
    "GenerationRequest",
    "GroupVectorEnv",
    "JsonParser",
    "KeyEventMemory",
    "LLMAgentEnv",
    "LongstepError",
    "Memory",
    "Message",
    "Policy",
    "Prompt",
    "PromptTemplate",
    "RegexParser",
    "RetrievalMemory",
    "Rollout",
    "RolloutBatch",
    "SimpleMemory",
    "StepRecord",
    "StopReason",
    "SummaryMemory",
    "TagParser",
    "Task",
    "TextSpace",
    "ToolCallParser",
    "Trajectory",
    "VectorEnv",
    "WindowMemory",
    "__version__",
    "actions",
    "check_env",
    "checks",
    "credit",
    "env",
    "errors",
    "make",
    "memory",
    "policy",
    "prompt",
    "recording",
    "register",
    "registration",
    "registry",
    "rollout",
    "spaces",
    "state_key",
    "tasks",
    "types",
    "vector",
]
