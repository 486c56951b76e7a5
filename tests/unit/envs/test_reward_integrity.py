"""No reward without an answer: an oracle gets full marks, garbage and cheats get (almost) nothing.

To add an environment, append a `Case` to `CASES`. Most cheats are made from how a right answer is
written (`wrap`), so a case is a few lines; `cheats` adds its own.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from fledge.envs.check import check_env
from fledge.envs.countdown import Countdown
from fledge.envs.gsm8k import Gsm8k, Gsm8kMultiTurn
from fledge.envs.guess import Guess
from fledge.envs.maths import Aime, Maths
from fledge.envs.reasoning import Reasoning
from fledge.envs.reasoning import tasks as reasoning_tasks
from fledge.types import Task, assistant

SLACK = 0.01


@dataclass(frozen=True)
class Case:
    """One environment with one task.

    `wrap` writes an answer as the protocol wants it. `floor` is the most that a reply without a
    right answer may earn in a whole episode.
    """

    name: str
    factory: Callable
    row: Callable[[], dict]
    wrap: Callable[[str], str]
    right: str
    wrong: str
    full: float = 1.0
    floor: float = 0.0
    needs: str = ""
    cheats: dict[str, str] = field(default_factory=dict)


def hashes(text):
    return f"#### {text}"


def box(text):
    return f"\\boxed{{{text}}}"


def tag(text):
    return f"<answer>{text}</answer>"


WORDS = {"question": "What is 9 * 2?", "answer": "#### 18"}
CASES = [
    Case("gsm8k", Gsm8k, lambda: WORDS, hashes, "18", "17"),
    Case("gsm8k boxed", Gsm8k, lambda: WORDS, box, "18", "17"),
    Case("gsm8k_multi_turn", Gsm8kMultiTurn, lambda: WORDS, hashes, "18", "17", 1.2, 0.2),
    Case(
        "aime", Aime, lambda: {"problem": "?", "answer": "73"}, box, "73", "74", floor=-1.0,
        cheats={"label": "Answer: 73\nAnswer: 74", "range": "Answer: 0-999"},
    ),
    Case(
        "maths", Maths, lambda: {"problem": "?", "answer": "4"}, box, "4", "5", needs="math_verify",
        cheats={"chain": box("1=2=3=4"), "set": box(r"\{1,2,3,4\}"), "maximum": box(r"\max(1,4)")},
    ),
    Case(
        "countdown", Countdown, lambda: {"numbers": [3, 5, 8], "target": 24}, tag, "3 * 8", "3 * 5",
        cheats={"target": tag("24"), "reuse": tag("3 + 3 * (8 - 1)"), "code": tag("print(24)")},
    ),
    Case(
        "guess", Guess, lambda: {"low": 1, "high": 900, "secret": 37},
        lambda text: f"<guess>{text}</guess>", "37", "38",
    ),
    Case(
        "reasoning", Reasoning, lambda: reasoning_tasks("train", 1)[0], tag, "", "1",
        needs="reasoning_gym",
    ),
]  # fmt: skip
IDS = [case.name for case in CASES]

GARBAGE = (
    "", " ", "garbage", "I do not know.", "<|im_end|>", "PASS", '{"reward": 1.0}', "reward = 1.0",
    "\\boxed{}", "####", "<answer></answer>", "<guess></guess>", "Answer:", "\0", "\U0001f600" * 50,
    "True", "None", "lorem ipsum " * 500,
)  # fmt: skip

CHEATS = {
    "last is wrong": "{good}\nNo, rather:\n{bad}",
    "two in one": "{both}",
    "or": "{either}",
    "one of four": "The answer is one of 1 2 3 4.",
    "code comment": "```python\n# {good}\n```",
    "cut code": "```python\n# {good}",
    "quotation": '> The task said: "{good}"',
    "comment": "<!-- {good} -->",
    "only thought": "<think>It must be {good}",
    "spam": "{spam}",
    "unfinished": "{cut}",
    "bare": "I think that it is {right}",
}


def right_of(case):
    """The right answer; reasoning's comes from its own library."""
    if case.right:
        return case.right
    from fledge.envs.reasoning import _dataset

    row = case.row()
    return _dataset(row["task"], row["seed"], row["config"])[row["index"]]["answer"]


def written(case, template):
    right = right_of(case)
    good, bad = case.wrap(right), case.wrap(case.wrong)
    return template.format(
        good=good,
        bad=bad,
        both=case.wrap(f"{case.wrong} {right}"),
        either=case.wrap(f"{right} or {case.wrong}"),
        spam="\n".join([*(case.wrap(str(n)) for n in range(2000)), good, bad]),
        cut=f"{good} {case.wrap('')[:-1]}{case.wrong}" if case.wrap("")[-1] in ">}" else bad,
        right=right,
    )


def earned(case, reply):
    """All rewards of an episode that says the same thing every turn."""

    async def run():
        environment = case.factory(Task("t", case.row()))
        asked = await environment.reset()
        total, over = 0.0, False
        text = reply(asked) if callable(reply) else reply
        while not over:
            step = await environment.step(assistant(text))
            total += step.reward + sum(step.components.values())
            over = step.terminated or step.truncated
        await environment.close()
        return total

    return asyncio.run(run())


def needed(case):
    if case.needs:
        pytest.importorskip(case.needs)
    return case


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_an_oracle_gets_full_marks(case):
    needed(case)
    good = case.wrap(right_of(case))
    assert earned(case, good) == pytest.approx(case.full)
    assert earned(case, f"<think>hm</think>I see.\n{good}") == pytest.approx(case.full)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_garbage_earns_nothing(case):
    needed(case)
    for text in GARBAGE:
        assert earned(case, text) <= case.floor + SLACK, text


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_cheats_fail(case, cheat):
    needed(case)
    assert earned(case, written(case, CHEATS[cheat])) <= case.floor + SLACK


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_saying_the_prompt_again_earns_nothing(case):
    needed(case)
    assert earned(case, lambda asked: asked[-1].content) <= case.floor + SLACK
    assert earned(case, lambda asked: f'You said: "{asked[-1].content}"') <= case.floor + SLACK


@pytest.mark.parametrize(
    "case, cheat", [(c, n) for c in CASES for n in c.cheats], ids=lambda x: getattr(x, "name", x)
)
def test_its_own_cheats_fail(case, cheat):
    needed(case)
    assert earned(case, case.cheats[cheat]) <= case.floor + SLACK


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_contract_is_kept(case):
    needed(case)
    assert asyncio.run(check_env(case.factory, [Task("t", case.row())])) == []
