r"""Mathematics: contest problems with an integer from 0 to 999, and general problems with a TeX
answer.

`Aime` compares integers. `Maths` asks math-verify whether two TeX answers are equal, in processes
of its own: the library is slow on some inputs, fails in threads, and reads an answer into almost
any text, so only a `\boxed{}` is shown to it. Both have generated rows: `aime_tasks` and `tasks`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field

from fledge.envs.answers import (
    Row,
    Split,
    draw,
    last_boxed,
    last_labelled,
    latest,
    number_of,
    said,
    text_of,
)
from fledge.envs.base import Environment
from fledge.envs.pool import shared_pool
from fledge.errors import DataError, PluginError
from fledge.types import Message, Step, Task, user

LONGEST = 300
"""Characters of an answer; what is longer is an essay or an attack."""

AIME_INSTRUCTION = (
    "Think step by step. The answer is an integer from 0 to 999; "
    "put it in \\boxed{} or on a last line `Answer: X`."
)
INSTRUCTION = "Think step by step, and put the final answer in \\boxed{}."


class Aime(Environment[Task]):
    """Reward is `right` when the last answer of the reply is the integer, otherwise `wrong`."""

    def __init__(
        self,
        task: Task,
        *,
        right: float = 1.0,
        wrong: float = -1.0,
        problem_key: str = "problem",
        answer_key: str = "answer",
        instruction: str = AIME_INSTRUCTION,
    ) -> None:
        super().__init__(task)
        self.problem = text_of(task, problem_key, "problem_key")
        gold = _integer(text_of(task, answer_key, "answer_key"))
        if gold is None:
            raise DataError(
                f"env.answer_key: {answer_key!r} of task {task.key!r} must be an integer from 0 to "
                f"999, got {task.data[answer_key]!r}; use env: maths for other answers"
            )
        self.answer = gold
        self.right, self.wrong = right, wrong
        self.instruction = instruction

    async def reset(self) -> Sequence[Message]:
        return [user(f"{self.problem}\n\n{self.instruction}".strip())]

    async def step(self, reply: Message) -> Step:
        text = said(reply.content)
        found = latest(last_boxed(text), last_labelled(text))
        right = found is not None and _integer(found) == self.answer
        return Step(reward=self.right if right else self.wrong, terminated=True)


def _integer(text: str) -> int | None:
    boxed = last_boxed(text)
    number = number_of(text if boxed is None else boxed[1])
    whole = number is not None and number.denominator == 1 and 0 <= number <= 999
    return int(number) if whole and number is not None else None


class Maths(Environment[Task]):
    r"""Reward is `right` when the last `\boxed{}` of the reply equals the answer, otherwise
    `wrong`.

    The answer of a row is TeX; where it has a `\boxed{}`, as solutions in MATH do, that is it.
    """

    def __init__(
        self,
        task: Task,
        *,
        right: float = 1.0,
        wrong: float = 0.0,
        problem_key: str = "problem",
        answer_key: str = "answer",
        instruction: str = INSTRUCTION,
        workers: Annotated[int, Field(ge=1)] = 2,
        timeout: Annotated[float, Field(gt=0)] = 10.0,
    ) -> None:
        super().__init__(task)
        if importlib.util.find_spec("math_verify") is None:
            raise PluginError("env: maths needs math-verify; run: pip install 'fledge[maths]'")
        self.problem = text_of(task, problem_key, "problem_key")
        gold = text_of(task, answer_key, "answer_key")
        boxed = last_boxed(gold)
        self.answer = (gold if boxed is None else boxed[1]).strip().strip("$")
        if not self.answer:
            raise DataError(f"env.answer_key: {answer_key!r} of task {task.key!r} is empty")
        self.right, self.wrong = right, wrong
        self.instruction = instruction
        self.pool = shared_pool("fledge.envs.maths:grade", workers, timeout)

    async def reset(self) -> Sequence[Message]:
        return [user(f"{self.problem}\n\n{self.instruction}".strip())]

    async def step(self, reply: Message) -> Step:
        boxed = last_boxed(said(reply.content))
        right = boxed is not None and await self._equal(boxed[1])
        return Step(reward=self.right if right else self.wrong, terminated=True)

    async def _equal(self, answer: str) -> bool:
        claim = comparable(self.answer, answer)
        if claim is None:
            return False
        if claim == self.answer:
            return True
        return bool(await self.pool.call({"gold": self.answer, "answer": claim}))


_NAMED = re.compile(r"\s*\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([a-z]\))?\s*=(?!=)")
_ORDERED = re.compile(r"\s*(?:\\left\s*)?([(\[])[^()]*,[^()]*[)\]]\s*")
_UNWORKED = re.compile(
    r"\\(?:sum|prod|int|oint|lim|binom|dbinom|tbinom|max|min|sup|inf|gcd|bmod|pmod)(?![a-z])"
    r"|[0-9]{4}\s*!|[)}!]\s*!"
    r"|\^\s*\{?\s*-?[0-9]{4}|\^\s*\{[^{}]*\^|\^[^{]\^"
)


def comparable(gold: str, answer: str) -> str | None:
    r"""The answer in the form that math-verify may be shown, or None where it is wrong as it
    stands.

    math-verify takes `1=2=3=4` for 4 and `2,1` for the point `(1,2)`, so a chain of equations and
    an answer without the brackets of the gold one are refused here. `x = 4` for 4 is fine. A sum,
    a limit or a tower of powers is a question rather than an answer, and some take hours: they are
    refused unless the gold answer has one.

    >>> comparable("4", "x = 4"), comparable("4", "1=2=3=4"), comparable("(1,2)", "2,1")
    ('4', None, None)
    >>> comparable("4", r"\max(1,4)"), comparable("4", "9^{9^{9}}")
    (None, None)
    """
    if not answer or len(answer) > LONGEST:
        return None
    if _UNWORKED.search(answer) and not _UNWORKED.search(gold):
        return None
    if "=" not in gold:
        answer = _NAMED.sub("", answer, count=1) if _NAMED.match(answer) else answer
        if "=" in answer:
            return None
    wanted, found = _ORDERED.match(gold), _ORDERED.match(answer)
    if wanted and (found is None or found[1] != wanted[1]):
        return None
    return answer.strip()


def grade(pair: Mapping[str, str]) -> bool:
    """Whether two TeX answers are equal: what a worker does. Its time limit is the pool's."""
    math_verify = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold, answer = _parsed(math_verify, pair["gold"]), _parsed(math_verify, pair["answer"])
    if not gold:
        raise ValueError(f"math-verify cannot read the right answer {pair['gold']!r}")
    return bool(math_verify.verify(gold, answer, timeout_seconds=None))


