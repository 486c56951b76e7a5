import asyncio

from fledge.envs import arithmetic
from fledge.envs.arithmetic import Arithmetic
from fledge.envs.check import check_env
from fledge.types import Task, assistant, user


def test_every_problem_is_in_exactly_one_pool():
    pools = arithmetic.pools()
    everything = [problem.prompt for pool in pools for problem in pool]
    assert len(everything) == len(set(everything)) == len(arithmetic.problems())
    assert len(pools.held_out) == arithmetic.HELD_OUT
    assert all(pools)


def test_answers_are_right_and_both_orders_are_there():
    answers = {p.prompt: p.answer for p in arithmetic.problems()}
    assert answers["34+57"] == answers["57+34"] == "91"
    assert answers["0+0"] == "0"


def test_generators_give_rows_of_disjoint_pools():
    train, held_out = arithmetic.tasks(), arithmetic.tasks(split="eval")
    demonstrations = arithmetic.demonstrations()
    assert set(train[0]) == {"prompt", "answer"}
    assert set(demonstrations[0]) == {"prompt", "response"}
    prompts = [{row["prompt"] for row in rows} for rows in (train, held_out, demonstrations)]
    assert sum(map(len, prompts)) == len(set().union(*prompts))


def test_the_pools_never_move():
    # Published scores are on these problems: a change here must be deliberate.
    assert [row["prompt"] for row in arithmetic.tasks("eval")[:3]] == ["49+95", "56+74", "12+70"]


def test_only_the_exact_answer_is_rewarded():
    async def score(reply):
        environment = Arithmetic(Task("t", {"prompt": "34+57", "answer": "91"}))
        assert list(await environment.reset()) == [user("34+57")]
        return await environment.step(assistant(reply))

    assert asyncio.run(score("91")).reward == 1.0
    for wrong in ("91 ", " 91", "091", "91<|im_end|>", "", "34+57=91"):
        step = asyncio.run(score(wrong))
        assert (step.reward, step.terminated) == (0.0, True), wrong


def test_it_passes_the_checker():
    tasks = [Task(row["prompt"], row) for row in arithmetic.tasks()[:3]]
    assert asyncio.run(check_env(Arithmetic, tasks)) == []
