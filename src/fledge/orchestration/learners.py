"""Who learns in a run, and from what: the policy with the models that score its tokens, and its
critic where the estimator needs values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fledge.algorithms import Algorithm
from fledge.config import TrainConfig
from fledge.errors import ConfigError
from fledge.interfaces import Loss
from fledge.models.fingerprint import digest, hashes, module_tensors
from fledge.models.load import Policy, load_policy
from fledge.models.reward import has_value_head, load_value_head
from fledge.trainer import Critic, LocalTrainer, copy_of, learning_rate

CRITIC_PATH = "algorithm.critic.path"


@dataclass(frozen=True)
class Learner:
    """A trainer, the loss that it is asked to lower, and its learning rate by step."""

    trainer: LocalTrainer
    loss: Loss
    rate: Callable[[int], float]


def make_policy_trainer(config: TrainConfig, algorithm: Algorithm, policy: Policy) -> LocalTrainer:
    """The policy's trainer, with the frozen models that its algorithm asks for."""
    lora, ref_every = config.model.lora, config.algorithm.kl.ref_every
    frozen = {}
    if "ref_logp" in algorithm.needs and (lora is None or ref_every):
        frozen["ref_logp"] = copy_of(policy, frozen=True)
    if config.algorithm.teacher not in (None, "base"):
        frozen["teacher_logp"] = _teacher(config, policy)
    return LocalTrainer(
        policy,
        config.optim,
        temperature=config.rollout.temperature,
        plus_ratio=lora.plus_ratio if lora else 1.0,
        gradient_checkpointing=config.model.gradient_checkpointing,
        frozen=frozen,
        value_head=bool(algorithm.value_coef),
        save_reference=bool(ref_every),
    )


def _teacher(config: TrainConfig, policy: Policy) -> Policy:
    key = "algorithm.teacher"
    name = str(config.algorithm.teacher)
    left = {"path": name, "random_init": False, "overrides": {}, "lora": None}
    teacher = load_policy(config.model.model_copy(update=left), config.seed, key)
    _refuse_other_tokens(teacher, policy, key)
    if teacher.vocabulary < policy.vocabulary:
        raise ConfigError(
            f"{key}: {name!r} has fewer token embeddings ({teacher.vocabulary}) than the policy "
            f"({policy.vocabulary}), so it cannot score all that the policy may say"
        )
    teacher.module.requires_grad_(False)
    return teacher


def _refuse_other_tokens(other: Policy, policy: Policy, key: str) -> None:
    """Models of one family may pad their embeddings differently; their tokens must be the same."""
    if other.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ConfigError(
            f"{key}: {other.source!r} has another vocabulary than the policy, so it would score "
            "other tokens; name a model of the same family"
        )


def make_critic(config: TrainConfig, algorithm: Algorithm, policy: Policy) -> Critic | None:
    """A separate value model, where the estimator needs values and the policy has no value head. A
    reward model is a fine one to start from: its head is taken over.
    """
    settings = config.algorithm.critic
    if "value" not in algorithm.needs or algorithm.value_coef:
        return None
    if settings.path is None:
        start = copy_of(policy, frozen=False)
    else:
        left = {"path": settings.path, "random_init": False, "overrides": {}}
        model = config.model.model_copy(update=left)
        start = load_policy(model, config.seed, CRITIC_PATH)
        _refuse_other_tokens(start, policy, CRITIC_PATH)
    lora = config.model.lora
    critic = Critic(
        start,
        config.optim,
        plus_ratio=lora.plus_ratio if lora else 1.0,
        gradient_checkpointing=config.model.gradient_checkpointing,
    )
    if settings.path is not None and has_value_head(settings.path):
        assert critic.value_head is not None
        load_value_head(critic.value_head, settings.path, CRITIC_PATH)
    return critic


@dataclass(frozen=True)
class Learners:
    """All learners of a run, saved and restored together."""

    policy: Learner
    critic: Learner | None
    warmup_steps: int
    identity: Mapping[str, str]
    """Weights from elsewhere that a resumed run must find unchanged."""

    @classmethod
    def of(cls, config: TrainConfig, algorithm: Algorithm, policy: Policy) -> Learners:
        critic = make_critic(config, algorithm, policy)
        trainer = make_policy_trainer(config, algorithm, policy)
        elsewhere = {
            "algorithm.teacher.weights": trainer.frozen.get("teacher_logp"),
            f"{CRITIC_PATH}.weights": critic and config.algorithm.critic.path and critic.policy,
        }
        optim, own = config.optim, config.algorithm.critic
        slower = optim if own.lr is None else optim.model_copy(update={"lr": own.lr})
        return cls(
            Learner(
                trainer,
                algorithm.loss,
                lambda step: learning_rate(optim, step, config.steps),
            ),
            None
            if critic is None
            else Learner(
                critic,
                algorithm.value_loss,
                lambda step: learning_rate(slower, step, config.steps),
            ),
            own.warmup_steps,
            {
                key: digest(hashes(module_tensors(other.model)))
                for key, other in elsewhere.items()
                if isinstance(other, Policy)
            },
        )

    def at(self, step: int) -> list[Learner]:
        """Who learns at this step: at first perhaps only the critic."""
        if self.critic is None:
            return [self.policy]
        return [self.critic] if step < self.warmup_steps else [self.policy, self.critic]

    def metrics(self) -> dict[str, float]:
        critic = {} if self.critic is None else self.critic.trainer.metrics()
        return {**critic, **self.policy.trainer.metrics()}

    def save(self, directory: Path) -> None:
        self.policy.trainer.save(directory)
        if self.critic is not None:
            self.critic.trainer.save(directory / "critic")

    def load(self, directory: Path) -> None:
        self.policy.trainer.load(directory)
        if self.critic is not None:
            self.critic.trainer.load(directory / "critic")
