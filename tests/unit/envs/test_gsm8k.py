import asyncio
import json
import os
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.envs import gsm8k
from fledge.envs.answers import number_of, said
from fledge.envs.gsm8k import Gsm8k, Gsm8kMultiTurn, answer_in
from fledge.errors import DataError
from fledge.types import Task, assistant

settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
FIXED = settings(settings.get_profile("fixed"), max_examples=200)

DATA = Path(
    os.environ.get("FLEDGE_TEST_DATA", Path(__file__).resolve().parents[4] / "shared" / "data")
)
needs_gsm8k = pytest.mark.skipif(
    not (DATA / "gsm8k" / "test.jsonl").is_file(),
    reason="GSM8K is not there; set FLEDGE_TEST_DATA to a folder with gsm8k/test.jsonl",
)
TASK = Task("t", {"question": "What is 9 * 2?", "answer": "It is 18.\n#### 18"})


def play(environment, *replies):
    """Rewards of the turns, and the last step."""

    async def run():
        await environment.reset()
        return [await environment.step(assistant(reply)) for reply in replies]

    steps = asyncio.run(run())
    return [s.reward + sum(s.components.values()) for s in steps], steps[-1]


def score(reply, task=TASK):
    rewards, last = play(Gsm8k(task), reply)
    assert last.terminated
    return rewards[0]


@pytest.mark.parametrize(
    "reply",
    [
        "#### 18",
        "####18",
        "so\n#### 18.",
        "#### $18",
        "#### $ 18.00",
        "#### 18 dollars.",
        "#### 18 dollars per day",
        "#### **18**",
        "**#### 18**",
        "#### 18\n\nThat is all.",
        "#### 18\n#### Check\nall is well",
        "#### 17\nNo, I was wrong.\n#### 18",
        r"\boxed{18}",
        r"$\boxed{\$18}$.",
        r"\boxed{18\text{ eggs}}",
        r"#### 17, no: \boxed{18}",
        "\\boxed{17}\n#### 18",
        "#### \\boxed{18}",
        "<think>#### 17</think>\n#### 18",
        "the thought began in the prompt #### 17</think>#### 18",
        "```\nprint(17)\n```\n#### 18",
    ],
)
def test_a_right_answer_may_be_dressed(reply):
    assert score(reply) == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "18",
        "The answer is 18.",
        "#### 17",
        "#### 18\n#### 17",
        "#### 18 or 17",
        "#### 18 17",
        "#### 1 8",
        "#### 1,8",
        "#### -18",
        "#### 18e0",
        "#### 18 million",
        "#### 18/1",
        "#### 36 / 2",
        "#### eighteen",
        "##### 18",
        r"\boxed{18",
        r"\boxed{18} \boxed{",
        r"\boxed{17, 18}",
        "```\n#### 18\n```",
        "```python\n# #### 18",
        "> #### 18",
        "<!-- #### 18 -->",
        "<think>#### 18",
        "#### " + "1" * 5000 + "8",
    ],
)
def test_a_wrong_or_hidden_answer_earns_nothing(reply):
    assert score(reply) == 0.0


@needs_gsm8k
def test_every_gold_answer_of_gsm8k_is_right_and_every_perturbed_one_wrong():
    lines = (DATA / "gsm8k" / "test.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 1319

    async def both(row):
        gold = row["answer"].rpartition("#### ")[2]
        perturbed = str(int(gold.replace(",", "")) + 1)
        wrong = row["answer"].replace(f"#### {gold}", f"#### {perturbed}")
        assert wrong != row["answer"]
        found = []
        for reply in (row["answer"], f"It is\n#### ${gold}.00 dollars.", wrong):
            environment = Gsm8k(Task("t", row))
            await environment.reset()
            found.append((await environment.step(assistant(reply))).reward)
        return found

    async def run():
        return [await both(row) for row in rows]

    found = asyncio.run(run())
    assert [sum(column) for column in zip(*found, strict=True)] == [1319.0, 1319.0, 0.0]


@FIXED
@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{}", "${}", "{} dollars", "{}.", "{}.00", " {} ", "**{}**", "{}%", "\\${}"]),
    st.booleans(),
)
def test_any_dress_of_any_number_is_read(number, dress, commas):
    text = f"{number:,}" if commas else str(number)
    assert number_of(dress.format(text)) == number


@FIXED
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from([", ", " or ", ";", "/", "="]))
def test_two_numbers_are_no_number(a, b, between):
    assert number_of(f"{a}{between}{b}") is None


