"""What the engine says about its tokens is what stock transformers says about them.

The judge is the exported model, loaded by plain transformers with eager attention, fed one sequence
at a time without padding.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fledge.inference import NativeEngine
from fledge.models.attention import BLOCK
from fledge.types import Completion, Sampling
from helpers import (
    CONFIGS,
    VOCABULARY,
    WINDOW,
    filtered_probabilities,
    policy_of_kind,
    ragged_batch,
    run,
    stock,
    stock_logits,
    stock_logps,
    tiny_policy,
    trainer_of,
)

CLOSE = 1e-5


@dataclass
class Ask:
    """One request: when it joins, and whether it is given up or followed by a second turn."""

    prompt: list[int]
    sampling: Sampling
    delay: int = 0
    give_up_after: int = 0
    second_turn: bool = False


@dataclass
class Answer:
    prompt: list[int]
    sampling: Sampling
    completion: Completion


def crowd(rng: random.Random, sampling: Sampling) -> list[Ask]:
    """64 requests: equal prompts, long common beginnings, odd lengths, two turns, quitters."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    def settings() -> Sampling:
        return replace(sampling, seed=rng.randrange(2**40), max_new_tokens=rng.randint(1, 24))

    asks = []
    for length in (7, 16, 33, 48):
        prompt = ids(length)
        asks += [Ask(prompt, settings(), delay=rng.choice((0, 0, 3))) for _ in range(6)]
    beginning = ids(2 * BLOCK + 5)
    asks += [
        Ask(beginning + ids(rng.randint(1, 20)), settings(), rng.randint(0, 12)) for _ in range(16)
    ]
    asks += [Ask(ids(n), settings(), rng.randint(0, 20)) for n in (1, 2, 15, 16, 17, 31, 32, 40)]
    asks += [
        Ask(ids(rng.randint(10, 30)), settings(), rng.randint(0, 9), second_turn=True)
        for _ in range(8)
    ]
    asks += [
        Ask(beginning + ids(3), replace(settings(), max_new_tokens=24), rng.randint(0, 9), 4)
        for _ in range(8)
    ]
    assert len(asks) == 64
    rng.shuffle(asks)
    return asks


async def answer(engine: NativeEngine, ask: Ask) -> list[Answer]:
    for _ in range(ask.delay):
        await asyncio.sleep(0)
    if ask.give_up_after:
        stream = engine.stream(ask.prompt, ask.sampling)
        heard = []
        async for item in stream:
            heard.append(item)
            if len(heard) == ask.give_up_after:
                break
        await stream.aclose()
        tokens, logps = zip(*heard, strict=True)
        partial = Completion(tokens, logps, logps, (0,) * len(tokens), "cancelled")
        return [Answer(ask.prompt, ask.sampling, partial)]
    first = await engine.generate(ask.prompt, ask.sampling)
    answers = [Answer(ask.prompt, ask.sampling, first)]
    if ask.second_turn:
        prompt = [*ask.prompt, *first.token_ids, 5, 6, 7]
        second = await engine.generate(prompt, ask.sampling)
        answers.append(Answer(prompt, ask.sampling, second))
    return answers


async def answer_all(engine: NativeEngine, asks: list[Ask]) -> list[Answer]:
    quitter = asyncio.create_task(engine.generate([9] * 20, Sampling(max_new_tokens=200)))
    answers = await asyncio.gather(*(answer(engine, ask) for ask in asks))
    quitter.cancel()
    with suppress(asyncio.CancelledError):
        await quitter
    return [a for some in answers for a in some]


def test_64_ragged_requests_have_the_log_probs_of_stock_transformers(policy, stock_model):
    engine = NativeEngine(policy, cache_mb=1)
    answers = run(answer_all(engine, crowd(random.Random(0), Sampling())))
    assert len(answers) == 72
    for a in answers:
        tokens = [*a.prompt, *a.completion.token_ids]
        expected = stock_logps(stock_model, tokens, len(a.prompt)).tolist()
        assert a.completion.logps == pytest.approx(expected, abs=CLOSE)
        assert a.completion.plain_logps == pytest.approx(expected, abs=CLOSE)
    assert engine.prefill_tokens < 0.7 * sum(len(a.prompt) for a in answers), "nothing was shared"
    assert engine.scheduler.pool.available == engine.scheduler.pool.total


SETTINGS = [
    Sampling(temperature=0.6),
    Sampling(temperature=1.7),
    Sampling(top_k=5),
    Sampling(top_p=0.7),
    Sampling(min_p=0.2),
    Sampling(temperature=1.4, top_k=40, top_p=0.9, min_p=0.02),
]


