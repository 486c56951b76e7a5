import asyncio
import os
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.envs import maths
from fledge.envs.maths import Aime, Maths, comparable
from fledge.envs.pool import GraderFailed, WorkerPool
from fledge.errors import DataError, FledgeError
from fledge.types import Task, assistant

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=200)
HERE = "unit_grader"


def play(environment, reply):
    async def run():
        await environment.reset()
        return await environment.step(assistant(reply))

    step = asyncio.run(run())
    assert step.terminated
    return step.reward


def aime(reply, answer="73", **arguments):
    return play(Aime(Task("t", {"problem": "?", "answer": answer}), **arguments), reply)


@pytest.mark.parametrize(
    "reply",
    [
        r"\boxed{73}",
        r"so $\boxed{073}$.",
        "Answer: 73",
        "**Answer:** 73.",
        "The final answer: $73$",
        r"\boxed{5} ... wait: \boxed{73}",
        "Answer: 5\nAnswer: \\boxed{73}",
        r"\boxed{73^\circ}",
    ],
)
def test_the_last_integer_counts(reply):
    assert aime(reply) == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "73",
        r"\boxed{74}",
        r"\boxed{73} or \boxed{74}",
        "Answer: 73 or 74",
        "Answer: one of 1 2 73",
        "Answer: 73\nAnswer: I am not sure",
        r"\boxed{1073}",
        r"\boxed{-73}",
        r"\boxed{73.5}",
        r"\boxed{70+3}",
        "the answer is 73",
    ],
)
def test_anything_else_is_wrong(reply):
    assert aime(reply) == -1.0
    assert aime(reply, right=2.0, wrong=0.0) == 0.0


@FIXED
@given(st.integers(0, 999), st.integers(0, 999))
def test_integers_are_compared(gold, said):
    assert aime(f"\\boxed{{{said:03d}}}", str(gold)) == (1.0 if gold == said else -1.0)


def test_aime_rows_that_do_not_fit_are_refused():
    for answer in ("1000", "-1", "x", "1.5"):
        with pytest.raises(DataError, match=r"env\.answer_key.*from 0 to 999"):
            Aime(Task("t", {"problem": "?", "answer": answer}))
    assert Aime(Task("t", {"Q": "?", "A": 7}), problem_key="Q", answer_key="A").answer == 7


def test_generated_contest_answers_fit():
    for row in maths.aime_tasks("train", 200):
        assert aime(f"\\boxed{{{row['answer']}}}", row["answer"]) == 1.0


def test_generated_splits_share_nothing_and_repeat():
    for make in (maths.tasks, maths.aime_tasks):
        found = [{r["problem"] for r in make(s, 100)} for s in ("train", "tuning", "eval")]
        assert sum(map(len, found)) == len(set.union(*found)) == 300
        assert make("eval", 9, 3) == make("eval", 9, 3) != make("eval", 9, 4)


@pytest.mark.parametrize(
    "gold, answer, shown",
    [
        ("4", "4", "4"),
        ("4", "x = 4", "4"),
        ("4", "f(x) = 4", "4"),
        ("x = 4", "x = 4", "x = 4"),
        ("4", "1=2=3=4", None),
        ("4", "1 2 3 4 = 4", None),
        ("4", "x = 3 = 4", None),
        ("(1, 2)", "2, 1", None),
        ("(1, 2)", "[1, 2]", None),
        ("(1, 2)", r"\left(1, 2\right)", r"\left(1, 2\right)"),
        (r"\{1, 2\}", "2, 1", "2, 1"),
        ("4", r"\max(1, 4)", None),
        ("4", r"\sum_{i=1}^{4} 1", None),
        ("4", "9^{9^{9}}", None),
        ("4", "10^{100000}", None),
        ("4", "99999!", None),
        ("24", "4!", "4!"),
        (r"\binom{4}{2}", r"\binom{4}{2}", r"\binom{4}{2}"),
        ("4", "", None),
        ("4", "4" * 301, None),
    ],
)
def test_what_math_verify_is_shown(gold, answer, shown):
    assert comparable(gold, answer) == shown


