"""The health detector warns by name: terms that contribute nothing, numbers that drift."""

from __future__ import annotations

import pytest

from fledge.orchestration.health import PATIENCE, Health
from fledge.types import Episode, Group, Outcome, Task


def watch(steps: list[dict[str, float]], dtype: str = "fp32") -> tuple[Health, list[str]]:
    said: list[str] = []
    health = Health(said.append, dtype, 512)
    for step, metrics in enumerate(steps, 1):
        health.look(step, {"optim/grad_norm": 1.0, **metrics})
    return health, said


@pytest.mark.parametrize(
    ("term", "named"),
    [
        ("term/kl", "algorithm.kl.coef"),
        ("term/entropy", "algorithm.entropy_coef"),
        ("term/policy", "no episode differs from its baseline"),
    ],
)
def test_a_term_that_stays_exactly_zero_is_warned_about_by_name_once(term: str, named: str):
    health, said = watch([{term: 0.0}] * (PATIENCE + 3))
    assert len(said) == 1 and named in said[0] and said[0].startswith(f"step {PATIENCE}:")
    assert list(health.report()["warnings"].values()) == [4], "counted each time"


@pytest.mark.parametrize("term", ["term/kl", "term/entropy", "term/policy"])
def test_a_term_that_comes_back_is_fine(term: str):
    steps = [{term: 0.0}] * (PATIENCE - 1) + [{term: 1e-12}] + [{term: 0.0}] * (PATIENCE - 1)
    assert watch(steps)[1] == []


def test_a_term_that_is_not_configured_is_not_missed():
    assert watch([{"reward/mean": 0.0}] * 20)[1] == []


def test_a_gradient_of_zero_is_warned_about_at_once():
    assert "gradient is exactly 0" in watch([{"optim/grad_norm": 0.0}])[1][0]
    assert watch([{"optim/grad_norm": 1e-9}])[1] == []


def test_a_step_in_which_nothing_was_trained_is_said():
    said: list[str] = []
    health = Health(said.append, "fp32", 512)
    health.look(1, {"critic/grad_norm": 1.0})
    assert said == [], "a critic may learn alone"
    health.look(2, {"reward/mean": 0.0})
    assert len(said) == 1 and "nothing was trained" in said[0]


def test_many_truncated_replies_name_the_limit():
    assert "rollout.max_new_tokens" in watch([{"response/truncated_frac": 0.51}])[1][0]
    assert watch([{"response/truncated_frac": 0.5}])[1] == []


@pytest.mark.parametrize(("dtype", "gap"), [("fp32", 2e-3), ("bf16", 0.6), ("fp16", 0.3)])
def test_an_engine_that_drifts_from_the_trainer_is_warned_about(dtype: str, gap: float):
    health, said = watch([{"mismatch/abs_logp_max": g} for g in (gap, 2 * gap, 0.0)], dtype)
    assert len(said) == 1 and "log-probs differ" in said[0]
    assert health.worst_mismatch == 2 * gap
    assert watch([{"mismatch/abs_logp_max": gap / 10}], dtype)[1] == []


def test_a_resumed_run_remembers_how_long_a_term_has_been_zero():
    health, said = watch([{"term/kl": 0.0}] * (PATIENCE - 1))
    assert said == []
    later: list[str] = []
    resumed = Health(later.append, "fp32", 512)
    resumed.restore(health.state())
    resumed.look(PATIENCE, {"term/kl": 0.0, "optim/grad_norm": 1.0})
    assert len(later) == 1
    again = Health(later.append, "fp32", 512)
    again.restore(resumed.state())
    again.look(PATIENCE + 1, {"term/kl": 0.0, "optim/grad_norm": 1.0})
    assert len(later) == 1, "what was said before the resume is not said again"
    assert again.report()["warnings"] == {next(iter(resumed.warnings)): 2}


def group(*outcomes: Outcome) -> Group:
    played = [Episode("t", i, (), (0.0,), o, (), error="boom") for i, o in enumerate(outcomes)]
    return Group(
        Task("t", {}),
        0,
        episodes=tuple(e for e in played if e.outcome.usable),
        discarded=tuple(e for e in played if not e.outcome.usable),
    )


def test_the_first_dropped_episode_is_told_with_its_reason_and_many_are_told_again():
    said: list[str] = []
    health = Health(said.append, "fp32", 512)
    health.dropped_episodes(1, [group(*[Outcome.OK] * 20)])
    assert said == []
    health.dropped_episodes(2, [group(Outcome.GRADER_ERROR, *[Outcome.OK] * 19)])
    assert len(said) == 1 and "grader_error: boom" in said[0]
    health.dropped_episodes(3, [group(Outcome.TIME_LIMIT, Outcome.OK, Outcome.OK)])
    assert len(said) == 2 and "1 of 3" in said[1]
    assert health.report()["dropped_episodes"] == {"grader_error": 1, "time_limit": 1}


def test_a_policy_that_falls_apart_is_told_and_one_that_starts_uniform_is_not():
    uniform = 6.2
    _, said = watch([{"policy/entropy": 1.0}, {"policy/entropy": uniform}])
    assert any("optim.lr" in text for text in said)
    assert watch([{"policy/entropy": uniform}, {"policy/entropy": uniform}])[1] == []
