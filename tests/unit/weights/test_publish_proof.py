"""Publishing weights with proof: each of its three parts fails when what it proves is broken."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
import torch

from fledge.algorithms.losses import cross_entropy
from fledge.algorithms.reduce import token_weights
from fledge.config.schema import LoraConfig
from fledge.errors import WeightSyncError
from fledge.inference import NativeEngine
from fledge.trainer import LocalTrainer
from fledge.types import Proof, Sampling
from fledge.weights import SharedMemoryTransport
from helpers import ragged_batch, run, stock, stock_logps, tiny_policy, trainer_of

CANARY = list(range(5, 30))


class Parts:
    """A trainer and an engine over one module, and the transport between them."""

    def __init__(self, lora: LoraConfig | None = None, temperature: float = 1.0) -> None:
        self.policy = tiny_policy(lora=lora)
        self.trainer = trainer_of(self.policy, temperature=temperature)
        self.engine = NativeEngine(self.policy, cache_mb=1)
        self.transport = SharedMemoryTransport(CANARY, temperature, torch.float32)

    async def publish(self, version: int) -> Proof:
        return await self.transport.publish(self.trainer, self.engine, version)


async def one_update(trainer: LocalTrainer, rate: float = 0.05) -> None:
    def reduce(*columns):
        return token_weights("token_mean", *columns, max_length=16)

    for mini in ragged_batch().updates(1, 1, 0, reduce):
        await trainer.forward_backward(mini, cross_entropy)
    await trainer.optim_step(rate)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_publishing_proves_every_tensor_and_a_canary(temperature: float):
    parts = Parts(temperature=temperature)
    proof = run(parts.publish(1))
    assert proof.version == parts.engine.version == 1
    assert proof.tensors == len(dict(parts.policy.model.named_parameters())) + len(
        list(parts.policy.model.buffers())
    )
    assert proof.canary_gap < 1e-5


def test_the_digest_follows_the_weights():
    parts = Parts()

    async def play() -> tuple[Proof, Proof, Proof]:
        first = await parts.publish(1)
        same = await parts.publish(2)
        await one_update(parts.trainer)
        return first, same, await parts.publish(3)

    first, same, other = run(play())
    assert first.digest == same.digest != other.digest


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8)])
def test_after_an_update_the_engine_speaks_with_the_new_weights(lora, tmp_path):
    parts = Parts(lora)
    sampling = Sampling(max_new_tokens=6, seed=3)

    async def play():
        await parts.publish(1)
        before = await parts.engine.generate(CANARY, sampling)
        await one_update(parts.trainer)
        await parts.publish(2)
        return before, await parts.engine.generate(CANARY, sampling)

    before, after = run(play())
    assert after.versions == (2,) * 6 and before.versions == (1,) * 6
    model = stock(parts.policy, tmp_path)
    expected = stock_logps(model, [*CANARY, *after.token_ids], len(CANARY)).tolist()
    assert after.logps == pytest.approx(expected, abs=1e-5)
    stale = stock_logps(model, [*CANARY, *before.token_ids], len(CANARY)).tolist()
    assert before.logps != pytest.approx(stale, abs=1e-3), "the update changed nothing"


# ---- (a) the engine reads the trainer's storages


def test_a_replaced_parameter_is_refused_by_name():
    parts = Parts()
    weight = parts.policy.model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(WeightSyncError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight'"):
        run(parts.publish(1))


def test_a_parameter_that_the_engine_does_not_know_is_refused_by_name():
    parts = Parts()
    parts.policy.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(WeightSyncError, match="'extra'"):
        run(parts.publish(1))


def test_a_replaced_adapter_is_refused_by_name():
    parts = Parts(LoraConfig(rank=4, alpha=8))
    name, weight = next((n, p) for n, p in parts.policy.model.named_parameters() if "lora_B" in n)
    weight.data = weight.data.clone()
    with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
        run(parts.publish(1))


# ---- (b) no page is read under another version


def test_a_page_that_survived_an_update_is_refused(monkeypatch):
    parts = Parts()

    async def play() -> None:
        await parts.publish(1)
        await parts.engine.generate(CANARY, Sampling(4))
        monkeypatch.setattr(parts.engine.scheduler.pool, "clear", lambda: None)
        await parts.publish(2)

    with pytest.raises(WeightSyncError, match="version 1 would be read under version 2"):
        run(play(), seconds=10)


def test_an_update_forgets_all_pages_so_nothing_is_reused():
    parts = Parts()

    async def play() -> list[int]:
        counts = []
        for version in (1, 2):
            await parts.engine.update(version)
            before = parts.engine.prefill_tokens
            await parts.engine.generate(CANARY, Sampling(2))
            counts.append(parts.engine.prefill_tokens - before)
        return counts

    assert run(play()) == [len(CANARY)] * 2


def test_an_update_with_running_requests_is_refused():
    parts = Parts()

    async def play() -> None:
        work = asyncio.create_task(parts.engine.generate(CANARY, Sampling(50)))
        for _ in range(5):
            await asyncio.sleep(0)
        try:
            await parts.publish(1)
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    with pytest.raises(WeightSyncError, match="1 requests still run under version 0"):
        run(play())
    assert parts.engine.version == 0


def test_a_running_request_never_meets_another_version():
    """Even when somebody changes the version behind the engine's back."""
    parts = Parts()

    async def play() -> None:
        work = asyncio.create_task(parts.engine.generate(CANARY, Sampling(50)))
        for _ in range(5):
            await asyncio.sleep(0)
        parts.engine.scheduler.version = 9
        await work

    with pytest.raises(WeightSyncError, match="version 0 is still running under version 9"):
        run(play(), seconds=10)


# ---- (c) the canary


def test_a_trainer_that_scores_otherwise_is_found_by_the_canary(monkeypatch):
    parts = Parts()
    score = parts.trainer.score

    async def off_by_a_little(batch, needs):
        scored = await score(batch, needs)
        return scored.with_columns(old_logp=scored.columns["old_logp"] + 0.002)

    monkeypatch.setattr(parts.trainer, "score", off_by_a_little)
    with pytest.raises(WeightSyncError, match=r"disagree on the canary by 0\.002"):
        run(parts.publish(1))


def test_an_engine_with_another_head_is_found_by_the_canary(monkeypatch):
    parts = Parts()
    import fledge.inference.runner as runner

    draw = runner.draw
    monkeypatch.setattr(runner, "draw", lambda logits, columns: draw(logits * 1.05, columns))
    with pytest.raises(WeightSyncError, match="canary"):
        run(parts.publish(1))


def test_a_canary_that_is_not_a_number_is_no_proof(monkeypatch):
    parts = Parts()
    score = parts.trainer.score

    async def nothing(batch, needs):
        scored = await score(batch, needs)
        return scored.with_columns(old_logp=scored.columns["old_logp"] * float("nan"))

    monkeypatch.setattr(parts.trainer, "score", nothing)
    with pytest.raises(WeightSyncError, match="canary"):
        run(parts.publish(1))


def test_an_engine_that_keeps_its_old_version_is_found(monkeypatch):
    parts = Parts()

    async def ignore(version: int) -> None:
        return None

    monkeypatch.setattr(parts.engine, "update", ignore)
    with pytest.raises(WeightSyncError, match="says version 0 after version 1"):
        run(parts.publish(1))