@FIXED
@given(st.text(alphabet="0123456789#$.,-{}\\boxed` \n>a<think/", max_size=200))
def test_no_text_makes_the_reader_fail(text):
    found = answer_in(text)
    assert found is None or isinstance(found, Fraction)
    assert said(said(text)) == said(text) or "`" in text or "<" in text or ">" in text


def test_long_replies_are_read_in_linear_time():
    for part in ("#### ", "\\boxed{", "<think>", "```\n", "\n> #### 18", "<!--", "answer: ", "\t"):
        assert answer_in(part * 50_000) is None


def test_fields_can_be_mapped():
    task = Task("t", {"problem": "What is 9 * 2?", "solution": "18"})
    environment = Gsm8k(task, question_key="problem", answer_key="solution", instruction="")
    assert asyncio.run(environment.reset())[0].content == "What is 9 * 2?"
    assert play(environment, "#### 18")[0] == [1.0]


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match=r"env\.question_key: task 't' has no field 'question'"):
        Gsm8k(Task("t", {"answer": "18"}))
    with pytest.raises(DataError, match=r"env\.answer_key: 'answer' of task 't' must end in"):
        Gsm8k(Task("t", {"question": "?", "answer": "maybe"}))
    with pytest.raises(DataError, match=r"env\.answer_key: 'answer' of task 't' must be text"):
        Gsm8k(Task("t", {"question": "?", "answer": [18]}))


def test_a_wrong_answer_is_told_and_another_may_follow():
    rewards, last = play(Gsm8kMultiTurn(TASK), "#### 17", "hm", "#### 18")
    assert rewards == pytest.approx([0.04, 0.0, 1 + 3 * 0.04])
    assert last.terminated and not last.messages and last.components["right"] == 1.0


def test_a_turn_that_goes_on_says_so():
    _, first = play(Gsm8kMultiTurn(TASK), "#### 17")
    assert not first.terminated and first.messages[0].role == "user"
    assert "18" not in first.messages[0].content


def test_the_last_turn_ends_the_episode():
    rewards, last = play(Gsm8kMultiTurn(TASK, max_turns=3), "#### 1", "#### 2", "#### 3")
    assert rewards == pytest.approx([0.04] * 3)
    assert last.terminated and not last.messages


def test_a_repeated_answer_earns_nothing():
    rewards, _ = play(Gsm8kMultiTurn(TASK), "#### 17", "#### 17.0", "#### $17")
    assert rewards == pytest.approx([0.04, 0.0, 0.0])


@pytest.mark.parametrize("wait", range(5))
def test_holding_the_answer_back_is_not_paid(wait):
    now, _ = play(Gsm8kMultiTurn(TASK), "#### 18")
    later, _ = play(Gsm8kMultiTurn(TASK), *(f"#### {i}" for i in range(wait)), "#### 18")
    assert sum(later) == pytest.approx(sum(now)) == pytest.approx(1.2)


def test_generated_answers_are_what_their_lines_say():
    for row in gsm8k.tasks("train", 300):
        assert score(row["answer"], Task("t", row)) == 1.0
        for line in row["answer"].splitlines():
            for left, right in zip(line.split(" = "), line.split(" = ")[1:], strict=False):
                terms = [t for t in left.split(" ") if t[-1].isdigit() or t in "+-*/"]
                value = right.split(" ")[0].rstrip(".")
                while terms and not terms[0].lstrip("-").isdigit():
                    terms.pop(0)
                assert _compute(terms) == int(value), line


def _compute(terms):
    """A line of whole numbers and signs, products first."""
    done = [int(terms[0])]
    for sign, text in zip(terms[1::2], terms[2::2], strict=True):
        number = int(text)
        if sign in "*/":
            done[-1] = done[-1] * number if sign == "*" else Fraction(done[-1], number)
        else:
            done.append(number if sign == "+" else -number)
    return sum(done)


def test_generated_splits_share_nothing_and_repeat():
    found = {
        split: {row["question"] for seed in (0, 1) for row in gsm8k.tasks(split, 200, seed)}
        for split in ("train", "tuning", "eval")
    }
    assert not found["train"] & found["eval"]
    assert not found["train"] & found["tuning"]
    assert not found["tuning"] & found["eval"]
    assert gsm8k.tasks("eval", 20, 3) == gsm8k.tasks("eval", 20, 3) != gsm8k.tasks("eval", 20, 4)
    assert gsm8k.tasks("eval", 50)[:20] == gsm8k.tasks("eval", 20)
