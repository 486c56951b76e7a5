"""Evaluation: avg@k and pass@k over tasks, failures counted apart, nothing left in the engine."""

from __future__ import annotations

import pytest

from fledge.config import TrainConfig
from fledge.data.render import make_renderer
from fledge.envs import Environment
from fledge.errors import TrainingError
from fledge.inference import NativeEngine
from fledge.orchestration.evaluation import Evaluation, Evaluator
from fledge.rollout import generator
from fledge.types import Step, Task, user
from helpers import run

TASKS = [Task(str(i), {"n": i}) for i in range(4)]


class Graded(Environment[Task]):
    """Task 0 is solved by the first attempt only, task 1 always, task 2 never; task 3 breaks."""

    attempts: dict[str, int]

    async def reset(self):
        return [user(f"task {self.key}")]

    async def step(self, reply):
        first = self.attempts.setdefault(self.key, 0) == 0
        self.attempts[self.key] += 1
        if self.key == "3":
            raise OSError("no grader")
        return Step(reward=float(self.key == "1" or (self.key == "0" and first)), terminated=True)


def evaluator(policy, tasks: list[Task]) -> tuple[Evaluator, NativeEngine]:
    Graded.attempts = {}
    config = TrainConfig.model_validate(
        {
            "env": "arithmetic",
            "data": {"train": "unused"},
            "eval": {"samples": 2, "temperature": 1.0},
            "rollout": {"max_new_tokens": 4, "retries": 0},
        }
    )
    engine = NativeEngine(policy, cache_mb=1)
    renderer = make_renderer(policy.tokenizer)
    return Evaluator(config, engine, renderer, Graded, tasks, policy.context), engine


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "BACK_OFF", 0.0)


def test_averages_are_over_tasks_and_failures_are_counted_apart(policy):
    evaluate, _ = evaluator(policy, TASKS)
    found = run(evaluate())
    assert (found.average, found.passed) == (pytest.approx(0.5), pytest.approx(2 / 3))
    assert (found.tasks, found.failed, found.samples) == (3, 2, 2)
    assert found.metrics("mine") == {
        "eval/mine/avg@2": pytest.approx(0.5),
        "eval/mine/pass@2": pytest.approx(2 / 3),
        "eval/mine/failed": 2.0,
    }


def test_an_evaluation_leaves_no_page_and_no_session_behind(policy):
    evaluate, engine = evaluator(policy, TASKS[:3])
    version = engine.version
    run(evaluate())
    first = engine.prefill_tokens
    run(evaluate())
    assert engine.prefill_tokens == 2 * first, "a prompt was found again"
    assert engine.version == version and not engine.scheduler.sessions


def test_the_same_weights_give_the_same_evaluation(policy):
    def answers() -> Evaluation:
        return run(evaluator(policy, TASKS[:3])[0]())

    assert answers() == answers()


def test_an_evaluation_without_a_single_score_names_the_failure(policy):
    evaluate, _ = evaluator(policy, TASKS[3:])
    with pytest.raises(TrainingError, match="no grader"):
        run(evaluate())
