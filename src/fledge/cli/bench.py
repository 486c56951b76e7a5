"""`fledge bench`: one whole GRPO step and its generation half, ours and the installed peers' side
by side in one run.

The workload is W3: a Qwen3 of 0.85 million parameters in fp32 on one CPU thread, 8 prompts, 8
samples each, 64 new tokens each, no stop; once with prompts of about 128 tokens and once with
short ones. Times are CPU seconds of this process: wall time on a shared machine says little.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from fledge.config import TrainConfig, load_config
from fledge.config.schema import ModelConfig
from fledge.inference import NativeEngine
from fledge.models.load import Policy, load_policy
from fledge.orchestration.loop import train
from fledge.orchestration.run import Run
from fledge.rollout import EpisodeGenerator
from fledge.types import Sampling

PROMPTS, SAMPLES, LEARNING_RATE = 8, 8, 1e-4


@dataclass(frozen=True)
class Size:
    """How much work; a smoke run differs in nothing else."""

    new_tokens: int
    prompt_words: int
    steps: int
    layers: int


FULL = (
    Size(new_tokens=64, prompt_words=24, steps=6, layers=4),
    Size(new_tokens=64, prompt_words=1, steps=6, layers=4),
)
SMOKE = (Size(new_tokens=4, prompt_words=4, steps=2, layers=1),)


def prompts(words: int) -> list[dict[str, str]]:
    """Distinct questions, of about five tokens per word and ten around them."""
    return [
        {"prompt": " ".join(str(1000 + 37 * i + 11 * j) for j in range(words))} for i in range(64)
    ]


def reward(prompt: str, response: str, meta: Any) -> float:
    """Some spread, so that no group is without signal."""
    return float(len(response) % 7)


def model_config(size: Size) -> ModelConfig:
    shape = {"num_hidden_layers": size.layers, "intermediate_size": 384}
    return ModelConfig(path="tiny", random_init=True, device="cpu", overrides=shape)


def run(smoke: bool) -> int:
    """Measure each size, and print the tables and ratios."""
    torch.set_num_threads(1)
    console = Console()
    for size in SMOKE if smoke else FULL:
        measure(size, console)
    return 0


def measure(size: Size, console: Console) -> None:
    prompt = max(map(len, _prompt_ids(load_policy(model_config(size), seed=0), size)))
    console.print(
        f"W3: {PROMPTS} prompts of {prompt} tokens x {SAMPLES} samples x {size.new_tokens} new "
        "tokens, one thread"
    )
    generation = {"fledge": engine_seconds(size), "transformers generate": generate_seconds(size)}
    step = {"fledge": step_seconds(size)}
    if importlib.util.find_spec("trl") is None:
        console.print("TRL is not installed; `make bench` installs it")
    else:
        step["TRL"] = trl_seconds(size)
        step["fledge, again"] = step_seconds(size)  # shows how far the machine drifted meanwhile
    tokens = PROMPTS * SAMPLES * size.new_tokens
    console.print(_table("generation (log-probs from fledge only)", generation, tokens))
    console.print(_table("one GRPO step: generate, reward, train, publish", step, tokens))
    if "TRL" in step:
        ours = max(step["fledge"], step["fledge, again"])
        console.print(f"one step: fledge / TRL = {ours / step['TRL']:.2f}")
    ratio = generation["fledge"] / generation["transformers generate"]
    console.print(f"generation: fledge / transformers = {ratio:.2f}\n")


def _table(title: str, seconds: dict[str, float], tokens: int) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("", "CPU s", "sampled tokens per CPU s", "relative"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, spent in seconds.items():
        relative = f"{spent / seconds['fledge']:.2f}"
        table.add_row(name, f"{spent:.3f}", f"{tokens / spent:,.0f}", relative)
    return table


def _median_cpu(work: Callable[[], object], repeats: int) -> float:
    spent = []
    for _ in range(repeats + 1):
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return median(spent[1:])  # the first one warms up


def _prompt_ids(policy: Policy, size: Size) -> Any:
    chats = [
        [{"role": "user", "content": row["prompt"]}] for row in prompts(size.prompt_words)[:PROMPTS]
    ]
    return [
        policy.tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)
        for c in chats
    ]


def engine_seconds(size: Size) -> float:
    """The engine alone, log-probs included."""
    policy = load_policy(model_config(size), seed=0)
    engine = NativeEngine(policy, cache_mb=64)
    chats = _prompt_ids(policy, size)

    async def sample() -> None:
        await engine.update(engine.version)  # no help from prompts cached by the last round
        requests = [
            engine.generate(ids, Sampling(size.new_tokens, seed=i * SAMPLES + j))
            for i, ids in enumerate(chats)
            for j in range(SAMPLES)
        ]
        await asyncio.gather(*requests)

    return _median_cpu(lambda: asyncio.run(sample()), size.steps)


def stock_model(size: Size) -> Policy:
    """The same model as its authors ship it: their attention, weights laid out their way."""
    policy = load_policy(model_config(size), seed=0)
    policy.model.set_attn_implementation("sdpa")
    for parameter in policy.model.parameters():
        parameter.data = parameter.data.contiguous()
    return policy


def generate_seconds(size: Size) -> float:
    """The stock model's own `generate`, without log-probs."""
    policy = stock_model(size)
    model: Any = policy.model
    shortest = min(map(len, _prompt_ids(policy, size)))
    ids = torch.tensor([ids[-shortest:] for ids in _prompt_ids(policy, size)]).repeat_interleave(
        SAMPLES, 0
    )

    def sample() -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=size.new_tokens,
            min_new_tokens=size.new_tokens,
            do_sample=True,
            top_k=0,
        )

    return _median_cpu(sample, size.steps)


