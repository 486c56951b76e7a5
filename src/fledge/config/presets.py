"""What `algorithm.name` stands for, and the learning rates that fit a method: layers below the
recipe, so that everything in them can be replaced.
"""

from __future__ import annotations

from typing import Any, get_args

from fledge.config.schema import PresetName

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "loss": "clipped", "reduction": "token_mean"},
    "dr_grpo": {
        "advantage": {"name": "grpo", "scale_by_std": False},
        "reduction": "sequence_mean_token_sum_norm",
    },
    "rloo": {"advantage": "rloo", "loss": "policy_gradient"},
    "reinforce": {"advantage": "reinforce", "loss": "policy_gradient"},
    "reinforce++": {"advantage": "reinforce++", "minibatches": 4},
    "reinforce++_baseline": {"advantage": "reinforce++_baseline", "minibatches": 4},
    "ppo": {"advantage": "gae", "epochs": 2, "minibatches": 2},
    "dapo": {
        "loss": {"name": "clipped", "low": 0.2, "high": 0.28},
        "minibatches": 4,
        "shaping": {"dynamic_sampling": "filter", "overlong_buffer": 0.2},
    },
    "gspo": {"loss": "gspo", "reduction": "sequence_mean", "minibatches": 4},
    "cispo": {"loss": "cispo", "minibatches": 4},
    "sapo": {"loss": "sapo", "minibatches": 4},
    "gmpo": {"loss": "geo_mean", "reduction": "sequence_mean", "minibatches": 4},
    "remax": {"advantage": "remax", "loss": "policy_gradient"},
    "opo": {"advantage": "opo", "loss": "policy_gradient"},
    "maxrl": {"advantage": "maxrl", "loss": "policy_gradient"},
    "clip_cov": {"loss": "clip_cov", "minibatches": 4},
    "kl_cov": {"loss": "kl_cov", "minibatches": 4},
    "flashrl": {"correction": [{"name": "token_tis", "cap": 2.0}]},
    "async": {"loss": "dppo"},
    "distill": {"advantage": "distillation", "loss": "importance_sampling"},
}
"""Below the recipe and above the defaults, which are those of GRPO."""

assert PRESETS.keys() == set(get_args(PresetName))

ADAPTERS_WANT = 10.0
"""How much higher the learning rate of LoRA is than that of all weights."""

LEARNING_RATES = {"train": 1e-6, "sft": 1e-5, "prefer": 5e-7, "reward_model": 1e-5}
"""Of full fine-tuning of models of a real size, by method."""


def default_rate(method: str, lora: bool) -> tuple[str, float]:
    """The learning rate of a recipe that names none, and what to call its origin.

    >>> default_rate("sft", lora=True)
    ('default of sft with LoRA', 0.0001)
    """
    rate = LEARNING_RATES[method] * (ADAPTERS_WANT if lora else 1.0)
    return f"default of {method} with {'LoRA' if lora else 'all weights'}", rate
