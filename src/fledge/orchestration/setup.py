"""From a configuration to the objects of a run: threads, model, renderer, tasks. Bad input is
refused here, before any work.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from fledge.config import TrainConfig
from fledge.config.schema import CommonConfig, DataConfig, ModelConfig, Plugin, spelled
from fledge.data.render import make_renderer
from fledge.data.tasks import (
    content,
    filter_by_length,
    fingerprint,
    load_rows,
    split_off,
    to_tasks,
)
from fledge.envs import EnvironmentFactory
from fledge.errors import ConfigError, DataError, FledgeError
from fledge.interfaces import InferenceEngine, Renderer
from fledge.models.fingerprint import digest, hashes, module_tensors
from fledge.models.load import Policy, load_policy
from fledge.plugins import bind
from fledge.rollout import EpisodeGenerator, Limits
from fledge.types import Sampling, Task

SMALL_MODEL = 20_000_000
"""Parameters below which more than one CPU thread makes everything slower."""


@dataclass(frozen=True)
class Tasks:
    """Training and held-out tasks, and what was left out on the way."""

    train: list[Task]
    eval: list[Task]
    duplicates: int
    too_long: int
    longest_prompt: int

    def fingerprint(self) -> str:
        return fingerprint([*self.train, *self.eval])


def make_policy(config: CommonConfig, model: ModelConfig | None = None) -> Policy:
    """Load the model, and settle the number of threads before anything is computed with it."""
    torch.set_num_threads(config.threads or 1)
    policy = load_policy(model or config.model, config.seed)
    if not config.threads and policy.parameters > SMALL_MODEL:
        torch.set_num_threads(max(1, (os.cpu_count() or 1)))
    return policy


def make_tasks(config: TrainConfig, environment: EnvironmentFactory, policy: Policy) -> Tasks:
    """Read, name, split and filter the tasks; refuse prompts that cannot fit the model."""
    rows = load_rows(config.data.train, "data.train")
    named = to_tasks(rows, "data.train")
    train, held_out = _hold_out(config.data, named, config.seed)
    _refuse_leaks(train, held_out)
    renderer = make_renderer(policy.tokenizer)
    lengths = prompt_lengths([*train, *held_out], environment, renderer, config.rollout.timeout)
    limit = config.data.max_prompt_tokens
    before = len(train) + len(held_out)
    if limit is not None:
        train, _ = filter_by_length(train, lambda task: lengths.get(task.key, 0), limit)
        held_out = [task for task in held_out if lengths.get(task.key, 0) <= limit]
    left = {task.key: lengths.get(task.key, 0) for task in [*train, *held_out]}
    _refuse_overlong(left, policy.context, config.rollout.max_new_tokens)
    return Tasks(
        train,
        held_out,
        duplicates=len(rows) - len(named),
        too_long=before - len(left),
        longest_prompt=max(left.values()),
    )


def _refuse_overlong(lengths: Mapping[str, int], context: int, new_tokens: int) -> None:
    key = max(lengths, key=lambda k: lengths[k])
    room = context - new_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_new_tokens: {new_tokens} leaves no room for a prompt in the model's "
            f"context of {context}; lower it, or raise model.overrides.max_position_embeddings"
        )
    if lengths[key] > room:
        raise DataError(
            f"data.max_prompt_tokens: the prompt of task {key!r} has {lengths[key]} tokens, but "
            f"the model's context of {context} leaves {room} beside "
            f"rollout.max_new_tokens={new_tokens}; set data.max_prompt_tokens={max(room, 1)} to "
            "filter such tasks, or lower rollout.max_new_tokens"
        )


def _hold_out(data: DataConfig, train: list[Task], seed: int) -> tuple[list[Task], list[Task]]:
    if data.eval is None:
        return split_off(train, data.eval_size, seed) if data.eval_size else (train, [])
    held_out = to_tasks(load_rows(data.eval, "data.eval"), "data.eval")
    if data.eval_size:
        if data.eval_size > len(held_out):
            raise DataError(
                f"data.eval_size: {data.eval_size} asked for, but data.eval has {len(held_out)} "
                "tasks"
            )
        held_out = held_out[: data.eval_size]
    return train, held_out


def _refuse_leaks(train: Sequence[Task], held_out: Sequence[Task]) -> None:
    """Tasks are compared by what they say, whatever their ids."""
    trained = {content(task) for task in train}
    shared = [task.key for task in held_out if content(task) in trained]
    if shared:
        raise DataError(
            f"data.eval: {len(shared)} held-out tasks are also in data.train (such as "
            f"{shared[0]!r}); an evaluation on trained tasks says nothing, so remove duplicates"
        )


def prompt_lengths(
    tasks: Sequence[Task], environment: EnvironmentFactory, renderer: Renderer, timeout: float
) -> dict[str, int]:
    """Tokens of each task's first prompt, for environments whose reset costs nothing."""

    async def measure() -> dict[str, int]:
        found = {}
        for task in tasks:
            env = environment(task)
            if not getattr(env, "reset_is_cheap", True):
                return {}
            try:
                messages = await asyncio.wait_for(env.reset(), timeout)
                await asyncio.wait_for(env.close(), timeout)
            except FledgeError:
                raise
            except Exception as error:
                name = type(env).__name__
                raise DataError(
                    f"env: {name}.reset failed for task {task.key!r}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            found[task.key] = len(renderer.start(messages))
        return found

    return asyncio.run(measure())


def make_generator(
    config: TrainConfig,
    engine: InferenceEngine,
    renderer: Renderer,
    environment: EnvironmentFactory,
    sampling: Sampling,
    *,
    context: int,
    greedy: bool = False,
) -> EpisodeGenerator:
    """What plays the episodes of a run and of its evaluations: by the same limits."""
    rollout = config.rollout
    mask = rollout.mask
    return EpisodeGenerator(
        engine,
        renderer,
        environment,
        sampling,
        Limits(
            timeout=rollout.timeout,
            retries=rollout.retries,
            turns=rollout.max_turns,
            tokens=rollout.max_episode_tokens,
            seconds=rollout.max_seconds,
            context=context,
            overflow=rollout.overflow,
            least=rollout.min_group_size,
        ),
        rollout.reward_weights,
        greedy,
        None
        if mask is None
        else bind(mask.name, {}, "rollout.mask", positional=("episode",), arguments=mask.arguments),
    )


def identity(policy: Policy, data_fingerprint: str) -> dict[str, Any]:
    """What a resumed run must share besides its configuration; taken before any training."""
    return {
        "data.fingerprint": data_fingerprint,
        "model.fingerprint": policy.fingerprint(),
        "model.weights": digest(hashes(module_tensors(policy.model))),
    }


def code_digests(config: CommonConfig) -> dict[str, str]:
    """Hashes of the files that the recipe's own plug-ins live in, so that an edit is noticed. Data
    is not among them: it is compared by content.
    """
    found = {}
    for key, spec in _plugins(config):
        name = spelled(spec)
        module = name.partition(":")[0] if isinstance(name, str) and ":" in name else ""
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and not module.startswith("fledge."):
            found[f"code.{key}"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return found


def _plugins(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every plug-in of a configuration under its key, and what its arguments name."""
    if isinstance(value, Plugin):
        yield key, value.name
        yield from ((f"{key}.{name}", argument) for name, argument in value.arguments.items())
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _plugins(inner, f"{key}[{number}]")
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            if name not in ("data", "warm_start"):
                yield from _plugins(getattr(value, name), f"{key}.{name}".lstrip("."))
