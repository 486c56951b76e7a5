"""Shaping: what it does to rewards, groups and masks, in which order, and never to its input."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.algorithms.shaping import has_spread, shape, shaping_metrics
from fledge.config.schema import ShapingConfig
from fledge.errors import DataError, PluginError
from fledge.types import Episode, Group, Outcome, Segment
from made_batches import episode, group, random_groups, segment, simple, steady

TRUNCATED = Outcome.TRUNCATED


def only(found: list[Group]) -> Episode:
    return found[0].episodes[0]


def lengthened(length: int, **settings: float) -> Episode:
    """An episode with one reply, in a budget of 100 of which 20 are the buffer."""
    shaping = ShapingConfig(overlong_buffer=0.2, **settings)
    return only(shape([group(episode(1, length))], shaping, 100))


def test_with_everything_off_nothing_changes():
    groups = [simple(1, 2), simple(3, 3)]
    assert shape(groups, ShapingConfig(), 10) == groups
    assert shaping_metrics(groups, shape(groups, ShapingConfig(), 10)) == {}


def test_spread_is_two_different_rewards():
    assert has_spread(simple(0, 0, 1))
    assert not has_spread(simple(1, 1)) and not has_spread(simple(1)) and not has_spread(group())
    assert not has_spread(group(episode([1, 2], [1, 1]), episode([3], [1])))


# ---- overlong


@pytest.mark.parametrize(
    ("length", "reward"),
    [(1, 1), (80, 1), (81, 1 - 0.05), (90, 0.5), (99, 1 - 0.95), (100, 0), (130, 0)],
)
def test_a_long_reply_is_punished_in_proportion_and_at_most_fully(length, reward):
    assert lengthened(length).reward == pytest.approx(reward)
    assert lengthened(length, overlong_penalty=4).reward == pytest.approx(1 + 4 * (reward - 1))


def test_each_reply_is_punished_by_itself():
    made = episode([1, 2, 3], [9, 4, 10], outcome=TRUNCATED)
    found = only(shape([group(made)], ShapingConfig(overlong_buffer=0.2), 10))
    assert found.rewards == (0.5, 2, 2)


def test_replies_in_several_segments_are_turns_of_one_episode():
    made = replace(episode([1, 2, 3]), segments=(segment(9, 4), segment(10)))
    found = only(shape([group(made)], ShapingConfig(overlong_buffer=0.2), 10))
    assert found.rewards == (0.5, 2, 2)


def test_a_reply_without_a_reward_of_its_own_can_be_punished():
    found = only(shape([group(episode([1], [2, 10]))], ShapingConfig(overlong_buffer=0.2), 10))
    assert found.rewards == (1, -1)


def test_sampled_tokens_count_even_if_they_are_not_trained():
    made = episode(1, 10)
    (tokens,) = made.segments
    made = replace(made, segments=(replace(tokens, trained=(False,) * len(tokens.trained)),))
    assert only(shape([group(made)], ShapingConfig(overlong_buffer=0.2), 10)).reward == 0


# ---- truncated


def test_a_truncated_episode_keeps_no_gain_and_every_loss():
    shaping = ShapingConfig(zero_unless_stopped=True)
    made = group(episode([1, -2, 3], [1, 1, 1], outcome=TRUNCATED), episode([1, -2], [1, 1]))
    found = shape([made], shaping, 10)[0].episodes
    assert found[0].rewards == (0, -2, 0) and found[1].rewards == (1, -2)


def test_a_truncated_episode_keeps_no_gain_of_tokens_either():
    shaping = ShapingConfig(zero_unless_stopped=True)
    made = group(episode(5, 2, outcome=TRUNCATED))
    found = only(shape([made], shaping, 10, lambda s: [0, 0, 2, -1]))
    assert found.rewards == (0,) and found.segments[0].rewards == (0, 0, 0, -1)


def test_the_punishment_comes_after_the_gains_are_gone():
    shaping = ShapingConfig(zero_unless_stopped=True, overlong_buffer=0.2)
    assert only(shape([group(episode(1, 10, outcome=TRUNCATED))], shaping, 10)).reward == -1


def test_truncated_episodes_can_be_left_out_of_the_loss():
    made = group(
        episode(1), episode(0, outcome=TRUNCATED), episode(2, outcome=Outcome.POLICY_ERROR)
    )
    found = shape([made], ShapingConfig(mask_truncated=True), 10)[0]
    assert [e.masked for e in found.episodes] == ["", "mask_truncated", ""]
    assert [e.reward for e in found.episodes] == [1, 0, 2]


# ---- spread


def test_groups_without_spread_can_be_left_out_of_the_loss():
    found = shape([simple(1, 1), simple(1, 2)], ShapingConfig(mask_zero_variance=True), 10)
    assert [e.masked for g in found for e in g.episodes] == ["mask_zero_variance"] * 2 + [""] * 2


def test_the_first_rule_gives_its_name():
    shaping = ShapingConfig(mask_zero_variance=True, mask_truncated=True)
    made = group(episode(1), episode(1, outcome=TRUNCATED), episode(1, masked="mine"))
    found = shape([made], shaping, 10)[0].episodes
    assert [e.masked for e in found] == ["mask_zero_variance", "mask_truncated", "mine"]


def test_groups_without_spread_are_replaced_by_the_others_in_turn():
    groups = [
        simple(*rewards, key=key)
        for key, rewards in {"a": (1, 1), "b": (0, 1), "c": (2,), "d": (0, 2), "e": (0, 0)}.items()
    ]
    found = shape(groups, ShapingConfig(dynamic_sampling="replace"), 10)
    assert [g.task.key for g in found] == ["b", "b", "d", "d", "b"]
    assert all(map(has_spread, found))


def test_with_no_spread_anywhere_nothing_is_replaced():
    groups = [simple(1, 1, key="a"), simple(2, 2, key="b")]
    assert shape(groups, ShapingConfig(dynamic_sampling="replace"), 10) == groups


def test_spread_is_that_of_the_shaped_rewards():
    equal = group(episode(1, 1), episode(1, 10), key="a")
    shaping = ShapingConfig(dynamic_sampling="replace", overlong_buffer=0.2)
    found = shape([equal, simple(0, 1, key="b")], shaping, 10)
    assert [g.task.key for g in found] == ["a", "b"]


def test_filtering_is_not_done_here():
    groups = [simple(1, 1, key="a"), simple(1, 2, key="b")]
    assert shape(groups, ShapingConfig(dynamic_sampling="filter"), 10) == groups


# ---- token rewards


def test_token_rewards_arrive_at_trained_tokens_and_in_the_episodes_reward():
    found = only(shape([group(episode(1, [2, 1]))], ShapingConfig(), 10, lambda s: [0.5] * 7))
    assert found.segments[0].rewards == (0, 0, 0.5, 0.5, 0, 0, 0.5)
    assert found.reward == 2.5 and found.rewards == (1,)


def test_the_greedy_episode_is_rewarded_like_the_others():
    made = group(episode(1, 10), greedy=episode(1, 10, outcome=TRUNCATED))
    shaping = ShapingConfig(overlong_buffer=0.2, zero_unless_stopped=True, mask_truncated=True)
    greedy = shape([made], shaping, 10, lambda s: [0.25] * len(s.token_ids))[0].greedy
    assert greedy is not None and greedy.reward == -1 and greedy.masked == ""


def misses(segment: Segment) -> list[float]:
    return [0.0]


def not_finite(segment: Segment) -> list[float]:
    return [0.0] * (len(segment.token_ids) - 1) + [math.nan]


def falls(segment: Segment) -> list[float]:
    raise KeyError("weights")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (misses, "1 rewards for a segment of 5 tokens"),
        (not_finite, "the reward of token 4 of a segment is nan"),
        (falls, "KeyError: 'weights'"),
        (lambda s: None, "TypeError"),
        (lambda s: ["x"] * 5, "ValueError"),
    ],
)
def test_token_rewards_that_cannot_be_trusted_are_refused_by_name(function, said):
    with pytest.raises(PluginError, match=rf"^algorithm\.token_reward: .*{said}"):
        shape([group(episode(1, 3))], ShapingConfig(), 10, function)


def test_an_error_with_its_own_words_is_passed_on():
    def own(segment: Segment) -> list[float]:
        raise DataError("mine")

    with pytest.raises(DataError, match=r"^mine$"):
        shape([group(episode(1, 3))], ShapingConfig(), 10, own)


# ---- metrics


def test_metrics_tell_what_was_changed_and_nothing_else():
    before = [simple(1, 1, key="a"), simple(0, 2, key="b"), simple(0, 1, 2, 3, key="c")]
    after = shape(before, ShapingConfig(mask_zero_variance=True), 10)
    assert shaping_metrics(before, after) == {"shaping/masked_frac": 2 / 8}
    after = shape(before, ShapingConfig(dynamic_sampling="replace"), 10)
    assert shaping_metrics(before, after) == {
        "shaping/replaced_frac": 1 / 3,
        "reward/shaped_mean": (0 + 2 + 0 + 2 + 0 + 1 + 2 + 3) / 8,
    }
    before = [group(episode(1, 10), episode(0, 1))]
    after = shape(before, ShapingConfig(overlong_buffer=0.2), 10)
    assert shaping_metrics(before, after) == {"reward/shaped_mean": 0}
    assert shaping_metrics([], []) == {}


@steady
@given(
    random_groups(),
    st.builds(
        ShapingConfig,
        dynamic_sampling=st.sampled_from(["off", "replace"]),
        mask_zero_variance=st.booleans(),
        mask_truncated=st.booleans(),
        zero_unless_stopped=st.booleans(),
        overlong_buffer=st.sampled_from([0.0, 0.25]),
    ),
    st.sampled_from([None, lambda s: [0.5] * len(s.token_ids)]),
)
def test_shaping_keeps_the_number_of_groups_and_never_its_input(groups, shaping, token_reward):
    before = copy.deepcopy(groups)
    found = shape(groups, shaping, 16, token_reward)
    assert groups == before and len(found) == len(groups)
    assert all(math.isfinite(e.reward) for g in found for e in g.episodes)
    for value in shaping_metrics(groups, found).values():
        assert math.isfinite(value)