def _parsed(math_verify: Any, tex: str) -> Any:
    latex = math_verify.LatexExtractionConfig(boxed_match_priority=0)
    text = f"\\boxed{{{tex}}}"
    return math_verify.parse(text, extraction_config=[latex], parsing_timeout=None)


def tasks(split: Split = "train", count: int = 1000, seed: int = 0) -> list[Row]:
    """Rows with `problem` and a TeX `answer`: fractions, surds, equations, products. No problem is
    in two splits, whatever the seed.
    """
    return _rows(_GENERAL, split, count, seed)


def aime_tasks(split: Split = "train", count: int = 1000, seed: int = 0) -> list[Row]:
    """Rows with `problem` and an integer `answer` from 0 to 999. No problem is in two splits,
    whatever the seed.
    """
    return _rows(_CONTEST, split, count, seed)


Maker = Callable[[random.Random], tuple[str, str]]


def _rows(makers: Sequence[Maker], split: Split, count: int, seed: int) -> list[Row]:
    def make(dice: random.Random) -> Row:
        problem, answer = dice.choice(makers)(dice)
        return {"problem": problem, "answer": answer}

    return draw(make, lambda row: str(row["problem"]), split, count, seed)


def tex(value: Fraction) -> str:
    r"""A number as TeX.

    >>> tex(Fraction(-3, 2))
    '-\\frac{3}{2}'
    """
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _fractions(dice: random.Random) -> tuple[str, str]:
    a, b = (Fraction(dice.randint(1, 30), dice.randint(2, 30)) for _ in range(2))
    return f"Compute ${tex(a)} + {tex(b)}$.", tex(a + b)


def _surd(dice: random.Random) -> tuple[str, str]:
    outside, inside = dice.randint(2, 20), dice.choice((2, 3, 5, 6, 7, 10, 11, 13, 14, 15))
    return f"Simplify $\\sqrt{{{outside**2 * inside}}}$.", f"{outside}\\sqrt{{{inside}}}"


def _linear(dice: random.Random) -> tuple[str, str]:
    a, b, c = dice.randint(2, 20), dice.randint(-30, 30), dice.randint(-30, 30)
    return f"Solve ${a}x {b:+d} = {c}$ for $x$.", tex(Fraction(c - b, a))


def _roots(dice: random.Random) -> tuple[str, str]:
    low, high = sorted(dice.sample(range(-20, 21), 2))
    return (
        f"Find the set of real solutions of $x^2 {-(low + high):+d}x {low * high:+d} = 0$.",
        f"\\{{{low}, {high}\\}}",
    )


def _product(dice: random.Random) -> tuple[str, str]:
    a, b = dice.randint(1, 20), dice.randint(1, 20)
    return f"Expand $(x + {a})(x - {b})$.", f"x^2 {a - b:+d}x - {a * b}"


def _remainder(dice: random.Random) -> tuple[str, str]:
    base, power = dice.randint(2, 99), dice.randint(20, 3000)
    return (
        f"Find the remainder when ${base}^{{{power}}}$ is divided by $1000$.",
        str(pow(base, power, 1000)),
    )


def _multiples(dice: random.Random) -> tuple[str, str]:
    a, b = dice.sample(range(3, 20), 2)
    top = dice.randint(100, 999)
    found = top // a + top // b - top // math.lcm(a, b)
    return (
        f"How many positive integers not exceeding ${top}$ are divisible by ${a}$ or by ${b}$?",
        str(found),
    )


def _drawn(dice: random.Random) -> tuple[str, str]:
    red, blue = dice.randint(2, 20), dice.randint(2, 20)
    same = Fraction(math.comb(red, 2) + math.comb(blue, 2), math.comb(red + blue, 2))
    if same.numerator + same.denominator > 999:
        return _drawn(dice)
    return (
        f"A bag holds ${red}$ red and ${blue}$ blue balls. Two are drawn without replacement. The "
        "probability that they have the same colour is $\\frac{m}{n}$ in lowest terms. "
        "Find $m + n$.",
        str(same.numerator + same.denominator),
    )


def _digits(dice: random.Random) -> tuple[str, str]:
    base, power = dice.randint(2, 30), dice.randint(5, 60)
    return (
        f"Find the sum of the decimal digits of ${base}^{{{power}}}$.",
        str(sum(map(int, str(base**power)))),
    )


_GENERAL: tuple[Maker, ...] = (_fractions, _surd, _linear, _roots, _product)
_CONTEST: tuple[Maker, ...] = (_remainder, _multiples, _drawn, _digits)
