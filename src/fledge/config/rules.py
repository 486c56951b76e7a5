"""Settings that contradict each other: refused before any work, by name.

Each rule is a function of the whole configuration of `fledge train`. Names of plug-ins are those of
built-ins; what a user's own function needs, it must check itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fledge.config.schema import TrainConfig

COMPARES_A_GROUP = ("grpo", "rloo", "opo", "maxrl", "reinforce++_baseline", "gdpo", "turn")
WHOLE_SEQUENCES = ("gspo", "geo_mean")
ANCHORED_AT_ENGINE = ("dppo", "importance_sampling", "rollout_is", "dro")
NEEDS_VALUES = ("gae",)


def refuse_contradictions(config: TrainConfig) -> None:
    """Raise ValueError for the first rule that is broken."""
    for rule in RULES:
        complaint = rule(config)
        if complaint:
            raise ValueError(complaint)


def _group_of_one(c: TrainConfig) -> str | None:
    name = c.algorithm.advantage.name
    compares = name in COMPARES_A_GROUP and c.algorithm.advantage.arguments.get("baseline", True)
    if compares and c.rollout.group_size < 2:
        return (
            f"rollout.group_size=1 gives {name} nothing to compare, so every advantage is 0; set "
            "it to 2 or more"
        )
    return None


def _too_many_minibatches(c: TrainConfig) -> str | None:
    if c.algorithm.minibatches > c.rollout.groups_per_step:
        return (
            "algorithm.minibatches must not exceed rollout.groups_per_step: a mini-batch holds "
            "whole groups"
        )
    return None


def _k1_in_the_loss(c: TrainConfig) -> str | None:
    kl = c.algorithm.kl
    if kl.coef and kl.placement == "loss" and kl.estimator == "k1":
        return (
            "algorithm.kl.estimator=k1 in the loss has zero expected gradient, so it would do "
            "nothing; set it to k2 or k3, or set algorithm.kl.placement=reward"
        )
    return None


def _kl_settings(c: TrainConfig) -> str | None:
    kl = c.algorithm.kl
    if kl.target is not None and (kl.placement == "loss" or not kl.coef):
        return (
            "algorithm.kl.target steers the coefficient of a KL in the reward; set "
            "algorithm.kl.placement=reward and algorithm.kl.coef > 0, or drop it"
        )
    if kl.ref_every and not kl.coef:
        return "algorithm.kl.ref_every has no effect without a KL term; set algorithm.kl.coef > 0"
    if kl.coef and kl.ref_every == 1 and c.algorithm.updates == 1:
        return (
            "algorithm.kl.ref_every=1 with one update per batch makes the reference equal to the "
            "policy, so the KL term is exactly 0; raise it, or algorithm.epochs"
        )
    return None


def _kl_cov_with_one_update(c: TrainConfig) -> str | None:
    if c.algorithm.loss.name == "kl_cov" and c.algorithm.updates == 1:
        return (
            "algorithm.loss=kl_cov with one update per batch is exactly inert: its penalty |lp - "
            "old| is 0; set algorithm.epochs or algorithm.minibatches above 1"
        )
    return None


def _sequence_losses(c: TrainConfig) -> str | None:
    loss, reduction = c.algorithm.loss.name, c.algorithm.reduction
    if loss in WHOLE_SEQUENCES and reduction != "sequence_mean":
        return (
            f"algorithm.loss={loss} is defined per sequence; set "
            f"algorithm.reduction=sequence_mean instead of {reduction}"
        )
    return None


def _norm_length(c: TrainConfig) -> str | None:
    reduction = c.algorithm.reduction
    if c.algorithm.norm_length is not None and reduction != "sequence_mean_token_sum_norm":
        return f"algorithm.norm_length has no effect with algorithm.reduction={reduction}; drop it"
    return None


def _maxrl_below_zero(c: TrainConfig) -> str | None:
    a = c.algorithm
    if a.advantage.name != "maxrl":
        return None
    if a.shaping.overlong_buffer:
        return (
            "algorithm.advantage=maxrl needs rewards of 0 or more, but "
            "algorithm.shaping.overlong_buffer makes them negative; drop one of them"
        )
    if a.kl.coef and a.kl.placement == "reward":
        return (
            "algorithm.advantage=maxrl needs rewards of 0 or more, but "
            "algorithm.kl.placement=reward can make them negative; set it to loss"
        )
    return None


def _changes_of_the_reward(c: TrainConfig) -> dict[str, bool]:
    """Settings that change what an episode's reward is after the environment has given it."""
    a = c.algorithm
    return {
        "algorithm.kl.placement=reward": bool(a.kl.coef) and a.kl.placement == "reward",
        "algorithm.token_reward": a.token_reward is not None,
        "algorithm.shaping.overlong_buffer": bool(a.shaping.overlong_buffer),
        "algorithm.shaping.zero_unless_stopped": a.shaping.zero_unless_stopped,
        "rollout.reward_weights": bool(c.rollout.reward_weights),
    }


def _distillation_sees_no_reward(c: TrainConfig) -> str | None:
    advantage = c.algorithm.advantage
    if advantage.name != "distillation" or advantage.arguments.get("reward"):
        return None
    unseen = {
        **_changes_of_the_reward(c),
        "reward_model": c.reward_model is not None,
        "algorithm.shaping.dynamic_sampling": c.algorithm.shaping.dynamic_sampling != "off",
        "algorithm.shaping.mask_zero_variance": c.algorithm.shaping.mask_zero_variance,
    }
    for key, is_on in unseen.items():
        if is_on:
            return (
                f"{key} has no sense with algorithm.advantage=distillation, which looks at no "
                "reward; drop it, or set algorithm.advantage.reward"
            )
    return None


