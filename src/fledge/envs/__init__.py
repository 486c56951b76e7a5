"""Environments: present a task in messages, answer the policy's reply, score it. No tokens, no
torch.

`base` has the class to derive from, `function` wraps a plain reward function, `check` tests an
environment, and `make_factory` turns the `env` section of a recipe into something that builds one
environment per episode.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from fledge import interfaces
from fledge.config import Plugin
from fledge.envs.arithmetic import Arithmetic
from fledge.envs.base import Environment, reward_of
from fledge.envs.check import check_env
from fledge.envs.countdown import Countdown
from fledge.envs.function import RewardEnvironment
from fledge.envs.gsm8k import Gsm8k, Gsm8kMultiTurn
from fledge.envs.guess import Guess
from fledge.envs.judge import Judge
from fledge.envs.maths import Aime, Maths
from fledge.envs.reasoning import Reasoning
from fledge.envs.search import Search
from fledge.envs.text2sql import TextToSql
from fledge.envs.tools import Toolbox, ToolEnvironment, ToolFailure, as_tool
from fledge.errors import PluginError
from fledge.plugins import check_arguments, check_positional, resolve
from fledge.types import Task

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "EnvironmentFactory",
    "RewardEnvironment",
    "ToolEnvironment",
    "ToolFailure",
    "Toolbox",
    "as_tool",
    "check_env",
    "make_factory",
    "reward_of",
]

EnvironmentFactory = Callable[[Task], interfaces.Environment]

ENVIRONMENTS: dict[str, Callable[..., interfaces.Environment]] = {
    "aime": Aime,
    "arithmetic": Arithmetic,
    "countdown": Countdown,
    "gsm8k": Gsm8k,
    "gsm8k_multi_turn": Gsm8kMultiTurn,
    "guess": Guess,
    "judge": Judge,
    "maths": Maths,
    "reasoning": Reasoning,
    "reward": RewardEnvironment,
    "search": Search,
    "text2sql": TextToSql,
}


def make_factory(plugin: Plugin) -> EnvironmentFactory:
    """Resolve `env`, check its class and arguments, and return what builds one environment per
    episode.
    """
    found = resolve(plugin.name, ENVIRONMENTS, "env")
    _check_class(found, plugin.label)
    arguments = check_arguments(found, plugin.arguments, "env", positional=1)
    factory = functools.partial(found, **arguments) if arguments else found
    check_positional(factory, ("task",), "env")
    return factory


def _check_class(found: Callable[..., Any], name: str) -> None:
    if not inspect.isclass(found):
        raise PluginError(f"env: {name!r} is not a class; name one with reset and step")
    for method in ("reset", "step", "close"):
        if not inspect.iscoroutinefunction(getattr(found, method, None)):
            raise PluginError(
                f"env: {found.__name__} has no `async def {method}`; "
                f"derive it from fledge.envs.Environment"
            )
    for method in ("reset", "step"):
        if getattr(found, method) is getattr(Environment, method):
            raise PluginError(f"env: {found.__name__} does not define {method}")
