"""The window rule: no batch is issued too early, nothing is lost, and a resume replays what was not
trained.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from fledge.data.stream import TaskStream
from fledge.orchestration.experience import Experience, episode_seed
from fledge.types import Group, Task
from helpers import run

TASKS = [Task(f"t{i}", {"n": i}) for i in range(7)]
STEPS = 8


@dataclass
class Generator:
    """Takes its time, and notes which version each group was begun and ended under."""

    version: int = 0
    begun: list[tuple[str, int, int]] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def generate(self, task: Task, n: int, *, epoch: int, seed: int) -> Group:
        self.begun.append((task.key, seed, self.version))
        for _ in range(self.rng.randint(0, 20)):
            await asyncio.sleep(0)
        return Group(task, epoch, (), {"seed": seed, "version": self.begun_under(seed)})

    def begun_under(self, seed: int) -> int:
        return next(v for _, s, v in self.begun if s == seed)


def experience(
    generator: Generator, stream: TaskStream, version: int, max_lag: int, last: int = STEPS - 1
) -> Experience:
    return Experience(
        generator,
        stream,
        group_size=2,
        groups_per_step=3,
        seed=11,
        version=version,
        last_batch=last,
        max_lag=max_lag,
    )


def tasks() -> TaskStream:
    return TaskStream(TASKS, seed=5, shuffle=True)


async def train(
    generator: Generator, stream: TaskStream, start: int, end: int, max_lag: int
) -> tuple[list[list[tuple[str, int]]], list[int], list[object]]:
    """What each step trained on, the lag of each group, and the state a checkpoint would hold."""
    batches, lags, states = [], [], []
    generator.version = start
    async with experience(generator, stream, start, max_lag) as source:
        for version in range(start, end):
            states.append(source.state(version))
            groups = (await source.take()).groups
            batches.append([(g.task.key, g.dropped["seed"]) for g in groups])
            lags += [version - g.dropped["version"] for g in groups]
            generator.version = version + 1
            source.advance(version + 1)
    return batches, lags, states


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_no_group_is_older_than_the_lag_and_nothing_is_lost(max_lag: int):
    generator = Generator()
    batches, lags, _ = run(train(generator, tasks(), 0, STEPS, max_lag))
    assert min(lags) >= 0 and max(lags) == max_lag, "the lag is used, and never exceeded"
    stream = tasks()
    expected = [stream.next()[1].key for _ in range(3 * STEPS)]
    assert [key for batch in batches for key, _ in batch] == expected
    assert len(generator.begun) == 3 * STEPS, "every group that was issued is trained, and no other"


def test_batches_do_not_depend_on_the_lag_or_on_time():
    found = [
        run(train(Generator(rng=random.Random(seed)), tasks(), 0, STEPS, max_lag))[0]
        for seed, max_lag in ((0, 0), (1, 0), (2, 1), (3, 2))
    ]
    assert all(batches == found[0] for batches in found)


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resume_replays_exactly_the_batches_that_were_not_trained(stop: int, max_lag: int):
    whole, _, states = run(train(Generator(), tasks(), 0, STEPS, max_lag))
    stream = tasks()
    stream.restore(states[stop])
    rest, _, _ = run(train(Generator(), stream, stop, STEPS, max_lag))
    assert rest == whole[stop:]


def test_the_state_before_a_batch_is_issued_is_where_the_stream_stands():
    """At a checkpoint the loop asks for the state of a version that has not been advanced to."""

    async def play(max_lag: int) -> tuple[object, object]:
        async with experience(Generator(), tasks(), 0, max_lag) as source:
            await source.take()
            before = source.state(1)
            source.advance(1)
            return before, source.state(1)

    for max_lag in (0, 1):
        before, after = run(play(max_lag))
        assert before == after
        assert before["position"] == 3


# ---- dynamic sampling


def odd(group: Group) -> bool:
    return int(group.task.key[1:]) % 2 == 1


async def train_filtered(generator: Generator, stream: TaskStream, start: int, rounds: int):
    """What each step took, what it turned down, and how often it drew anew."""
    found, states = [], []
    source = Experience(
        generator,
        stream,
        group_size=2,
        groups_per_step=3,
        seed=11,
        version=start,
        last_batch=STEPS - 1,
        keep=odd,
        max_rounds=rounds,
    )
    async with source:
        for version in range(start, STEPS):
            taken = await source.take()
            found.append(
                (
                    [(g.task.key, g.dropped["seed"]) for g in taken.groups],
                    [g.task.key for g in taken.filtered],
                    taken.rounds,
                )
            )
            states.append(source.state(version + 1))  # as at a checkpoint, before it is advanced
            source.advance(version + 1)
    return found, states


def test_groups_that_are_turned_down_are_replaced_until_the_batch_is_full():
    generator = Generator()
    steps, _ = run(train_filtered(generator, tasks(), 0, rounds=20))
    played = [key for key, _, _ in generator.begun]
    for groups, filtered, rounds in steps:
        assert len(groups) == 3 and all(int(key[1:]) % 2 for key, _ in groups)
        assert not any(int(key[1:]) % 2 for key in filtered)
        assert bool(filtered) == bool(rounds)
    assert any(rounds > 1 for _, _, rounds in steps)
    assert len(played) == sum(len(g) + len(f) for g, f, _ in steps), "nothing is lost or hidden"
    seeds = [seed for _, seed, _ in generator.begun]
    assert len(set(seeds)) == len(seeds)


def test_filtering_is_bounded():
    steps, _ = run(train_filtered(Generator(), tasks(), 0, rounds=1))
    assert all(rounds <= 1 for _, _, rounds in steps)
    assert any(len(groups) < 3 for groups, _, _ in steps)


@pytest.mark.parametrize("stop", [1, 4])
def test_a_resume_goes_on_after_the_tasks_that_filtering_used_up(stop: int):
    whole, states = run(train_filtered(Generator(), tasks(), 0, rounds=20))
    stream = tasks()
    stream.restore(states[stop - 1])
    rest, _ = run(train_filtered(Generator(), stream, stop, rounds=20))
    assert rest == whole[stop:]


def test_nothing_is_issued_beyond_the_last_step():
    generator = Generator()

    async def play() -> None:
        async with experience(generator, tasks(), 0, max_lag=5, last=1) as source:
            await source.take()
            source.advance(1)
            await source.take()

    run(play())
    assert len(generator.begun) == 6


def test_leaving_cancels_what_is_in_flight():
    cancelled = 0

    class Slow(Generator):
        async def generate(self, task, n, *, epoch, seed):
            nonlocal cancelled
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled += 1
                raise

    async def play() -> None:
        async with experience(Slow(), tasks(), 0, max_lag=1):
            await asyncio.sleep(0)

    run(play(), seconds=5)
    assert cancelled == 6


def test_a_failure_of_the_generator_is_raised_where_the_batch_is_taken():
    class Failing(Generator):
        async def generate(self, task, n, *, epoch, seed):
            raise RuntimeError("boom")

    async def play() -> None:
        async with experience(Failing(), tasks(), 0, max_lag=0) as source:
            await source.take()

    with pytest.raises(RuntimeError, match="boom"):
        run(play(), seconds=5)


def test_seeds_of_episodes_never_meet():
    groups = [episode_seed(0, batch, i) for batch in range(50) for i in range(8)]
    seeds = {seed + episode for seed in groups for episode in range(8)}
    assert len(seeds) == 50 * 8 * 8 and all(0 <= s < 2**64 for s in seeds)
    assert episode_seed(0, 1, 2) == episode_seed(0, 1, 2) != episode_seed(1, 1, 2)
