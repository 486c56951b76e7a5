"""Playing episodes: ask the environment, let the engine answer, score the reply. One turn per
episode.

Tokens are kept exactly as the engine sampled them; the text that the environment sees is a view. A
failure of the environment is never a reward: it is retried, then the episode is set aside with its
outcome. Only a reward that is not a number stops the run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fledge.envs import reward_of
from fledge.errors import FledgeError, PluginError
from fledge.interfaces import Environment, InferenceEngine, Renderer
from fledge.types import Completion, Episode, Group, Message, Outcome, Sampling, Segment, Step, Task

T = TypeVar("T")
BACK_OFF = 0.5
"""Seconds before the first retry; each further one waits twice as long."""


class _Failed(Exception):
    """An environment's failure, attributed to the boundary where it happened."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True)
class EpisodeGenerator:
    """Plays n single-turn episodes of a task at once.

    `timeout` bounds each call of the environment, `retries` how often a failed episode is played
    again. `weights` are those of the named parts of a reward. With `greedy` one more episode is
    played without randomness, for estimators that compare with it.
    """

    engine: InferenceEngine
    renderer: Renderer
    environment: Callable[[Task], Environment]
    sampling: Sampling
    timeout: float = 120.0
    retries: int = 2
    weights: Mapping[str, float] = field(default_factory=dict)
    greedy: bool = False

    async def generate(self, task: Task, n: int, *, epoch: int, seed: int) -> Group:
        samplings = [replace(self.sampling, seed=seed + i) for i in range(n)]
        if self.greedy:
            samplings.append(replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0))
        played = await asyncio.gather(
            *(self._until_usable(task, i, sampling) for i, sampling in enumerate(samplings))
        )
        failed = [e for e in played if not e.outcome.usable]
        return Group(
            task=task,
            epoch=epoch,
            episodes=tuple(e for e in played[:n] if e.outcome.usable),
            dropped=Counter(e.outcome.value for e in failed),
            discarded=tuple(failed),
            greedy=next((e for e in played[n:] if e.outcome.usable), None),
        )

    async def _until_usable(self, task: Task, index: int, sampling: Sampling) -> Episode:
        # The session opens before the first wait, so the engine knows of every episode from the
        # start.
        with self.engine.session() as session:
            for attempt in range(self.retries + 1):
                if attempt:
                    await asyncio.sleep(BACK_OFF * 2 ** (attempt - 1))
                episode = await self._play(task, index, sampling, session)
                if episode.outcome.usable:
                    break
            return episode

    async def _play(self, task: Task, index: int, sampling: Sampling, session: int) -> Episode:
        env: Environment | None = None
        try:
            env = self._make(task)
            asked = await self._call(env.reset(), Outcome.INFRA_ABORT, "reset")
            prompt = self.renderer.start(asked)
            completion = await self.engine.generate(prompt, sampling, session)
            reply = self.renderer.parse(completion.token_ids)
            step = await self._call(env.step(reply), Outcome.GRADER_ERROR, "step")
            return _finished(
                task,
                index,
                prompt,
                completion,
                [*asked, reply],
                check_step(step, env, task, self.weights),
            )
        except _Failed as failure:
            return Episode(task.key, index, (), (), failure.outcome, (), error=str(failure))
        finally:
            if env is not None:
                await _close(env, self.timeout)

    def _make(self, task: Task) -> Environment:
        try:
            return self.environment(task)
        except FledgeError:
            raise
        except Exception as error:
            text = f"making the environment: {type(error).__name__}: {error}"
            raise _Failed(Outcome.INFRA_ABORT, text) from error

    async def _call(self, work: Awaitable[T], outcome: Outcome, what: str) -> T:
        """Await one call of the environment; what goes wrong there is attributed to it."""
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                return await work
        except FledgeError:
            raise
        except Exception as error:
            if limit.expired():
                text = f"{what} took longer than rollout.timeout={self.timeout:g} s"
                raise _Failed(Outcome.TIME_LIMIT, text) from None
            raise _Failed(outcome, f"{what}: {type(error).__name__}: {error}") from error


def check_step(
    step: Step, env: Environment, task: Task, weights: Mapping[str, float] | None = None
) -> Step:
    """A step that training may trust: a finite reward, and an episode that is over."""
    name = type(env).__name__
    if not isinstance(step, Step):
        raise PluginError(f"env: {name}.step returned {type(step).__name__}, it must return a Step")
    if not (step.terminated or step.truncated):
        raise PluginError(
            f"env: {name} asks for a second turn; this generator plays one turn per episode"
        )
    where = f"env: {name}, task {task.key!r},"
    components = {part: reward_of(v, f"{where} {part}") for part, v in step.components.items()}
    return replace(
        step, reward=_total(step.reward, components, weights or {}, where), components=components
    )


def _total(
    reward: object, components: Mapping[str, float], weights: Mapping[str, float], where: str
) -> float:
    """The reward of a step: given as a number, or the weighed sum of its named parts."""
    unknown = sorted(set(weights) - set(components))
    if unknown:
        raise PluginError(
            f"rollout.reward_weights: {where} has no part named {unknown[0]!r} in its reward (it "
            f"has: {', '.join(components) or 'no parts, only a number'})"
        )
    alone = reward_of(reward, where)
    if not components:
        return alone
    if alone:
        raise PluginError(
            f"{where} gave the reward {alone:g} and components; the reward is their weighed sum, "
            "so give one or the other"
        )
    return sum(weights.get(part, 1.0) * value for part, value in components.items())


def _finished(
    task: Task,
    index: int,
    prompt: list[int],
    completion: Completion,
    messages: list[Message],
    step: Step,
) -> Episode:
    context = len(prompt)
    sampled = len(completion.token_ids)
    segment = Segment(
        token_ids=(*prompt, *completion.token_ids),
        logps=(*([0.0] * context), *completion.logps),
        trained=(*([False] * context), *([True] * sampled)),
        versions=(*([-1] * context), *completion.versions),
    )
    cut = step.truncated or completion.stop_reason == "length"
    return Episode(
        task_key=task.key,
        index=index,
        segments=(segment,),
        rewards=(step.reward,),
        outcome=Outcome.TRUNCATED if cut else Outcome.OK,
        messages=tuple(messages),
        info=step.info,
        components=step.components,
    )


async def _close(env: Environment, timeout: float) -> None:
    """Closing must not change what happened: a failure there is the environment's own affair."""
    try:
        await asyncio.wait_for(env.close(), timeout)
    except Exception:
        return
