"""One RL run: the parts, wired; the books, kept. `loop.train` is the only thing that drives it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from fledge.algorithms import make_algorithm, token_weights
from fledge.config import Resolved, TrainConfig
from fledge.data.render import make_renderer
from fledge.data.stream import TaskStream
from fledge.envs import make_factory
from fledge.errors import PluginError, TrainingError
from fledge.inference import NativeEngine
from fledge.metrics import rollout_metrics
from fledge.models.load import Policy
from fledge.orchestration.books import Books
from fledge.orchestration.evaluation import Evaluator
from fledge.orchestration.experience import Experience
from fledge.orchestration.health import Health
from fledge.orchestration.setup import code_digests, identity, inert_settings, make_tasks
from fledge.plugins import bind
from fledge.rollout import EpisodeGenerator
from fledge.trainer import LocalTrainer, learning_rate
from fledge.types import Group, user
from fledge.weights import SharedMemoryTransport


class Run:
    """Everything that the loop touches, built from a configuration before the loop begins."""

    def __init__(self, resolved: Resolved[TrainConfig], policy: Policy) -> None:
        config = self.config = resolved.config
        self.steps = config.steps
        self.micro_tokens = config.optim.micro_tokens
        self.algorithm = make_algorithm(config.algorithm)
        environment = make_factory(config.env)
        self.tasks = make_tasks(config, environment, policy)
        renderer = make_renderer(policy.tokenizer)
        lora = config.model.lora
        self.policy = LocalTrainer(
            policy,
            config.optim,
            temperature=config.rollout.temperature,
            plus_ratio=lora.plus_ratio if lora else 1.0,
            gradient_checkpointing=config.model.gradient_checkpointing,
            keep_reference="ref_logp" in self.algorithm.needs,
        )
        self.engine = NativeEngine(policy, config.engine.cache_mb)
        canary = renderer.start([user("canary")])
        self.weights = SharedMemoryTransport(canary, config.rollout.temperature, policy.dtype)
        self.reduce = partial(
            token_weights, config.algorithm.reduction, max_length=config.rollout.max_new_tokens
        )
        self.stream = TaskStream(self.tasks.train, config.seed, config.data.shuffle)
        title = f"{config.run_dir}: {config.algorithm.name} on {config.env.label}"
        known = {**identity(policy, self.tasks.fingerprint()), **code_digests(config)}
        self.books = Books(resolved, known, title)
        self.health = Health(self.books.warn, config.model.dtype, policy.vocabulary)
        self._inert = inert_settings(resolved)
        self.generator = EpisodeGenerator(
            self.engine,
            renderer,
            environment,
            config.rollout.sampling(renderer.stop_ids),
            config.rollout.timeout,
            config.rollout.retries,
        )
        self._evaluator = Evaluator(config, self.engine, renderer, environment, self.tasks.eval)
        self._experience: Experience | None = None
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
        for text in self._inert:
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
        self.policy.load(saved.path)
        self.stream.restore(saved.state["data"])
        self.algorithm.restore(saved.state["algorithm"])
        self.health.restore(saved.state["health"])
        self.evaluations = saved.state["evaluations"]

    def experience(self, version: int) -> Experience:
        rollout = self.config.rollout
        self._experience = Experience(
            self.generator,
            self.stream,
            group_size=rollout.group_size,
            groups_per_step=rollout.groups_per_step,
            seed=self.config.seed,
            version=version,
            last_batch=self.steps - 1,
        )
        return self._experience

    def accept(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """Write every episode down, then leave out groups in which nothing could be scored."""
        for group in groups:
            for episode in (*group.episodes, *group.discarded):
                self.books.run_dir.episode(step, group.epoch, episode)
        self.health.dropped_episodes(step, groups)
        usable = [g for g in groups if g.episodes]
        if not usable:
            first = groups[0].discarded[0]
            raise TrainingError(
                f"env: every episode of step {step} failed ({first.outcome.value}): {first.error}"
            )
        return usable

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.config.optim, step, self.steps)

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

    async def record(self, step: int, groups: Sequence[Group], trained: dict[str, float]) -> None:
        """Metrics, evaluation and checkpoint of a finished step."""
        metrics = {**rollout_metrics(groups, step - 1), **trained}
        metrics |= self._user_metrics(groups)
        metrics["perf/tokens"] = float(sum(e.response_length for g in groups for e in g.episodes))
        self.health.look(step, metrics)
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
        self.books.save(step, self.policy, self._state(step), score)

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
