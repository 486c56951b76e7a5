"""`check_env`: what an environment author runs before training. Plays episodes with canned replies;
no model is needed.

It reports problems as text and never raises for a fault of the environment.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from numbers import Real
from typing import Any, TypeVar

from fledge.envs.base import reward_of
from fledge.errors import RewardError
from fledge.interfaces import Environment
from fledge.types import Message, Step, Task, assistant

R = TypeVar("R")
REPLIES = ("42", "", "I do not know.\n<|im_end|>")
MAX_TURNS = 100


class _Fault(Exception):
    """What is wrong, in words."""


async def check_env(
    factory: Callable[[Task], Environment], tasks: Iterable[Task], timeout: float = 60.0
) -> list[str]:
    """Problems found, one line each with the first place it showed; empty when the contract is
    kept.

    `timeout` is how many seconds one call of the environment may take.
    """
    found: dict[str, str] = {}
    count = 0
    for task in tasks:
        count += 1
        for reply in REPLIES:
            for problem in await _try(factory, task, assistant(reply), timeout):
                found.setdefault(problem, f"task {task.key!r}, reply {reply!r}")
    if not count:
        return ["there are no tasks to check with"]
    return [f"{problem} ({place})" for problem, place in found.items()]


async def _try(
    factory: Callable[[Task], Environment], task: Task, reply: Message, timeout: float
) -> list[str]:
    problems: list[str] = []
    made: list[Environment] = []
    try:
        made = [_construct(factory, task), _construct(factory, task)]
        if made[0] is made[1]:
            raise _Fault("the factory returned one object twice; an environment is used once")
        # Both begin before either is stepped, so that state shared between them shows.
        openings = [_opening(await _call("reset", e.reset, timeout)) for e in made]
        if openings[0] != openings[1]:
            raise _Fault("two environments of one task begin with different messages")
        for environment in made:
            await _play(environment, reply, timeout)
    except _Fault as fault:
        problems.append(str(fault))
    for environment in made:
        try:
            await _call("close", environment.close, timeout)
            await _call("the second close", environment.close, timeout)
        except _Fault as fault:
            problems.append(str(fault))
    return problems


def _construct(factory: Callable[[Task], Environment], task: Task) -> Environment:
    try:
        made = factory(task)
    except Exception as error:
        raise _Fault(f"construction raised {_say(error)}") from error
    if not isinstance(made, Environment):
        raise _Fault(f"{type(made).__name__} lacks reset, step or close")
    return made


async def _play(environment: Environment, reply: Message, timeout: float) -> None:
    for _ in range(MAX_TURNS):
        step = await _call("step", lambda: environment.step(reply), timeout)
        _check_step(step)
        if step.terminated or step.truncated:
            return
    raise _Fault(f"no end after {MAX_TURNS} turns; set terminated or truncated at a limit")


async def _call(name: str, method: Callable[[], Awaitable[R]], timeout: float) -> R:
    try:
        pending = method()
        if not inspect.isawaitable(pending):
            raise _Fault(f"{name} is not `async def`")
        return await asyncio.wait_for(pending, timeout)
    except _Fault:
        raise
    except TimeoutError:
        raise _Fault(f"{name} took more than {timeout:g} s") from None
    except Exception as error:
        raise _Fault(f"{name} raised {_say(error)}") from error


def _opening(messages: Any) -> list[Message]:
    listed = _messages("reset", messages)
    if not listed:
        raise _Fault("reset returned no messages")
    if listed[-1].role not in ("user", "system"):
        raise _Fault(f"reset must end with a user or system message, not {listed[-1].role!r}")
    return listed


def _check_step(step: Any) -> None:
    if not isinstance(step, Step):
        raise _Fault(f"step returned {type(step).__name__}, not a Step")
    messages = _messages("step", step.messages)
    try:
        reward_of(step.reward, "step")
    except RewardError as error:
        raise _Fault(str(error)) from None
    for name, value in step.info.items():
        _number(f"info[{name!r}]", value)
    if not (messages or step.terminated or step.truncated):
        raise _Fault("step neither ended the episode nor returned messages to go on with")


def _messages(name: str, messages: Any) -> list[Message]:
    if not isinstance(messages, Sequence) or not all(isinstance(m, Message) for m in messages):
        raise _Fault(f"{name} must return a list of Message, got {repr(messages)[:80]}")
    return list(messages)


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise _Fault(f"{name} must be a finite float, got {value!r}")


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
