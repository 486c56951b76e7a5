"""Sharing an engine: seeds, pages, prefixes and waves. Tokens never depend on the company."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from fledge.errors import EngineError
from fledge.inference import NativeEngine
from fledge.types import Completion, Sampling
from helpers import VOCABULARY, run


def engine_with(policy, pages: int, monkeypatch: pytest.MonkeyPatch) -> NativeEngine:
    """An engine with exactly this many pages, fewer than a megabyte has."""
    with monkeypatch.context() as patch:
        patch.setattr("fledge.inference.engine.bytes_per_block", lambda _: 2**20 // (pages + 1))
        engine = NativeEngine(policy, cache_mb=1)
    assert engine.scheduler.pool.total == pages
    return engine


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


async def dawdle(rng: random.Random, most: int = 12) -> None:
    for _ in range(rng.randint(0, most)):
        await asyncio.sleep(0)


Asks = list[tuple[list[int], Sampling]]


async def together(engine: NativeEngine, asks: Asks) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(p, s) for p, s in asks))


# ---- seeds


def test_a_request_draws_the_same_tokens_alone_and_in_a_crowd(policy):
    rng = random.Random(0)
    asks = [
        (ids(rng, rng.randint(1, 40)), Sampling(max_new_tokens=rng.randint(4, 20), seed=seed))
        for seed in range(32)
    ]

    async def crowd() -> list[Completion]:
        engine = NativeEngine(policy, cache_mb=1)

        async def late(prompt: list[int], sampling: Sampling) -> Completion:
            await dawdle(rng)
            return await engine.generate(prompt, sampling)

        return await asyncio.gather(*(late(*ask) for ask in asks))

    crowded = run(crowd())
    for ask, said in list(zip(asks, crowded, strict=True))[::5]:
        alone = run(NativeEngine(policy, cache_mb=1).generate(*ask))
        assert alone.token_ids == said.token_ids
        assert alone.logps == pytest.approx(said.logps, abs=1e-5)


def test_different_seeds_draw_different_tokens_from_one_prompt(policy):
    engine = NativeEngine(policy, cache_mb=1)
    said = run(together(engine, [([5, 6, 7], Sampling(8, seed=s)) for s in range(16)]))
    assert len({c.token_ids for c in said}) == 16


# ---- pages


@pytest.mark.parametrize("length", [5, 32, 40])
def test_a_group_is_prefilled_once_and_each_member_goes_its_own_way(policy, length: int):
    engine = NativeEngine(policy, cache_mb=1)
    asks = [(ids(random.Random(1), length), Sampling(6, seed=s)) for s in range(8)]
    said = run(together(engine, asks))
    assert engine.prefill_tokens == length
    assert engine.sampled_tokens == 48
    for ask, completion in list(zip(asks, said, strict=True))[::3]:
        alone = run(NativeEngine(policy, cache_mb=1).generate(*ask))
        assert alone.token_ids == completion.token_ids
        assert alone.logps == pytest.approx(completion.logps, abs=1e-5)


def test_a_second_turn_computes_only_what_is_new(policy):
    engine = NativeEngine(policy, cache_mb=1)
    prompt = ids(random.Random(1), 40)

    async def two_turns() -> tuple[list[int], Completion]:
        first = await engine.generate(prompt, Sampling(10))
        assert len(first.token_ids) == 10
        assert engine.prefill_tokens == 40
        longer = [*prompt, *first.token_ids, 7, 8, 9]
        return longer, await engine.generate(longer, Sampling(10, seed=1))

    longer, second = run(two_turns())
    # 49 tokens have been fed, which fills 3 pages of 16; 53 - 48 are left
    assert engine.prefill_tokens == 40 + 5
    fresh = run(NativeEngine(policy, cache_mb=1).generate(longer, Sampling(10, seed=1)))
    assert second.token_ids == fresh.token_ids


def test_reused_pages_give_the_same_tokens_as_a_fresh_engine(policy):
    rng = random.Random(3)
    beginning = ids(rng, 35)
    asks = [(beginning + ids(rng, n), Sampling(8, seed=n)) for n in (1, 5, 13, 14)]
    warm = NativeEngine(policy, cache_mb=1)
    run(warm.generate(beginning, Sampling(1)))
    before = warm.prefill_tokens
    shared = run(together(warm, asks))
    assert warm.prefill_tokens - before == sum(len(p) - 32 for p, _ in asks)
    for ask, said in zip(asks, shared, strict=True):
        fresh = run(NativeEngine(policy, cache_mb=1).generate(*ask))
        assert fresh.token_ids == said.token_ids
        assert fresh.logps == pytest.approx(said.logps, abs=1e-5)


def test_requests_beyond_the_memory_wait_and_all_finish(policy, monkeypatch):
    rng = random.Random(5)
    asks = [(ids(rng, 20), Sampling(20, seed=s)) for s in range(10)]  # 3 pages each
    small = engine_with(policy, 8, monkeypatch)
    most = 0
    decode = small._runner.decode

    def spy(running: list[Any]) -> Any:
        nonlocal most
        most = max(most, len(running))
        return decode(running)

    small._runner.decode = spy
    said = run(together(small, asks))
    assert most == 2
    expected = run(together(NativeEngine(policy, cache_mb=1), asks))
    assert [c.token_ids for c in said] == [c.token_ids for c in expected]
    assert small.scheduler.pool.available == 8


def test_eviction_under_pressure_changes_no_token(policy, monkeypatch):
    beginning = ids(random.Random(6), 20)

    async def conversation(engine: NativeEngine, number: int) -> list[tuple[int, ...]]:
        rng = random.Random(number)
        prompt, said = beginning + ids(rng, number), []
        for turn in range(3):
            await dawdle(rng)
            sampling = Sampling(max_new_tokens=6, seed=10 * number + turn)
            completion = await engine.generate(prompt, sampling)
            said.append(completion.token_ids)
            prompt = [*prompt, *completion.token_ids, *ids(rng, 4)]
        return said

    async def all_of(engine: NativeEngine) -> list[Any]:
        return await asyncio.gather(*(conversation(engine, n) for n in range(8)))

    small = engine_with(policy, 10, monkeypatch)
    evicted = 0
    evict = small.scheduler.pool._evict

    def spy() -> int:
        nonlocal evicted
        evicted += 1
        return evict()

    small.scheduler.pool._evict = spy
    assert run(all_of(small)) == run(all_of(NativeEngine(policy, cache_mb=4)))
    assert evicted > 10, "there was no pressure, so this proved nothing"
    assert small.scheduler.pool.available == 10


def test_a_request_that_never_fits_is_refused_by_name(policy, monkeypatch):
    engine = engine_with(policy, 4, monkeypatch)
    with pytest.raises(EngineError, match=r"engine\.cache_mb"):
        run(engine.generate([5] * 50, Sampling(max_new_tokens=20)))
    assert len(run(engine.generate([5] * 50, Sampling(max_new_tokens=14))).token_ids) == 14


def test_a_cache_without_room_for_one_page_is_refused_by_name(policy, monkeypatch):
    monkeypatch.setattr("fledge.inference.engine.bytes_per_block", lambda _: 2**20)
    with pytest.raises(EngineError, match=r"engine\.cache_mb=1 "):
        NativeEngine(policy, cache_mb=1)


# ---- waves


def record(engine: NativeEngine) -> list[tuple[Any, ...]]:
    """Who ran with whom, step by step, by the seeds of the requests."""
    steps: list[tuple[Any, ...]] = []
    prefill, decode = engine._runner.prefill, engine._runner.decode

    def on_prefill(admissions: Any) -> Any:
        who = tuple(tuple(m.sampling.seed for m in a.members) for a in admissions)
        cached = tuple(a.leader.cached for a in admissions)
        steps.append(("prefill", who, cached))
        return prefill(admissions)

    def on_decode(running: Any) -> Any:
        steps.append(("decode", tuple(r.sampling.seed for r in running)))
        return decode(running)

    engine._runner.prefill, engine._runner.decode = on_prefill, on_decode
    return steps


async def episode(engine: NativeEngine, number: int, rng: random.Random, waves: bool) -> None:
    """One to three turns, with an environment that takes its time."""
    with engine.session() as session:
        prompt = [3 + number // 2] * 20
        for turn in range(1 + number % 3):
            await dawdle(rng)
            if rng.random() < 0.2:
                await asyncio.sleep(0.001)
            sampling = Sampling(max_new_tokens=2 + number % 4, seed=10 * number + turn)
            said = await engine.generate(prompt, sampling, session if waves else None)
            prompt = [*prompt, *said.token_ids, 7]
        await dawdle(rng)


def compositions(policy, timing: int, waves: bool, cache_mb: int = 1) -> list[tuple[Any, ...]]:
    engine = NativeEngine(policy, cache_mb)
    steps = record(engine)

    async def play() -> None:
        rng = random.Random(timing)
        await asyncio.gather(*(episode(engine, n, rng, waves) for n in range(7)))

    run(play())
    assert not engine.scheduler.sessions
    return steps


def test_who_shares_a_batch_in_a_wave_does_not_depend_on_time(policy):
    first = compositions(policy, timing=0, waves=True)
    assert all(compositions(policy, timing, waves=True) == first for timing in (1, 2, 3))
    assert max(len(step[1]) for step in first) > 3, "nobody shared a batch"


def test_without_sessions_it_does_depend_on_time(policy):
    """A check of the test above: the delays are real."""
    first = compositions(policy, timing=0, waves=False)
    assert any(compositions(policy, timing, waves=False) != first for timing in (1, 2, 3))


def test_waves_are_the_same_under_memory_pressure(policy, monkeypatch):
    monkeypatch.setattr("fledge.inference.engine.bytes_per_block", lambda _: 2**20 // 8)
    first = compositions(policy, timing=0, waves=True)
    assert all(compositions(policy, timing, waves=True) == first for timing in (1, 2))


def test_a_request_without_a_session_joins_a_running_wave(policy):
    engine = NativeEngine(policy, cache_mb=1)
    steps = record(engine)

    async def play() -> None:
        with engine.session() as session:
            work = asyncio.create_task(engine.generate([5, 6], Sampling(20, seed=1), session))
            for _ in range(6):
                await asyncio.sleep(0)
            await engine.generate([7, 8], Sampling(3, seed=2))
            assert not work.done()
            await work

    run(play())
    assert ("decode", (1, 2)) in steps


def test_an_environment_may_ask_the_engine_while_its_siblings_wait(policy):
    engine = NativeEngine(policy, cache_mb=1)

    async def plain(number: int) -> Completion:
        with engine.session() as session:
            return await engine.generate([5, number], Sampling(4), session)

    async def judged() -> Completion:
        with engine.session() as session:
            await asyncio.sleep(0.01)  # the sibling's request is waiting by now
            await engine.generate([9, 9], Sampling(2))  # a judge, without a session
            return await engine.generate([5, 6], Sampling(4), session)

    async def play() -> list[Completion]:
        return await asyncio.gather(plain(8), judged())

    assert [len(c.token_ids) for c in run(play(), seconds=10)] == [4, 4]
