"""No estimator costs more than a few passes over the tokens of its batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from crafted import LIMIT_OF_COST

from fledge.algorithms.advantages import ADVANTAGES
from fledge.algorithms.returns import gae_parts
from fledge.algorithms.trajectories import Trajectories, whiten
from made_batches import episode, group, trajectories

GROUPS, SIZE, LENGTH, TURNS = 64, 8, 512, 4
MOST = LIMIT_OF_COST


def seconds(work: Callable[[], object], repeats: int = 12) -> float:
    """CPU time of the fastest of several runs: others share the machine."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


@pytest.fixture(scope="module")
def batch() -> Trajectories:
    generator = torch.Generator().manual_seed(0)

    def noise(count: int) -> torch.Tensor:
        return torch.rand(count, generator=generator)

    lengths = [LENGTH // TURNS] * TURNS
    rewards = noise(GROUPS * SIZE).tolist()
    groups = []
    for g in range(GROUPS):
        episodes = []
        for i in range(SIZE):
            reward = rewards[g * SIZE + i]
            parts = {"a": reward, "b": -reward}
            made = episode([0, 0, 0, reward], lengths, index=i, key=str(g), components=parts, gap=1)
            episodes.append(made)
        groups.append(group(*episodes, key=str(g), greedy=episodes[0]))
    t = trajectories(*groups, dtype=torch.float32)
    count = len(t.reward)
    assert count == 262_144
    return replace(
        t, value=noise(count), bootstrap=noise(len(t.lengths)), teacher_logp=-noise(count)
    )


@pytest.fixture(scope="module")
def unit() -> Callable[[], float]:
    """One exponential and three multiplications over as many numbers: what a loss does at least."""
    x = torch.rand(GROUPS * SIZE * LENGTH)

    def work() -> object:
        return x.exp() * x * x * x

    return lambda: seconds(work)


def assert_cheap(work: Callable[[], object], unit: Callable[[], float]) -> None:
    """The better of two tries, each against the machine as it is at that moment."""
    work()
    ratio = seconds(work) / unit()
    if ratio > MOST:
        ratio = min(ratio, seconds(work, 40) / unit())
    assert ratio <= MOST, f"{ratio:.2f} times one exponential and three multiplications"


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"gae"}))
def test_an_estimator_is_cheap(name, batch, unit):
    estimator = ADVANTAGES[name]
    if isinstance(estimator, type):
        estimator = estimator()
    if getattr(estimator, "over_batch", False):
        assert_cheap(lambda: estimator(batch), unit)
        return

    def lifted() -> torch.Tensor:
        found = [a for g in batch.groups for a in estimator(g.episodes)]
        return batch.per_token(torch.tensor(found))

    assert_cheap(lifted, unit)


def test_the_returns_and_the_whitening_of_gae_are_cheap(batch, unit):
    assert_cheap(lambda: gae_parts(batch, 1.0, 0.95), unit)
    assert_cheap(lambda: whiten(batch.value), unit)


def test_sums_to_go_of_ragged_episodes_are_cheap(batch, unit):
    shifts = torch.randint(-200, 200, (len(batch.lengths) // 2,))
    ragged = replace(batch, lengths=batch.lengths + torch.cat([shifts, -shifts]))
    assert_cheap(lambda: ragged.to_go(batch.value, 0.95), unit)


def test_a_penalty_costs_no_more_than_any_estimator(batch: Trajectories, unit):
    penalty = torch.rand(len(batch.reward))
    assert seconds(lambda: batch.penalised(penalty)) < MOST * unit()
    alone = replace(batch, turn=torch.zeros_like(batch.turn)).penalised(penalty)
    # Records of 512 episodes are made anew: mostly Python, which a long test run slows down.
    assert seconds(alone.charged) < 2 * MOST * unit()
