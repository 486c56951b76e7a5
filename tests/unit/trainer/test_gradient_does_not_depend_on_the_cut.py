"""The gradient of a mini-batch is the same however it is cut, packed, ordered or shared.

The judge is autograd through stock transformers, one sequence at a time; its losses are written out
here.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from fledge.algorithms.losses import clipped, cross_entropy, policy_gradient
from fledge.algorithms.reduce import REDUCTIONS, token_weights
from fledge.config.schema import LoraConfig
from fledge.data.batch import Batch
from fledge.models.load import Policy, export
from fledge.trainer import LocalTrainer, forward
from helpers import make_exact, ragged_batch, run, shake_adapters, stock, tiny_policy, trainer_of

Gradients = dict[str, Tensor]

LOSSES = {"clipped": clipped, "policy_gradient": policy_gradient, "cross_entropy": cross_entropy}
TUNINGS = {
    "full": None,
    "lora": LoraConfig(rank=4, alpha=8),
    "dora": LoraConfig(rank=4, alpha=8, dora=True),
}
TEMPERATURE = 0.8


@functools.cache
def trained(tuning: str, double: bool) -> LocalTrainer:
    """One trainer per kind; the tests take its gradients and never let it step."""
    policy = tiny_policy(lora=TUNINGS[tuning])
    shake_adapters(policy)
    if double:
        make_exact(policy.model)
    return trainer_of(policy, temperature=TEMPERATURE)


def mini_batch(trainer: LocalTrainer, reduction: str) -> Batch:
    """Three ragged groups, with old log-probs near the present ones: only some are clipped."""
    batch = run(trainer.score(ragged_batch(), {"old_logp"}))
    generator = torch.Generator().manual_seed(5)
    present = batch.columns["old_logp"].double()
    noise = torch.randn(len(present), generator=generator, dtype=torch.float64)
    reduce = functools.partial(token_weights, reduction, max_length=12)
    batch = batch.with_columns(old_logp=present + 0.3 * noise)
    return next(iter(batch.updates(1, 1, 0, reduce)))


def gradients(trainer: LocalTrainer, micros: Sequence[Batch], loss: str) -> Gradients:
    trainer.optimizer.clear()
    for micro in micros:
        run(trainer.forward_backward(micro, LOSSES[loss]))
    found = {name: g.clone() for name, g in trainer.optimizer.gradients().items()}
    trainer.optimizer.clear()
    return found


def random_cut(batch: Batch, seed: int) -> list[Batch]:
    """Rows in another order, in pieces of random size."""
    rng = random.Random(seed)
    order = rng.sample(range(len(batch.rows)), len(batch.rows))
    cuts = sorted(rng.sample(range(1, len(order)), 3))
    return [batch.select(order[a:b]) for a, b in itertools.pairwise([0, *cuts, len(order)])]


def check_equal(ours: Gradients, other: Gradients, allowed: float) -> None:
    assert ours.keys() == other.keys()
    for name, gradient in ours.items():
        size = gradient.norm()
        assert size > 0, f"{name} has no gradient, so nothing was compared"
        gap = (gradient - other[name]).norm() / size
        assert gap <= allowed, f"{name} differs by {gap:.2g}"


def check_all_cuts(trainer: LocalTrainer, batch: Batch, loss: str, allowed: float) -> Gradients:
    whole = gradients(trainer, batch.micros(10**9), loss)
    rows = [batch.select([i]) for i in range(len(batch.rows))]
    backwards = [batch.select(range(len(batch.rows))[::-1])]
    budget = batch.micros(25)
    assert 1 < len(budget) < len(rows)
    for cut in (rows, backwards, budget, random_cut(batch, 1)):
        check_equal(whole, gradients(trainer, cut, loss), allowed)
    return whole


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_cut_gives_the_same_gradient_in_fp64(loss: str, reduction: str):
    trainer = trained("full", double=True)
    check_all_cuts(trainer, mini_batch(trainer, reduction), loss, 1e-10)


@pytest.mark.parametrize("tuning", ["lora", "dora"])
@pytest.mark.parametrize(
    ("loss", "reduction"),
    list(zip(itertools.cycle(sorted(LOSSES)), REDUCTIONS, strict=False)),
)
def test_every_cut_gives_adapters_the_same_gradient_in_fp64(tuning, loss, reduction):
    trainer = trained(tuning, double=True)
    check_all_cuts(trainer, mini_batch(trainer, reduction), loss, 1e-10)


@pytest.mark.parametrize(
    ("tuning", "loss"),
    [("full", loss) for loss in sorted(LOSSES)] + [("lora", "clipped"), ("dora", "clipped")],
)
def test_every_cut_gives_the_same_gradient_in_fp32(tuning: str, loss: str):
    trainer = trained(tuning, double=False)
    check_all_cuts(trainer, mini_batch(trainer, "sequence_mean"), loss, 1e-5)


def test_rows_share_their_prompt_only_when_they_are_computed_together():
    """A check of the tests above: one cut shares prompts, the other does not."""
    batch = ragged_batch()
    device = torch.device("cpu")
    together = len(forward.Plan.of(batch.rows, device).tokens)
    apart = sum(len(forward.Plan.of([row], device).tokens) for row in batch.rows)
    assert apart - together == 2 * (5 + 11 + 3)


# ---- the naive reference


def reference_loss(
    kind: str, logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor
) -> Tensor:
    if kind == "cross_entropy":
        return -weight * logp
    if kind == "policy_gradient":
        return -advantage * logp
    ratio = (logp - old).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def naive_weights(batch: Batch, reduction: str) -> list[float]:
    """The meaning of each reduction, spelled out; each row is a sequence of its own here."""
    counts = [len(r.trained) for r in batch.rows]
    prompts = [r.prompt for r in batch.rows]
    of_prompt = {p: sum(c for c, q in zip(counts, prompts, strict=True) if q == p) for p in prompts}
    return {
        "token_mean": [1 / sum(counts)] * len(counts),
        "sequence_mean": [1 / len(counts) / c for c in counts],
        "sequence_mean_token_sum_norm": [1 / len(counts) / 12] * len(counts),
        "prompt_mean": [1 / len(of_prompt) / of_prompt[p] for p in prompts],
    }[reduction]


def naive_gradients(model: torch.nn.Module, batch: Batch, loss: str, reduction: str) -> Gradients:
    model.zero_grad()
    start = 0
    for row, scale in zip(batch.rows, naive_weights(batch, reduction), strict=True):
        logits = model(input_ids=torch.tensor([row.token_ids]), use_cache=False).logits[0]
        logps = (logits / TEMPERATURE).log_softmax(-1)
        places = torch.tensor(row.trained)
        logp = logps[places - 1, torch.tensor(row.token_ids)[places]]
        end = start + len(places)
        columns = (batch.columns[n][start:end] for n in ("old_logp", "advantage", "weight"))
        (scale * reference_loss(loss, logp, *columns)).sum().backward()
        start = end
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def stock_twin(policy: Policy, tuning: str, folder: Path) -> torch.nn.Module:
    """The same weights in plain transformers (and plain PEFT)."""
    if tuning == "full":
        return stock(policy, folder, policy.dtype)
    base = stock(tiny_policy(), folder / "base", policy.dtype)
    export(policy, folder / "adapter", merge=False)
    return PeftModel.from_pretrained(base, str(folder / "adapter"), is_trainable=True)


@pytest.mark.parametrize(("double", "allowed"), [(True, 1e-10), (False, 1e-5)])
@pytest.mark.parametrize("tuning", sorted(TUNINGS))
def test_gradients_equal_autograd_through_stock_transformers(tuning, double, allowed, tmp_path):
    trainer = trained(tuning, double=double)
    twin = stock_twin(trainer.policy, tuning, tmp_path)
    if double:
        make_exact(twin)
        inner = twin if tuning == "full" else twin.get_base_model()
        inner.set_attn_implementation("sdpa")  # eager rounds its softmax to fp32
    for loss, reduction in zip(itertools.cycle(sorted(LOSSES)), REDUCTIONS, strict=False):
        batch = mini_batch(trainer, reduction)
        ours = gradients(trainer, batch.micros(10**9), loss)
        check_equal(ours, naive_gradients(twin, batch, loss, reduction), allowed)


# ---- the chunked head and gradient checkpointing


def test_the_chunked_head_gives_the_same_gradient_and_never_builds_all_logits(monkeypatch):
    trainer = trained("full", double=True)
    batch = mini_batch(trainer, "token_mean")
    whole = gradients(trainer, [batch], "clipped")
    scored = run(trainer.score(batch, {"old_logp"})).columns["old_logp"]
    limit = 3 * 512 + 100
    monkeypatch.setattr(forward, "CHUNK_LOGITS", limit)
    largest, calls = 0, 0

    def spy(_module, _inputs, output: Tensor) -> None:
        nonlocal largest, calls
        largest, calls = max(largest, output.numel()), calls + 1

    handle = trainer.policy.head.register_forward_hook(spy)
    try:
        check_equal(whole, gradients(trainer, [batch], "clipped"), 1e-12)
        chunked = run(trainer.score(batch, {"old_logp"})).columns["old_logp"]
    finally:
        handle.remove()
    assert torch.allclose(chunked, scored, rtol=0, atol=1e-12)
    assert 0 < largest <= limit
    chunks = -(-batch.trained_tokens // 3)
    assert calls == 2 * chunks + chunks, "logits are computed again in the backward pass"


def test_a_vocabulary_larger_than_a_chunk_goes_token_by_token(monkeypatch):
    trainer = trained("full", double=True)
    batch = mini_batch(trainer, "token_mean")
    whole = gradients(trainer, [batch], "clipped")
    monkeypatch.setattr(forward, "CHUNK_LOGITS", 100)
    check_equal(whole, gradients(trainer, [batch], "clipped"), 1e-12)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_gradient_checkpointing_gives_the_same_gradient(tuning: str):
    plain = trained(tuning, double=True)
    policy = tiny_policy(lora=TUNINGS[tuning])
    shake_adapters(policy)
    make_exact(policy.model)
    saving = trainer_of(policy, temperature=TEMPERATURE, gradient_checkpointing=True)
    calls = 0

    def spy(*_: object) -> None:
        nonlocal calls
        calls += 1

    policy.model.model.layers[0].mlp.register_forward_pre_hook(spy)
    batch = mini_batch(plain, "token_mean")
    ours = gradients(saving, [batch], "clipped")
    assert calls == 2, "activations were not recomputed"
    check_equal(gradients(plain, [batch], "clipped"), ours, 1e-12)
    assert not policy.model.training, "the engine must find the model in evaluation mode"
