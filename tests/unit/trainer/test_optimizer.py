"""Updates: fp32 masters for low precision, loss scaling, clipping, LoRA+, and refusing NaN."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from fledge.algorithms.losses import cross_entropy, policy_gradient
from fledge.algorithms.reduce import token_weights
from fledge.config.schema import LoraConfig, OptimConfig
from fledge.data.batch import Batch
from fledge.errors import TrainingError
from fledge.trainer import learning_rate
from fledge.trainer.optim import Optimizer
from helpers import ragged_batch, run, tiny_policy, trainer_of


def weighed(batch: Batch) -> Batch:
    def reduce(*columns):
        return token_weights("token_mean", *columns, max_length=16)

    return batch.weighed(reduce)


def one_weight(value: float, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.full((4,), value, dtype=dtype))


def step(optimizer: Optimizer, weight: nn.Parameter, factor: float, rate: float) -> dict:
    optimizer.scale((weight.float() * factor).sum()).backward()
    return optimizer.step(rate)


# ---- low precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_too_small_for_the_dtype_add_up_in_the_master(dtype: torch.dtype):
    weight = one_weight(1.0, dtype)
    optimizer = Optimizer({"w": weight}, OptimConfig(clip_norm=100))
    rate = 2e-4 if dtype == torch.bfloat16 else 2e-5
    assert (weight - rate == weight).all(), "the update alone is lost in this dtype"
    for _ in range(100):
        step(optimizer, weight, 1.0, rate)
    lost = (1 - weight.detach().float()).tolist()
    assert lost == pytest.approx([100 * rate] * 4, rel=0.05)
    assert weight.dtype == dtype


def test_small_gradients_add_up_in_fp32():
    """256 + 1 is 256 in bf16: a sum of many micro-batches would stop growing."""
    weight = one_weight(1.0, torch.bfloat16)
    optimizer = Optimizer({"w": weight}, OptimConfig())
    for factor in [256.0] + [1.0] * 64:
        optimizer.scale((weight * factor).sum()).backward()
    assert optimizer.gradients()["w"].tolist() == [320.0] * 4
    assert weight.grad is None


def test_a_gradient_that_overflows_fp16_is_skipped_and_the_scale_is_halved():
    weight = one_weight(1.0, torch.float16)
    optimizer = Optimizer({"w": weight}, OptimConfig())
    step(optimizer, weight, 1.0, 0.1)
    before, state = weight.clone(), optimizer.tensors()["exp_avg.w"].clone()
    found = step(optimizer, weight, 60_000.0, 0.1)  # times the scale: infinite in fp16
    assert found["optim/skipped"] == 1 and found["optim/loss_scale"] == 2**11
    assert torch.equal(weight, before) and torch.equal(optimizer.tensors()["exp_avg.w"], state)
    found = step(optimizer, weight, 1.0, 0.1)
    assert found["optim/skipped"] == 0 and (weight < before).all()


def test_loss_scaling_does_not_change_the_update():
    low, full = one_weight(1.0, torch.float16), one_weight(1.0, torch.float32)
    config = OptimConfig(clip_norm=0.5)
    optimizers = [Optimizer({"w": low}, config), Optimizer({"w": full}, config)]
    found = [step(o, w, 3.0, 0.01) for o, w in zip(optimizers, (low, full), strict=True)]
    assert found[0]["optim/grad_norm"] == pytest.approx(found[1]["optim/grad_norm"]) == 6.0
    assert low.tolist() == pytest.approx(full.tolist(), abs=1e-3)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_model_in_low_precision_learns(dtype: str):
    policy = tiny_policy(dtype=dtype, initializer_range=0.1)
    trainer = trainer_of(policy)
    batch = weighed(ragged_batch())

    async def play() -> list[float]:
        losses = []
        for _ in range(6):
            await trainer.forward_backward(batch, cross_entropy)
            await trainer.optim_step(0.01)
            losses.append(trainer.metrics()["sft/loss"])
        return losses

    losses = run(play())
    assert losses[-1] < losses[0] - 0.5
    assert {p.dtype for p in policy.model.parameters()} == {policy.dtype}


# ---- clipping and refusing


def test_the_gradient_is_clipped_to_the_norm():
    """Plain momentum shows it: after one step exp_avg is a tenth of the clipped gradient."""
    weight = one_weight(1.0, torch.float32)
    optimizer = Optimizer({"w": weight}, OptimConfig(clip_norm=1.0))
    found = step(optimizer, weight, 30.0, 0.01)
    assert found["optim/grad_norm"] == pytest.approx(60.0)
    assert optimizer.tensors()["exp_avg.w"].norm().item() == pytest.approx(0.1, rel=1e-4)


def test_a_gradient_within_the_norm_is_left_alone():
    weight = one_weight(1.0, torch.float32)
    optimizer = Optimizer({"w": weight}, OptimConfig(clip_norm=10.0))
    step(optimizer, weight, 0.3, 0.01)
    assert optimizer.tensors()["exp_avg.w"].tolist() == pytest.approx([0.03] * 4)


def test_a_gradient_that_is_not_finite_never_reaches_the_weights():
    weight = one_weight(1.0, torch.float32)
    optimizer = Optimizer({"w": weight}, OptimConfig())
    with pytest.raises(TrainingError, match="gradient is not finite"):
        step(optimizer, weight, math.inf, 0.1)
    assert weight.tolist() == [1.0] * 4


def test_a_step_without_a_gradient_is_refused():
    with pytest.raises(TrainingError, match="no gradient"):
        Optimizer({"w": one_weight(1.0, torch.float32)}, OptimConfig()).step(0.1)


def test_a_step_forgets_the_gradient_it_used():
    weight = one_weight(1.0, torch.float32)
    optimizer = Optimizer({"w": weight}, OptimConfig())
    step(optimizer, weight, 1.0, 0.01)
    assert optimizer.gradients() == {}


@pytest.mark.parametrize(
    ("column", "named"), [("advantage", "advantage is"), ("old_logp", "old log-prob is")]
)
@pytest.mark.parametrize("row", [0, 4, 8])
def test_a_loss_that_is_not_finite_names_the_episode(policy, column: str, named: str, row: int):
    trainer = trainer_of(policy)
    batch = weighed(ragged_batch())
    batch = run(trainer.score(batch, {"old_logp"}))
    start = sum(len(r.trained) for r in batch.rows[:row])
    broken = batch.columns[column].clone()
    broken[start] = torch.nan
    batch = batch.with_columns(**{column: broken})

    def loss(x):
        return -x.advantage * (x.logp - x.old_logp).exp(), {}

    for micro in (batch, batch.select([1, row, 3])):
        with pytest.raises(TrainingError, match=rf"episode {row} of this batch \(its {named}"):
            run(trainer.forward_backward(micro, loss))
    assert trainer.optimizer.gradients() == {}


def test_a_loss_of_its_own_making_is_named_too(policy):
    trainer = trainer_of(policy)

    def loss(x):
        return x.logp / 0.0, {}

    with pytest.raises(TrainingError, match="episode 0 of this batch; lower"):
        run(trainer.forward_backward(weighed(ragged_batch()), loss))


# ---- LoRA+


def test_lora_plus_moves_b_faster_by_its_ratio():
    """The first Adam step moves every weight by the learning rate, whatever its gradient."""

    def moved(ratio: float) -> dict[str, float]:
        policy = tiny_policy(lora=LoraConfig(rank=4, alpha=8))
        trainer = trainer_of(policy, plus_ratio=ratio)
        before = {n: p.detach().clone() for n, p in policy.module.named_parameters()}
        batch = weighed(ragged_batch())

        async def play() -> None:
            for _ in range(2):  # A has no gradient before B has moved
                await trainer.forward_backward(batch, policy_gradient)
                await trainer.optim_step(1e-3)

        run(play())
        return {
            kind: max(
                (p - before[n]).abs().max().item()
                for n, p in policy.module.named_parameters()
                if kind in n
            )
            for kind in ("lora_A", "lora_B")
        }

    plain, plus = moved(1.0), moved(8.0)
    assert plain["lora_B"] == pytest.approx(2e-3, rel=0.05)
    assert plus["lora_B"] == pytest.approx(8 * plain["lora_B"], rel=0.05)
    assert plus["lora_A"] < 2.1e-3


def test_the_first_step_of_b_is_exactly_the_ratio_times_that_of_a():
    names = {"x.lora_A.default.weight": 1.0, "x.lora_B.default.weight": 1.0}
    weights = {name: one_weight(value, torch.float32) for name, value in names.items()}
    optimizer = Optimizer(weights, OptimConfig(clip_norm=100), plus_ratio=16.0)
    sum(w.sum() for w in weights.values()).backward()
    optimizer.step(1e-3)
    a, b = ((1 - w.detach())[0].item() for w in weights.values())
    assert a == pytest.approx(1e-3, rel=1e-3) and b == pytest.approx(16 * a, rel=1e-3)


# ---- schedules


def test_the_constant_schedule_warms_up_linearly():
    config = OptimConfig(lr=1.0, warmup_steps=4)
    rates = [learning_rate(config, s, 10) for s in range(10)]
    assert rates == [0.25, 0.5, 0.75, 1.0, *[1.0] * 6]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_without_warmup_the_first_step_has_the_full_rate(schedule):
    assert learning_rate(OptimConfig(lr=0.3, schedule=schedule), 0, 10) == 0.3


def test_linear_and_cosine_go_down_from_the_full_rate_and_never_reach_zero_in_a_step():
    for schedule, middle in (("linear", 0.5), ("cosine", 0.5)):
        config = OptimConfig(lr=1.0, warmup_steps=2, schedule=schedule)
        rates = [learning_rate(config, s, 12) for s in range(12)]
        assert rates[:3] == [0.5, 1.0, 1.0]
        assert rates[7] == pytest.approx(middle)
        assert all(a > b > 0 for a, b in itertools.pairwise(rates[2:]))
    linear = OptimConfig(lr=1.0, warmup_steps=2, schedule="linear")
    assert learning_rate(linear, 11, 12) == pytest.approx(0.1)
    cosine = OptimConfig(lr=2.0, schedule="cosine")
    assert learning_rate(cosine, 1, 4) == pytest.approx(1 + math.cos(math.pi / 4))


def test_the_rate_that_is_asked_for_is_the_rate_that_is_used():
    weight = one_weight(1.0, torch.float32)
    optimizer = Optimizer({"w": weight}, OptimConfig(lr=123.0))
    found = step(optimizer, weight, 1.0, 0.01)
    assert found["optim/lr"] == 0.01 and (1 - weight.detach())[0].item() == pytest.approx(0.01)