def test_log_probs_belong_to_the_distribution_that_was_drawn_from(policy, stock_model):
    """Requests with different settings share every batch."""
    rng = random.Random(4)
    asks = [
        Ask(
            [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))],
            replace(settings, seed=seed, max_new_tokens=rng.randint(3, 12)),
            delay=rng.randint(0, 5),
        )
        for seed in range(3)
        for settings in SETTINGS
    ]
    engine = NativeEngine(policy, cache_mb=1)
    for a in run(answer_all(engine, asks)):
        tokens = [*a.prompt, *a.completion.token_ids]
        logits = stock_logits(stock_model, tokens)[len(a.prompt) - 1 : -1].numpy()
        plain = stock_logps(stock_model, tokens, len(a.prompt)).tolist()
        drawn = [
            np.log(filtered_probabilities(row, a.sampling)[token])
            for row, token in zip(logits, a.completion.token_ids, strict=True)
        ]
        assert a.completion.logps == pytest.approx(drawn, abs=CLOSE)
        assert a.completion.plain_logps == pytest.approx(plain, abs=CLOSE)
        assert a.completion.logps != a.completion.plain_logps


def test_greedy_is_the_stock_argmax_with_log_prob_zero(policy, stock_model):
    engine = NativeEngine(policy, cache_mb=1)
    prompt = [5, 9, 33, 100]
    said = run(engine.generate(prompt, Sampling(max_new_tokens=12, temperature=0.0)))
    logits = stock_logits(stock_model, [*prompt, *said.token_ids])[len(prompt) - 1 : -1]
    assert list(said.token_ids) == logits.argmax(-1).tolist()
    assert set(said.logps) == {0.0}
    expected = stock_logps(stock_model, [*prompt, *said.token_ids], len(prompt)).tolist()
    assert said.plain_logps == pytest.approx(expected, abs=CLOSE)


def check_all_paths(policy, model) -> None:
    """Engine and trainer against the judge, on sequences longer than any window."""
    rng = random.Random(7)
    long, short = ([rng.randrange(VOCABULARY) for _ in range(n)] for n in (40, 3))
    asks = [
        Ask(prompt, Sampling(max_new_tokens=20, seed=seed), delay=seed)
        for seed in range(3)
        for prompt in (long, [*long, 4, 5], short)
    ]
    engine = NativeEngine(policy, cache_mb=1)
    for a in run(answer_all(engine, asks)):
        tokens = [*a.prompt, *a.completion.token_ids]
        expected = stock_logps(model, tokens, len(a.prompt)).tolist()
        assert a.completion.logps == pytest.approx(expected, abs=CLOSE)
    check_trainer(policy, model)


def check_trainer(policy, model, **settings) -> None:
    batch = ragged_batch(prompts=(5, 24, 3), longest=24)
    temperature = settings.get("temperature", 1.0)
    for micro_tokens in (1, 40, 10**6):
        trainer = trainer_of(policy, micro_tokens=micro_tokens, **settings)
        scored = run(trainer.score(batch, {"old_logp"})).columns["old_logp"]
        expected = [
            stock_logps(model, row.token_ids, 1, temperature)[torch.tensor(row.trained) - 1]
            for row in batch.rows
        ]
        assert (scored - torch.cat(expected)).abs().max() < CLOSE


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_other_architectures_agree_with_stock_transformers(kind: str, tmp_path: Path):
    policy = policy_of_kind(tmp_path / "given", kind)
    model = stock(policy, tmp_path / "exported")
    assert type(model).__name__.lower().startswith(CONFIGS[kind]["model_type"])
    check_all_paths(policy, model)


def test_the_sliding_window_is_really_in_use(tmp_path: Path):
    """A token further back than the window reaches through all layers changes nothing."""
    policy = policy_of_kind(tmp_path / "given", "mistral")
    engine = NativeEngine(policy, cache_mb=1)
    reach = 2 * (WINDOW - 1)  # two layers
    prompt = [(7 * i) % VOCABULARY for i in range(40)]
    beyond, within = list(prompt), list(prompt)
    beyond[-reach - 2] = 1
    within[-reach] = 1
    sampling = Sampling(max_new_tokens=1, temperature=0.0)
    first, second, third = (
        run(engine.generate(p, sampling)).plain_logps[0] for p in (prompt, beyond, within)
    )
    assert first == pytest.approx(second, abs=1e-6)
    assert first != pytest.approx(third, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_trainer_log_probs_equal_stock_transformers(policy, stock_model, temperature):
    check_trainer(policy, stock_model, temperature=temperature)


ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_rope_overrides_mean_the_same_to_engine_trainer_and_export(rope, policy, tmp_path):
    changed = tiny_policy(rope_parameters=ROPES[rope], max_position_embeddings=256)
    model = stock(changed, tmp_path)
    assert model.config.rope_parameters["rope_theta"] == 100.0, "the given value was dropped"
    assert model.config.max_position_embeddings == changed.context == 256
    check_all_paths(changed, model)
    tokens = list(range(3, 43))
    plain = stock(policy, tmp_path / "plain")
    gap = stock_logps(model, tokens, 1) - stock_logps(plain, tokens, 1)
    assert gap.abs().max() > 1e-3, "the override had no effect"
