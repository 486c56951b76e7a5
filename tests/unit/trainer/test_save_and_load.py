"""Saving and loading a trainer: in place, complete, and exact to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fledge.algorithms.losses import cross_entropy
from fledge.algorithms.reduce import token_weights
from fledge.config.schema import LoraConfig
from fledge.errors import CheckpointError
from fledge.inference import NativeEngine
from fledge.trainer import LocalTrainer
from fledge.types import Sampling
from helpers import ragged_batch, run, tiny_policy, trainer_of

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LoraConfig(rank=4, alpha=8)},
    "dora": {"lora": LoraConfig(rank=4, alpha=8, dora=True)},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16", "initializer_range": 0.1},
    "untied": {"tie_word_embeddings": False},
}


def make(kind: str, seed: int = 0, **settings: Any) -> LocalTrainer:
    return trainer_of(tiny_policy(seed=seed, **KINDS[kind]), weight_decay=0.01, **settings)


def train(trainer: LocalTrainer, steps: range) -> None:
    def reduce(*columns):
        return token_weights("token_mean", *columns, max_length=16)

    async def play() -> None:
        for step in steps:
            for micro in ragged_batch(seed=step).weighed(reduce).micros(40):
                await trainer.forward_backward(micro, cross_entropy)
            await trainer.optim_step(0.01)

    run(play())


def everything(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    found = {n: p.detach().clone() for n, p in trainer.policy.module.named_parameters()}
    found |= {f"optim.{n}": t.clone() for n, t in trainer.optimizer.tensors().items()}
    return found


def check_identical(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == other.keys()
    different = [n for n, t in ours.items() if not torch.equal(t, other[n])]
    assert not different


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_resumed_training_is_bit_for_bit_the_training_that_went_on(kind: str, tmp_path: Path):
    straight = make(kind)
    train(straight, range(4))
    first = make(kind)
    train(first, range(2))
    first.save(tmp_path)
    resumed = make(kind)
    resumed.load(tmp_path)
    check_identical(everything(first), everything(resumed))
    train(resumed, range(2, 4))
    check_identical(everything(straight), everything(resumed))
    start = {n: p.detach() for n, p in make(kind).policy.module.named_parameters()}
    moved = [n for n, p in start.items() if not torch.equal(p, everything(straight)[n])]
    assert moved, "nothing was trained"


@pytest.mark.parametrize("kind", ["full", "lora", "bf16"])
def test_loading_keeps_every_address_and_the_engine_sees_the_new_values(kind: str, tmp_path: Path):
    saved = make(kind)
    train(saved, range(2))
    saved.save(tmp_path)
    trainer = make(kind)
    engine = NativeEngine(trainer.policy, cache_mb=1)
    before = dict(trainer.addresses())
    stale = trainer.fingerprint()
    trainer.load(tmp_path)
    assert trainer.addresses() == before == engine.addresses()
    assert trainer.fingerprint() == engine.fingerprint() == saved.fingerprint() != stale
    sampling = Sampling(max_new_tokens=5, temperature=0.0)
    ours = run(engine.generate([5, 6, 7], sampling))
    theirs = run(NativeEngine(saved.policy, cache_mb=1).generate([5, 6, 7], sampling))
    assert ours.token_ids == theirs.token_ids and ours.plain_logps == theirs.plain_logps


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path):
    trainer_of(tiny_policy()).save(tmp_path)
    other = trainer_of(tiny_policy(intermediate_size=64))
    with pytest.raises(CheckpointError, match="mlp"):
        other.load(tmp_path)


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path):
    make("full").save(tmp_path)
    with pytest.raises(CheckpointError, match="do not match"):
        make("lora").load(tmp_path)


def test_a_checkpoint_with_a_missing_tensor_is_refused_by_its_name(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    make("full").save(tmp_path)
    file = next((tmp_path / "weights").glob("*.safetensors"))
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        make("full").load(tmp_path)


def test_loading_forgets_gradients_of_the_time_before(tmp_path: Path):
    trainer = make("full")
    trainer.save(tmp_path)

    def reduce(*columns):
        return token_weights("token_mean", *columns, max_length=16)

    run(trainer.forward_backward(ragged_batch().weighed(reduce), cross_entropy))
    trainer.load(tmp_path)
    assert trainer.optimizer.gradients() == {}


def test_loading_an_untrained_checkpoint_forgets_the_optimiser_of_the_time_before(tmp_path: Path):
    """Going back to step 0 in a trainer that has stepped gives the same run again."""
    trainer = make("full")
    trainer.save(tmp_path)
    train(trainer, range(2))
    expected = everything(trainer)
    trainer.load(tmp_path)
    train(trainer, range(2))
    check_identical(expected, everything(trainer))


# ---- the value head


def test_a_value_head_gives_one_value_per_trained_token_and_learns(tmp_path: Path):
    def critic() -> LocalTrainer:
        return trainer_of(tiny_policy(), value_head=True)

    def squared(x):
        return (x.value - target.to(x.value)).square(), {}

    def reduce(*columns):
        return token_weights("token_mean", *columns, max_length=16)

    trainer = critic()
    batch = ragged_batch().weighed(reduce)
    target = torch.linspace(-1, 1, batch.trained_tokens)

    async def play() -> tuple[torch.Tensor, torch.Tensor]:
        first = (await trainer.score(batch, {"value"})).columns["value"]
        for _ in range(20):
            await trainer.forward_backward(batch, squared)
            await trainer.optim_step(0.03)
        return first, (await trainer.score(batch, {"value"})).columns["value"]

    first, last = run(play())
    assert first.shape == target.shape and (first == 0).all(), "a fresh critic predicts nothing"
    assert (last - target).square().mean() < 0.1 * target.square().mean()
    trainer.save(tmp_path)
    other = critic()
    other.load(tmp_path)
    restored = run(other.score(batch, {"value"})).columns["value"]
    assert torch.equal(restored, last)
    assert torch.equal(other.value_head.linear.weight, trainer.value_head.linear.weight)


def test_values_do_not_depend_on_the_cut():
    trainer = trainer_of(tiny_policy(), value_head=True)
    torch.nn.init.normal_(trainer.value_head.linear.weight)
    batch = ragged_batch()
    whole = run(trainer.score(batch, {"value"})).columns["value"]
    trainer.micro_tokens = 1
    cut = run(trainer.score(batch, {"value"})).columns["value"]
    assert torch.allclose(whole, cut, atol=1e-5) and whole.std() > 0.1
