import asyncio
import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.envs import countdown
from fledge.envs.countdown import Countdown, evaluate
from fledge.errors import DataError
from fledge.types import Task, assistant

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=200)
TASK = Task("t", {"numbers": [3, 5, 8, 8], "target": 24})


def score(reply, **arguments):
    async def run():
        environment = Countdown(TASK, **arguments)
        await environment.reset()
        return await environment.step(assistant(reply))

    step = asyncio.run(run())
    assert step.terminated
    return step.reward


@pytest.mark.parametrize(
    "expression",
    ["3 * 8", "(8 - 5) * 8", "8*3", "3\u00d78", "8 * (8 - 5)", "((3))*(8)", "8 + 8 + 8 / (8/8)"],
)
def test_exact_expressions(expression):
    uses_too_much = expression.count("8") > 2
    assert score(f"<answer>{expression}</answer>") == (0.0 if uses_too_much else 1.0)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "24",
        "3 * 8 = 24",
        "6 * 4",
        "3 * 3 + 5 * 3",
        "8 ** 2 - 8 * 5",
        "8 // 1 * 3",
        "38 - 8 - 5",
        "3 * 8 # 24",
        "3 * 8.0",
        "3 * +8",
        "-8 * -3",
        "3(8)",
        "3 * 8, 3 * 8",
        "[3 * 8]",
        "3 if 8 else 5",
        "__import__('os').getpid()",
        "3 * 8 or 5",
        "1 / 0",
        "3 * 08",
        "3_8",
        "\u0663 * \u0668",
        "(" * 90 + "3*8" + ")" * 90 + "*",
        "3*8" + " " * 500 + "+0",
    ],
)
def test_anything_else(expression):
    assert score(f"<answer>{expression}</answer>", format_reward=0.1) == 0.0


def test_a_legal_miss_earns_the_format_reward():
    assert score("<answer>3 + 5</answer>") == 0.0
    assert score("<answer>3 + 5</answer>", format_reward=0.1) == 0.1
    assert score("3 + 5", format_reward=0.1) == 0.0


def test_all_numbers_may_be_demanded():
    assert score("<answer>3 * 8</answer>", use_all=True) == 0.0
    assert score("<answer>8 * 3 * (8 - 5)</answer>", use_all=True) == 0.0
    assert score("<answer>(5 - 3) * 8 + 8</answer>", use_all=True) == 1.0


def expressions():
    leaves = st.integers(0, 99).map(lambda n: (str(n), Fraction(n), [n]))

    def join(parts):
        left, sign, right = parts
        (a, x, used), (b, y, more) = left, right
        if sign == "/" and not y:
            sign = "-"
        value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else 0}[sign]
        return f"({a}{sign}{b})", value, used + more

    return st.recursive(
        leaves, lambda s: st.tuples(s, st.sampled_from("+-*/"), s).map(join), max_leaves=12
    )


@FIXED
@given(expressions())
def test_values_and_numbers_are_exact(expression):
    text, value, used = expression
    assert evaluate(text) == (value, Counter(used))


@FIXED
@given(st.text(alphabet="0123456789+-*/() _.,e[]{}'\"=<", max_size=60))
def test_no_text_makes_the_parser_fail(text):
    found = evaluate(text)
    assert found is None or isinstance(found[0], Fraction)


@pytest.mark.parametrize("text", ["2 ** 3", "9**9**9", "7 // 2", "7 % 2", "6 - -3", "~1", "2(3)"])
def test_only_the_four_operations_on_two_values(text):
    assert evaluate(text) is None


def test_depth_and_length_are_bounded():
    for text in ("(" * 100_000, "1+" * 50_000 + "1", "9" * 190, "(" * 100 + "1" + ")" * 99, "\0"):
        found = evaluate(text)
        assert found is None or text == "9" * 190


def test_rows_that_do_not_fit_are_refused():
    for numbers in ([], "3 5", [3, -5], [True], [1.5], None):
        with pytest.raises(DataError, match=r"env\.numbers_key"):
            Countdown(Task("t", {"numbers": numbers, "target": 24}))
    with pytest.raises(DataError, match=r"env\.target_key"):
        Countdown(Task("t", {"numbers": [1], "target": "24"}))
    named = Countdown(
        Task("t", {"nums": [3, 8], "goal": 24}), numbers_key="nums", target_key="goal"
    )
    assert named.numbers == [3, 8]


@pytest.mark.parametrize("size", [2, 4, 6])
def test_generated_puzzles_have_their_solution(size):
    for row in countdown.tasks("train", 60, size=size):
        value, used = evaluate(row["solution"])
        assert value == row["target"] and used == Counter(row["numbers"])
        assert row["target"] not in row["numbers"] and len(row["numbers"]) == size


def test_generated_splits_share_nothing_and_repeat():
    def puzzles(split):
        rows = [row for seed in (0, 1) for row in countdown.tasks(split, 100, seed, size=3)]
        return {(tuple(row["numbers"]), row["target"]) for row in rows}

    train, tuning, held_out = (puzzles(s) for s in ("train", "tuning", "eval"))
    assert not train & held_out and not train & tuning and not tuning & held_out
    assert countdown.tasks("eval", 9, 3) == countdown.tasks("eval", 9, 3)


def test_asking_for_more_than_there_is():
    with pytest.raises(DataError, match="count=5000 is more than split 'eval' holds"):
        countdown.tasks("eval", 5000, size=2, largest=10)


def test_drawing_leaves_the_global_dice_alone():
    random.seed(1)
    before = random.getstate()
    countdown.tasks("train", 5)
    assert random.getstate() == before
