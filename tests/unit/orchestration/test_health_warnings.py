"""The health detector warns by name: terms that contribute nothing, numbers that drift."""

from __future__ import annotations

import pytest

from fledge.orchestration.health import PATIENCE, Health


def watch(steps: list[dict[str, float]], dtype: str = "fp32") -> tuple[Health, list[str]]:
    said: list[str] = []
    health = Health(said.append, dtype)
    for step, metrics in enumerate(steps, 1):
        health.look(step, metrics)
    return health, said


@pytest.mark.parametrize(
    ("term", "named"),
    [
        ("term/kl", "algorithm.kl_coef"),
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
    resumed = Health(later.append, "fp32")
    resumed.restore(health.state())
    resumed.look(PATIENCE, {"term/kl": 0.0})
    assert len(later) == 1
    again = Health(later.append, "fp32")
    again.restore(resumed.state())
    again.look(PATIENCE + 1, {"term/kl": 0.0})
    assert len(later) == 1, "what was said before the resume is not said again"
    assert again.report()["warnings"] == {next(iter(resumed.warnings)): 2}
