"""Playing episodes: ask the environment, let the engine answer, hand the reply back, until it ends.

Tokens are kept exactly as the engine sampled them; the text that the environment sees is a view. A
failure of the environment is never a reward: it is retried, then the episode is set aside with its
outcome. Only a reward that is not a number stops the run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from fledge.envs import reward_of
from fledge.errors import FledgeError, PluginError, PolicyError
from fledge.interfaces import Environment, InferenceEngine, Renderer
from fledge.rollout.overflow import slide, squeeze
from fledge.rollout.transcript import MaskFunction, Transcript, masked
from fledge.types import Completion, Episode, Group, Message, Outcome, Sampling, Step, Task, Tool

T = TypeVar("T")
BACK_OFF = 0.5
"""Seconds before the first retry; each further one waits twice as long."""


class _Failed(Exception):
    """An environment's failure, attributed to the boundary where it happened."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True)
class Limits:
    """What an episode may take. `timeout` bounds each call of the environment, `seconds` the whole
    episode; `tokens` all that the policy says in it; `context` what the model can see at once.
    """

    timeout: float = 120.0
    retries: int = 2
    turns: int = 16
    tokens: int | None = None
    seconds: float | None = None
    context: int | None = None
    overflow: Literal["end", "truncate", "sliding"] = "end"
    least: int = 0
    """Usable episodes of a group below which new ones are played."""


@dataclass(frozen=True)
class EpisodeGenerator:
    """Plays n episodes of a task at once.

    `weights` are those of the named parts of a reward. With `greedy` one more episode is played
    without randomness, for estimators that compare with it. `mask` may clear sampled tokens.
    """

    engine: InferenceEngine
    renderer: Renderer
    environment: Callable[[Task], Environment]
    sampling: Sampling
    limits: Limits = Limits()
    weights: Mapping[str, float] = field(default_factory=dict)
    greedy: bool = False
    mask: MaskFunction | None = None

    async def generate(self, task: Task, n: int, *, epoch: int, seed: int) -> Group:
        samplings = [replace(self.sampling, seed=seed + i) for i in range(n)]
        if self.greedy:
            samplings.append(replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0))
        played = await self._at_once(task, samplings, first=0)
        greedy = next((e for e in played[n:] if e.outcome.usable), None)
        lost = [e for e in played if not e.outcome.usable]
        usable = [e for e in played[:n] if e.outcome.usable]
        if len(usable) < min(self.limits.least, n):
            more = [replace(self.sampling, seed=seed + len(samplings) + i) for i in range(n)]
            again = await self._at_once(task, more[: n - len(usable)], first=len(samplings))
            usable += [e for e in again if e.outcome.usable]
            lost += [e for e in again if not e.outcome.usable]
        return Group(
            task=task,
            epoch=epoch,
            episodes=tuple(usable),
            dropped=Counter(e.outcome.value for e in lost),
            discarded=tuple(lost),
            greedy=greedy,
        )

    async def _at_once(
        self, task: Task, samplings: Sequence[Sampling], first: int
    ) -> list[Episode]:
        return await asyncio.gather(
            *(self._until_usable(task, first + i, s) for i, s in enumerate(samplings))
        )

    async def _until_usable(self, task: Task, index: int, sampling: Sampling) -> Episode:
        # The session opens before the first wait, so the engine knows of every episode from the
        # start.
        with self.engine.session() as session:
            for attempt in range(self.limits.retries + 1):
                if attempt:
                    await asyncio.sleep(BACK_OFF * 2 ** (attempt - 1))
                episode = await self._play(task, index, sampling, session)
                if episode.outcome.usable:
                    break
            return episode

    async def _play(self, task: Task, index: int, sampling: Sampling, session: int) -> Episode:
        playing: _Playing | None = None
        limit = asyncio.timeout(self.limits.seconds)
        try:
            async with limit:
                playing = _Playing(self, task, self._make(task), sampling, session)
                episode = await playing.to_the_end(index)
            return episode if self.mask is None else masked(episode, self.mask, _name(self.mask))
        except _Failed as failure:
            return Episode(task.key, index, (), (), failure.outcome, (), error=str(failure))
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"the episode took longer than rollout.max_seconds={self.limits.seconds:g} s"
            return Episode(task.key, index, (), (), Outcome.TIME_LIMIT, (), error=text)
        finally:
            if playing is not None:
                await _close(playing.env, self.limits.timeout)

    def _make(self, task: Task) -> Environment:
        try:
            return self.environment(task)
        except FledgeError:
            raise
        except Exception as error:
            text = f"making the environment: {type(error).__name__}: {error}"
            raise _Failed(Outcome.INFRA_ABORT, text) from error