def step_seconds(size: Size) -> float:
    """Our whole loop, books and proofs included; stop tokens are ignored, so lengths are fixed."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = {
            "run_dir": folder,
            "steps": size.steps + 1,
            "console": "quiet",
            "model": model_config(size).model_dump(),
            "env": {"name": "reward", "function": f"{__name__}:reward"},
            "data": {"train": {"name": f"{__name__}:prompts", "words": size.prompt_words}},
            "rollout": {
                "group_size": SAMPLES,
                "groups_per_step": PROMPTS,
                "max_new_tokens": size.new_tokens,
            },
            "optim": {"lr": LEARNING_RATE},
            "checkpoint": {"every": 1000},
        }
        resolved = load_config(TrainConfig, recipe, environ={})
        measured = Run(resolved, load_policy(resolved.config.model, seed=0))
        generator = cast(EpisodeGenerator, measured.generator)
        endless = replace(generator.sampling, stop_ids=())
        measured.generator = replace(generator, sampling=endless)
        began: list[float] = []
        measured.books.clock.listeners.append(
            lambda phase: began.append(time.process_time()) if phase == "generate" else None
        )
        with measured.books:
            asyncio.run(train(measured))
    return median(b - a for a, b in pairwise(began[1:]))


def trl_seconds(size: Size) -> float:
    """TRL's GRPO trainer on the same model, prompts, reward and optimiser."""
    trl = importlib.import_module("trl")
    rows = importlib.import_module("trl.trainer.grpo_trainer").Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["prompt"]}]}
            for row in prompts(size.prompt_words)
        ]
    )
    policy = stock_model(size)
    began: list[float] = []

    def scored(completions: list[Any], **_: Any) -> list[float]:
        return [reward("", c[0]["content"], {}) for c in completions]

    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            output_dir=str(Path(folder)),
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=size.new_tokens,
            generation_kwargs={"min_new_tokens": size.new_tokens},
            max_steps=size.steps + 1,
            learning_rate=LEARNING_RATE,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=policy.model,
            reward_funcs=scored,
            args=arguments,
            train_dataset=rows,
            processing_class=policy.tokenizer,
            callbacks=[_step_clock(began)],
        )
        trainer.train()
    return median(b - a for a, b in pairwise(began[1:]))


def _step_clock(began: list[float]) -> Any:
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began.append(time.process_time())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            began.append(time.process_time())

    return StepClock()
