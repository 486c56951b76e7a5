"""The same code on a CUDA device: a whole small run, and agreement with stock transformers."""

import asyncio
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from fledge.config import PreferConfig, TrainConfig, load_config
from fledge.config.schema import ModelConfig
from fledge.inference import NativeEngine
from fledge.models.load import export, load_policy
from fledge.orchestration import prefer, train
from fledge.orchestration.rundir import live_lines
from fledge.types import Sampling

pytestmark = pytest.mark.gpu


def test_a_whole_run_with_warm_start_trains_on_the_device(tmp_path):
    overrides = [f"run_dir={tmp_path}", "model.device=cuda", "console=quiet", "steps=3"]
    overrides += ["warm_start.steps=20", "eval.every=0", "data.eval_size=50"]
    report = train(load_config(TrainConfig, "quickstart", overrides, {}))
    assert report["finished"]
    assert report["health"]["worst_mismatch"] < 1e-3


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-4), ("bf16", 0.1)])
def test_engine_log_probs_equal_stock_transformers(tmp_path, dtype, bound):
    policy = load_policy(ModelConfig(random_init=True, device="cuda", dtype=dtype), seed=0)
    export(policy, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=policy.dtype
    ).cuda()
    engine = NativeEngine(policy, cache_mb=16)
    prompts = [list(range(5, 5 + n)) for n in (3, 17, 40, 40, 33)]

    async def play():
        requests = [engine.generate(p, Sampling(24, seed=i)) for i, p in enumerate(prompts)]
        return await asyncio.gather(*requests)

    for prompt, said in zip(prompts, asyncio.run(play()), strict=True):
        ids = torch.tensor([[*prompt, *said.token_ids]], device="cuda")
        with torch.no_grad():
            logp = stock(ids).logits[0, :-1].float().log_softmax(-1)
        chosen = logp[len(prompt) - 1 :].gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        assert (chosen - torch.tensor(said.logps)).abs().max() < bound


def vowels(prompt, response, meta):
    return sum(c in "aeiou0123" for c in response) / 4


def prompts():
    return [{"prompt": f"{i}+{i}"} for i in range(12)]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["ppo", "dapo", "gspo", "clip_cov", "flashrl", "async", "remax"])
def test_every_kind_of_algorithm_runs_on_the_device(name, lora, tmp_path):
    recipe = {
        "run_dir": str(tmp_path / "run"),
        "steps": 3,
        "console": "quiet",
        "env": {"name": "reward", "function": vowels},
        "model": {"random_init": True, "device": "cuda", "lora": {"rank": 4} if lora else None},
        "data": {"train": {"name": prompts}},
        "rollout": {"group_size": 4, "groups_per_step": 4, "max_new_tokens": 6},
        "algorithm": {"name": name, "kl": {"coef": 0.01, "ref_every": 2}},
        "optim": {"lr": 1e-3},
    }
    report = train(load_config(TrainConfig, recipe, [], environ={}))
    assert report["finished"] and report["health"]["worst_mismatch"] < 1e-3
    for line in live_lines(tmp_path / "run", "metrics"):
        assert all(math.isfinite(value) for value in line.values())
        assert line["optim/grad_norm"] > 0


@pytest.mark.parametrize("loss", ["dpo", "ipo", "bradley_terry"])
def test_preferences_are_learned_on_the_device(loss, tmp_path):
    recipe = {
        "run_dir": str(tmp_path / "run"),
        "steps": 20,
        "console": "quiet",
        "model": {"random_init": True, "device": "cuda"},
        "data": {"train": "arithmetic_pairs", "eval_size": 64, "batch_size": 32},
        "loss": loss,
        "optim": {"lr": 1e-3},
    }
    prefer(load_config(PreferConfig, recipe, [], environ={}))
    accuracy = [
        v["eval/accuracy"] for v in live_lines(tmp_path / "run", "metrics") if "eval/accuracy" in v
    ]
    assert accuracy[0] == pytest.approx(0.5, abs=0.2) and accuracy[-1] > accuracy[0]