class _Playing:
    """One episode on its way: what has been said, what it has earned, what it may still use."""

    def __init__(
        self,
        generator: EpisodeGenerator,
        task: Task,
        env: Environment,
        sampling: Sampling,
        session: int,
    ) -> None:
        self.env = env
        self._generator, self._limits = generator, generator.limits
        self._task, self._sampling, self._session = task, sampling, session
        self._transcript = Transcript()
        self._messages: list[Message] = []
        self._opening = 0
        self._tools: Sequence[Tool] = ()
        self._rewards: list[float] = []
        self._components: Counter[str] = Counter()
        self._info: dict[str, float] = {}

    async def to_the_end(self, index: int) -> Episode:
        asked = await self._call(self.env.reset(), Outcome.INFRA_ABORT, "reset")
        self._messages, self._opening = list(asked), len(asked)
        self._tools = tuple(getattr(self.env, "tools", ()))
        prompt: list[int] | None = self._renderer.start(self._messages, self._tools)
        outcome = Outcome.TRUNCATED
        while prompt is not None:
            completion = await self._say(prompt)
            step, failed = await self._answer(
                self._renderer.parse(completion.token_ids, self._tools)
            )
            if failed or step.terminated or step.truncated:
                cut = step.truncated or (completion.stop_reason == "length" and not failed)
                outcome = Outcome.POLICY_ERROR if failed else Outcome.OK
                outcome = Outcome.TRUNCATED if cut else outcome
                break
            prompt = self._next_prompt(step)
        return Episode(
            task_key=self._task.key,
            index=index,
            segments=self._transcript.segments(),
            rewards=tuple(self._rewards),
            outcome=outcome,
            messages=tuple(self._messages),
            info=self._info,
            components=dict(self._components),
        )

    @property
    def _renderer(self) -> Renderer:
        return self._generator.renderer

    async def _say(self, prompt: list[int]) -> Completion:
        """Let the policy answer `prompt`, as long as the episode's budget allows."""
        turn = len(self._rewards)
        sampling = replace(
            self._sampling,
            max_new_tokens=self._room(prompt),
            seed=self._sampling.seed + turn * TURN_SEED,
        )
        self._transcript.show(prompt)
        completion = await self._generator.engine.generate(prompt, sampling, self._session)
        self._transcript.say(completion)
        return completion

    async def _answer(self, reply: Message) -> tuple[Step, bool]:
        """The environment's answer to a reply, and whether it blames the policy."""
        self._messages.append(reply)
        where = f"env: {type(self.env).__name__}, task {self._task.key!r},"
        try:
            step = await self._call(self.env.step(reply), Outcome.GRADER_ERROR, "step")
        except PolicyError as mistake:
            self._rewards.append(reward_of(mistake.reward, where))
            return Step(terminated=True), True
        step = check_step(step, self.env, self._task, self._generator.weights)
        self._rewards.append(step.reward)
        self._components.update(step.components)
        self._info |= step.info
        self._messages += step.messages
        return step, False

    def _next_prompt(self, step: Step) -> list[int] | None:
        """What the policy sees next, or None when the episode has used up what it may use."""
        tokens = self._limits.tokens
        if len(self._rewards) >= self._limits.turns:
            return None
        if tokens is not None and self._transcript.tokens >= tokens:
            return None
        prompt = self._renderer.extend(self._transcript.ids, step.messages, self._tools)
        if prompt is None:  # the template cannot go on from these tokens: a new segment
            prompt = self._renderer.start(self._messages, self._tools)
        if self._room(prompt) >= 1:
            return prompt
        return self._made_to_fit(step)

    def _made_to_fit(self, step: Step) -> list[int] | None:
        """A prompt that leaves room for a reply, by `rollout.overflow`; None ends the episode."""
        if self._limits.overflow == "truncate":
            return squeeze(
                step.messages,
                lambda shorter: self._renderer.extend(self._transcript.ids, shorter, self._tools),
                self._leaves_room,
            )
        if self._limits.overflow == "sliding":
            return slide(
                self._messages,
                self._opening,
                lambda kept: self._renderer.start(kept, self._tools),
                self._leaves_room,
            )
        return None

    def _leaves_room(self, prompt: Sequence[int]) -> bool:
        """For a whole reply: one that is made to fit should not be cut short at once."""
        context = self._limits.context
        return context is None or context - len(prompt) >= self._sampling.max_new_tokens

    def _room(self, prompt: Sequence[int]) -> int:
        """Tokens that the policy may say after `prompt`."""
        room = self._sampling.max_new_tokens
        if self._limits.tokens is not None:
            room = min(room, self._limits.tokens - self._transcript.tokens)
        if self._limits.context is not None:
            room = min(room, self._limits.context - len(prompt))
        return room

    async def _call(self, work: Awaitable[T], outcome: Outcome, what: str) -> T:
        """Await one call of the environment; what goes wrong there is attributed to it."""
        limit = asyncio.timeout(self._limits.timeout)
        try:
            async with limit:
                return await work
        except (FledgeError, PolicyError):
            raise
        except Exception as error:
            if limit.expired():
                text = f"{what} took longer than rollout.timeout={self._limits.timeout:g} s"
                raise _Failed(Outcome.TIME_LIMIT, text) from None
            # An environment may know better than we whose failure it was.
            known = getattr(error, "outcome", outcome)
            raise _Failed(known, f"{what}: {type(error).__name__}: {error}") from error


