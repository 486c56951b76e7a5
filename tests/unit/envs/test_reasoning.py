import asyncio
import importlib.metadata

import pytest

from fledge.envs import reasoning
from fledge.envs.pool import GraderFailed
from fledge.envs.reasoning import AUDITED, REFUSED, TRUSTED, Reasoning, audit, check_trusted
from fledge.errors import PluginError
from fledge.types import Task, assistant

QUICK = ("gcd", "count_bits", "game_of_life_halting", "prime_factorization", "spiral_matrix")


@pytest.fixture
def gym():
    pytest.importorskip("reasoning_gym")
    if importlib.metadata.version("reasoning-gym") != AUDITED:
        pytest.skip(f"the audit was made with reasoning-gym {AUDITED}")


def play(row, reply, **arguments):
    async def run():
        environment = Reasoning(Task("t", row), **arguments)
        await environment.reset()
        return await environment.step(assistant(reply))

    step = asyncio.run(run())
    assert step.terminated
    return step.reward


def test_no_task_is_both_trusted_and_refused():
    assert not set(TRUSTED) & set(REFUSED) and all(REFUSED.values())
    assert len(TRUSTED) == len(set(TRUSTED)) and len(TRUSTED) + len(REFUSED) == 106


@pytest.mark.parametrize("name", ["countdown", "n_queens", "puzzle24", "polynomial_multiplication"])
def test_a_scorer_that_runs_answers_is_refused(name):
    with pytest.raises(PluginError, match=f"'{name}' is refused: its scorer runs the answer"):
        check_trusted(name, "env")


def test_unknown_tasks_are_refused_with_a_hint():
    with pytest.raises(PluginError, match="no audited task 'chain_sums'; did you mean 'chain_sum'"):
        check_trusted("chain_sums", "env")
    with pytest.raises(PluginError, match="'game_of_life_halting' is refused: garbage scores 1"):
        reasoning.tasks(task="game_of_life_halting")
    row = {"task": "rubiks_cube", "seed": 0, "index": 0, "config": "{}", "question": "?"}
    with pytest.raises(PluginError, match="env: reasoning-gym's 'rubiks_cube' is refused"):
        Reasoning(Task("t", row))


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(reasoning, "_installed", lambda: "9.9")
    with pytest.raises(PluginError, match=rf"needs reasoning-gym {AUDITED}.*installed: 9\.9"):
        check_trusted("gcd", "env")


def test_the_scorer_decides(gym):
    row = reasoning.tasks("train", 1, task="gcd")[0]
    answer = reasoning._dataset("gcd", 0, "{}")[row["index"]]["answer"]
    assert play(row, f"<answer>{answer}</answer>") == 1.0
    assert play(row, f"<answer>{answer}0</answer>") == 0.0
    assert play(row, f"<answer>{answer}0</answer>", partial=True) > 0.0
    assert play(row, answer) == play(row, f"<answer>{'9' * 20_000}</answer>") == 0.0


def test_a_row_of_another_version_is_no_reward(gym):
    row = {**reasoning.tasks("train", 1, task="gcd")[0], "question": "another"}
    with pytest.raises(GraderFailed, match="not the one that its seed makes"):
        play(row, "<answer>1</answer>")


def test_splits_share_nothing_and_repeat(gym):
    found = [
        {r["question"] for seed in (0, 1) for r in reasoning.tasks(s, 60, seed)}
        for s in ("train", "tuning", "eval")
    ]
    assert sum(map(len, found)) == len(set.union(*found))
    assert reasoning.tasks("eval", 9, 3) == reasoning.tasks("eval", 9, 3)
    harder = reasoning.tasks("eval", 2, config={"min_terms": 9, "max_terms": 9})
    assert all(row["question"].count("+") + row["question"].count("-") >= 8 for row in harder)


def test_the_audit_finds_what_the_lists_say_for_a_few(gym):
    found = audit(QUICK)
    assert found == {name: REFUSED.get(name, "") for name in QUICK}
    assert not found["gcd"] and found["spiral_matrix"] == "its scorer runs the answer as code"


@pytest.mark.slow
def test_the_audit_finds_what_the_lists_say(gym):
    found = audit()
    assert {name for name, reason in found.items() if not reason} == set(TRUSTED)
    assert {name: reason for name, reason in found.items() if reason} == REFUSED
