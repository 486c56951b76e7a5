"""Advantages: closed forms, and silence where there is nothing to compare."""

from __future__ import annotations

import itertools
import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.algorithms import make_algorithm
from fledge.algorithms.advantages import Reinforce, grpo
from fledge.config.schema import AlgorithmConfig
from fledge.errors import PluginError
from fledge.types import Episode, Group, Outcome, Task


def episodes(*rewards: float) -> list[Episode]:
    return [Episode("t", i, (), (r,), Outcome.OK, ()) for i, r in enumerate(rewards)]


def group(*rewards: float, key: str = "t") -> Group:
    return Group(Task(key, {}), 0, tuple(episodes(*rewards)))


def test_grpo_divides_by_the_unbiased_standard_deviation():
    # mean 1, squared deviations 1 + 0 + 1, over n - 1 = 2: standard deviation 1
    assert grpo(episodes(0, 1, 2)) == pytest.approx([-1, 0, 1], abs=2e-6)
    # mean 0.25, variance (3 * 0.0625 + 0.5625) / 3 = 0.25
    assert grpo(episodes(1, 0, 0, 0)) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_dr_grpo_only_subtracts_the_mean():
    assert grpo(episodes(0, 1, 5), scale_by_std=False) == [-2, -1, 3]


@pytest.mark.parametrize("rewards", [(), (3.0,), (0.0, 0.0), (0.1, 0.1, 0.1), (-2.0,) * 7])
def test_groups_that_say_nothing_get_exactly_zero(rewards):
    assert grpo(episodes(*rewards)) == [0.0] * len(rewards)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16))
def test_grpo_is_centred_finite_and_of_unit_scale(rewards):
    found = grpo(episodes(*rewards))
    assert all(math.isfinite(a) for a in found)
    assert sum(found) == pytest.approx(0, abs=1e-4 * len(found))
    assert pstdev(found) <= 1.0001
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert all(found[a] <= found[b] for a, b in itertools.pairwise(order))


def test_the_baseline_of_reinforce_is_made_of_earlier_batches_only():
    estimator = Reinforce(decay=0.9)
    assert estimator([group(1, 3), group(5)]) == [[1, 3], [5]]
    assert estimator([group(1, 0)]) == [[1 - 3, 0 - 3]]  # the mean of the first batch
    expected = 0.9 * 3 + 0.1 * 0.5
    assert estimator([group(2)])[0][0] == pytest.approx(2 - expected)


def test_reinforce_without_a_baseline_is_the_reward():
    estimator = Reinforce(baseline=False)
    for _ in range(2):
        assert estimator([group(1, 3), group(-5)]) == [[1, 3], [-5]]


def test_the_baseline_survives_saving():
    ours, other = Reinforce(), Reinforce()
    ours([group(1, 3)])
    other.restore(ours.state())
    assert ours([group(7)]) == other([group(7)]) == [[5.0]]


# ---- through the algorithm


def test_judge_goes_group_by_group():
    algorithm = make_algorithm(AlgorithmConfig())
    found = algorithm.judge([group(0, 2), group(5, 5, 5), group(1, 0)])
    assert found[1] == [0, 0, 0]
    assert found[0] == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], rel=1e-5)
    assert found[2] == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)], rel=1e-5)


def too_few(episodes):
    return [0.0]


def not_finite(episodes):
    return [float("nan")] * len(episodes)


def test_an_estimator_with_the_wrong_count_is_refused_with_the_task():
    config = AlgorithmConfig(advantage=f"{__name__}:too_few")
    with pytest.raises(PluginError, match=r"1 advantages for the 2 episodes of task 'sum'"):
        make_algorithm(config).judge([group(1, 0, key="sum")])


def test_an_estimator_that_is_not_finite_is_refused_with_the_task():
    config = AlgorithmConfig(advantage=f"{__name__}:not_finite")
    with pytest.raises(PluginError, match=r"not finite for task 'sum'"):
        make_algorithm(config).judge([group(1, 0, key="sum")])


def test_an_argument_that_an_estimator_does_not_have_is_refused_with_the_nearest():
    with pytest.raises(PluginError, match=r"scale_by_sdt.*scale_by_std"):
        make_algorithm(AlgorithmConfig(advantage={"name": "grpo", "scale_by_sdt": False}))


def test_arguments_of_an_estimator_have_an_effect():
    algorithm = make_algorithm(AlgorithmConfig(advantage={"name": "grpo", "scale_by_std": False}))
    assert algorithm.judge([group(0, 3)]) == [[-1.5, 1.5]]
    algorithm = make_algorithm(AlgorithmConfig(advantage={"name": "reinforce", "decay": 0.5}))
    algorithm.judge([group(2.0)])
    algorithm.judge([group(4.0)])
    assert algorithm.state()["average"] == fmean([2.0, 4.0])
