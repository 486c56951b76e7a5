import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.envs import guess
from fledge.envs.guess import Guess, guess_in
from fledge.errors import DataError
from fledge.types import Task, assistant

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=200)


def task(secret, low=1, high=100):
    return Task("t", {"low": low, "high": high, "secret": secret})


def play(environment, *replies):
    async def run():
        await environment.reset()
        return [await environment.step(assistant(reply)) for reply in replies]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "reply, found",
    [
        ("<guess>50</guess>", 50),
        ("Halfway is best. <guess> 50 </guess>", 50),
        ("<guess>10</guess> no <guess>50</guess>", 50),
        ("50", 50),
        (" 50\n", 50),
        ("-3", -3),
        ("50.", None),
        ("I guess 50", None),
        ("50 51", None),
        ("<guess>50 51</guess>", None),
        ("<guess>50</guess> <guess>", None),
        ("<guess>fifty</guess>", None),
        ("", None),
        ("9" * 5000, None),
        ("```\n50\n```", None),
        ("\u0665", None),
    ],
)
def test_guesses(reply, found):
    assert guess_in(reply) == found


def test_higher_and_lower_until_the_hit():
    steps = play(Guess(task(37)), "50", "25", "37")
    assert [s.messages[0].content for s in steps[:2]] == ["lower", "higher"]
    assert [(s.reward, s.terminated) for s in steps] == [(0, False), (0, False), (1, True)]


def test_the_turns_run_out():
    steps = play(Guess(task(37), max_turns=2), "1", "2")
    assert [s.terminated for s in steps] == [False, True]
    assert not steps[1].messages and sum(s.reward for s in steps) == 0


def test_fewer_turns_earn_the_bonus():
    assert play(Guess(task(37), max_turns=4, bonus=0.4), "37")[-1].reward == pytest.approx(1.3)
    last = play(Guess(task(37), max_turns=4, bonus=0.4), "1", "2", "3", "37")[-1]
    assert last.reward == 1.0 and last.info == {"guesses": 4.0}


def test_a_malformed_guess_uses_up_its_turn():
    steps = play(Guess(task(37), max_turns=3, malformed=-0.1), "hm", "101", "37")
    assert [s.reward for s in steps] == [-0.1, -0.1, 1.0]
    assert all("from 1 to 100" in s.messages[0].content for s in steps[:2])


@FIXED
@given(st.integers(1, 1000))
def test_halving_finds_every_secret_in_ten_turns(secret):
    environment = Guess(task(secret, 1, 1000))

    async def run():
        await environment.reset()
        low, high, total = 1, 1000, 0.0
        while True:
            middle = (low + high) // 2
            step = await environment.step(assistant(str(middle)))
            total += step.reward
            if step.terminated:
                return total
            if step.messages[0].content == "higher":
                low = middle + 1
            else:
                high = middle - 1

    assert asyncio.run(run()) == 1.0


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="secret 7 is not from 1 to 5"):
        Guess(task(7, 1, 5))
    with pytest.raises(DataError, match="high"):
        Guess(Task("t", {"low": 1, "secret": 1}))


def test_every_secret_is_in_one_split():
    found = [{r["secret"] for r in guess.tasks(s, seed=3)} for s in ("train", "tuning", "eval")]
    assert set.union(*found) == set(range(1, 1001)) and sum(map(len, found)) == 1000
    assert guess.tasks("eval", 5) == guess.tasks("eval")[:5] == guess.tasks("eval", 5)
    assert guess.tasks("eval", seed=1) != guess.tasks("eval", seed=2)
    with pytest.raises(DataError, match="high - low"):
        guess.tasks(low=5, high=5)