def test_general_answers_are_compared_by_value():
    pytest.importorskip("math_verify")
    cases = [
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"\frac{1}{2}", r"\frac{2}{4}", 1.0),
        (r"2\sqrt{3}", r"\sqrt{12}", 1.0),
        (r"\{1, 2\}", r"\{2, 1\}", 1.0),
        ("x^2 - 1", "(x-1)(x+1)", 1.0),
        ("(1,2)", r"\left(1, 2\right)", 1.0),
        (r"So it is \boxed{7}.", "14/2", 1.0),
        (r"\frac{1}{2}", "0.51", 0.0),
        (r"\{1, 2\}", r"\{1, 2, 3\}", 0.0),
        ("4", "1 2 3 4", 0.0),
        ("4", "1, 2, 3, 4", 0.0),
        ("4", r"4 \text{ or } 5", 0.0),
        ("4", "one of 1 2 3 4", 0.0),
        ("x^2 - 1", "x^2 + 1", 0.0),
    ]

    async def one(gold, answer):
        environment = Maths(Task("t", {"problem": "?", "answer": gold}))
        await environment.reset()
        return (await environment.step(assistant(f"I get $\\boxed{{{answer}}}$."))).reward

    async def run():
        return await asyncio.gather(*(one(gold, answer) for gold, answer, _ in cases))

    found = asyncio.run(run())
    assert found == [wanted for *_, wanted in cases]


def test_only_a_box_is_looked_at():
    pytest.importorskip("math_verify")
    environment = Maths(Task("t", {"problem": "?", "answer": "4"}), wrong=-0.5)
    assert play(environment, "I guess 1 2 3 4") == -0.5


def test_an_unreadable_gold_answer_is_no_reward():
    pytest.importorskip("math_verify")
    environment = Maths(Task("t", {"problem": "?", "answer": r"\text{}"}))
    with pytest.raises(GraderFailed, match="cannot read the right answer"):
        play(environment, r"\boxed{4}")


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / f"{HERE}.py").write_text(
        "import os, sys, time\n"
        "def grade(request):\n"
        "    kind, value = request\n"
        "    if kind == 'sleep': time.sleep(value)\n"
        "    if kind == 'die': os._exit(value)\n"
        "    if kind == 'raise': raise ValueError(value)\n"
        "    if kind == 'print': print(value); os.write(1, b'noise\\n')\n"
        "    if kind == 'memory': bytearray(value)\n"
        "    return [os.getpid(), value]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = WorkerPool(f"{HERE}:grade", 1, timeout=2.0)
    yield made
    made.close()


def ask(pool, kind, value):
    return asyncio.run(pool.call([kind, value]))


def test_a_worker_is_kept_and_its_output_is_not_taken_for_an_answer(pool):
    first, _ = ask(pool, "echo", 1)
    assert ask(pool, "print", "x" * 100_000) == [first, "x" * 100_000]
    assert ask(pool, "echo", 2) == [first, 2]


def test_failures_raise_and_the_next_call_works(pool):
    with pytest.raises(GraderFailed, match="ValueError: odd"):
        ask(pool, "raise", "odd")
    with pytest.raises(GraderFailed, match="MemoryError"):
        ask(pool, "memory", 1 << 40)
    with pytest.raises(GraderFailed, match="died"):
        ask(pool, "die", 3)
    assert ask(pool, "echo", 4)[1] == 4
    assert not issubclass(GraderFailed, FledgeError)  # one would end the run


def test_a_worker_that_hangs_is_killed_and_replaced(pool):
    first, _ = ask(pool, "echo", 1)
    began = time.monotonic()
    with pytest.raises(GraderFailed, match="longer than 2 s"):
        ask(pool, "sleep", 60)
    assert time.monotonic() - began < 10
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert ask(pool, "echo", 2)[0] != first


def test_a_worker_killed_between_calls_is_replaced_unseen(pool):
    first, _ = ask(pool, "echo", 1)
    os.kill(first, signal.SIGKILL)
    time.sleep(0.2)
    second, value = ask(pool, "echo", 2)
    assert second != first and value == 2
