"""Advantages within a group: closed forms, and silence where there is nothing to compare."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.algorithms.advantages import ADVANTAGES, grpo, maxrl, opo, rloo
from fledge.config.presets import PRESETS
from fledge.errors import PluginError
from fledge.types import Episode
from made_batches import any_reward, episode, simple, steady


def episodes(*rewards: float, lengths: list[int] | None = None) -> tuple[Episode, ...]:
    return simple(*rewards, lengths=lengths).episodes


def test_grpo_divides_by_the_unbiased_standard_deviation():
    # mean 1, squared deviations 1 + 0 + 1, over n - 1 = 2: standard deviation 1
    assert grpo(episodes(0, 1, 2)) == pytest.approx([-1, 0, 1], abs=2e-6)
    # mean 0.25, variance (3 * 0.0625 + 0.5625) / 3 = 0.25
    assert grpo(episodes(1, 0, 0, 0)) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_grpo_keeps_a_spread_of_nothing_small():
    # the standard deviation 7e-10 drowns in 1e-6
    found = grpo(episodes(1.0, 1.0 + 1e-9))
    assert found == pytest.approx([-5e-4, 5e-4], rel=1e-2)


def test_dr_grpo_only_subtracts_the_mean():
    assert grpo(episodes(0, 1, 5), scale_by_std=False) == [-2, -1, 3]


def test_rloo_compares_with_the_mean_of_the_others():
    assert rloo(episodes(0, 1, 5)) == [0 - 3, 1 - 2.5, 5 - 0.5]


@steady
@given(st.lists(any_reward, min_size=2, max_size=12))
def test_rloo_is_dr_grpo_times_n_over_n_minus_one(rewards):
    n = len(rewards)
    plain = grpo(episodes(*rewards), scale_by_std=False)
    assert rloo(episodes(*rewards)) == pytest.approx([a * n / (n - 1) for a in plain], rel=1e-12)
    direct = [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    assert rloo(episodes(*rewards)) == pytest.approx(direct, rel=1e-9, abs=1e-8)


def test_maxrl_divides_by_the_mean():
    # one success in four: it gains (1 - p) / p = 3, each failure loses 1
    assert maxrl(episodes(1, 0, 0, 0)) == pytest.approx([3, -1, -1, -1], rel=1e-5)
    assert maxrl(episodes(2, 6)) == pytest.approx([-0.5, 0.5], rel=1e-5)


def test_maxrl_is_silent_when_nothing_was_earned():
    assert maxrl(episodes(0, 0, 0)) == [0, 0, 0]


def test_maxrl_refuses_a_reward_below_zero_by_task_and_number():
    group = (episode(1, key="sum"), episode(-0.5, key="sum", index=3))
    said = r"^algorithm\.advantage: maxrl .* episode 3 of task 'sum' has -0\.5"
    with pytest.raises(PluginError, match=said):
        maxrl(group)


def test_opo_weighs_long_replies_more():
    # (1 * 3 + 0 * 1) / 4 = 0.75
    assert opo(episodes(1, 0, lengths=[3, 1])) == [0.25, -0.75]
    assert opo(episodes(2, 5, 8, lengths=[0, 1, 1])) == [2 - 6.5, 5 - 6.5, 8 - 6.5]


def test_opo_with_equal_lengths_is_dr_grpo():
    rewards = (0.5, 3, -2)
    expected = grpo(episodes(*rewards), scale_by_std=False)
    assert opo(episodes(*rewards, lengths=[7, 7, 7])) == pytest.approx(expected)


def test_opo_counts_the_tokens_of_an_episode_that_is_not_trained_on():
    group = list(episodes(1, 0, lengths=[3, 1]))
    group[0] = replace(group[0], masked="mask_truncated")
    assert opo(group) == [0.25, -0.75]


def test_opo_without_any_token_is_silent():
    assert opo(episodes(1, 0, lengths=[0, 0])) == [0, 0]


@pytest.mark.parametrize("estimator", [grpo, rloo, maxrl, opo])
@pytest.mark.parametrize("rewards", [(), (3.0,), (0.0, 0.0), (0.1, 0.1, 0.1), (1e6 / 3,) * 7])
def test_groups_that_say_nothing_get_exactly_zero(estimator, rewards):
    assert estimator(episodes(*rewards)) == [0.0] * len(rewards)


@steady
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16))
def test_grpo_is_centred_finite_and_of_unit_scale(rewards):
    found = grpo(episodes(*rewards))
    assert all(math.isfinite(a) for a in found)
    assert sum(found) == pytest.approx(0, abs=1e-4 * len(found))
    assert pstdev(found) <= 1.0001
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert all(found[a] <= found[b] for a, b in itertools.pairwise(order))


@pytest.mark.parametrize("estimator", [grpo, rloo, maxrl, opo])
@steady
@given(data=st.data())
def test_whatever_the_group_it_is_finite_ordered_and_follows_a_permutation(estimator, data):
    rewards = data.draw(st.lists(any_reward.map(abs), min_size=1, max_size=8))
    same_length = st.lists(st.integers(0, 30), min_size=len(rewards), max_size=len(rewards))
    lengths = data.draw(same_length)
    group = episodes(*rewards, lengths=lengths)
    found = estimator(group)
    assert len(found) == len(group) and all(map(math.isfinite, found))
    if len(set(rewards)) == 1:
        assert found == [0.0] * len(group)
    order = data.draw(st.permutations(range(len(group))))
    again = estimator([group[i] for i in order])
    scale = max(map(abs, found)) + fmean(rewards) * 1e-3 + 1e-9
    assert again == pytest.approx([found[i] for i in order], abs=1e-6 * scale)


def test_every_preset_names_an_estimator_that_exists():
    assert list(ADVANTAGES) == [
        "grpo", "reinforce", "rloo", "reinforce++", "reinforce++_baseline", "gae", "maxrl", "opo",
        "gdpo", "remax", "turn", "distillation",
    ]  # fmt: skip
    for preset in PRESETS.values():
        chosen = preset.get("advantage", "grpo")
        name = chosen if isinstance(chosen, str) else chosen["name"]
        assert name in ADVANTAGES
