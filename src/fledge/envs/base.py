"""The class that environments derive from.

An environment sees messages and its task, never tokens or tensors. Nothing here plays an episode.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from fledge.errors import DataError, RewardError
from fledge.types import Message, Step, Task, Tool

T = TypeVar("T")


class Environment(Generic[T]):
    """One attempt at one task: `reset`, `step` until it ends, `close`. Used once.

    `Environment[Task]` sees the plain task. `Environment[MyRecord]` sees its row as a `MyRecord` (a
    dataclass, a TypedDict or a pydantic model); a row that does not fit is refused with the name of
    the field.
    """

    reset_is_cheap: ClassVar[bool] = True
    """Prompts are looked at before training starts, unless `reset` starts a server or the like."""

    tools: Sequence[Tool] = ()
    """What the policy is told that it may call; its calls come back in `reply.tool_calls`."""

    _record: ClassVar[Any] = Task

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in getattr(cls, "__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Environment):
                record = get_args(base)[0]
                if not isinstance(record, TypeVar):
                    cls._record = record

    def __init__(self, task: Task) -> None:
        self.key = task.key
        self.task: T = _read(self._record, task, type(self).__name__)

    async def reset(self) -> Sequence[Message]:
        """The messages that the policy sees first."""
        raise NotImplementedError

    async def step(self, reply: Message) -> Step:
        """The answer to one reply of the policy."""
        raise NotImplementedError

    async def close(self) -> None:
        """Give back what `reset` took. May be called twice, and without a `reset`."""


LARGEST_REWARD = 1e9


def reward_of(value: object, where: str) -> float:
    """A reward as a float: any real number, also of numpy or torch; anything else is refused.

    >>> reward_of(True, "env")
    1.0
    """
    scalar = getattr(value, "item", None)
    if scalar is not None and getattr(value, "ndim", 1) == 0:
        value = scalar()
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_REWARD:
        raise RewardError(
            f"{where} gave the reward {_short(value)}; it must be a finite number "
            f"no larger than {LARGEST_REWARD:.0e}"
        )
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read(record: Any, task: Task, name: str) -> Any:
    if record is Task:
        return task
    try:
        return _adapter(record).validate_python(dict(task.data))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "row"
        raise DataError(
            f"env: task {task.key!r} does not fit {name}: {field}: {first['msg']}; "
            f"change the rows of data.train"
        ) from None


@functools.cache
def _adapter(record: Any) -> TypeAdapter[Any]:
    return TypeAdapter(record)
