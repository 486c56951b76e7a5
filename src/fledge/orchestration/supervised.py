"""Learning from rows instead of rewards: demonstrations (`SftRun`) and preference pairs
(`PreferRun`), with the same trainer, data stream and checkpoints as RL.

`SupervisedRun` is the loop and the books of both. A kind of run says how a row becomes tokens, what
to score a batch for, which loss it minimises, and what to tell of the held-out rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from fledge.algorithms import Tokens, supervised, token_weights
from fledge.algorithms.preferences import make_preference
from fledge.config import PreferConfig, Resolved, SftConfig
from fledge.data.batch import Batch, pack_pairs, pack_samples
from fledge.data.demos import demo_messages, encode_demo
from fledge.data.pairs import encode_pair, encode_scored_pair
from fledge.data.render import make_renderer
from fledge.data.stream import TaskStream
from fledge.data.tasks import filter_by_length, fingerprint, load_rows, split_off, to_tasks
from fledge.errors import DataError
from fledge.interfaces import Loss, Renderer
from fledge.models.load import Policy, export
from fledge.models.reward import save_reward_model
from fledge.orchestration.books import Books
from fledge.orchestration.setup import code_digests, identity
from fledge.trainer import Critic, LocalTrainer, copy_of, learning_rate
from fledge.types import Pair, Sample, Task

C = TypeVar("C", bound=SftConfig | PreferConfig)
T = TypeVar("T", bound=Sample | Pair)


class SupervisedRun(ABC, Generic[C, T]):
    """Rows in, a checkpoint and an export out."""

    noun: ClassVar[str]
    reduction: ClassVar[str]
    trains = "a policy"
    needs: frozenset[str] = frozenset()
    """Columns that each batch is scored for before it is trained on."""

    def __init__(self, resolved: Resolved[C], policy: Policy) -> None:
        self.config: C = resolved.config
        config = self.config
        self._encode_all(load_rows(config.data.train, "data.train"), policy)
        self.stream = TaskStream(self.train_rows, config.seed, shuffle=True)
        lora = config.model.lora
        self.trainer = self._trainer(
            policy,
            plus_ratio=lora.plus_ratio if lora else 1.0,
            gradient_checkpointing=config.model.gradient_checkpointing,
        )
        known = {**identity(policy, fingerprint(self.train_rows)), **code_digests(config)}
        self.books = Books(resolved, known, self._title())
        self._reduce = partial(token_weights, self.reduction, max_length=policy.context)
        self.evaluations: dict[str, dict[str, float]] = {}

    # ---- what a kind of run decides

    @property
    @abstractmethod
    def loss(self) -> Loss: ...

    @abstractmethod
    def _title(self) -> str: ...

    @abstractmethod
    def _trainer(self, policy: Policy, **options: Any) -> LocalTrainer: ...

    @abstractmethod
    def _encode(self, renderer: Renderer, row: Mapping[str, Any], where: str) -> T: ...

    @abstractmethod
    def _samples(self, item: T) -> tuple[Sample, ...]:
        """The token sequences of a row."""

    @abstractmethod
    def _pack(self, items: Sequence[T]) -> Batch: ...

    @abstractmethod
    async def _judge(self, batch: Batch) -> dict[str, float]:
        """What the held-out rows say, by name without `eval/`."""

    async def export(self, directory: Path) -> None:
        export(self.trainer.policy, directory)

    # ---- the data

    def _encode_all(self, rows: list[dict[str, Any]], policy: Policy) -> None:
        """Every row as tokens, before any training; what does not fit is refused or filtered with
        a count.
        """
        data = self.config.data
        renderer = make_renderer(policy.tokenizer)
        tasks = to_tasks(rows, "data.train")
        self.duplicates = len(rows) - len(tasks)
        numbers = {id(row): number for number, row in enumerate(rows, 1)}
        self._items: dict[str, T] = {
            task.key: self._encode(
                renderer, task.data, f"data.train: row {numbers[id(task.data)]} ({task.key})"
            )
            for task in tasks
        }

        def length(task: Task) -> int:
            return max(len(s.token_ids) for s in self._samples(self._items[task.key]))

        self.filtered = 0
        if data.max_tokens is not None:
            tasks, self.filtered = filter_by_length(
                tasks, length, data.max_tokens, "data.max_tokens"
            )
        longest = max(tasks, key=length)
        if length(longest) > policy.context:
            raise DataError(
                f"data.max_tokens: row {longest.key!r} has {length(longest)} tokens, the "
                "model's context is "
                f"{policy.context}; set data.max_tokens={policy.context} to filter such rows"
            )
        self.train_rows, self.held_out = (
            split_off(tasks, data.eval_size, self.config.seed) if data.eval_size else (tasks, [])
        )

    def _batch(self, tasks: Sequence[Task]) -> Batch:
        return self._pack([self._items[task.key] for task in tasks])

    # ---- the loop

    async def train(self) -> int:
        """Train until the last step or until somebody asks to stop; returns the step reached."""
        config, trainer, span = self.config, self.trainer, self.books.clock.span
        step = await self._begin()
        while step < config.steps and not self.books.stopping:
            batch = self._batch([self.stream.next()[1] for _ in range(config.data.batch_size)])
            if self.needs:
                with span("score"):
                    batch = await trainer.score(batch, self.needs)
            for mini in batch.updates(1, 1, step, self._reduce):
                with span("backward"):
                    for micro in mini.micros(config.optim.micro_tokens):
                        await trainer.forward_backward(micro, self.loss)
                with span("step"):
                    await trainer.optim_step(learning_rate(config.optim, step, config.steps))
            step += 1
            await self._record(step, batch)
        return step

    async def _begin(self) -> int:
        """Restore or start, and judge what we begin from."""
        step = self.books.begin(self._restore)
        self.books.note(
            f"{len(self.train_rows)} {self.noun}, {len(self.held_out)} held out, "
            f"{self.duplicates} duplicates merged, {self.filtered} filtered by length"
        )
        if step == 0 and self.held_out:
            self.books.record(0, await self._evaluate(0))
        return step

    def _restore(self, saved: Any) -> None:
        self.trainer.load(saved.path)
        self.stream.restore(saved.state["data"])
        self.evaluations = saved.state["evaluations"]

    async def _record(self, step: int, batch: Batch) -> None:
        metrics = self.trainer.metrics()
        if not any(v for name, v in metrics.items() if name.endswith("/grad_norm")):
            self.books.warn(f"step {step}: the gradient is exactly 0: this step taught nothing")
        metrics["perf/tokens"] = float(sum(len(row.token_ids) for row in batch.rows))
        if self.held_out and step == self.config.steps:
            metrics |= await self._evaluate(step)
        self.books.record(step, metrics)
        if self.books.due(step, self.config.checkpoint.every):
            self.save(step)

    def save(self, step: int) -> None:
        state = {"data": self.stream.state(), "evaluations": self.evaluations}
        self.books.save(step, self.trainer.save, state)

    async def _evaluate(self, step: int) -> dict[str, float]:
        with self.books.clock.span("evaluate"):
            found = await self._judge(self._batch(self.held_out))
        self.evaluations[str(step)] = found
        return {f"eval/{name}": value for name, value in found.items()}


class SftRun(SupervisedRun[SftConfig, Sample]):
    """Cross-entropy on what an assistant said."""

    noun = "demonstrations"
    reduction = "token_mean"
    loss = staticmethod(supervised().loss)

    def _title(self) -> str:
        return f"{self.config.run_dir}: sft"

    def _trainer(self, policy: Policy, **options: Any) -> LocalTrainer:
        return LocalTrainer(policy, self.config.optim, **options)

    def _encode(self, renderer: Renderer, row: Mapping[str, Any], where: str) -> Sample:
        return encode_demo(renderer, demo_messages(row, where))

    def _samples(self, item: Sample) -> tuple[Sample, ...]:
        return (item,)

    def _pack(self, items: Sequence[Sample]) -> Batch:
        return pack_samples(items)

    async def _judge(self, batch: Batch) -> dict[str, float]:
        scored = await self.trainer.score(batch, {"old_logp"})
        return {"loss": -fmean(scored.columns["old_logp"].tolist())}


class PreferRun(SupervisedRun[PreferConfig, Pair]):
    """A preference loss: of a policy against the model it starts from, or of a reward model."""

    noun = "pairs"
    reduction = "sequence_mean"

    def __init__(self, resolved: Resolved[PreferConfig], policy: Policy) -> None:
        self._preference = make_preference(resolved.config.loss)
        self.is_reward_model = self._preference.of_scores
        if self.is_reward_model:
            self.trains = "a reward model"
        else:
            self.needs = frozenset({"ref_logp"})
        super().__init__(resolved, policy)

    @property
    def loss(self) -> Loss:
        return self._preference

    def _title(self) -> str:
        return f"{self.config.run_dir}: {self.config.loss.label}"

    def _trainer(self, policy: Policy, **options: Any) -> LocalTrainer:
        if self.is_reward_model:
            return Critic(policy, self.config.optim, **options)
        # With adapters the reference is the same model without them.
        frozen = {} if policy.has_adapter else {"ref_logp": copy_of(policy, frozen=True)}
        return LocalTrainer(policy, self.config.optim, frozen=frozen, **options)

    def _encode(self, renderer: Renderer, row: Mapping[str, Any], where: str) -> Pair:
        encode: Callable[..., Pair] = encode_scored_pair if self.is_reward_model else encode_pair
        return encode(renderer, row, where)

    def _samples(self, item: Pair) -> tuple[Sample, ...]:
        return item.chosen, item.rejected

    def _pack(self, items: Sequence[Pair]) -> Batch:
        return pack_pairs(items)

    async def _judge(self, batch: Batch) -> dict[str, float]:
        """The loss and its statistics of pairs, as they would be in training."""
        batch = batch.weighed(self._reduce)
        if self.is_reward_model:
            value = await self._scores(batch)
            logp = torch.zeros_like(value)
        else:
            batch = await self.trainer.score(batch, {"old_logp", *self.needs})
            logp, value = batch.columns["old_logp"], None
        unknown = torch.full_like(logp, torch.nan)
        with torch.no_grad():
            x = Tokens.of(batch.columns, logp, unknown, batch.lengths.to(logp.device), value)
            loss, stats = self.loss(x)
        total = (batch.columns["scale"].to(loss) * loss).sum()
        found = {n.removeprefix("pair/"): v for n, v in stats.items() if n.startswith("pair/")}
        return {"loss": total.item()} | {n: v.double().nanmean().item() for n, v in found.items()}

    async def _scores(self, batch: Batch) -> Tensor:
        scored = await self.trainer.score(batch, {"value"})
        value: Tensor = scored.columns["value"]
        return value

    async def export(self, directory: Path) -> None:
        """A reward model comes with the mean and the spread of its scores on held-out pairs, or on
        a batch's worth of others: a score by itself has neither zero nor unit.
        """
        if not self.is_reward_model:
            return await super().export(directory)
        pairs = self.held_out or self.train_rows[: self.config.data.batch_size]
        scores = (await self._scores(self._batch(pairs))).tolist()
        facts = {"loss": self.config.loss.label, "mean": fmean(scores), "std": pstdev(scores)}
        assert self.trainer.value_head is not None
        save_reward_model(self.trainer.policy, self.trainer.value_head, directory, facts)
