"""Every configuration key, with its type, default and meaning. Frozen; an unknown key is refused.

Checks of two keys against each other sit next to the keys. What depends on the model or the data is
checked at start by the part that knows it. Keys that would have no effect in a mode are refused or
warned about, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

from fledge.config.rules import refuse_contradictions
from fledge.types import Sampling

PresetName = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce++",
    "reinforce++_baseline",
    "ppo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "remax",
    "opo",
    "maxrl",
    "clip_cov",
    "kl_cov",
    "flashrl",
    "async",
    "distill",
]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


def spelled(value: Any) -> Any:
    """A function object as `"module:name"`, so that configurations can be written down."""
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    return value


SPELLINGS = {
    "ClipCov": "clip_cov",
    "KlCov": "kl_cov",
    "Reinforce": "reinforce",
    "reinforce_pp": "reinforce++",
    "reinforce_pp_baseline": "reinforce++_baseline",
    "RewardEnvironment": "reward",
}
"""Built-ins whose name in the code is not their name in a recipe."""


def built_in_name(name: Any) -> Any:
    """A built-in that is spelled `"module:name"` or given as a function is the same built-in, so
    that the same rules hold for it.
    """
    spelling = spelled(name)
    if isinstance(spelling, str) and spelling.startswith(
        ("fledge.algorithms.", "fledge.envs.function:")
    ):
        found = spelling.rpartition(":")[2]
        return SPELLINGS.get(found, found)
    return name


class Plugin(BaseModel):
    """A built-in name, `"module:name"` or a function object, with arguments.

    `clipped`, or `{name: clipped, high: 0.28}`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str | Callable[..., Any]

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        value = {"name": value} if isinstance(value, str) or callable(value) else value
        if isinstance(value, dict) and "name" in value:
            value = {**value, "name": built_in_name(value["name"])}
        return value

    @model_serializer
    def _spelled(self) -> dict[str, Any]:
        return {key: spelled(value) for key, value in {"name": self.name, **self.arguments}.items()}

    @property
    def label(self) -> str:
        """The name as it is shown and saved."""
        return str(spelled(self.name))

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class LoraConfig(Section):
    """Low-rank adapters through PEFT. The base model is frozen and serves as the reference with
    adapters off.
    """

    rank: int = Field(16, ge=1, description="rank of the update")
    alpha: float = Field(
        32.0,
        gt=0,
        description="scale: the update is multiplied by alpha/rank (rsLoRA: alpha/sqrt(rank))",
    )
    targets: str | list[str] = Field(
        "all-linear", description='module names to adapt, or "all-linear"'
    )
    rslora: bool = Field(False, description="rank-stabilised scale (arXiv:2312.03732)")
    dora: bool = Field(False, description="decomposed magnitude and direction (arXiv:2402.09353)")
    plus_ratio: float = Field(
        1.0,
        ge=1,
        description="LoRA+: learning rate of B is this times that of A (arXiv:2402.12354)",
    )


class ModelConfig(Section):
    path: str = Field(
        "tiny", description="a folder, a hub name, or `tiny` (the model in the package)"
    )
    random_init: bool = Field(
        False,
        description="fresh weights instead of trained ones; needs only a config and a tokenizer",
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="fields of the model's own config, such as max_position_embeddings",
    )
    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="of the weights; optimiser state is always fp32"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="cuda where there is one")
    lora: LoraConfig | None = Field(None, description="train adapters instead of all weights")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass to save memory"
    )


class DataConfig(Section):
    train: Plugin = Field(
        description="JSONL or Parquet file, HF dataset name or folder, or a generator function"
    )
    eval: Plugin | None = Field(
        None, description="held-out tasks; without it `eval_size` tasks are split off `train`"
    )
    eval_size: int = Field(
        0, ge=0, description="tasks used for evaluation; with `eval` set, 0 means all of them"
    )
    shuffle: bool = Field(True, description="a new order each epoch, a function of the seed")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="longer prompts are filtered out and counted"
    )


