"""The same code on a CUDA device: a whole small run, and agreement with stock transformers."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from fledge.config import TrainConfig, load_config
from fledge.config.schema import ModelConfig
from fledge.inference import NativeEngine
from fledge.models.load import export, load_policy
from fledge.orchestration import train
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
