import asyncio
import itertools

import pytest

from fledge.envs.base import Environment
from fledge.envs.check import check_env
from fledge.types import Step, Task, assistant, user

TASK = Task("t", {})
counter = itertools.count()


class Good(Environment):
    async def reset(self):
        self.turns = 0
        return [user("go")]

    async def step(self, reply):
        self.turns += 1
        return Step(messages=[user("more")], reward=0.5, terminated=self.turns == 3)


class Silent(Good):
    async def reset(self):
        return []


class AssistantLast(Good):
    async def reset(self):
        return [user("go"), assistant("gone")]


class TextReset(Good):
    async def reset(self):
        return "go"


class Random(Good):
    async def reset(self):
        return [user(str(next(counter)))]


class WrongStep(Good):
    async def step(self, reply):
        return 1.0, True


class NanReward(Good):
    async def step(self, reply):
        return Step(reward=float("nan"), terminated=True)


class TextReward(Good):
    async def step(self, reply):
        return Step(reward="1", terminated=True)


class NanInfo(Good):
    async def step(self, reply):
        return Step(info={"speed": float("inf")}, terminated=True)


class Endless(Good):
    async def step(self, reply):
        return Step(messages=[user("more")])


class Stuck(Good):
    async def step(self, reply):
        return Step()


class Breaks(Good):
    async def step(self, reply):
        return Step(reward=1 / len(reply.content), terminated=True)


class Sync(Good):
    def reset(self):
        return [user("go")]


class Slow(Good):
    async def reset(self):
        await asyncio.sleep(10)


class ClosesOnce(Good):
    closed = False

    async def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class NoClose:
    def __init__(self, task):
        pass

    async def reset(self):
        return [user("go")]

    async def step(self, reply):
        return Step(terminated=True)


class NeedsField(Good):
    def __init__(self, task):
        super().__init__(task)
        task.data["secret"]


def test_a_good_environment_has_no_problems():
    assert asyncio.run(check_env(Good, [TASK, Task("u", {})])) == []


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (Silent, "no messages"),
        (AssistantLast, "end with a user or system message"),
        (TextReset, "list of Message"),
        (Random, "begin with different messages"),
        (WrongStep, "returned tuple, not a Step"),
        (NanReward, "gave the reward nan; it must be a finite"),
        (TextReward, "gave the reward '1'; it must be a finite"),
        (NanInfo, "info['speed']"),
        (Endless, "no end after 100 turns"),
        (Stuck, "neither ended the episode nor returned messages"),
        (Breaks, "step raised ZeroDivisionError"),
        (Sync, "reset is not `async def`"),
        (Slow, "reset took more than 0.05 s"),
        (ClosesOnce, "the second close raised RuntimeError: closed already"),
        (NoClose, "lacks reset, step or close"),
        (NeedsField, "construction raised KeyError"),
    ],
)
def test_each_fault_is_named_once(environment, said):
    problems = asyncio.run(check_env(environment, [TASK, Task("u", {})], timeout=0.05))
    assert len(problems) == 1, problems
    assert said in problems[0]
    assert "task 't'" in problems[0]


def test_a_factory_that_reuses_its_object_is_found():
    one = Good(TASK)
    (problem,) = asyncio.run(check_env(lambda task: one, [TASK]))
    assert "one object twice" in problem


def test_nothing_to_check_with_is_a_problem():
    assert asyncio.run(check_env(Good, [])) == ["there are no tasks to check with"]
