"""Advantages over a batch: closed forms by hand, plain loops as oracles, and silence where there is
nothing to compare.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fledge.algorithms.advantages import ADVANTAGES, grpo
from fledge.algorithms.returns import (
    Reinforce,
    distillation,
    gae,
    gae_parts,
    gdpo,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    turn,
)
from fledge.algorithms.trajectories import Trajectories, whiten
from fledge.errors import PluginError
from fledge.types import Group
from made_batches import episode, group, numbers, random_groups, simple, steady, trajectories


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def with_values(t: Trajectories, seed: int = 0) -> Trajectories:
    value, bootstrap = numbers(len(t.reward), seed), numbers(len(t.lengths), seed + 1)
    return replace(t, value=value, bootstrap=bootstrap)


def advantage_of(name: str, t: Trajectories) -> Tensor:
    estimator = ADVANTAGES[name]
    found = (estimator() if isinstance(estimator, type) else estimator)(t)
    return found[0] if isinstance(found, tuple) else found


BATCH = [name for name, e in ADVANTAGES.items() if getattr(e, "over_batch", False)]


def complete(*groups: Group) -> Trajectories:
    t = with_values(trajectories(*groups))
    return replace(t, teacher_logp=t.old_logp + numbers(len(t.reward), seed=5))


# ---- reinforce


def test_the_baseline_of_reinforce_is_made_of_earlier_batches_only():
    estimator = Reinforce(decay=0.9)
    assert estimator(trajectories(simple(1, 3), simple(5))).tolist() == [1, 3, 5]
    # minus the mean of the first batch
    assert estimator(trajectories(simple(1, 0, lengths=[1, 2]))).tolist() == [-2, -3, -3]
    expected = 0.9 * 3 + 0.1 * 0.5
    assert estimator(trajectories(simple(2))).tolist() == pytest.approx([2 - expected])


def test_reinforce_counts_an_episode_without_tokens_in_its_average():
    estimator = Reinforce()
    assert estimator(trajectories(simple(1, 5, lengths=[1, 0]))).tolist() == [1]
    assert estimator(trajectories(simple(0))).tolist() == [-3]


def test_reinforce_without_a_baseline_is_the_reward():
    estimator = Reinforce(baseline=False)
    for _ in range(2):
        assert estimator(trajectories(simple(1, 3), simple(-5))).tolist() == [1, 3, -5]


def test_the_baseline_survives_saving():
    ours, other = Reinforce(), Reinforce()
    ours(trajectories(simple(1, 3)))
    other.restore(ours.state())
    after = trajectories(simple(7))
    assert ours(after).tolist() == other(after).tolist() == [5]


# ---- reinforce++


def test_reinforce_pp_whitens_the_discounted_returns():
    t = trajectories(simple(4, 1, lengths=[3, 1]))
    assert torch.equal(reinforce_pp(t, gamma=0.5), whiten(tensor(1, 2, 4, 1)))
    assert torch.equal(reinforce_pp(t), whiten(tensor(4, 4, 4, 1)))


def test_reinforce_pp_sees_the_rewards_of_turns_and_tokens():
    t = trajectories(group(episode([1, 2], [2, 1]), episode(0, 1)))
    assert torch.equal(reinforce_pp(t), whiten(tensor(3, 3, 2, 0)))
    penalised = t.penalised(tensor(1, 0, 0, 0))
    assert torch.equal(reinforce_pp(penalised), whiten(tensor(2, 3, 2, 0)))


def test_reinforce_pp_baseline_subtracts_the_mean_of_the_group_first():
    t = trajectories(simple(0, 2, lengths=[1, 2]), simple(5, 5, lengths=[1, 0]))
    assert torch.equal(reinforce_pp_baseline(t), whiten(tensor(-1, 1, 1, 0)))


def test_a_masked_episode_counts_in_its_group_but_not_in_the_whitening():
    masked = episode(9, 7, index=2, masked="mask_truncated")
    t = trajectories(group(episode(0, 1), episode(3, 2, index=1), masked))
    assert torch.equal(reinforce_pp_baseline(t), whiten(tensor(-4, -1, -1)))


def test_an_episode_without_tokens_counts_in_its_group_but_not_in_the_whitening():
    t = trajectories(simple(0, 3, 9, lengths=[1, 2, 0]))
    assert torch.equal(reinforce_pp_baseline(t), whiten(tensor(-4, -1, -1)))


@pytest.mark.parametrize("name", BATCH)
def test_observed_tokens_change_nothing(name):
    def batch(gap: int) -> Trajectories:
        parts = ({"a": 1.0}, {"a": 2.0}, {"a": 4.0})
        first = episode([1, 2], [3, 2], gap=gap, components=parts[0])
        second = episode([0, 1, 5], [1, 2, 2], gap=gap, index=1, components=parts[1])
        third = episode(2, 4, index=2, gap=gap, components=parts[2])
        return complete(group(first, second, third, greedy=third))

    found = advantage_of(name, batch(1))
    assert torch.equal(found, advantage_of(name, batch(17))) and found.any()


# ---- gae


def plain_gae(t: Trajectories, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """One episode after the other, one token after the other, from the back."""
    advantages, returns, start = [], [], 0
    for s, length in enumerate(t.lengths.tolist()):
        following, later, found = t.bootstrap[s].item(), 0.0, []
        for i in reversed(range(start, start + length)):
            delta = t.reward[i].item() + gamma * following - t.value[i].item()
            later = delta + gamma * lam * later
            following = t.value[i].item()
            found.append((later, later + following))
        for advantage, value in reversed(found):
            advantages.append(advantage)
            returns.append(value)
        start += length
    return advantages, returns


def test_gae_by_hand():
    t = replace(
        trajectories(simple(1, lengths=[2])), value=tensor(0.5, 0.25), bootstrap=tensor(0.0)
    )
    # delta_1 = 1 - 0.25 = 0.75; delta_0 = 0.5 * 0.25 - 0.5 = -0.375, plus 0.5 * 0.8 * 0.75
    advantage, returns = gae_parts(t, gamma=0.5, lam=0.8)
    assert advantage.tolist() == pytest.approx([-0.075, 0.75])
    assert returns.tolist() == pytest.approx([0.425, 1.0])


def test_the_value_behind_a_truncated_episode_is_its_bootstrap_and_not_its_neighbour():
    t = trajectories(simple(0, 0, 0, lengths=[1, 0, 1]))
    t = replace(t, value=tensor(1, 10), bootstrap=tensor(4, 100, 0))
    advantage, returns = gae_parts(t, gamma=0.5, lam=0.9)
    assert advantage.tolist() == [0.5 * 4 - 1, -10]
    assert returns.tolist() == [2, 0]


@steady
@given(random_groups(), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_a_plain_loop_with_gaps_and_bootstraps(groups, gamma, lam):
    t = with_values(trajectories(*groups))
    advantage, returns = gae_parts(t, gamma, lam)
    expected = plain_gae(t, gamma, lam)
    assert advantage.tolist() == pytest.approx(expected[0], rel=1e-9, abs=1e-7)
    assert returns.tolist() == pytest.approx(expected[1], rel=1e-9, abs=1e-7)


def test_gae_without_any_discount_is_return_minus_value():
    t = with_values(trajectories(group(episode([1, -2, 3], [2, 5, 20]), episode(4, 9, index=1))))
    advantage, returns = gae_parts(t, 1.0, 1.0)
    outcome = t.to_go(t.reward, 1.0) + t.per_token(t.bootstrap)
    assert advantage.tolist() == pytest.approx((outcome - t.value).tolist())
    assert returns.tolist() == pytest.approx(outcome.tolist())


def test_gae_whitens_the_advantages_but_not_the_returns():
    t = with_values(trajectories(simple(1, 2, 3, lengths=[4, 2, 9])))
    advantage, returns = gae_parts(t, 0.9, 0.8)
    found = gae(t, gamma=0.9, lam=0.8)
    assert torch.equal(found[0], whiten(advantage)) and torch.equal(found[1], returns)
    assert torch.equal(gae(t, gamma=0.9, lam=0.8, whitened=False)[0], advantage)


def test_gae_leaves_the_values_alone():
    t = with_values(trajectories(simple(1, 2, lengths=[4, 2])))
    before = t.value.clone()
    gae(t)
    assert torch.equal(t.value, before)


# ---- gdpo


def parts(*components: dict[str, float], key: str = "t") -> Group:
    return group(
        *(episode(0, 1, index=i, key=key, components=c) for i, c in enumerate(components)), key=key
    )


def test_gdpo_normalises_each_component_by_itself():
    t = trajectories(
        parts({"fit": 0, "form": 100}, {"fit": 1, "form": 100}, {"fit": 2, "form": 400}),
        parts({"fit": 7, "form": 1}),
    )
    # fit: mean 1, std 1; form: mean 200, std sqrt(30000); a group of one says nothing
    form = [-100 / 30000**0.5, -100 / 30000**0.5, 200 / 30000**0.5]
    expected = tensor(-1 + form[0], form[1], 1 + form[2], 0)
    assert gdpo(t).tolist() == pytest.approx(whiten(expected).tolist(), abs=1e-5)
    weighed = tensor(-1 + 3 * form[0], 3 * form[1], 1 + 3 * form[2], 0)
    found = gdpo(t, weights={"form": 3})
    assert found.tolist() == pytest.approx(whiten(weighed).tolist(), abs=1e-5)


def test_gdpo_of_one_component_is_grpo_whitened():
    rewards = (0.0, 1.0, 5.0)
    t = trajectories(parts(*({"only": r} for r in rewards)))
    expected = whiten(tensor(*grpo(simple(*rewards).episodes)))
    assert gdpo(t).tolist() == pytest.approx(expected.tolist())


def test_gdpo_is_blind_to_a_component_without_spread():
    one = trajectories(parts({"a": 1, "b": 0.1}, {"a": 3, "b": 0.1}, {"a": 4, "b": 0.1}))
    other = trajectories(parts({"a": 1}, {"a": 3}, {"a": 4}))
    assert gdpo(one).tolist() == pytest.approx(gdpo(other).tolist())
    silent = trajectories(parts({"a": 0.1, "b": 3}, {"a": 0.1, "b": 3}, {"a": 0.1, "b": 3}))
    assert not gdpo(silent).any()


@pytest.mark.parametrize(
    ("components", "weights", "said"),
    [
        (({}, {}), None, "episode 0 of task 'sum' has no components"),
        (({"a": 1}, {}), None, "episode 1 of task 'sum' has no component 'a'"),
        (({"a": 1}, {"b": 1}), None, "episode 0 of task 'sum' has no component 'b'"),
        (({"a": 1}, {"a": 2}), {"c": 1}, "a weight for 'c', but the rewards are made of a"),
    ],
)
def test_gdpo_refuses_rewards_whose_parts_it_cannot_tell(components, weights, said):
    with pytest.raises(PluginError, match=rf"^algorithm\.advantage: gdpo .*{said}"):
        gdpo(trajectories(parts(*components, key="sum")), weights=weights)


# ---- remax


def test_remax_compares_with_the_greedy_episode():
    one = group(*simple(1, 4, lengths=[2, 1]).episodes, greedy=episode([1, 0.5], [1, 1]))
    two = group(*simple(3, lengths=[1]).episodes, greedy=episode(7))
    assert remax(trajectories(one, two)).tolist() == [-0.5, -0.5, 2.5, -4]


def test_remax_without_the_greedy_episode_is_silent_for_that_task_only():
    lost = simple(5, 9)
    found = group(*simple(2).episodes, greedy=episode(-1))
    assert remax(trajectories(lost, found)).tolist() == [0, 0, 3]


# ---- turns


def two_and_three() -> Trajectories:
    """Rewards by turn: 1, 2 and 5, 0, 4; lengths 2, 1 and 1, 1, 3."""
    return trajectories(group(episode([1, 2], [2, 1]), episode([5, 0, 4], [1, 1, 3], index=1)))


def test_turns_are_judged_by_what_came_from_them_on():
    # returns to go: 3, 2 and 9, 4, 4; means 6, 3, and nobody else has the third turn
    assert turn(two_and_three()).tolist() == [-3, -3, -1, 3, 1, 0, 0, 0]


def test_turns_can_be_discounted():
    # returns to go: 2, 2 and 5 + 0 + 1, 2, 4
    found = turn(two_and_three(), gamma=0.5, baseline=False)
    assert found.tolist() == [2, 2, 2, 6, 2, 4, 4, 4]


def test_turns_can_be_judged_by_their_own_reward():
    found = turn(two_and_three(), to_go=False, baseline=False)
    assert found.tolist() == [1, 1, 2, 5, 0, 4, 4, 4]
    assert turn(two_and_three(), to_go=False).tolist() == [-2, -2, 1, 2, -1, 0, 0, 0]


def test_turns_scaled_by_their_spread():
    found = turn(two_and_three(), scale_by_std=True).tolist()
    root = 0.5**0.5
    assert found == pytest.approx([-root, -root, -root, root, root, 0, 0, 0], abs=1e-5)


def test_turns_cannot_be_scaled_without_a_baseline():
    with pytest.raises(PluginError, match=r"^algorithm\.advantage: turn .*baseline"):
        turn(two_and_three(), baseline=False, scale_by_std=True)


def test_turns_see_penalties_of_single_tokens():
    t = two_and_three().penalised(tensor(0, 1, 0, 0, 0, 0, 0, 0))
    assert turn(t, to_go=False, baseline=False).tolist() == [0, 0, 2, 5, 0, 4, 4, 4]


def test_a_masked_episode_is_still_one_to_compare_with():
    long = episode([5, 0, 4], [1, 1, 3], index=1)
    both = group(episode([1, 2], [2, 1]), replace(long, masked="mask_truncated"))
    assert turn(trajectories(both)).tolist() == [-3, -3, -1]
    (segment,) = long.segments
    earned = tuple(float(i == 2) for i in range(len(segment.token_ids)))  # the first sampled token
    long = replace(long, segments=(replace(segment, rewards=earned),))
    both = group(episode([1, 2], [2, 1]), replace(long, masked="mask_truncated"))
    assert turn(trajectories(both)).tolist() == [-3.5, -3.5, -1]


@steady
@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4), min_size=1, max_size=4))
def test_with_one_turn_each_turn_is_dr_grpo(rewards):
    groups = [simple(*r, lengths=[2] * len(r), key=str(i)) for i, r in enumerate(rewards)]
    expected = [a for g in groups for a in grpo(g.episodes, scale_by_std=False) for _ in range(2)]
    assert turn(trajectories(*groups)).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-6)


# ---- distillation


def test_distillation_is_minus_the_reverse_kl_of_each_token():
    t = trajectories(simple(1, 0, lengths=[2, 1]))
    t = replace(t, old_logp=tensor(-1, -2, -3), teacher_logp=tensor(-2, -0.5, -3))
    assert distillation(t).tolist() == [-1, 1.5, 0]


def test_a_reward_may_drive_what_a_teacher_holds_back():
    t = trajectories(simple(3, 1, lengths=[2, 1]))
    t = replace(t, old_logp=tensor(-1, -2, -3), teacher_logp=tensor(-2, -0.5, -3))
    assert distillation(t, reward=0.5).tolist() == [-1 + 0.5, 1.5 + 0.5, 0 - 0.5]


def test_distillation_stays_finite_where_the_teacher_would_never_go():
    t = trajectories(simple(1, 0, lengths=[2, 1]))
    impossible = tensor(-torch.inf, -0.5, -50)
    t = replace(t, old_logp=tensor(-1, -torch.inf, -1), teacher_logp=impossible)
    assert distillation(t).tolist() == [-20, 20, -20]


# ---- all of them


def test_what_each_estimator_asks_for():
    marks = {
        name: (sorted(ADVANTAGES[name].needs), ADVANTAGES[name].greedy)
        for name in BATCH
        if ADVANTAGES[name].needs or ADVANTAGES[name].greedy
    }
    assert marks == {
        "gae": (["value"], False),
        "remax": ([], True),
        "distillation": (["teacher_logp"], False),
    }
    assert len(BATCH) == 8 and "reinforce" in BATCH


@steady
@given(groups=random_groups())
def test_every_estimator_is_finite_for_every_batch(groups):
    t = complete(*groups)
    for name in BATCH:
        found = advantage_of(name, t)
        assert found.shape == t.reward.shape and found.isfinite().all(), name


@pytest.mark.parametrize("name", ["reinforce++_baseline", "gdpo", "turn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@steady
@given(st.floats(-1e6, 1e6), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_batch_of_silent_groups_gets_exactly_zero(name, dtype, reward, sizes):
    made = episode(reward, 3, components={"a": reward, "b": 1.0})
    t = trajectories(*(group(*[made] * size) for size in sizes), dtype=dtype)
    assert not advantage_of(name, t).any()


@steady
@given(groups=random_groups(), data=st.data())
def test_a_permutation_of_groups_and_episodes_permutes_the_advantages(groups, data):
    t = complete(*groups)
    orders = [data.draw(st.permutations(range(len(g.episodes)))) for g in groups]
    among = data.draw(st.permutations(range(len(groups))))
    starts = [sum(len(g.episodes) for g in groups[:i]) for i in range(len(groups))]
    moved = [starts[g] + i for g in among for i in orders[g]]  # the old place of each episode

    def place(column: Tensor) -> Tensor:
        rows = column.split(t.lengths.tolist())
        return torch.cat([rows[i] for i in moved])

    shuffled = [
        replace(groups[g], episodes=tuple(groups[g].episodes[i] for i in orders[g])) for g in among
    ]
    other = replace(
        trajectories(*shuffled),
        value=place(t.value),
        bootstrap=t.bootstrap[moved],
        teacher_logp=place(t.teacher_logp),
    )
    for name in BATCH:
        expected = place(advantage_of(name, t))
        scale = 1 + expected.abs().max().item() if len(expected) else 1
        found = advantage_of(name, other)
        close = pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6 * scale)
        assert found.tolist() == close, name


@pytest.mark.parametrize("name", BATCH)
def test_a_batch_in_which_everything_is_masked_has_no_advantages(name):
    one = episode(1, 3, masked="mask_truncated", components={"a": 1.0})
    two = episode(2, 3, masked="mask_truncated", components={"a": 2.0}, index=1)
    assert advantage_of(name, complete(group(one, two, greedy=one))).shape == (0,)
