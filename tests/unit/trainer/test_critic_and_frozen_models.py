"""Values, references and teachers: who scores what, checked against plain transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fledge.algorithms.critic import clipped_value
from fledge.algorithms.losses import policy_gradient
from fledge.algorithms.reduce import token_weights
from fledge.config.schema import LoraConfig, OptimConfig
from fledge.data.batch import Batch
from fledge.models.load import Policy
from fledge.trainer import Critic, LocalTrainer, copy_of
from helpers import make_exact, ragged_batch, run, shake_adapters, stock, tiny_policy, trainer_of

REDUCE = partial(token_weights, "token_mean")


def critic_of(policy: Policy) -> Critic:
    critic = Critic(policy, OptimConfig())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = critic.value_head.linear.weight
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return critic


def judged(batch: Batch) -> Batch:
    count = batch.trained_tokens
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(2, count, generator=generator, dtype=torch.float64)
    return batch.with_columns(value=noise[0], returns=noise[1])


@torch.no_grad()
def hidden_by_the_book(policy: Policy, row_tokens: tuple[int, ...], folder: Path) -> Tensor:
    model = stock(policy, folder)
    out = model(torch.tensor([row_tokens]), output_hidden_states=True, use_cache=False)
    return out.hidden_states[-1][0]


def test_a_value_is_that_of_the_state_before_its_token_and_the_last_that_of_what_follows(tmp_path):
    policy = tiny_policy()
    critic = critic_of(policy)
    batch = run(critic.score(ragged_batch(), {"value"}))
    head = critic.value_head
    start = 0
    for number, row in enumerate(batch.rows):
        end = start + len(row.trained)
        values = head(hidden_by_the_book(policy, row.token_ids, tmp_path / str(number)))
        before = values[torch.tensor(row.trained) - 1]
        assert torch.allclose(batch.columns["value"][start:end], before, atol=1e-4)
        after = batch.columns["bootstrap"][start:end]
        assert after[-1].item() == pytest.approx(values[row.trained[-1]].item(), abs=1e-4)
        assert not after[:-1].any()
        start = end


def test_scoring_does_not_depend_on_the_cut():
    critic = critic_of(tiny_policy())
    whole = run(critic.score(ragged_batch(), {"value"}))
    critic.micro_tokens = 20
    cut = run(critic.score(ragged_batch(), {"value"}))
    for name in ("value", "bootstrap"):
        assert torch.allclose(whole.columns[name], cut.columns[name], atol=1e-5)


def value_gradients(critic: Critic, micros: list[Batch]) -> dict[str, Tensor]:
    critic.optimizer.clear()
    for micro in micros:
        run(critic.forward_backward(micro, partial(clipped_value, clip=0.2)))
    found = {name: g.clone() for name, g in critic.optimizer.gradients().items()}
    critic.optimizer.clear()
    return found


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8)])
@pytest.mark.parametrize("untied", [False, True])
def test_the_gradient_of_a_critic_does_not_depend_on_the_cut(untied: bool, lora):
    policy = tiny_policy(lora=lora, tie_word_embeddings=not untied)
    shake_adapters(policy)
    critic = critic_of(policy)
    make_exact(policy.model)
    critic.value_head.double()
    batch = judged(ragged_batch()).weighed(REDUCE)
    whole = value_gradients(critic, batch.micros(10**9))
    cut = value_gradients(critic, [batch.select([i]) for i in reversed(range(len(batch.rows)))])
    assert whole.keys() == cut.keys() and "value_head.linear.weight" in whole
    assert not any("lm_head" in name for name in whole), "its language-model head is left alone"
    for name, gradient in whole.items():
        assert (gradient - cut[name]).norm() <= 1e-10 * gradient.norm()


def test_a_critic_learns_what_it_is_shown_and_reports_under_its_own_name(tmp_path: Path):
    critic = critic_of(tiny_policy())
    batch = ragged_batch()
    target = torch.linspace(-1, 1, batch.trained_tokens)
    errors = []
    for _ in range(60):
        scored = run(critic.score(batch, {"value"})).with_columns(returns=target)
        for mini in scored.updates(1, 1, 0, REDUCE):
            run(critic.forward_backward(mini, partial(clipped_value, clip=1e9)))
        run(critic.optim_step(3e-3))
        metrics = critic.metrics()
        errors.append(metrics["critic/loss"])
    assert errors[-1] < 0.05 * errors[0]
    assert {"critic/loss", "critic/grad_norm", "critic/lr"} <= metrics.keys()
    assert not any(name.startswith(("policy/", "optim/", "mismatch/")) for name in metrics)
    (tmp_path / "critic").mkdir()
    critic.save(tmp_path / "critic")
    other = Critic(tiny_policy(seed=5), OptimConfig())
    other.load(tmp_path / "critic")
    ours, theirs = (run(c.score(batch, {"value"})).columns["value"] for c in (critic, other))
    assert torch.equal(ours, theirs)


# ---- copies


def test_a_copy_is_equal_and_apart():
    policy = tiny_policy()
    other = copy_of(policy, frozen=True)
    batch = ragged_batch()
    trainer = trainer_of(policy, frozen={"ref_logp": other})
    scored = run(trainer.score(batch, {"old_logp", "ref_logp"})).columns
    assert torch.equal(scored["old_logp"], scored["ref_logp"])
    assert not any(p.requires_grad for p in other.module.parameters())
    assert all(p.requires_grad for p in copy_of(policy, frozen=False).module.parameters())
    ours = {p.data_ptr() for p in policy.module.parameters()}
    assert not ours & {p.data_ptr() for p in other.module.parameters()}


def test_a_copy_of_adapters_shares_the_base_and_trains_apart():
    policy = tiny_policy(lora=LoraConfig(rank=4, alpha=8))
    critic = Critic(copy_of(policy, frozen=False), OptimConfig())
    before = {n: p.detach().clone() for n, p in policy.module.named_parameters()}
    batch = judged(ragged_batch()).weighed(REDUCE)
    for _ in range(2):  # the first step moves only the head, which starts at 0
        run(critic.forward_backward(batch, partial(clipped_value, clip=0.2)))
        run(critic.optim_step(1e-2))
    for name, parameter in policy.module.named_parameters():
        assert torch.equal(parameter, before[name]), name
    theirs = dict(critic.policy.module.named_parameters())
    moved = [n for n, p in theirs.items() if not torch.equal(p, before[n])]
    assert moved and all("lora_" in name for name in moved)
    base = next(n for n, p in policy.module.named_parameters() if not p.requires_grad)
    assert theirs[base].data_ptr() == dict(policy.module.named_parameters())[base].data_ptr()


# ---- references that follow, and teachers


def step(trainer: LocalTrainer, seed: int) -> None:
    run(trainer.forward_backward(ragged_batch(seed).weighed(REDUCE), policy_gradient))
    run(trainer.optim_step(1e-2))


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8)])
def test_a_refreshed_reference_is_the_policy_of_that_moment_and_survives_saving(lora, tmp_path):
    def make() -> LocalTrainer:
        policy = tiny_policy(lora=lora)
        frozen = {"ref_logp": copy_of(policy, frozen=True)}
        return trainer_of(policy, frozen=frozen, save_reference=True)

    trainer, batch = make(), ragged_batch()
    for seed in range(2):
        step(trainer, seed)
    now = run(trainer.score(batch, {"old_logp"})).columns["old_logp"]
    trainer.refresh_reference()
    step(trainer, 7)
    scored = run(trainer.score(batch, {"old_logp", "ref_logp"})).columns
    assert torch.equal(scored["ref_logp"], now)
    assert (scored["old_logp"] - now).abs().max() > 1e-3
    trainer.save(tmp_path)
    other = make()
    other.load(tmp_path)
    again = run(other.score(batch, {"old_logp", "ref_logp"})).columns
    assert torch.equal(again["ref_logp"], now) and torch.equal(
        again["old_logp"], scored["old_logp"]
    )


def test_a_teacher_scores_the_students_tokens():
    student, teacher = tiny_policy(), tiny_policy(seed=9)
    batch = ragged_batch()
    trainer = trainer_of(student, frozen={"teacher_logp": teacher}, temperature=0.7)
    found = run(trainer.score(batch, {"teacher_logp"})).columns["teacher_logp"]
    own = run(trainer_of(teacher, temperature=0.7).score(batch, {"old_logp"})).columns["old_logp"]
    assert torch.equal(found, own)


def test_the_base_model_can_teach_its_own_adapters():
    policy = tiny_policy(lora=LoraConfig(rank=4, alpha=8))
    shake_adapters(policy)
    batch = ragged_batch()
    scored = run(trainer_of(policy).score(batch, {"old_logp", "teacher_logp"})).columns
    base = run(trainer_of(tiny_policy()).score(batch, {"old_logp"})).columns["old_logp"]
    assert torch.allclose(scored["teacher_logp"], base, atol=1e-6)
    assert (scored["old_logp"] - base).abs().max() > 1e-2


def test_present_log_probs_are_not_computed_twice(monkeypatch: pytest.MonkeyPatch):
    trainer = trainer_of(tiny_policy())
    batch = run(trainer.score(ragged_batch(), {"old_logp"}))
    monkeypatch.setattr(trainer, "_score_micro", None)
    again = run(trainer.score(batch, {"fresh_logp"}))
    assert again.columns["fresh_logp"] is batch.columns["old_logp"]
    assert run(trainer.score(batch, set())) is batch
