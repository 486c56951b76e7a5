"""Tiny real models for tests, and the stock model that they are measured against.

`tiny_policy` loads through fledge; `stock` is what plain transformers loads from fledge's export,
run one sequence at a time without padding. Nothing here uses fledge's attention or sampling.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Coroutine, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fledge.config.schema import LoraConfig, ModelConfig, OptimConfig
from fledge.data.batch import Batch, Row
from fledge.models.load import Policy, export, load_policy
from fledge.trainer import LocalTrainer
from fledge.types import Sampling

T = TypeVar("T")
VOCABULARY = 512

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,  # large enough for attention to matter in every logit
}

_PLAIN = {
    **SHAPE,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

WINDOW = 8

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **_PLAIN},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, **_PLAIN},
    "qwen3_untied": {"model_type": "qwen3", "tie_word_embeddings": False, **_PLAIN},
    "mistral": {
        "model_type": "mistral",
        "tie_word_embeddings": False,
        "sliding_window": WINDOW,
        **_PLAIN,
    },
}


def run(work: Coroutine[Any, Any, T], seconds: float = 60) -> T:
    """Run to the end; a hang is a failure with a name."""
    return asyncio.run(asyncio.wait_for(work, seconds))


def tiny_policy(
    *, dtype: str = "fp32", lora: LoraConfig | None = None, seed: int = 0, **overrides: Any
) -> Policy:
    """The package's tiny Qwen3, made smaller."""
    config = ModelConfig(
        random_init=True,
        overrides={**SHAPE, **overrides},
        dtype=dtype,
        device="cpu",
        lora=lora,
    )
    return load_policy(config, seed)


def write_model(directory: Path, kind: str) -> Path:
    """A folder with the config of another architecture and the package's tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[kind]))
    tiny = Path(str(resources.files("fledge.models") / "tiny"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, directory / name)
    return directory


def policy_of_kind(directory: Path, kind: str) -> Policy:
    path = write_model(directory, kind)
    return load_policy(ModelConfig(path=str(path), random_init=True, device="cpu"), seed=1)


def stock(policy: Policy, directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """What plain transformers makes of fledge's export."""
    export(policy, directory)
    model = AutoModelForCausalLM.from_pretrained(
        str(directory), attn_implementation="eager", dtype=dtype
    )
    assert model.config._attn_implementation == "eager"
    return model.eval()


@torch.no_grad()
def stock_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Logits `[T, V]` of one sequence on its own, as float64."""
    out = model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    logits: Tensor = out.logits[0].double()
    return logits


def stock_logps(
    model: PreTrainedModel, tokens: Sequence[int], start: int, temperature: float = 1.0
) -> Tensor:
    """Log-prob of each token from `start` on, given all before it."""
    logits = stock_logits(model, tokens)[start - 1 : -1] / temperature
    wanted = torch.tensor(list(tokens[start:]))
    return logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]


def filtered_probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution that the settings describe, by the book: sort, cut, renormalise."""
    scaled = logits.astype(np.float64) / sampling.temperature
    probability = np.exp(scaled - scaled.max())
    probability /= probability.sum()
    order = np.argsort(-probability, kind="stable")
    kept = list(order[: sampling.top_k] if sampling.top_k else order)
    if sampling.top_p < 1:
        mass = probability[kept].sum()
        nucleus, total = [], 0.0
        for token in kept:
            nucleus.append(token)
            total += probability[token] / mass
            if total >= sampling.top_p:
                break
        kept = nucleus
    kept = [t for t in kept if probability[t] >= sampling.min_p * probability[order[0]]]
    found = np.zeros_like(probability)
    found[kept] = probability[kept]
    return found / found.sum()


def ragged_batch(
    seed: int = 0, *, prompts: Sequence[int] = (5, 11, 3), replies: int = 3, longest: int = 9
) -> Batch:
    """Groups that share a prompt, ragged replies, and some gaps in what is trained."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())

    rows = []
    for prompt, length in enumerate(prompts):
        start = ids(length)
        for _ in range(replies):
            reply = ids(int(torch.randint(1, longest, (), generator=generator)))
            places = list(range(length, length + len(reply)))
            if len(places) > 4:
                del places[2]  # a token in the middle that nobody sampled
            rows.append(Row((*start, *reply), tuple(places), len(rows), prompt))
    count = sum(len(r.trained) for r in rows)

    def noise(scale: float) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64) * scale

    columns = {
        "engine_logp": noise(1.0) - 6,
        "advantage": noise(1.0),
        "weight": noise(1.0).abs(),
    }
    return Batch(tuple(rows), columns)


def trainer_of(policy: Policy, **kwargs: Any) -> LocalTrainer:
    optim = {name: kwargs.pop(name) for name in tuple(kwargs) if name in OptimConfig.model_fields}
    return LocalTrainer(policy, OptimConfig(**optim), **kwargs)


def shake_adapters(policy: Policy, seed: int = 3, scale: float = 0.2) -> None:
    """Adapters start as a no-op; give B values so that they do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * scale)


class ExactNorm(torch.nn.Module):
    """RMSNorm in the precision of its input; Hugging Face's rounds to fp32 on the way."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()


def make_exact(model: torch.nn.Module) -> torch.nn.Module:
    """Double precision from end to end, so that 1e-10 means something."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, ExactNorm(child))
    return model.double()
