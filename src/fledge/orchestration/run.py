"""One RL run: the parts, wired; the books, kept. `loop.train` is the only thing that drives it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from fledge.algorithms import make_algorithm, token_weights
from fledge.algorithms.shaping import has_spread, shape, shaping_metrics
from fledge.config import Resolved, TrainConfig
from fledge.data.batch import Batch, pack
from fledge.data.render import make_renderer
from fledge.data.stream import TaskStream
from fledge.envs import make_factory
from fledge.errors import PluginError, TrainingError
from fledge.inference import NativeEngine
from fledge.metrics import rollout_metrics
from fledge.models.load import Policy
from fledge.orchestration.advice import advice
from fledge.orchestration.books import Books
from fledge.orchestration.evaluation import Evaluator
from fledge.orchestration.experience import Experience, Taken
from fledge.orchestration.health import Health
from fledge.orchestration.learned_reward import LearnedReward
from fledge.orchestration.learners import Learner, Learners
from fledge.orchestration.setup import code_digests, identity, make_generator, make_tasks
from fledge.plugins import bind
from fledge.types import Group, user
from fledge.weights import SharedMemoryTransport


class Run:
    """Everything that the loop touches, built from a configuration before the loop begins."""

    def __init__(self, resolved: Resolved[TrainConfig], policy: Policy) -> None:
        config = self.config = resolved.config
        self.steps = config.steps
        self.micro_tokens = config.optim.micro_tokens
        self.algorithm = make_algorithm(config.algorithm, config.seed)
        own = config.algorithm.token_reward
        self._token_reward = (
            None
            if own is None
            else bind(
                own.name,
                {},
                "algorithm.token_reward",
                positional=("segment",),
                arguments=own.arguments,
            )
        )
        environment = make_factory(config.env)
        self.tasks = make_tasks(config, environment, policy)
        renderer = make_renderer(policy.tokenizer)
        self._learners = Learners.of(config, self.algorithm, policy)
        self.policy = self._learners.policy.trainer
        self.engine = NativeEngine(policy, config.engine.cache_mb)
        canary = renderer.start([user("canary")])
        self.weights = SharedMemoryTransport(canary, config.rollout.temperature, policy.dtype)
        self.reduce = partial(
            token_weights,
            config.algorithm.reduction,
            max_length=config.algorithm.norm_length or config.rollout.max_new_tokens,
        )
        self.stream = TaskStream(self.tasks.train, config.seed, config.data.shuffle)
        title = f"{config.run_dir}: {config.algorithm.name} on {config.env.label}"
        learned = LearnedReward.of(config)
        known = {
            **learned.identity,
            **self._learners.identity,
            **identity(policy, self.tasks.fingerprint()),
            **code_digests(config),
        }
        self.books = Books(resolved, known, title)
        self.health = Health(self.books.warn, config.model.dtype, policy.vocabulary)
        self._advice = advice(resolved, policy.parameters)
        self.generator = learned.around(
            make_generator(
                config,
                self.engine,
                renderer,
                environment,
                config.rollout.sampling(renderer.stop_ids),
                context=policy.context,
                greedy=self.algorithm.greedy,
            )
        )
        self._evaluator = Evaluator(
            config,
            self.engine,
            renderer,
            environment,
            self.tasks.eval,
            policy.context,
            learned.around,
        )
        self._experience: Experience | None = None
        self._seen: list[Group] = []
        self._sampled: dict[str, float] = {}
        self._measures = [
            bind(m.name, {}, "metrics", positional=("groups",), arguments=m.arguments)
            for m in config.metrics
        ]
        self.evaluations: dict[str, dict[str, Any]] = {}

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.books.clock.span(name)

    async def begin(self) -> int:
        """Restore or start, publish with proof, evaluate what we begin from."""
        step = self.books.begin(self._restore)
        for text in self._advice:
            self.books.warn(text)
        tasks = self.tasks
        self.books.note(
            f"{len(tasks.train)} training tasks, {len(tasks.eval)} held out, "
            f"{tasks.duplicates} duplicates merged, {tasks.too_long} filtered by length"
        )
        with self.phase("publish"):
            await self.publish(step)
        if step == 0 and tasks.eval:
            self.books.record(0, await self._evaluate(0))
        return step

    def _restore(self, saved: Any) -> None:
        self._learners.load(saved.path)
        self.stream.restore(saved.state["data"])
        self.algorithm.restore(saved.state["algorithm"])
        self.health.restore(saved.state["health"])
        self.evaluations = saved.state["evaluations"]

    def experience(self, version: int) -> Experience:
        rollout, shaping = self.config.rollout, self.config.algorithm.shaping
        self._experience = Experience(
            self.generator,
            self.stream,
            group_size=rollout.group_size,
            groups_per_step=rollout.groups_per_step,
            seed=self.config.seed,
            version=version,
            last_batch=self.steps - 1,
            keep=self._has_spread if shaping.dynamic_sampling == "filter" else None,
            max_rounds=shaping.max_rounds if shaping.dynamic_sampling == "filter" else 0,
        )
        return self._experience

    def _has_spread(self, group: Group) -> bool:
        return has_spread(self._shape([group])[0])

    def _shape(self, groups: Sequence[Group]) -> list[Group]:
        longest = self.config.rollout.max_new_tokens
        return shape(groups, self.config.algorithm.shaping, longest, self._token_reward)

    def accept(self, step: int, taken: Taken) -> list[Group]:
        """Write every episode down, then leave out groups in which nothing could be scored."""
        everything = [*taken.groups, *taken.filtered]
        for group in everything:
            extra = () if group.greedy is None else (group.greedy,)
            for episode in (*group.episodes, *group.discarded, *extra):
                self.books.run_dir.episode(step, group.epoch, episode)
        self.health.dropped_episodes(step, everything)
        self._seen = [g for g in everything if g.episodes]
        if not self._seen:
            first = everything[0].discarded[0]
            raise TrainingError(
                f"env: every episode of step {step} failed ({first.outcome.value}): {first.error}"
            )
        self._sampled = rollout_metrics(self._seen, step - 1)
        if self.config.algorithm.shaping.dynamic_sampling == "filter":
            missing = self.config.rollout.groups_per_step - len(taken.groups)
            self.health.filtered(step, len(taken.filtered), missing, nothing=not taken.groups)
            self._sampled["group/filtered"] = float(len(taken.filtered))
            self._sampled["group/rounds"] = float(taken.rounds)
        return [g for g in taken.groups if g.episodes]

    def pack(self, groups: Sequence[Group]) -> Batch:
        """Shaped rewards and exact tokens as one batch."""
        shaped = self._shape(groups)
        self._sampled |= shaping_metrics(groups, shaped)
        batch = pack(shaped)
        if self.config.rollout.cut:
            # The engine's log-probs are those of a cut distribution: whoever compares them with
            # those of the whole one must not get a number.
            unknown = torch.full_like(batch.columns["engine_logp"], torch.nan)
            batch = batch.with_columns(engine_logp=unknown)
        return batch

    async def score(self, batch: Batch) -> Batch:
        """Every column that the algorithm needs, from whoever can compute it."""
        critic = self._learners.critic
        own = self.algorithm.needs if critic is None else self.algorithm.needs - {"value"}
        batch = await self.policy.score(batch, own)
        return batch if critic is None else await critic.trainer.score(batch, {"value"})

    def key(self, step: int) -> str:
        """What is random in a step is drawn by this."""
        return f"{self.config.seed}/{step}"

    def learners(self, step: int) -> list[Learner]:
        return self._learners.at(step)

    async def publish(self, version: int) -> None:
        proof = await self.weights.publish(self.policy, self.engine, version)
        self.health.publishes += 1
        self.books.run_dir.event(
            "publish",
            f"version {version}: {proof.tensors} tensors",
            step=version,
            digest=proof.digest,
            canary_gap=proof.canary_gap,
        )

    async def record(self, step: int, judged: dict[str, float]) -> None:
        """Metrics, evaluation and checkpoint of a finished step."""
        metrics = {**self._sampled, **judged, **self._learners.metrics()}
        metrics |= self._user_metrics(self._seen)
        lengths = (e.response_length for g in self._seen for e in g.episodes)
        metrics["perf/tokens"] = float(sum(lengths))
        self.health.look(step, metrics)
        every = self.config.algorithm.kl.ref_every
        if every and step % every == 0:
            self.policy.refresh_reference()
            self.books.note(f"step {step}: the reference is now the policy of this step")
        score = None
        if self.tasks.eval and self.books.due(step, self.config.eval.every):
            metrics |= await self._evaluate(step)
            score = self.evaluations[str(step)]["average"]
        self.books.record(step, metrics)
        if self.books.due(step, self.config.checkpoint.every) or self._is_best(score):
            self.save(step, score)

    def _is_best(self, score: float | None) -> bool:
        if score is None or not self.config.checkpoint.keep_best:
            return False
        trained = [found["average"] for step, found in self.evaluations.items() if step != "0"]
        return bool(score >= max(trained))

    def _user_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        try:
            found = [measure(groups) for measure in self._measures]
            return {f"user/{k}": float(v) for numbers in found for k, v in numbers.items()}
        except Exception as error:
            raise PluginError(f"metrics: {type(error).__name__}: {error}") from error

    def save(self, step: int, score: float | None = None) -> None:
        self.books.save(step, self._learners.save, self._state(step), score)

    def _state(self, step: int) -> dict[str, Any]:
        assert self._experience is not None
        return {
            "data": self._experience.state(step),
            "algorithm": self.algorithm.state(),
            "health": self.health.state(),
            "evaluations": self.evaluations,
        }

    async def _evaluate(self, step: int) -> dict[str, float]:
        with self.phase("evaluate"):
            found = await self._evaluator()
        if found.failed:
            self.books.warn(
                f"step {step}: {found.failed} evaluation episodes could not be scored; the score "
                f"is that of {found.tasks} of {len(self.tasks.eval)} tasks"
            )
        self.evaluations[str(step)] = found.record()
        return found.metrics(self.config.env.label)
