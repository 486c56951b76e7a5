"""fledge: reinforcement-learning post-training for language models that refuses to be silently
wrong.

Everything the command line does is a function here. Heavy parts load on first use, so `import
fledge` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fledge.config import PreferConfig, SftConfig, TrainConfig, load_config
    from fledge.envs import Environment, check_env
    from fledge.errors import FledgeError
    from fledge.orchestration import evaluate, prefer, sft, train
    from fledge.types import Message, Step, Task, assistant, system, user

__version__ = "0.1.0"

_HOME = {
    "Environment": "fledge.envs",
    "FledgeError": "fledge.errors",
    "Message": "fledge.types",
    "PreferConfig": "fledge.config",
    "SftConfig": "fledge.config",
    "Step": "fledge.types",
    "Task": "fledge.types",
    "TrainConfig": "fledge.config",
    "assistant": "fledge.types",
    "check_env": "fledge.envs",
    "evaluate": "fledge.orchestration",
    "load_config": "fledge.config",
    "prefer": "fledge.orchestration",
    "sft": "fledge.orchestration",
    "system": "fledge.types",
    "train": "fledge.orchestration",
    "user": "fledge.types",
}

__all__ = [
    "Environment",
    "FledgeError",
    "Message",
    "PreferConfig",
    "SftConfig",
    "Step",
    "Task",
    "TrainConfig",
    "__version__",
    "assistant",
    "check_env",
    "evaluate",
    "load_config",
    "prefer",
    "sft",
    "system",
    "train",
    "user",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fledge' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
