import asyncio
from dataclasses import dataclass

import pytest

from fledge import interfaces
from fledge.envs.base import Environment
from fledge.errors import DataError
from fledge.messages import messages_of
from fledge.types import Message, Step, Task, user


@dataclass
class Guess:
    secret: int
    high: int = 10


class GuessEnvironment(Environment[Guess]):
    async def reset(self):
        return [user(f"1 to {self.task.high}")]

    async def step(self, reply):
        return Step(reward=float(reply.content == str(self.task.secret)), terminated=True)


class Louder(GuessEnvironment):
    """Inherits the record of its base."""


class Plain(Environment):
    async def reset(self):
        return messages_of(self.task.data["prompt"], "prompt")


def test_row_is_read_into_the_record_and_converted():
    environment = GuessEnvironment(Task("t", {"secret": "7", "unused": 1}))
    assert environment.task == Guess(7, 10)
    assert environment.key == "t"
    assert Louder(Task("t", {"secret": 3})).task.secret == 3


def test_row_that_does_not_fit_names_task_and_field():
    with pytest.raises(DataError, match=r"'t'.*GuessEnvironment.*secret"):
        GuessEnvironment(Task("t", {"high": 3}))


def test_without_a_record_the_task_itself_is_seen():
    task = Task("t", {"prompt": "hi"})
    assert Plain(task).task is task
    assert asyncio.run(Plain(task).reset()) == [user("hi")]


def test_close_may_be_called_twice_and_the_protocol_is_met():
    environment = GuessEnvironment(Task("t", {"secret": 1}))
    assert isinstance(environment, interfaces.Environment)
    asyncio.run(environment.close())
    asyncio.run(environment.close())


def test_messages_of_text_and_of_dicts():
    assert messages_of("hi", "prompt") == [Message("user", "hi")]
    listed = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert messages_of(listed, "prompt") == [Message("system", "s"), Message("user", "u")]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (7, r"prompt: must be text or a list"),
        ([], r"prompt: must be text or a list"),
        (["hi"], r"prompt\[0\]"),
        ([{"role": "robot", "content": "x"}], r"prompt\[0\]\.role.*'robot'"),
        ([{"role": "user", "content": None}], r"prompt\[0\]\.content.*None"),
    ],
)
def test_malformed_messages_name_the_place(value, said):
    with pytest.raises(DataError, match=said):
        messages_of(value, "prompt")
