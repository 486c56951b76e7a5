"""The life of a request: streaming, stopping, cancelling, pausing, failing, closing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from fledge.errors import EngineError
from fledge.inference import NativeEngine
from fledge.types import Completion, Sampling
from helpers import run

PROMPT = list(range(3, 23))
LONG = Sampling(max_new_tokens=60, seed=4)


@pytest.fixture
def engine(policy) -> NativeEngine:
    return NativeEngine(policy, cache_mb=1)


def all_pages_are_back(engine: NativeEngine) -> bool:
    pool = engine.scheduler.pool
    return pool.available == pool.total and not engine.scheduler.everything()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# ---- streaming and cancelling


def test_streaming_yields_the_tokens_of_generate(engine):
    async def listen() -> list[tuple[int, float]]:
        return [item async for item in engine.stream(PROMPT, LONG)]

    heard = run(listen())
    said = run(engine.generate(PROMPT, LONG))
    assert tuple(token for token, _ in heard) == said.token_ids
    assert [logp for _, logp in heard] == pytest.approx(said.logps, abs=1e-6)


def test_tokens_are_streamed_while_they_are_drawn(engine):
    async def listen() -> int:
        stream = engine.stream(PROMPT, LONG)
        await anext(stream)
        drawn = engine.sampled_tokens
        await stream.aclose()
        return drawn

    assert run(listen()) < 10


def test_closing_a_stream_cancels_it_and_frees_its_pages(engine):
    async def listen() -> None:
        stream = engine.stream(PROMPT, LONG)
        async for _ in stream:
            break
        assert not all_pages_are_back(engine)
        await stream.aclose()
        assert all_pages_are_back(engine)
        drawn = engine.sampled_tokens
        await turns(5)
        assert engine.sampled_tokens == drawn

    run(listen())


def test_cancelling_generate_frees_its_pages_and_leaves_others_alone(engine):
    expected = run(engine.generate(PROMPT[:5], Sampling(30, seed=1))).token_ids

    async def play() -> Completion:
        running = asyncio.create_task(engine.generate(PROMPT, LONG))
        other = asyncio.create_task(engine.generate(PROMPT[:5], Sampling(30, seed=1)))
        await turns(6)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        assert running.cancelled() and len(engine.scheduler.running) == 1
        return await other

    assert run(play()).token_ids == expected
    assert all_pages_are_back(engine)


def test_cancelling_a_request_that_waits_takes_it_out_of_the_queue(engine):
    async def play() -> None:
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(PROMPT, LONG))
        await turns(2)
        assert len(engine.scheduler.everything()) == 1
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await engine.resume()

    run(play())
    assert all_pages_are_back(engine) and engine.sampled_tokens == 0


def test_what_a_cancelled_request_computed_can_be_reused(engine):
    async def play() -> int:
        stream = engine.stream(PROMPT, LONG)
        await anext(stream)
        await stream.aclose()
        before = engine.prefill_tokens
        await engine.generate(PROMPT, Sampling(2))
        return engine.prefill_tokens - before

    assert run(play()) == len(PROMPT) - 16


# ---- pausing


def test_pausing_keeps_running_requests_and_their_result(engine):
    expected = run(engine.generate(PROMPT, LONG))

    async def play() -> Completion:
        work = asyncio.create_task(engine.generate(PROMPT, LONG))
        await turns(8)
        await engine.pause()
        drawn = engine.sampled_tokens
        await asyncio.sleep(0.02)
        assert engine.sampled_tokens == drawn and not work.done()
        assert len(engine.scheduler.running) == 1
        await engine.resume()
        return await work

    said = run(play())
    assert said.token_ids == expected.token_ids
    assert said.logps == pytest.approx(expected.logps, abs=1e-6)


def test_requests_made_while_paused_run_after_resume(engine):
    async def play() -> Completion:
        await engine.pause()
        work = asyncio.create_task(engine.generate(PROMPT, Sampling(3)))
        await turns(5)
        assert engine.sampled_tokens == 0
        await engine.resume()
        return await work

    assert len(run(play()).token_ids) == 3


# ---- stopping


def test_the_sampled_stop_token_is_the_last_token(engine):
    free = run(engine.generate(PROMPT, LONG)).token_ids
    stop = free[10]
    where = free.index(stop)
    said = run(engine.generate(PROMPT, Sampling(60, seed=4, stop_ids=(511, stop))))
    assert said.token_ids == free[: where + 1] and said.stop_reason == "stop"
    assert len(said.logps) == len(said.plain_logps) == len(said.versions) == where + 1


def test_a_stop_token_may_be_the_first_token(engine):
    first = run(engine.generate(PROMPT, LONG)).token_ids[0]
    said = run(engine.generate(PROMPT, Sampling(60, seed=4, stop_ids=(first,))))
    assert said.token_ids == (first,) and said.stop_reason == "stop"
    assert all_pages_are_back(engine)


def test_the_limit_is_exact_and_named(engine):
    for limit in (1, 2, 17):
        said = run(engine.generate(PROMPT, Sampling(limit)))
        assert len(said.token_ids) == limit and said.stop_reason == "length"


def test_a_stop_string_is_found_across_token_boundaries(engine):
    decode = engine.policy.tokenizer.decode
    for seed in range(20):
        free = run(engine.generate(PROMPT, Sampling(40, seed=seed))).token_ids
        pieces = [decode([t]) for t in free]
        found = _spanning(pieces)
        if found is not None:
            break
    assert found is not None, "no seed gave a text to try this on"
    text, last = found
    said = run(engine.generate(PROMPT, Sampling(40, seed=seed, stop=("never said", text))))
    assert said.stop_reason == "stop" and said.token_ids == free[: last + 1]
    assert text in decode(list(said.token_ids)) and text not in decode(list(free[:last]))


def _spanning(pieces: list[str]) -> tuple[str, int] | None:
    """A string that begins in one token and ends two tokens later, where it first occurs."""
    for i in range(3, len(pieces) - 2):
        three = pieces[i : i + 3]
        text = three[0][-1:] + three[1] + three[2][:1]
        clean = all(p.isascii() and p.isprintable() and p for p in three)
        if clean and "".join(pieces[: i + 2]).count(text) == 0:
            return text, i + 2
    return None


# ---- refusing


def test_a_request_beyond_the_context_is_refused_by_name(engine):
    context = engine.policy.context
    with pytest.raises(EngineError, match=rf"context of {context}.*rollout\.max_new_tokens"):
        run(engine.generate([5] * (context - 9), Sampling(10)))
    assert all_pages_are_back(engine)


def test_a_request_that_just_fits_the_context_runs(engine):
    context = engine.policy.context
    assert len(run(engine.generate([5] * (context - 2), Sampling(2))).token_ids) == 2


def test_an_empty_prompt_is_refused(engine):
    with pytest.raises(EngineError, match="at least one prompt token"):
        run(engine.generate([], Sampling(10)))


# ---- versions


def test_every_token_carries_the_version_it_was_drawn_under(policy):
    engine = NativeEngine(policy, cache_mb=1, version=7)

    async def play() -> list[Completion]:
        first = await engine.generate(PROMPT, Sampling(5))
        await engine.update(8)
        return [first, await engine.generate(PROMPT, Sampling(5))]

    first, second = run(play())
    assert first.versions == (7,) * 5 and second.versions == (8,) * 5
    assert engine.version == 8 and first.token_ids == second.token_ids


# ---- failing and closing


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_a_failure_of_the_engine_reaches_everyone_who_waits(engine, step: str):
    def explode(*_: Any) -> Any:
        raise RuntimeError("boom")

    setattr(engine._runner, step, explode)

    async def listen() -> list[Any]:
        return [item async for item in engine.stream(PROMPT, LONG)]

    async def play() -> list[Any]:
        work = (engine.generate(PROMPT, LONG), engine.generate([5], LONG), listen())
        return await asyncio.gather(*work, return_exceptions=True)

    found = run(play(), seconds=10)
    assert [type(e) for e in found] == [EngineError] * 3
    assert all("boom" in str(e) and isinstance(e.__cause__, RuntimeError) for e in found)


def test_who_comes_after_a_failure_is_told_its_cause(engine):
    def explode(*_: Any) -> Any:
        raise RuntimeError("boom")

    engine._runner.prefill = explode
    for _ in range(2):
        with pytest.raises(EngineError, match="boom"):
            run(engine.generate(PROMPT, LONG), seconds=10)


def test_closing_ends_everyone_who_waits(engine):
    async def play() -> list[Any]:
        running = asyncio.create_task(engine.generate(PROMPT, LONG))
        stream = engine.stream(PROMPT, LONG)
        await anext(stream)
        with engine.session() as session, engine.session():
            parked = asyncio.create_task(engine.generate(PROMPT, LONG, session))
            await turns(3)
            await engine.close()
            found = await asyncio.gather(running, parked, return_exceptions=True)
        try:
            async for _ in stream:
                pass
        except EngineError as error:
            found.append(error)
        return found

    found = run(play(), seconds=10)
    assert [type(e) for e in found] == [EngineError] * 3
    assert all("closed" in str(e) for e in found)
    assert all_pages_are_back(engine)
    with pytest.raises(EngineError, match="closed"):
        run(engine.generate(PROMPT, LONG))
