r"""Grade-school word problems with one number as their answer: GSM8K, in one turn or several.

Rows have `question` and `answer`, where the answer ends in `#### N` as in GSM8K itself
(arXiv:2110.14168) or is the number alone. `tasks` makes such rows without any download. A reply
gives its answer as `#### N` or `\boxed{N}`; the one that stands last counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from fledge.envs.answers import (
    Row,
    Split,
    draw,
    last_boxed,
    last_hashed,
    latest,
    number_of,
    said,
    text_of,
)
from fledge.envs.base import Environment
from fledge.errors import DataError
from fledge.types import Message, Step, Task, user

INSTRUCTION = "Think step by step, and end with a line `#### N`, where N is the final number."
TENTATIVE = (
    "End your reply with a line `#### N`, where N is your answer. "
    "You are told whether it is right, and may try {turns} times."
)


def answer_in(reply: str) -> Fraction | None:
    r"""The number that a reply ends on.

    >>> answer_in("16 - 7 = 9, so 9 * 2 = 18.\n#### $18.00")
    Fraction(18, 1)
    """
    text = said(reply)
    found = latest(last_hashed(text), last_boxed(text))
    return None if found is None else number_of(found)


class Gsm8k(Environment[Task]):
    """Reward is 1 when the last answer of the reply is the right number, otherwise 0."""

    def __init__(
        self,
        task: Task,
        *,
        question_key: str = "question",
        answer_key: str = "answer",
        instruction: str = INSTRUCTION,
    ) -> None:
        super().__init__(task)
        self.question = text_of(task, question_key, "question_key")
        self.answer = _gold(task, answer_key)
        self.instruction = instruction

    async def reset(self) -> Sequence[Message]:
        return [user(f"{self.question}\n\n{self.instruction}".strip())]

    async def step(self, reply: Message) -> Step:
        return Step(reward=float(answer_in(reply.content) == self.answer), terminated=True)


class Gsm8kMultiTurn(Gsm8k):
    """A tentative answer each turn; 1 for the right one, which ends the episode.

    Each turn that gives a new answer in the right form earns `format_reward`, on that turn. The
    turn that is right also earns it for the turns that were not needed: otherwise a policy that
    knows the answer would be paid for holding it back. A repeated answer earns nothing.
    """

    def __init__(
        self,
        task: Task,
        *,
        max_turns: Annotated[int, Field(ge=1, le=50)] = 5,
        format_reward: Annotated[float, Field(ge=0, le=0.1)] = 0.04,
        question_key: str = "question",
        answer_key: str = "answer",
        instruction: str = TENTATIVE,
    ) -> None:
        instruction = instruction.replace("{turns}", str(max_turns))
        super().__init__(
            task, question_key=question_key, answer_key=answer_key, instruction=instruction
        )
        self.max_turns = max_turns
        self.format_reward = format_reward
        self.tried: set[Fraction] = set()
        self.turns = 0

    async def step(self, reply: Message) -> Step:
        self.turns += 1
        left = self.max_turns - self.turns
        answer = answer_in(reply.content)
        if answer == self.answer:
            return self._scored(right=1.0, well_formed=1 + left, feedback="", left=0)
        new = answer is not None and answer not in self.tried
        if answer is None:
            feedback = "There is no answer in your reply. End it with a line `#### N`."
        else:
            self.tried.add(answer)
            feedback = "That is not right. Look for the mistake and try again."
        return self._scored(right=0.0, well_formed=int(new), feedback=feedback, left=left)

    def _scored(self, *, right: float, well_formed: int, feedback: str, left: int) -> Step:
        parts = {"right": right, "format": well_formed * self.format_reward}
        messages = [user(feedback)] if left else []
        return Step(messages=messages, components=parts, terminated=not left)


def _gold(task: Task, key: str) -> Fraction:
    """The number of a row: after its `####`, or all of it."""
    text = text_of(task, key, "answer_key")
    number = number_of(text.rpartition("####")[2])
    if number is None:
        raise DataError(
            f"env.answer_key: {key!r} of task {task.key!r} must end in `#### N` or be a number, "
            f"got {text[-60:]!r}"
        )
    return number


def tasks(split: Split = "train", count: int = 1000, seed: int = 0) -> list[Row]:
    """Made-up word problems with their worked answers, in the form of GSM8K's rows. No problem is
    in two splits, whatever the seed.
    """
    return draw(_problem, lambda row: str(row["question"]), split, count, seed)


def _problem(dice: random.Random) -> Row:
    question, lines, answer = dice.choice(_STORIES)(dice)
    return {"question": question, "answer": "\n".join([*lines, f"#### {answer}"])}


Story = tuple[str, list[str], int]
NAMES = ("Ana", "Bela", "Chidi", "Dana", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun")
GOODS = ("apples", "pencils", "stickers", "eggs", "candles", "marbles", "buns", "tickets")


def _shop(dice: random.Random) -> Story:
    name, goods = dice.choice(NAMES), dice.choice(GOODS)
    packs, size, price = dice.randint(3, 30), dice.randint(4, 12), dice.randint(2, 9)
    lost = dice.randint(1, packs * size - 1)
    rest = packs * size - lost
    return (
        f"{name} buys {packs} boxes of {size} {goods} each. {lost} of the {goods} are spoiled; "
        f"{name} sells the rest for ${price} each. How many dollars does {name} take in?",
        [
            f"There are {packs} * {size} = {packs * size} {goods}.",
            f"{packs * size} - {lost} = {rest} can be sold.",
            f"That makes {rest} * {price} = {rest * price} dollars.",
        ],
        rest * price,
    )


def _savings(dice: random.Random) -> Story:
    name = dice.choice(NAMES)
    weekly, weeks, spent = dice.randint(5, 60), dice.randint(3, 40), dice.randint(10, 400)
    total = weekly * weeks - spent
    return (
        f"{name} had no money, then saved ${weekly} every week for {weeks} weeks, and owes a friend"
        f" ${spent}. How many dollars would {name} have after paying (negative if short)?",
        [
            f"{weekly} * {weeks} = {weekly * weeks} dollars were saved.",
            f"{weekly * weeks} - {spent} = {total}.",
        ],
        total,
    )


def _travel(dice: random.Random) -> Story:
    name = dice.choice(NAMES)
    speed, hours, more = dice.randint(20, 110), dice.randint(2, 9), dice.randint(10, 90)
    return (
        f"{name} drives for {hours} hours at {speed} km per hour, rests, and drives {more} km more."
        f" The way back is the same. How many km does {name} drive in all?",
        [
            f"One way is {speed} * {hours} + {more} = {speed * hours + more} km.",
            f"Both ways are 2 * {speed * hours + more} = {2 * (speed * hours + more)} km.",
        ],
        2 * (speed * hours + more),
    )


def _shares(dice: random.Random) -> Story:
    name, goods = dice.choice(NAMES), dice.choice(GOODS)
    friends, each, left = dice.randint(3, 25), dice.randint(3, 30), dice.randint(1, 40)
    total = friends * each + left
    return (
        f"{name} has {total} {goods}, keeps {left} and shares the others equally among {friends} "
        f"friends. How many {goods} does each friend get?",
        [
            f"{total} - {left} = {friends * each} are shared.",
            f"{friends * each} / {friends} = {each}.",
        ],
        each,
    )


def _ages(dice: random.Random) -> Story:
    older, younger = dice.sample(NAMES, 2)
    age, times, years = dice.randint(4, 20), dice.randint(2, 5), dice.randint(2, 30)
    answer = age * times + years + age + years
    return (
        f"{younger} is {age} years old. {older} is {times} times as old. What will be the sum of "
        f"their ages in {years} years?",
        [
            f"{older} is {age} * {times} = {age * times}.",
            f"In {years} years they are {age + years} and {age * times + years}.",
            f"The sum is {answer}.",
        ],
        answer,
    )


_STORIES: tuple[Callable[[random.Random], Story], ...] = (_shop, _savings, _travel, _shares, _ages)