TURN_SEED = 1_000_003
"""Between the seeds of two turns of an episode, farther apart than a group has episodes."""


def check_step(
    step: Step, env: Environment, task: Task, weights: Mapping[str, float] | None = None
) -> Step:
    """A step that training may trust: a finite reward, and either an end or something to answer."""
    name = type(env).__name__
    if not isinstance(step, Step):
        raise PluginError(f"env: {name}.step returned {type(step).__name__}, it must return a Step")
    if not (step.terminated or step.truncated or step.messages):
        raise PluginError(
            f"env: {name} goes on without a message; set terminated, or say something to answer"
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
    alone = reward_of(reward, where)
    if not components and not alone:
        return alone  # a turn that is not scored yet has no parts
    unknown = sorted(set(weights) - set(components))
    if unknown:
        raise PluginError(
            f"rollout.reward_weights: {where} has no part named {unknown[0]!r} in its reward (it "
            f"has: {', '.join(components) or 'no parts, only a number'})"
        )
    if not components:
        return alone
    if alone:
        raise PluginError(
            f"{where} gave the reward {alone:g} and components; the reward is their weighed sum, "
            "so give one or the other"
        )
    return sum(weights.get(part, 1.0) * value for part, value in components.items())


def _name(function: Callable[..., object]) -> str:
    inner = getattr(function, "func", function)  # the function of a partial
    return getattr(inner, "__name__", type(inner).__name__)


async def _close(env: Environment, timeout: float) -> None:
    """Closing must not change what happened: a failure there is the environment's own affair."""
    try:
        await asyncio.wait_for(env.close(), timeout)
    except Exception:
        return
