"""Settings that will not do what somebody hopes: no effect in this run, or known to fail. Said
loudly at the start, by name; what contradicts itself is refused earlier, in `config/rules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fledge.config import Resolved, TrainConfig
from fledge.config.presets import ADAPTERS_WANT
from fledge.config.rules import NEEDS_VALUES

REAL_MODEL = 50_000_000
"""Parameters from which on the known learning rates of language models apply."""

TOO_HIGH = 1e-4
"""Learning rate at which RL on all weights of a real model is known to fall apart."""

TOO_LOW = 2e-6
"""Learning rate at which adapters are known not to move."""

RATIO_BOUNDS = {
    "clipped": ("low", "high"),
    "dual_clip": ("low", "high", "c"),
    "gspo": ("low", "high"),
    "geo_mean": ("bound",),
    "sapo": ("tau_pos", "tau_neg"),
    "cispo": ("low", "high"),
    "clip_cov": ("low", "high"),
}
"""Arguments of losses that have something to bound only when the policy has moved."""


LEARN_WITHOUT_SPREAD = ("gae", "reinforce", "reinforce++", "remax")
"""Estimators whose baseline is not the mean of the group."""


def advice(resolved: Resolved[TrainConfig], parameters: int) -> list[str]:
    """Everything worth a warning before the first step."""
    return [
        *_inert_algorithm(resolved),
        *_inert_elsewhere(resolved),
        *_known_to_fail(resolved, parameters),
    ]


def _inert_algorithm(resolved: Resolved[TrainConfig]) -> Iterator[str]:
    a = resolved.config.algorithm
    at_engine = a.loss.arguments.get("anchor") == "engine"
    if a.updates == 1 and a.loss.name in RATIO_BOUNDS and not at_engine:
        for name in a.loss.arguments:
            if name in RATIO_BOUNDS[str(a.loss.name)]:
                yield (
                    f"algorithm.loss.{name} has no effect: with one update per batch the ratio is "
                    "1 and nothing is clipped; set algorithm.epochs or algorithm.minibatches above "
                    "1, or drop it"
                )
    if a.advantage.name not in NEEDS_VALUES and ":" not in a.advantage.label:
        yield from _set_but(
            resolved, "algorithm.critic", f"algorithm.advantage={a.advantage.label} uses no values"
        )
    if a.critic.model == "head":
        for name in ("path", "lr", "warmup_steps"):
            yield from _set_but(
                resolved, f"algorithm.critic.{name}", "algorithm.critic.model=head has no own model"
            )
    else:
        yield from _set_but(
            resolved, "algorithm.critic.coef", "a separate critic has a loss of its own"
        )
    if a.kl.target is None:
        yield from _set_but(resolved, "algorithm.kl.horizon", "algorithm.kl.target is not set")
    if not a.shaping.overlong_buffer:
        yield from _set_but(
            resolved,
            "algorithm.shaping.overlong_penalty",
            "algorithm.shaping.overlong_buffer is 0",
        )
    if not a.kl.coef:
        yield from _set_but(
            resolved, "algorithm.kl", "algorithm.kl.coef is 0", besides=("coef", "horizon")
        )
    if a.shaping.dynamic_sampling != "filter":
        yield from _set_but(
            resolved,
            "algorithm.shaping.max_rounds",
            "it belongs to algorithm.shaping.dynamic_sampling=filter",
        )


def _set_but(
    resolved: Resolved[TrainConfig], key: str, why: str, besides: tuple[str, ...] = ()
) -> Iterator[str]:
    """A warning for each setting at or under `key` that somebody made."""
    skipped = {f"{key}.{name}" for name in besides}
    for name, origin in resolved.origins.items():
        under = name == key or name.startswith(f"{key}.")
        if under and name not in skipped and not origin.startswith(("default", "preset")):
            yield f"{name} has no effect: {why}"


def _inert_elsewhere(resolved: Resolved[TrainConfig]) -> Iterator[str]:
    config = resolved.config
    evaluates = config.data.eval is not None or config.data.eval_size
    for name in type(config.eval).model_fields:
        if resolved.was_set(f"eval.{name}") and not evaluates:
            yield (
                f"eval.{name} has no effect: there is nothing to evaluate on; set data.eval or "
                "data.eval_size"
            )
    if resolved.was_set("tracking.project") and not config.tracking.to:
        yield "tracking.project has no effect: tracking.to is empty"
    if config.optim.lr == 0:
        yield "optim.lr=0: nothing will be learned"
    if config.model.dtype != "fp32" and not _on_gpu(config.model.device):
        yield (
            f"model.dtype={config.model.dtype} saves memory but is slow on a CPU; "
            "fp32 is faster there"
        )
    if config.optim.warmup_steps >= config.steps:
        yield (
            f"optim.lr={config.optim.lr:g} is never reached: "
            f"optim.warmup_steps={config.optim.warmup_steps} "
            f"is not less than steps={config.steps}"
        )


def _known_to_fail(resolved: Resolved[TrainConfig], parameters: int) -> Iterator[str]:
    yield from _rates_that_fail(resolved, parameters)
    config, a = resolved.config, resolved.config.algorithm
    if a.updates > 1 and a.loss.name == "policy_gradient":
        yield (
            f"algorithm.loss=policy_gradient with {a.updates} updates per batch: after the first "
            "one the policy is not the one that was sampled from, and nothing corrects or bounds "
            "that; use clipped, or one update"
        )
    if a.advantage.name in NEEDS_VALUES and a.critic.warmup_steps >= config.steps:
        yield (
            f"algorithm.critic.warmup_steps={a.critic.warmup_steps} is not less than "
            f"steps={config.steps}: the policy will never be trained"
        )
    if a.shaping.dynamic_sampling != "off" and a.advantage.name in LEARN_WITHOUT_SPREAD:
        yield (
            f"algorithm.shaping.dynamic_sampling={a.shaping.dynamic_sampling} throws away groups "
            f"with equal rewards, which algorithm.advantage={a.advantage.label} could learn from"
        )
    if a.loss.name == "gspo" and float(a.loss.arguments.get("high", 0)) >= 0.05:
        yield (
            f"algorithm.loss.high={a.loss.arguments['high']:g} bounds a ratio of whole sequences, "
            "which hardly moves: nothing would be clipped; gspo wants about 4e-4"
        )
    if a.advantage.name == "grpo" and config.rollout.group_size == 2 and _scales(a.advantage):
        yield (
            "rollout.group_size=2 with grpo makes every advantage +-0.707, however large the "
            "difference; set algorithm.advantage.scale_by_std=false or a larger group"
        )
    if config.rollout.cut:
        keys = " and ".join(f"rollout.{name}" for name in config.rollout.cut)
        yield (
            f"{keys}: replies come from a cut distribution, but the gradient is that of the whole "
            "one, and the agreement of engine and trainer is not measured"
        )


def _rates_that_fail(resolved: Resolved[TrainConfig], parameters: int) -> Iterator[str]:
    lora, rate = resolved.config.model.lora, resolved.config.optim.lr
    if parameters >= REAL_MODEL:
        if lora is None and rate >= TOO_HIGH:
            yield (
                f"optim.lr={rate:g} is known to break a model of this size when all weights are "
                f"trained; 1e-6 is a good start, or train adapters (model.lora.rank=16)"
            )
        if lora is not None and 0 < rate < TOO_LOW:
            yield (
                f"optim.lr={rate:g} hardly moves adapters: they want about {ADAPTERS_WANT:g} times "
                "the rate of full fine-tuning; 1e-5 is a good start"
            )
    if lora is not None and isinstance(lora.targets, list) and not _has_mlp(lora.targets):
        yield (
            "model.lora.targets leaves out the MLP layers, which is known to learn worse than "
            "all-linear at the same rank"
        )


def _scales(advantage: object) -> bool:
    return bool(getattr(advantage, "arguments", {}).get("scale_by_std", True))


def _has_mlp(targets: list[str]) -> bool:
    return any(
        word in target for target in targets for word in ("gate", "up_", "down", "mlp", "fc")
    )


def _on_gpu(device: str) -> bool:
    return device != "cpu" and torch.cuda.is_available()