class RolloutConfig(Section):
    group_size: int = Field(8, ge=1, description="episodes per task")
    groups_per_step: int = Field(8, ge=1, description="tasks per training step")
    max_new_tokens: int = Field(64, ge=1, description="limit of one reply")
    temperature: float = Field(
        1.0, gt=0, description="of the rollouts; the trainer scores at the same temperature"
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="smallest set of tokens with this mass; see the guide"
    )
    top_k: int = Field(0, ge=0, description="only the k likeliest tokens; 0 is off")
    min_p: float = Field(0.0, ge=0, lt=1, description="least share of the likeliest token's mass")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="strings that end a reply, besides the end-of-turn token"
    )
    reward_weights: dict[str, float] = Field(
        default_factory=dict,
        description="weights of the named parts of a reward; a part that is not named has 1",
    )
    max_turns: int = Field(16, ge=1, description="replies per episode; more are cut off")
    max_episode_tokens: int | None = Field(
        None, ge=1, description="tokens that the policy may say in one episode"
    )
    max_seconds: float | None = Field(None, gt=0, description="wall-clock limit of one episode")
    overflow: Literal["end", "truncate", "sliding"] = Field(
        "end",
        description="when a conversation outgrows the model: end it, cut what the environment "
        "said, or forget the oldest exchanges",
    )
    min_group_size: int = Field(
        0, ge=0, description="usable episodes of a group below which new ones are played"
    )
    mask: Plugin | None = Field(
        None, description="your own: `(episode) -> for each segment, which tokens may be trained`"
    )
    timeout: float = Field(
        120.0, gt=0, description="seconds that one call of an environment may take"
    )
    retries: int = Field(
        2,
        ge=0,
        description="how often a failed environment is tried again before its episode is dropped",
    )

    def sampling(self, stop_ids: tuple[int, ...]) -> Sampling:
        """All but the seed, which is each episode's own."""
        return Sampling(
            self.max_new_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            stop=tuple(self.stop),
            stop_ids=stop_ids,
        )

    @property
    def cut(self) -> list[str]:
        """The settings that make replies come from less than the whole distribution."""
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return [name for name, off in neutral.items() if getattr(self, name) != off]


class KlConfig(Section):
    """The pull towards the frozen reference; off while `coef` is 0."""

    coef: float = Field(0.0, ge=0, description="weight of KL(policy || reference); 0 is off")
    estimator: Literal["k1", "k2", "k3", "abs"] = Field(
        "k3", description="estimate of the KL per token; k3 fits the loss, k1 the reward"
    )
    placement: Literal["loss", "reward"] = Field(
        "loss", description="added to the loss, or taken off the reward of each token"
    )
    target: float | None = Field(
        None, gt=0, description="KL per token that an adaptive `coef` steers to (in the reward)"
    )
    horizon: int = Field(
        10_000, ge=1, description="episodes in which an adaptive `coef` corrects itself"
    )
    ref_every: int = Field(
        0, ge=0, description="steps between refreshes of the reference; 0 keeps the starting model"
    )


class ShapingConfig(Section):
    """What happens to groups and rewards before advantages are computed."""

    dynamic_sampling: Literal["off", "filter", "replace"] = Field(
        "off",
        description="for groups whose rewards are all equal: `filter` draws new tasks until the "
        "batch is full, `replace` repeats groups that have spread",
    )
    max_rounds: int = Field(
        4, ge=1, description="how often `filter` draws anew before it trains on what there is"
    )
    mask_zero_variance: bool = Field(
        False, description="leave groups whose rewards are all equal out of the loss"
    )
    mask_truncated: bool = Field(
        False, description="leave truncated episodes out of the loss (overlong filtering)"
    )
    zero_unless_stopped: bool = Field(
        False, description="no positive reward for an episode that was truncated"
    )
    overlong_buffer: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of rollout.max_new_tokens at its end in which a soft punishment rises "
        "to `overlong_penalty`; 0 is off",
    )
    overlong_penalty: float = Field(
        1.0, gt=0, description="largest soft punishment of a reply that is too long"
    )


class CriticConfig(Section):
    """The value function; used by estimators that need one, such as gae."""

    model: Literal["separate", "head"] = Field(
        "separate", description="a second model, or one more head on the policy's"
    )
    path: str | None = Field(
        None, description="where a separate critic starts from; by default the policy's model"
    )
    lr: float | None = Field(
        None, gt=0, description="learning rate of a separate critic; by default optim.lr"
    )
    coef: float = Field(0.5, gt=0, description="weight of the value loss of a critic head")
    clip: float = Field(0.2, gt=0, description="how far a value may move in one batch")
    warmup_steps: int = Field(
        0, ge=0, description="steps in which only a separate critic is trained"
    )


