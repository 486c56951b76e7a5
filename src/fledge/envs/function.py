"""A single-turn environment out of a plain reward function: `(prompt, response, meta) -> float`, or
-> `{name: float}` for a reward with named parts.

It asks once, scores the reply, and ends. It never turns a failed grader into a reward: what the
function raises goes up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from fledge.envs.base import Environment, reward_of
from fledge.envs.threads import in_thread
from fledge.errors import DataError
from fledge.messages import messages_of
from fledge.plugins import check_positional, resolve
from fledge.types import Message, Step, Task


def _load(function: str | Callable[..., Any]) -> Callable[..., Any]:
    found = resolve(function, {}, "env.function")
    check_positional(found, ("prompt", "response", "meta"), "env.function")
    return found


RewardFunction = Annotated[Callable[[str, str, Mapping[str, Any]], Any], BeforeValidator(_load)]
"""`"module:name"` in a recipe; resolved and checked once, when the recipe's arguments are
validated. It returns a number, or the named parts of a reward: `{"right": 1.0, "short": 0.3}`.
"""


class RewardEnvironment(Environment[Task]):
    """Ask `task.data[prompt_key]` (text or a list of messages), reward the one reply with
    `function`.

    `prompt` is the text of the last message asked, `meta` the whole row. Without a function the
    reward is 0, for runs whose reward is a model's.
    """

    def __init__(
        self, task: Task, *, function: RewardFunction | None = None, prompt_key: str = "prompt"
    ) -> None:
        super().__init__(task)
        if prompt_key not in task.data:
            raise DataError(
                f"env.prompt_key: task {task.key!r} has no field {prompt_key!r} "
                f"(it has: {', '.join(map(str, task.data)) or 'none'})"
            )
        self.function = function
        self.prompt = messages_of(task.data[prompt_key], f"env.prompt_key: {prompt_key}")

    async def reset(self) -> Sequence[Message]:
        return self.prompt

    async def step(self, reply: Message) -> Step:
        if self.function is None:
            return Step(terminated=True)
        # A copy: a function that changes its row must not reach the other episodes of the group.
        arguments = (self.prompt[-1].content, reply.content, dict(self.task.data))
        if _is_async(self.function):
            reward: Any = self.function(*arguments)
        else:
            # In a thread: a grader that blocks must not stop the other episodes.
            reward = await in_thread(self.function, *arguments)
        if inspect.isawaitable(reward):
            reward = await reward
        name = getattr(self.function, "__name__", type(self.function).__name__)
        where = f"env.function: {name}, task {self.key!r},"
        if isinstance(reward, Mapping) and reward:
            parts = {str(part): reward_of(v, f"{where} {part}") for part, v in reward.items()}
            return Step(components=parts, terminated=True)
        return Step(reward=reward_of(reward, where), terminated=True)


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
