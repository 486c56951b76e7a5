"""Evaluation: avg@k and pass@k over held-out tasks, with a few answers to look at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fledge.config import TrainConfig
from fledge.envs import EnvironmentFactory
from fledge.errors import TrainingError
from fledge.interfaces import Generator, InferenceEngine, Renderer
from fledge.metrics import pass_at_k
from fledge.orchestration.experience import episode_seed
from fledge.orchestration.setup import make_generator
from fledge.types import Group, Sampling, Task

AT_ONCE = 128
"""Tasks in flight together; a constant, so that who shares a batch with whom never changes."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of one evaluation. A reward of 1 or more counts as solved for pass@k.

    >>> e = Evaluation(average=0.5, passed=0.75, samples=4, tasks=100, failed=0, answers=())
    >>> e.metrics("maths")
    {'eval/maths/avg@4': 0.5, 'eval/maths/pass@4': 0.75}
    """

    average: float
    passed: float
    samples: int
    tasks: int
    failed: int
    answers: tuple[tuple[str, str, float], ...]
    """Prompt, reply and reward of the first few tasks."""

    def metrics(self, name: str) -> dict[str, float]:
        found = {f"eval/{name}/avg@{self.samples}": self.average}
        if self.samples > 1:
            found[f"eval/{name}/pass@{self.samples}"] = self.passed
        if self.failed:
            found[f"eval/{name}/failed"] = float(self.failed)
        return found

    def record(self) -> dict[str, Any]:
        """What the report and the checkpoint keep of it."""
        return {
            "average": self.average,
            "passed": self.passed,
            "tasks": self.tasks,
            "failed": self.failed,
            "answers": [list(answer) for answer in self.answers],
        }


class Evaluator:
    """Plays held-out tasks with whatever weights the engine serves; `around` adds what else rewards
    an episode.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: InferenceEngine,
        renderer: Renderer,
        environment: EnvironmentFactory,
        tasks: Sequence[Task],
        context: int,
        around: Callable[[Generator], Generator] = lambda generator: generator,
    ) -> None:
        settings, rollout = config.eval, config.rollout
        sampling = Sampling(
            rollout.max_new_tokens,
            settings.temperature,
            settings.top_p,
            settings.top_k,
            settings.min_p,
            stop=tuple(rollout.stop),
            stop_ids=renderer.stop_ids,
        )
        self.tasks = tasks
        self._engine = engine
        self._samples = settings.samples
        self._seed = config.seed
        self._generator = around(
            make_generator(config, engine, renderer, environment, sampling, context=context)
        )

    async def __call__(self) -> Evaluation:
        """Play every task; leaves nothing behind in the engine that training could meet."""
        groups: list[Group] = []
        for start in range(0, len(self.tasks), AT_ONCE):
            chunk = self.tasks[start : start + AT_ONCE]
            groups += await asyncio.gather(
                *(self._play(task, start + i) for i, task in enumerate(chunk))
            )
        # Cached prompts would change how the next rollouts are batched, and so their last bits.
        await self._engine.update(self._engine.version)
        scored = [g for g in groups if g.episodes]
        if not scored:
            error = groups[0].discarded[0].error
            raise TrainingError(f"env: no evaluation episode could be scored: {error}")
        return Evaluation(
            average=fmean(fmean(e.reward for e in g.episodes) for g in scored),
            passed=fmean(map(_passed, scored)),
            samples=self._samples,
            tasks=len(scored),
            failed=sum(len(g.discarded) for g in groups),
            answers=tuple(map(_answer, scored[:3])),
        )

    async def _play(self, task: Task, index: int) -> Group:
        seed = episode_seed(self._seed, index)
        return await self._generator.generate(task, self._samples, epoch=0, seed=seed)


def _passed(group: Group) -> float:
    solved = sum(e.reward >= 1 for e in group.episodes)
    return pass_at_k(solved, len(group.episodes), len(group.episodes))


def _answer(group: Group) -> tuple[str, str, float]:
    episode = group.episodes[0]
    return episode.messages[-2].content, episode.messages[-1].content, episode.reward
