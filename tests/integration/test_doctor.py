"""The doctor passes on the tiny model, and each check fails when the thing it checks is broken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fledge.cli import checks, doctor, main
from fledge.cli.checks import Check, Subject
from fledge.config.schema import CommonConfig, LoraConfig, ModelConfig
from fledge.data.batch import Batch
from fledge.inference import NativeEngine, sampling
from fledge.models.attention import PackedLayout, PagedLayout
from fledge.models.load import Policy
from fledge.orchestration.setup import make_policy
from fledge.trainer import LocalTrainer
from fledge.trainer.optim import Optimizer


@pytest.fixture
def subject() -> Subject:
    return Subject.of(make_policy(CommonConfig(model=ModelConfig(random_init=True))))


def expect_failure(check: Check) -> None:
    assert not check.ok, check
    assert check.advice


def test_the_tiny_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out and "checks pass" in out


def test_adapters_pass_before_and_after_training() -> None:
    model = ModelConfig(random_init=True, lora=LoraConfig(rank=4))
    found = list(doctor.examine(make_policy(CommonConfig(model=model))))
    assert all(check.ok for check in found), found


def test_one_failure_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Check("x", False, "[it] broke", "mend it")
    monkeypatch.setattr(doctor, "examine", lambda policy: iter([broken]))
    assert main.run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out and "[it] broke -> mend it" in out and "1 of" in out


@pytest.mark.parametrize(("layout", "part"), [(PagedLayout, "engine"), (PackedLayout, "trainer")])
def test_a_wrong_attention_scale_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, layout: Any, part: str
) -> None:
    right = layout.attend

    def wrong(self: Any, layer: int, q: Any, k: Any, v: Any, scale: float, window: Any) -> Any:
        return right(self, layer, q, k, v, 1.01 * scale, window)

    monkeypatch.setattr(layout, "attend", wrong)
    check = checks.stock_agreement(subject)
    expect_failure(check)
    assert part in check.detail


def test_a_page_of_another_prompt_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = subject.engine.scheduler.pool
    lookup = pool.lookup

    def careless(tokens: Any, version: int) -> list[int]:
        """Whoever has a first page gets the first page that anybody computed."""
        found = lookup(tokens, version)
        known = list(pool._key_of)
        if found or not known or len(tokens) <= pool.size:
            return found
        pool.share(known[:1])
        return known[:1]

    monkeypatch.setattr(pool, "lookup", careless)
    expect_failure(checks.guarded(checks.STOCK, lambda: checks.stock_agreement(subject)))


def test_a_loss_that_is_averaged_per_micro_batch_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LocalTrainer.forward_backward

    async def wrong(self: LocalTrainer, micro: Batch, loss: Any) -> None:
        mean = torch.full_like(micro.columns["scale"], 1 / micro.trained_tokens)
        await right(self, micro.with_columns(scale=mean), loss)

    monkeypatch.setattr(LocalTrainer, "forward_backward", wrong)
    expect_failure(checks.cut_invariance(subject))


def test_a_step_that_ignores_the_rate_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Optimizer.step
    monkeypatch.setattr(Optimizer, "step", lambda self, rate: right(self, rate + 1e-6))
    check = checks.zero_rate(subject)
    expect_failure(check)
    assert "tensors changed" in check.detail


def test_draws_that_depend_on_the_place_in_the_batch_are_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sampling.uniform

    def wrong(seed: Any, index: Any) -> Any:
        return right(seed + torch.arange(len(seed)), index)

    monkeypatch.setattr(sampling, "uniform", wrong)
    expect_failure(checks.seeds(subject))


def test_training_that_changes_nothing_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Optimizer.step
    monkeypatch.setattr(Optimizer, "step", lambda self, rate: right(self, 0.0))
    check = checks.overfit_one_prompt(subject)
    expect_failure(check)
    assert "loss" in check.detail


def test_an_engine_with_its_own_copy_is_found(subject: Subject) -> None:
    policy = subject.policy
    model = copy.deepcopy(policy.model)
    stale = NativeEngine(Policy(model, model, policy.tokenizer, policy.source), checks.CACHE_MB)
    separate = Subject(policy, subject.renderer, stale, subject.trainer)
    check = checks.guarded(checks.LEARN, lambda: checks.overfit_one_prompt(separate))
    expect_failure(check)
    assert "WeightSyncError" in check.detail


def test_a_template_that_rewrites_history_is_found(subject: Subject) -> None:
    subject.policy.tokenizer.chat_template = "{{ messages | length }}"
    found = {check.name: check for check in checks.template(subject)}
    expect_failure(found["chat template is append-only"])
    expect_failure(found["first prompt equals the chat template's"])


def test_too_little_memory_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 1024)
    expect_failure(doctor.fits(subject.policy))


def test_more_threads_than_cores_get_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    threads = next(check for check in doctor.machine() if check.name == "threads")
    assert threads.ok and "unset it" in threads.advice


@pytest.mark.parametrize("target", ["tiny", "quickstart"])
def test_models_and_recipes_can_be_named(target: str) -> None:
    assert doctor.open_target(target).model.config.model_type == "qwen3"


def test_an_sft_recipe_and_a_folder_can_be_named(
    tmp_path: Any, subject: Subject, make_recipe: Callable[[str], str]
) -> None:
    from fledge.models.load import export

    export(subject.policy, tmp_path / "model")
    assert doctor.open_target(str(tmp_path / "model")).dtype == torch.float32
    recipe = make_recipe(
        f"model: {{path: {tmp_path}/model, dtype: bf16}}\ndata: {{train: x.jsonl}}"
    )
    assert doctor.open_target(recipe).dtype == torch.bfloat16


@pytest.fixture
def make_recipe(tmp_path: Any) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "recipe.yaml").write_text(text)
        return str(tmp_path / "recipe.yaml")

    return write
