"""LoRA and its switches are real, are saved as PEFT does, and need no second copy of the model."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from fledge.algorithms.losses import cross_entropy
from fledge.algorithms.reduce import token_weights
from fledge.config.schema import LoraConfig
from fledge.errors import ConfigError
from fledge.inference import NativeEngine
from fledge.models.attention import PackedLayout
from fledge.models.load import Policy, export
from fledge.trainer import LocalTrainer, copy_of
from fledge.types import Sampling
from helpers import (
    ragged_batch,
    run,
    shake_adapters,
    stock,
    stock_logits,
    tiny_policy,
    trainer_of,
)

KINDS = {
    "lora": LoraConfig(rank=4, alpha=8),
    "rslora": LoraConfig(rank=4, alpha=8, rslora=True),
    "dora": LoraConfig(rank=4, alpha=8, dora=True),
    "some": LoraConfig(rank=2, alpha=8, targets=["q_proj", "down_proj"]),
}
TOKENS = [5, 9, 33, 100, 7, 7, 250, 11]


@torch.no_grad()
def our_logits(policy: Policy) -> torch.Tensor:
    layout = PackedLayout.of_lengths([len(TOKENS)], policy.device)
    hidden = policy.hidden(torch.tensor(TOKENS), torch.arange(len(TOKENS)), layout)
    return policy.head(hidden).double()


def train(trainer: LocalTrainer, steps: int = 2) -> None:
    def reduce(*columns):
        return token_weights("token_mean", *columns, max_length=16)

    async def play() -> None:
        for _ in range(steps):
            await trainer.forward_backward(ragged_batch().weighed(reduce), cross_entropy)
            await trainer.optim_step(0.02)

    run(play())


def adapted(kind: str) -> Policy:
    policy = tiny_policy(lora=KINDS[kind])
    shake_adapters(policy, scale=0.05)
    train(trainer_of(policy))
    return policy


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_saved_adapter_loads_in_plain_peft_with_the_same_logits(kind: str, tmp_path: Path):
    policy = adapted(kind)
    export(policy, tmp_path / "adapter", merge=False)
    base = stock(tiny_policy(), tmp_path / "base")
    without = stock_logits(base, TOKENS)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert (stock_logits(theirs, TOKENS) - our_logits(policy)).abs().max() < 1e-5
    assert (without - our_logits(policy)).abs().max() > 0.1, "the adapter does nothing"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_merged_export_agrees_and_leaves_the_live_weights_untouched(kind: str, tmp_path: Path):
    policy = adapted(kind)
    live = dict(policy.module.named_parameters())
    before = {n: p.detach().clone() for n, p in live.items()}
    places = {n: (p.data_ptr(), p.stride()) for n, p in live.items()}
    model = stock(policy, tmp_path)
    assert not isinstance(model, PeftModel)
    assert (stock_logits(model, TOKENS) - our_logits(policy)).abs().max() < 1e-5
    after = dict(policy.module.named_parameters())
    assert after.keys() == before.keys()
    assert [n for n in before if not torch.equal(before[n], after[n])] == []
    assert {n: (p.data_ptr(), p.stride()) for n, p in after.items()} == places


def test_a_fresh_adapter_changes_nothing_and_trains_only_itself():
    plain, policy = tiny_policy(), tiny_policy(lora=KINDS["lora"])
    assert torch.equal(our_logits(plain), our_logits(policy))
    base = {n: p.detach().clone() for n, p in policy.module.named_parameters() if "lora_" not in n}
    train(trainer_of(policy))
    for name, parameter in policy.module.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        if name in base:
            assert torch.equal(parameter, base[name])


def adapter_effect(config: LoraConfig) -> torch.Tensor:
    policy = tiny_policy(lora=config)
    shake_adapters(policy)
    layer = policy.model.model.layers[0].mlp.up_proj
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        delta = layer(x) - layer.base_layer(x)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        return (delta / (x @ a.T @ b.T)).median()


@pytest.mark.parametrize(("rslora", "scale"), [(False, 12 / 9), (True, 12 / math.sqrt(9))])
def test_the_scale_is_alpha_over_rank_and_for_rslora_over_its_root(rslora: bool, scale: float):
    effect = adapter_effect(LoraConfig(rank=9, alpha=12, rslora=rslora))
    assert effect.item() == pytest.approx(scale, rel=1e-3)


def test_dora_trains_magnitudes_and_is_not_lora():
    both = {}
    for kind in ("lora", "dora"):
        policy = tiny_policy(lora=KINDS[kind])
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in policy.module.named_parameters():
                if "lora_A" in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.2)
        magnitudes = {
            n: p.detach().clone() for n, p in policy.module.named_parameters() if "magnitude" in n
        }
        train(trainer_of(policy), steps=1)
        both[kind] = our_logits(policy)
        now = dict(policy.module.named_parameters())
        assert bool(magnitudes) == (kind == "dora")
        assert all(now[n].requires_grad for n in magnitudes)
        assert not any(torch.equal(now[n], m) for n, m in magnitudes.items())
    assert (both["lora"] - both["dora"]).abs().max() > 1e-3


def test_the_reference_is_the_base_model_with_adapters_off(tmp_path: Path):
    policy = tiny_policy(lora=KINDS["lora"])
    base = run(trainer_of(tiny_policy()).score(ragged_batch(), {"old_logp"})).columns["old_logp"]
    trainer = trainer_of(policy)
    train(trainer)
    scored = run(trainer.score(ragged_batch(), {"old_logp", "ref_logp"})).columns
    assert torch.allclose(scored["ref_logp"], base, atol=1e-6)
    assert (scored["old_logp"] - base).abs().max() > 1e-2
    again = run(trainer.score(ragged_batch(), {"old_logp"})).columns["old_logp"]
    assert torch.equal(again, scored["old_logp"]), "the adapters did not come back"


def test_the_reference_of_full_training_stays_where_training_began():
    policy = tiny_policy()
    trainer = trainer_of(policy, frozen={"ref_logp": copy_of(policy, frozen=True)})
    base = run(trainer.score(ragged_batch(), {"old_logp"})).columns["old_logp"]
    train(trainer)
    scored = run(trainer.score(ragged_batch(), {"old_logp", "ref_logp"})).columns
    assert torch.equal(scored["ref_logp"], base)
    assert (scored["old_logp"] - base).abs().max() > 1e-2


def live_bytes() -> dict[int, int]:
    """Every tensor storage that anything still holds, by address."""
    gc.collect()
    tensors = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def test_adapters_with_a_reference_need_no_second_copy_of_the_model():
    shape = {"hidden_size": 64, "intermediate_size": 256}
    before = live_bytes()
    policy = tiny_policy(lora=KINDS["lora"], **shape)
    trainer = trainer_of(policy)
    run(trainer.score(ragged_batch(), {"old_logp", "ref_logp"}))
    now = live_bytes()
    new = sum(size for address, size in now.items() if address not in before)
    parameters = {p.data_ptr(): p.numel() * 4 for p in policy.module.parameters()}
    total = sum(parameters.values())
    adapters = sum(p.numel() * 4 for n, p in policy.module.named_parameters() if "lora_" in n)
    base = sum(p.numel() * 4 for p in tiny_policy(**shape).model.parameters())
    assert total == base + adapters
    assert total <= new < 1.1 * total


def test_the_engine_generates_with_the_adapters(tmp_path: Path):
    policy = adapted("dora")
    model = stock(policy, tmp_path)
    said = run(NativeEngine(policy, 1).generate(TOKENS, Sampling(6, temperature=0.0)))
    tokens = [*TOKENS, *said.token_ids]
    assert stock_logits(model, tokens)[len(TOKENS) - 1 : -1].argmax(-1).tolist() == list(
        said.token_ids
    )


def test_a_target_that_matches_nothing_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"model\.lora\.targets.*'qq_proj'"):
        tiny_policy(lora=LoraConfig(targets=["q_proj", "qq_proj"]))


def test_all_linear_adapts_every_linear_layer_but_the_head():
    policy = tiny_policy(lora=KINDS["lora"])
    adapted = {n.split(".lora_A")[0] for n, _ in policy.model.named_parameters() if "lora_A" in n}
    assert len(adapted) == 2 * 7 and not any("lm_head" in n for n in adapted)


def test_an_exported_adapter_run_is_plain_safetensors_and_json(tmp_path: Path):
    export(adapted("lora"), tmp_path, merge=False)
    assert {p.suffix for p in tmp_path.iterdir()} <= {".json", ".safetensors", ".jinja"}
