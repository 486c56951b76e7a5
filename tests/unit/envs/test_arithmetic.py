import asyncio

from fledge.envs import arithmetic
from fledge.envs.arithmetic import Arithmetic, without_carries
from fledge.envs.check import check_env
from fledge.types import Task, assistant, user


def test_every_problem_is_in_exactly_one_pool():
    pools = arithmetic.pools()
    everything = [problem.prompt for pool in pools for problem in pool]
    assert len(everything) == len(set(everything)) == len(arithmetic.problems()) == 72_000
    assert len(pools.held_out) == arithmetic.HELD_OUT
    assert all(pools)


def test_answers_are_right():
    for problem in arithmetic.problems()[::997]:
        a, b = problem.prompt.split("+")
        assert problem.answer == str(int(a) + int(b))


def test_a_fraction_of_the_demonstrations_forgets_every_carry():
    rows = arithmetic.demonstrations(forget=0.6)
    carries = [r for r in rows if without_carries(r["prompt"]) != _sum(r["prompt"])]
    forgot = [r for r in carries if r["response"] == without_carries(r["prompt"])]
    right = [r for r in carries if r["response"] == _sum(r["prompt"])]
    assert len(forgot) + len(right) == len(carries)
    assert abs(len(forgot) / len(carries) - 0.6) < 0.01
    assert all(r["response"] == _sum(r["prompt"]) for r in arithmetic.demonstrations(forget=0))


def _sum(prompt):
    a, b = prompt.split("+")
    return str(int(a) + int(b))


def test_forgetting_carries():
    assert without_carries("345+67") == "302"
    assert without_carries("111+22") == "133"
    assert without_carries("899+99") == "888"


def test_the_pools_never_move():
    # Published scores are on these problems: a change here must be deliberate.
    first = [row["prompt"] for row in arithmetic.tasks("eval")[:3]]
    assert first == PINNED


PINNED = ["668+51", "356+82", "728+30"]


def test_only_the_exact_answer_is_rewarded():
    async def score(reply):
        environment = Arithmetic(Task("t", {"prompt": "345+67", "answer": "412"}))
        assert list(await environment.reset()) == [user("345+67")]
        return await environment.step(assistant(reply))

    assert asyncio.run(score("412")).reward == 1.0
    for wrong in ("412 ", " 412", "0412", "412<|im_end|>", "", "345+67=412", "302"):
        step = asyncio.run(score(wrong))
        assert (step.reward, step.terminated) == (0.0, True), wrong


def test_it_passes_the_checker():
    tasks = [Task(row["prompt"], row) for row in arithmetic.tasks()[:3]]
    assert asyncio.run(check_env(Arithmetic, tasks)) == []
