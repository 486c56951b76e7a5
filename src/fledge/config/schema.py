"""Every configuration key, with its type, default and meaning. Frozen; an unknown key is refused.

Checks of two keys against each other sit next to the keys. What depends on the model or the data is
checked at start by the part that knows it. Keys that would have no effect in a mode are refused or
warned about, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

from fledge.types import Sampling


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


def spelled(value: Any) -> Any:
    """A function object as `"module:name"`, so that configurations can be written down."""
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    return value


class Plugin(BaseModel):
    """A built-in name, `"module:name"` or a function object, with arguments.

    `clipped`, or `{name: clipped, high: 0.28}`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str | Callable[..., Any]

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) or callable(value) else value

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
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="strings that end a reply, besides the end-of-turn token"
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
            self.max_new_tokens, self.temperature, stop=tuple(self.stop), stop_ids=stop_ids
        )


class AlgorithmConfig(Section):
    """A preset name fills the rest; each part can be replaced on its own."""

    name: Literal["grpo", "reinforce"] = Field("grpo", description="the preset")
    advantage: Plugin = Field(
        Plugin(name="grpo"),
        description="rewards of a group (or batch) to one advantage per episode",
    )
    loss: Plugin = Field(Plugin(name="clipped"), description="per-token policy loss")
    reduction: Literal[
        "token_mean", "sequence_mean", "sequence_mean_token_sum_norm", "prompt_mean"
    ] = Field("token_mean", description="how the losses of tokens become one number")
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the k3 estimate of KL(policy || reference) in the loss"
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of an entropy bonus")
    epochs: int = Field(1, ge=1, description="passes over each batch")
    minibatches: int = Field(1, ge=1, description="optimiser steps per pass")

    @property
    def updates(self) -> int:
        return self.epochs * self.minibatches


class OptimConfig(Section):
    lr: float = Field(
        1e-5, ge=0, description="learning rate of AdamW; fits full fine-tuning, adapters want more"
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


class WarmStartConfig(SftStage):
    """A supervised run in `<run_dir>/warm_start` whose result RL begins from."""

    steps: int = Field(100, ge=1, description="the fixed rule that ends it")
    optim: OptimConfig = OptimConfig()


class TrainConfig(CommonConfig):
    """`fledge train`."""

    env: Plugin = Field(description='a built-in environment, or "module:Class"')
    data: DataConfig
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
        algorithm, rollout = self.algorithm, self.rollout
        if algorithm.advantage.name == "grpo" and rollout.group_size < 2:
            raise ValueError(
                "rollout.group_size=1 gives grpo nothing to compare, so every advantage is 0; set "
                "it to 2 or more"
            )
        if algorithm.minibatches > rollout.groups_per_step:
            raise ValueError(
                "algorithm.minibatches must not exceed rollout.groups_per_step: a mini-batch holds "
                "whole groups"
            )
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


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "loss": "clipped", "reduction": "token_mean"},
    "reinforce": {"advantage": "reinforce", "loss": "policy_gradient", "reduction": "token_mean"},
}
"""What `algorithm.name` fills in, below the recipe."""

SMOKE = {
    "steps": 2,
    "optim.warmup_steps": 1,
    "data.batch_size": 2,
    "data.eval_size": 4,
    "rollout.group_size": 2,
    "rollout.groups_per_step": 2,
    "rollout.max_new_tokens": 8,
    "warm_start.steps": 2,
    "warm_start.batch_size": 2,
    "warm_start.optim.warmup_steps": 1,
}
"""What `--smoke` caps: sizes only, so that it shows whether a recipe works at all."""

MAY_CHANGE_ON_RESUME = ("steps", "run_dir", "tracking", "console", "checkpoint", "eval.every")
"""Keys (or sections) that do not change what is learned, so a resumed run may change them."""
