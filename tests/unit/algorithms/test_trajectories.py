"""What estimators are made of: sums to the end of an episode, whitening, and penalties that reach
every place where a reward is looked for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fledge.algorithms.advantages import grpo
from fledge.algorithms.trajectories import discounted_to_go, on_batch, whiten
from made_batches import episode, group, numbers, random_groups, simple, steady, trajectories


def plain_to_go(x: list[float], lengths: list[int], decay: float) -> list[float]:
    found, start = [], 0
    for length in lengths:
        row, rest = [], 0.0
        for value in reversed(x[start : start + length]):
            rest = value + decay * rest
            row.insert(0, rest)
        found += row
        start += length
    return found


# ---- sums to the end


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize(
    "lengths",
    [
        [1], [16], [17], [0, 3, 0, 0, 5, 0], [16, 16, 16], [32, 32], [300, 1, 0, 257, 15],
        [0, 0], [600], [0, 1, 40], [40, 1, 0],
    ],
)  # fmt: skip
def test_sums_to_go_equal_a_plain_loop(lengths, decay):
    x = numbers(sum(lengths))
    found = discounted_to_go(x, torch.tensor(lengths), decay)
    assert found.tolist() == pytest.approx(plain_to_go(x.tolist(), lengths, decay), abs=1e-10)


@steady
@given(st.lists(st.integers(0, 70), min_size=1, max_size=8), st.floats(0, 1))
def test_sums_to_go_equal_a_plain_loop_whatever_the_lengths(lengths, decay):
    x = numbers(sum(lengths), seed=1)
    found = discounted_to_go(x, torch.tensor(lengths), decay)
    assert found.tolist() == pytest.approx(plain_to_go(x.tolist(), lengths, decay), abs=1e-10)


def test_sums_to_go_of_single_precision_are_nearly_exact_and_leave_their_input_alone():
    lengths = torch.tensor([700, 0, 123])
    x = numbers(823)
    single = x.float()
    before = single.clone()
    found = discounted_to_go(single, lengths, 0.99)
    assert found.dtype == torch.float32 and torch.equal(single, before)
    assert (found - discounted_to_go(x, lengths, 0.99)).abs().max() < 1e-4


def test_sums_to_go_of_nothing_are_nothing():
    for lengths in ([0, 0], []):
        found = discounted_to_go(torch.zeros(0), torch.tensor(lengths, dtype=torch.long), 0.9)
        assert found.shape == (0,)


# ---- whitening


def test_whitening_gives_mean_zero_and_unbiased_unit_variance():
    found = whiten(3 + 5 * numbers(1000))
    assert found.mean().item() == pytest.approx(0, abs=1e-12)
    assert found.std(correction=1).item() == pytest.approx(1, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e6 / 7, 1e-7])
@pytest.mark.parametrize("count", [1, 2, 1000, 262_147])
def test_what_has_no_spread_becomes_exactly_zero(value, count, dtype):
    assert not whiten(torch.full((count,), value, dtype=dtype)).any()


def test_a_small_spread_on_a_large_number_is_kept_in_double_precision():
    x = torch.tensor([1e6, 1e6 + 0.5], dtype=torch.float64)
    assert whiten(x).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_whitening_leaves_its_input_alone():
    x = numbers(10)
    before = x.clone()
    whiten(x)
    assert torch.equal(x, before)


def test_whitening_of_nothing_is_nothing():
    assert whiten(torch.zeros(0)).shape == (0,)


# ---- views of a batch


def test_numbers_of_episodes_reach_their_tokens_and_back():
    t = trajectories(simple(1, 2, 3, lengths=[2, 0, 3]))
    assert t.per_token(torch.tensor([5.0, 6.0, 7.0])).tolist() == [5, 5, 7, 7, 7]
    assert t.per_episode(torch.arange(5.0)).tolist() == [1, 0, 9]
    assert t.sequence.tolist() == [0, 0, 2, 2, 2]
    assert t.to_go(t.reward, 0.5).tolist() == [0.5, 1, 0.75, 1.5, 3]


def test_turns_are_counted_up_to_the_last_with_a_trained_token():
    t = trajectories(group(episode([1, 2], [2, 1]), episode(0, 0), episode([1, 2, 3], [0, 2, 0])))
    assert t.turns.tolist() == [2, 0, 1]
    table, places, counts = t.by_turn(torch.arange(5.0), width=3)
    assert table.tolist() == [[1, 2, 0], [0, 0, 0], [7, 0, 0]]
    assert places.tolist() == [0, 1, 6] and counts.tolist() == [2, 1, 2]


# ---- penalties


def test_a_penalty_reaches_the_tokens_the_episodes_and_the_turns_of_the_groups():
    t = trajectories(
        group(episode([1, 2], [2, 1]), episode(5, 0, index=1), key="a"),
        group(episode([3, 4, 5], [1, 1, 2]), key="b"),
    )
    penalty = torch.tensor([0.1, 0.2, 0.4, 1, 2, 3, 4], dtype=torch.float64)
    found = t.penalised(penalty)
    assert found.reward.tolist() == pytest.approx([-0.1, 0.8, 1.6, 2, 2, -3, 1])
    assert found.episode_reward.tolist() == pytest.approx([2.3, 5, 2])
    rewards = [e.rewards for g in found.charged() for e in g.episodes]
    assert rewards == [pytest.approx((0.7, 1.6)), (5,), pytest.approx((2, 2, -2))]
    assert t.groups[0].episodes[0].rewards == (1, 2), "the rollouts stay as they are"


def test_a_penalty_on_a_turn_without_a_reward_stays_in_its_episode():
    quiet = replace(episode(0, [1, 2]), rewards=())
    found = trajectories(group(quiet, episode(1.0, 1, index=1))).penalised(
        torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    )
    assert [e.rewards for e in found.charged()[0].episodes] == [(-1, -5), (-3,)]


@steady
@given(random_groups())
def test_groups_and_columns_agree_after_a_penalty(groups):
    t = trajectories(*groups)
    found = t.penalised(numbers(len(t.reward)))
    rewards = [e.reward for g in found.charged() for e in g.episodes]
    assert rewards == pytest.approx(found.episode_reward.tolist(), rel=1e-9, abs=1e-6)
    assert [len(e.rewards) for g in found.charged() for e in g.episodes] == [
        len(e.rewards) for g in groups for e in g.episodes
    ]


def test_a_penalty_can_make_a_silent_group_speak():
    t = trajectories(simple(1, 1)).penalised(torch.tensor([0.0, 0.5], dtype=torch.float64))
    assert grpo(t.charged()[0].episodes, scale_by_std=False) == [0.25, -0.25]


# ---- marks


def test_a_mark_says_what_an_estimator_needs():
    @on_batch(needs=["value"], greedy=True)
    def mine(t):
        return t.reward

    assert mine.over_batch and mine.needs == {"value"} and mine.greedy
