"""From episodes to rows and columns: where each reward arrives, which turn a token is part of, and
what is never torn apart.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fledge.data.batch import Batch, Row, after_the_end, pack, pack_pairs
from fledge.errors import TrainingError
from fledge.types import Episode, Group, Outcome, Pair, Sample, Segment, Task


def segment(layout: str, **columns: tuple[float, ...]) -> Segment:
    """`.` is observed, `x` sampled and trained, `o` sampled but not trained."""
    return Segment(
        token_ids=tuple(range(10, 10 + len(layout))),
        logps=tuple(0.0 if c == "." else -0.1 * (i + 1) for i, c in enumerate(layout)),
        trained=tuple(c == "x" for c in layout),
        versions=tuple(-1 if c == "." else 2 for c in layout),
        **columns,
    )


def episode(rewards: tuple[float, ...], *layouts: str, index: int = 0, masked: str = "") -> Episode:
    segments = tuple(map(segment, layouts))
    return Episode("sum", index, segments, rewards, Outcome.OK, (), masked=masked)


def packed(*episodes: Episode) -> Batch:
    return pack([Group(Task("sum", {}), 0, episodes)])


def rewards_and_turns(*episodes: Episode) -> tuple[list[float], list[int]]:
    columns = packed(*episodes).columns
    return columns["reward"].tolist(), columns["turn"].tolist()


# ---- rewards and turns


def test_a_turns_reward_arrives_at_its_last_trained_token():
    found = rewards_and_turns(episode((1, 2), "..xx..xxx"))
    assert found == ([0, 1, 0, 0, 2], [0, 0, 1, 1, 1])


def test_turns_go_on_from_segment_to_segment():
    made = episode((1, 2, 3), ".xx.x", "....xx")
    assert rewards_and_turns(made) == ([0, 1, 2, 0, 3], [0, 0, 1, 2, 2])
    assert [r.trained for r in packed(made).rows] == [(1, 2, 4), (4, 5)]
    assert [r.sequence for r in packed(made).rows] == [0, 0]


def test_the_reward_of_a_turn_without_trained_tokens_arrives_before_it():
    assert rewards_and_turns(episode((1, 2, 4), ".xx.oo.x")) == ([0, 3, 4], [0, 0, 2])


def test_rewards_behind_the_last_trained_token_arrive_at_it():
    assert rewards_and_turns(episode((1, 2), ".x.oo")) == ([3], [0])


def test_a_turn_that_no_trained_token_led_to_teaches_nothing():
    found = rewards_and_turns(episode((7,), ".x"), episode((5, 1), ".oo.x", index=1))
    assert found == ([7, 1], [0, 1]), "it is not charged to the episode before"


def test_rewards_of_single_tokens_add_to_the_turns():
    made = episode((1,), ".xx.o")
    with_tokens = segment(".xx.o", rewards=(9, 0.25, 0.5, 9, 9))
    assert rewards_and_turns(replace(made, segments=(with_tokens,))) == ([0.25, 1.5], [0, 0])


def test_episodes_do_not_share_rewards():
    found = rewards_and_turns(
        episode((1,), ".x"), episode((2, 3), ".x.x", index=1), episode((4,), ".xx", index=2)
    )
    assert found == ([1, 2, 3, 0, 4], [0, 0, 1, 0, 0])


def test_a_masked_episode_has_no_tokens_but_keeps_its_number():
    batch = packed(
        episode((1,), ".x"), episode((2,), ".xx", index=1, masked="rule"), episode((3,), ".x")
    )
    assert [r.sequence for r in batch.rows] == [0, 2]
    assert batch.columns["reward"].tolist() == [1, 3]
    assert len(batch.groups[0].episodes) == 3


def test_rewards_are_summed_in_double_precision():
    column = packed(episode((1e6, 1e-6), ".x.o")).columns["reward"]
    assert column.dtype == torch.float64 and column.item() == 1e6 + 1e-6


@pytest.mark.parametrize("impossible", [-math.inf, math.nan])
def test_a_token_that_cannot_have_been_sampled_is_refused_by_task_and_episode(impossible):
    made = episode((1,), ".xx", index=3)
    (tokens,) = made.segments
    bad = replace(made, segments=(replace(tokens, logps=(0.0, -0.5, impossible)),))
    said = rf"episode 3 of task 'sum' has .* {impossible}\b.*cannot have been sampled"
    with pytest.raises(TrainingError, match=said):
        packed(episode((1,), ".x"), bad)


def test_an_impossible_token_that_is_not_trained_is_nobodys_business():
    made = episode((1,), ".ox")
    (tokens,) = made.segments
    odd = replace(made, segments=(replace(tokens, logps=(0.0, -math.inf, -0.5)),))
    assert packed(odd).columns["engine_logp"].tolist() == [-0.5]


def test_nothing_to_train_on_is_an_empty_batch():
    batch = packed(episode((1,), masked="rule"))
    assert batch.rows == () and all(len(c) == 0 for c in batch.columns.values())


# ---- cuts


@pytest.mark.parametrize("budget", [1, 5, 9, 20, 1000])
def test_the_rows_of_a_sequence_are_never_in_two_micro_batches(budget):
    made = [episode((float(i),), ".xx", "...x.x", ".x", index=i) for i in range(5)]
    batch = packed(*made)
    micros = batch.micros(budget)
    owners = [{r.sequence for r in m.rows} for m in micros]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 5
    assert all(len(m.rows) == 3 * len(o) for m, o in zip(micros, owners, strict=True))
    assert all(m.lengths.tolist() == [5] * len(o) for m, o in zip(micros, owners, strict=True))
    assert torch.equal(torch.cat([m.columns["reward"] for m in micros]), batch.columns["reward"])
    assert (len(micros) == 1) == (budget == 1000)


# ---- pairs


def test_the_halves_of_a_pair_are_one_sequence_with_two_sides():
    pairs = [
        Pair(Sample((1, 2, 3), (0, 1, 1)), Sample((1, 4), (0, 1))),
        Pair(Sample((5, 6), (0, 1)), Sample((5, 7, 8), (0, 0, 1))),
    ]
    batch = pack_pairs(pairs)
    assert [r.token_ids for r in batch.rows] == [(1, 2, 3), (1, 4), (5, 6), (5, 7, 8)]
    assert [r.sequence for r in batch.rows] == [r.prompt for r in batch.rows] == [0, 0, 1, 1]
    assert batch.columns["side"].tolist() == [1, 1, -1, 1, -1]
    assert batch.lengths.tolist() == [3, 2]
    assert [len(m.rows) for m in batch.micros(1)] == [2, 2]


# ---- what comes next


def test_the_state_after_the_last_trained_token_is_one_more_place_to_predict():
    rows = (
        Row(token_ids=(5, 6, 7, 8, 9), trained=(2, 3), sequence=4, prompt=1),
        Row(token_ids=(5, 6), trained=(1,), sequence=5, prompt=1),
    )
    found = after_the_end(rows)
    assert found[0] == Row((5, 6, 7, 8, 0), (2, 3, 4), sequence=4, prompt=1)
    assert found[1] == Row((5, 6, 0), (1, 2), sequence=5, prompt=1)
    assert [r.needed for r in found] == [4, 2]