def _gdpo_sees_parts(c: TrainConfig) -> str | None:
    a = c.algorithm
    if a.advantage.name != "gdpo":
        return None
    unseen = {
        **_changes_of_the_reward(c),
        "reward_model.weight": c.reward_model is not None and c.reward_model.weight != 1,
    }
    for key in ("dynamic_sampling", "mask_zero_variance"):
        if getattr(a.shaping, key) not in ("off", False):
            return (
                f"algorithm.shaping.{key} compares whole rewards, but algorithm.advantage=gdpo "
                "their parts: groups with equal sums would be lost; drop one of them"
            )
    for key, is_on in unseen.items():
        if is_on:
            return (
                f"{key} has no effect with algorithm.advantage=gdpo, which normalises the named "
                "parts of a reward on their own; weigh them with algorithm.advantage.weights"
            )
    return None


def _correction_without_log_probs(c: TrainConfig) -> str | None:
    a = c.algorithm
    for number, correction in enumerate(a.correction):
        bounds = {"low": 0.5, "high": 2.0, **correction.arguments}
        if correction.name == "token_mask" and bounds["low"] is bounds["high"] is None:
            return f"algorithm.correction[{number}]: token_mask without a bound masks nothing"
    if a.correction and not a.recomputed:
        return (
            "algorithm.correction compares the trainer's log-probs with the engine's, but "
            "algorithm.old=engine has only the engine's, so every weight would be 1; set "
            "algorithm.old=recomputed"
        )
    if a.correction and _anchored_at_engine(c):
        return (
            f"algorithm.correction with algorithm.loss={a.loss.label}: the loss starts from the "
            "engine's log-probs already, so the gap would be corrected twice; drop one of them"
        )
    return None


def _anchored_at_engine(c: TrainConfig) -> bool:
    loss = c.algorithm.loss
    return loss.name in ANCHORED_AT_ENGINE or loss.arguments.get("anchor") == "engine"


def _cut_distribution(c: TrainConfig) -> str | None:
    cut, a = c.rollout.cut, c.algorithm
    if not cut:
        return None
    keys = " and ".join(f"rollout.{name}" for name in cut)
    compared = (
        ("algorithm.correction" if a.correction else "")
        or (f"algorithm.loss={a.loss.label}" if _anchored_at_engine(c) else "")
        or ("algorithm.kl.placement=reward" if a.kl.coef and a.kl.placement == "reward" else "")
        or ("algorithm.advantage=distillation" if a.advantage.name == "distillation" else "")
    )
    cure = "drop the filter, or what compares them"
    if not compared and not a.recomputed and a.loss.name != "policy_gradient":
        compared, cure = "algorithm.old=engine", "drop the filter, or set algorithm.old=recomputed"
    if compared:
        return (
            f"{keys}: replies would come from a cut, renormalised distribution, while {compared} "
            f"compares log-probs of the whole one; {cure}"
        )
    return None


def _teacher(c: TrainConfig) -> str | None:
    a = c.algorithm
    distills = a.advantage.name == "distillation"
    if distills and a.teacher is None:
        return (
            "algorithm.teacher: distillation needs a teacher; name a folder, a hub model or `base`"
        )
    if a.teacher is not None and a.advantage.name in BUILT_IN_WITHOUT_TEACHER:
        return (
            f"algorithm.teacher has no effect with algorithm.advantage={a.advantage.label}; use "
            "the preset distill, or drop it"
        )
    if a.teacher == "base" and c.model.lora is None:
        return (
            "algorithm.teacher=base is the model with its adapters off, but there are none; set "
            "model.lora, or name another teacher"
        )
    if a.teacher == "base" and distills and not a.advantage.arguments.get("reward"):
        return (
            "algorithm.teacher=base: adapters begin as the base model, so there is nothing to "
            "imitate; name another teacher, or set algorithm.advantage.reward so that the teacher "
            "only holds back what the reward drives"
        )
    return None


def _no_reward(c: TrainConfig) -> str | None:
    advantage = c.algorithm.advantage
    if advantage.name == "distillation" and not advantage.arguments.get("reward"):
        return None
    nothing = c.env.name == "reward" and c.env.arguments.get("function") is None
    if nothing and c.reward_model is None:
        return "env.function: there is nothing to reward with; name a function, or a reward_model"
    return None


def _overlong_buffer(c: TrainConfig) -> str | None:
    share, longest = c.algorithm.shaping.overlong_buffer, c.rollout.max_new_tokens
    if share and round(share * longest) < 1:
        return (
            f"algorithm.shaping.overlong_buffer={share:g} of rollout.max_new_tokens={longest} is "
            "less than one token, so nothing would be punished; raise one of them"
        )
    return None


BUILT_IN_WITHOUT_TEACHER = (
    *COMPARES_A_GROUP,
    *NEEDS_VALUES,
    "reinforce",
    "reinforce++",
    "remax",
    "turn",
)

RULES: tuple[Callable[[TrainConfig], str | None], ...] = (
    _group_of_one,
    _too_many_minibatches,
    _k1_in_the_loss,
    _kl_settings,
    _kl_cov_with_one_update,
    _sequence_losses,
    _norm_length,
    _maxrl_below_zero,
    _gdpo_sees_parts,
    _distillation_sees_no_reward,
    _correction_without_log_probs,
    _cut_distribution,
    _teacher,
    _no_reward,
    _overlong_buffer,
)