class AlgorithmConfig(Section):
    """A preset name fills the rest; each part can be replaced on its own."""

    name: PresetName = Field("grpo", description="the preset")
    advantage: Plugin = Field(
        Plugin(name="grpo"), description="from rewards to an advantage per episode or token"
    )
    loss: Plugin = Field(Plugin(name="clipped"), description="per-token policy loss")
    reduction: Literal[
        "token_mean", "sequence_mean", "sequence_mean_token_sum_norm", "prompt_mean"
    ] = Field("token_mean", description="how the losses of tokens become one number")
    norm_length: int | None = Field(
        None,
        ge=1,
        description="the fixed length of sequence_mean_token_sum_norm; by default "
        "rollout.max_new_tokens",
    )
    old: Literal["auto", "engine", "recomputed"] = Field(
        "auto",
        description="log-probs that ratios start from: the engine's, or the trainer's own before "
        "the first update; auto recomputes when there are several updates or a correction",
    )
    correction: list[Plugin] = Field(
        default_factory=list,
        description="weights for the gap between engine and trainer, multiplied",
    )
    kl: KlConfig = KlConfig()
    entropy_coef: float = Field(0.0, ge=0, description="weight of an entropy bonus")
    token_reward: Plugin | None = Field(
        None, description="your own rewards per token: `(segment) -> one number per token`"
    )
    shaping: ShapingConfig = ShapingConfig()
    critic: CriticConfig = CriticConfig()
    teacher: str | None = Field(
        None,
        description="the model that distillation imitates: a folder, a hub name, or `base` for the "
        "policy's own model with its adapters off",
    )
    epochs: int = Field(1, ge=1, description="passes over each batch")
    minibatches: int = Field(1, ge=1, description="optimiser steps per pass")

    @property
    def updates(self) -> int:
        return self.epochs * self.minibatches

    @property
    def recomputed(self) -> bool:
        """Whether ratios start from the trainer's own log-probs."""
        if self.old == "auto":
            return self.updates > 1 or bool(self.correction)
        return self.old == "recomputed"


class OptimConfig(Section):
    lr: float = Field(
        1e-5,
        ge=0,
        description="learning rate of AdamW; a recipe that names none gets what fits its method, "
        "ten times as much with LoRA",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate after the warm-up; falls to 0 at the end"
    )
    warmup_steps: int = Field(0, ge=0, description="steps in which the learning rate rises")
    weight_decay: float = Field(0.0, ge=0, description="decoupled, as in AdamW")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the mean of gradients")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the mean of their squares")
    clip_norm: float = Field(1.0, gt=0, description="largest norm of the whole gradient")
    micro_tokens: int = Field(
        16384, ge=1, description="tokens per forward/backward pass; changes memory, not results"
    )


class EngineConfig(Section):
    cache_mb: int = Field(
        512, ge=1, description="memory for the key/value cache; requests beyond it wait their turn"
    )


class EvalConfig(Section):
    every: int = Field(
        0, ge=0, description="steps between evaluations; 0 means only before and after"
    )
    samples: int = Field(1, ge=1, description="replies per task: avg@k, and pass@k when k > 1")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="smallest set of tokens with this mass")
    top_k: int = Field(0, ge=0, description="only the k likeliest tokens; 0 is off")
    min_p: float = Field(0.0, ge=0, lt=1, description="least share of the likeliest token's mass")

    @model_validator(mode="after")
    def _sampled(self) -> EvalConfig:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                "eval.samples > 1 draws the same greedy reply each time; set eval.temperature > 0"
            )
        if self.temperature == 0 and (self.top_p < 1 or self.top_k or self.min_p):
            raise ValueError(
                "eval.top_p/top_k/min_p have no effect at eval.temperature=0; set a temperature or "
                "drop them"
            )
        return self


class CheckpointConfig(Section):
    every: int = Field(20, ge=1, description="steps between saves; the last step is always saved")
    keep_last: int = Field(2, ge=1, description="newest checkpoints that stay")
    keep_best: bool = Field(
        False, description="also keep the checkpoint with the best evaluation; needs eval.every > 0"
    )


