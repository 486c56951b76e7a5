"""Countdown: reach a target with the four operations, using each given number at most once.

Rows have `numbers` and `target`; `tasks` makes some that have a solution. The expression of a reply
is read by a parser of our own grammar, bounded in size, and evaluated exactly in fractions: nothing
that a policy writes is ever run.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from fledge.envs.answers import Row, Split, draw, field_of, last_tagged, said
from fledge.envs.base import Environment
from fledge.errors import DataError
from fledge.types import Message, Step, Task, user

LONGEST = 200
"""Characters of an expression."""

_ALLOWED = re.compile(r"[0-9+\-*/() ]+")
_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\n": " ", "\t": " "})


class Countdown(Environment[Task]):
    """Reward is 1 for an expression that equals the target, `format_reward` for a legal one that
    does not, otherwise 0.
    """

    def __init__(
        self,
        task: Task,
        *,
        numbers_key: str = "numbers",
        target_key: str = "target",
        use_all: bool = False,
        format_reward: Annotated[float, Field(ge=0, le=0.5)] = 0.0,
    ) -> None:
        super().__init__(task)
        given = field_of(task, numbers_key, "numbers_key")
        if not isinstance(given, Sequence) or not given or not all(_is_count(n) for n in given):
            raise DataError(
                f"env.numbers_key: {numbers_key!r} of task {task.key!r} must be a list of whole "
                f"numbers from 0, got {given!r}"
            )
        self.numbers = [int(n) for n in given]
        target = field_of(task, target_key, "target_key")
        if isinstance(target, bool) or not isinstance(target, int):
            raise DataError(
                f"env.target_key: {target_key!r} of task {task.key!r} must be a whole number, "
                f"got {target!r}"
            )
        self.target = target
        self.use_all = use_all
        self.format_reward = format_reward

    async def reset(self) -> Sequence[Message]:
        how = "all of them exactly once" if self.use_all else "each at most once"
        return [
            user(
                f"Using the numbers {', '.join(map(str, self.numbers))}, {how}, and + - * / and "
                f"parentheses, write an expression that equals {self.target}. Think step by step, "
                "then give the expression alone, without an equals sign, as "
                "<answer>expression</answer>."
            )
        ]

    async def step(self, reply: Message) -> Step:
        expression = last_tagged(said(reply.content), "answer")
        found = None if expression is None else evaluate(expression)
        legal = found is not None and self._may_use(found[1])
        right = legal and found is not None and found[0] == self.target
        reward = 1.0 if right else self.format_reward if legal else 0.0
        return Step(reward=reward, terminated=True, info={"legal": float(legal)})

    def _may_use(self, used: Counter[int]) -> bool:
        given = Counter(self.numbers)
        return used == given if self.use_all else used <= given


def evaluate(expression: str) -> tuple[Fraction, Counter[int]] | None:
    """Value of an expression and the numbers in it; None where it is not one of ours.

    >>> evaluate("(1 + 2) * 3 / 2")
    (Fraction(9, 2), Counter({2: 2, 1: 1, 3: 1}))
    >>> evaluate("2 ** 9"), evaluate("1 / 0"), evaluate("-1")
    (None, None, None)
    """
    text = expression.translate(_SIGNS).strip()
    if len(text) > LONGEST or not _ALLOWED.fullmatch(text):
        return None
    used: Counter[int] = Counter()
    try:
        return _value(ast.parse(text, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise ValueError("not an operation on two values")
    left, right = _value(node.left, used), _value(node.right, used)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
    raise ValueError("not one of the four operations")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def tasks(
    split: Split = "train",
    count: int = 1000,
    seed: int = 0,
    size: Annotated[int, Field(ge=2, le=6)] = 4,
    largest: Annotated[int, Field(ge=10, le=100)] = 50,
) -> list[Row]:
    """Rows with `numbers`, `target` and a `solution` that uses all of them. No puzzle is in two
    splits, whatever the seed.
    """

    def make(dice: random.Random) -> Row:
        while True:
            numbers = [dice.randint(1, largest) for _ in range(size)]
            expression = _join(dice, [str(n) for n in numbers])
            found = evaluate(expression)
            if found and found[0].denominator == 1 and 10 <= found[0] <= 999:
                target = int(found[0])
                if target not in numbers:
                    break
        return {"numbers": sorted(numbers), "target": target, "solution": expression}

    return draw(make, lambda row: f"{row['numbers']} {row['target']}", split, count, seed)


def _join(dice: random.Random, parts: list[str]) -> str:
    """A random expression: two neighbours become one until one is left."""
    while len(parts) > 1:
        place = dice.randrange(len(parts) - 1)
        left, right = parts[place : place + 2]
        parts[place : place + 2] = [f"({left} {dice.choice('+-*/')} {right})"]
    return parts[0][1:-1]