class TrackingConfig(Section):
    to: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(
        default_factory=list, description="several at once are fine"
    )
    project: str = Field("fledge", description="project or experiment name there")


class CommonConfig(Section):
    run_dir: str = Field(
        "runs/run", description="everything about the run; reusing it resumes the run"
    )
    seed: int = Field(0, ge=0, description="of weights, order, sampling: all that is random")
    steps: int = Field(100, ge=1, description="training steps; may be raised to go on")
    threads: int = Field(
        0, ge=0, description="CPU threads; 0 chooses by model size (one for small models)"
    )
    console: Literal["auto", "live", "plain", "quiet"] = Field(
        "auto", description="live display on a terminal, plain lines elsewhere"
    )
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()


class SftStage(Section):
    """Supervised fine-tuning on messages or prompt/response pairs, packed; only assistant tokens
    are trained.
    """

    train: Plugin = Field(
        description="demonstrations: JSONL, Parquet, HF dataset or a generator function"
    )
    eval_size: int = Field(0, ge=0, description="demonstrations held out for a loss curve")
    batch_size: int = Field(64, ge=1, description="demonstrations per step")
    max_tokens: int | None = Field(
        None, ge=2, description="longer demonstrations are filtered out and counted"
    )


class SftConfig(CommonConfig):
    """`fledge sft`."""

    data: SftStage


class PreferStage(Section):
    """Preference pairs: rows with `prompt`, `chosen` and `rejected`."""

    train: Plugin = Field(description="pairs: JSONL, Parquet, HF dataset or a generator function")
    eval_size: int = Field(0, ge=0, description="pairs held out for an accuracy")
    batch_size: int = Field(64, ge=1, description="pairs per step")
    max_tokens: int | None = Field(
        None, ge=2, description="pairs with a longer half are filtered out and counted"
    )


class PreferConfig(CommonConfig):
    """`fledge prefer`."""

    data: PreferStage
    loss: Plugin = Field(
        Plugin(name="dpo"),
        description="dpo or ipo train a policy, bradley_terry trains a reward model",
    )


class RewardModelConfig(Section):
    """A trained reward model whose score is added to the reward of each episode."""

    path: str = Field(description="the export of a `fledge prefer` run with bradley_terry")
    weight: float = Field(1.0, description="of its score in the reward")


class WarmStartConfig(SftStage):
    """A supervised run in `<run_dir>/warm_start` whose result RL begins from."""

    steps: int = Field(100, ge=1, description="the fixed rule that ends it")
    optim: OptimConfig = OptimConfig()


class TrainConfig(CommonConfig):
    """`fledge train`."""

    env: Plugin = Field(description='a built-in environment, or "module:Class"')
    data: DataConfig
    reward_model: RewardModelConfig | None = Field(
        None, description="a learned reward, on top of the environment's"
    )
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    engine: EngineConfig = EngineConfig()
    eval: EvalConfig = EvalConfig()
    metrics: list[Plugin] = Field(
        default_factory=list, description="your own: functions `(groups) -> {name: number}`"
    )
    warm_start: WarmStartConfig | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        refuse_contradictions(self)
        if self.checkpoint.keep_best and not self.eval.every:
            raise ValueError(
                "checkpoint.keep_best needs evaluations to compare; set eval.every > 0"
            )
        if self.data.eval is None and self.data.eval_size == 0 and self.eval.every:
            raise ValueError(
                "eval.every is set but there is nothing to evaluate on; set data.eval or "
                "data.eval_size"
            )
        return self


SMOKE = {
    "steps": 2,
    "optim.warmup_steps": 1,
    "data.batch_size": 2,
    "data.eval_size": 4,
    "rollout.group_size": 2,
    "rollout.groups_per_step": 2,
    "rollout.max_new_tokens": 8,
    "algorithm.epochs": 2,
    "algorithm.minibatches": 2,
    "warm_start.steps": 2,
    "warm_start.batch_size": 2,
    "warm_start.optim.warmup_steps": 1,
}
"""What `--smoke` caps: sizes only, so that it shows whether a recipe works at all."""

MAY_CHANGE_ON_RESUME = (
    "steps",
    "run_dir",
    "tracking",
    "console",
    "checkpoint",
    "eval.every",
    "optim.micro_tokens",
)
"""Keys (or sections) that do not change what is learned, so a resumed run may change them."""
