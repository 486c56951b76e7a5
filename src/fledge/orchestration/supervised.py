"""Supervised fine-tuning: the same trainer, data stream and checkpoints as RL, with cross-entropy
on what an assistant said.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import Any

from fledge.algorithms import supervised, token_weights
from fledge.config import Resolved, SftConfig
from fledge.data.batch import Batch, pack_samples
from fledge.data.demos import demo_messages, encode_demo
from fledge.data.render import make_renderer
from fledge.data.stream import TaskStream
from fledge.data.tasks import filter_by_length, fingerprint, load_rows, split_off, to_tasks
from fledge.errors import DataError
from fledge.models.load import Policy
from fledge.orchestration.books import Books
from fledge.orchestration.setup import identity
from fledge.trainer import LocalTrainer, learning_rate
from fledge.types import Sample, Task


class SftRun:
    """A supervised run: demonstrations in, a checkpoint and an export out."""

    def __init__(self, resolved: Resolved[SftConfig], policy: Policy) -> None:
        config = self.config = resolved.config
        self._encode(load_rows(config.data.train, "data.train"), policy)
        self.stream = TaskStream(self.demos, config.seed, shuffle=True)
        lora = config.model.lora
        self.trainer = LocalTrainer(
            policy,
            config.optim,
            plus_ratio=lora.plus_ratio if lora else 1.0,
            gradient_checkpointing=config.model.gradient_checkpointing,
        )
        self.books = Books(
            resolved, identity(policy, fingerprint(self.demos)), f"{config.run_dir}: sft"
        )
        self._reduce = partial(token_weights, "token_mean", max_length=policy.context)

    def _encode(self, rows: list[dict[str, Any]], policy: Policy) -> None:
        """Every demonstration as tokens, before any training; what does not fit is refused or
        filtered with a count.
        """
        data = self.config.data
        renderer = make_renderer(policy.tokenizer)
        demos = to_tasks(rows, "data.train")
        self.samples: dict[str, Sample] = {
            demo.key: encode_demo(renderer, demo_messages(demo.data, f"data.train: {demo.key}"))
            for demo in demos
        }

        def length(demo: Task) -> int:
            return len(self.samples[demo.key].token_ids)

        self.filtered = 0
        if data.max_tokens is not None:
            demos, self.filtered = filter_by_length(
                demos, length, data.max_tokens, "data.max_tokens"
            )
        longest = max(demos, key=length)
        if length(longest) > policy.context:
            raise DataError(
                f"data.max_tokens: demonstration {longest.key!r} has {length(longest)} tokens, the "
                "model's context is "
                f"{policy.context}; set data.max_tokens={policy.context} to filter such rows"
            )
        self.demos, self.held_out = (
            split_off(demos, data.eval_size, self.config.seed) if data.eval_size else (demos, [])
        )

    async def train(self) -> int:
        """Train until the last step or until somebody asks to stop; returns the step reached."""
        config, trainer, algo = self.config, self.trainer, supervised()
        step = self.books.begin(self._restore)
        self.books.note(
            f"{len(self.demos)} demonstrations, {len(self.held_out)} held out, "
            f"{self.filtered} filtered by length"
        )
        while step < config.steps and not self.books.stopping:
            demos = [self.samples[self.stream.next()[1].key] for _ in range(config.data.batch_size)]
            for mini in pack_samples(demos).updates(1, 1, step, self._reduce):
                with self.books.clock.span("backward"):
                    for micro in mini.micros(config.optim.micro_tokens):
                        await trainer.forward_backward(micro, algo.loss)
                with self.books.clock.span("step"):
                    await trainer.optim_step(learning_rate(config.optim, step, config.steps))
            step += 1
            await self._record(step, demos)
        return step

    def _restore(self, saved: Any) -> None:
        self.trainer.load(saved.path)
        self.stream.restore(saved.state["data"])

    async def _record(self, step: int, demos: list[Sample]) -> None:
        metrics = self.trainer.metrics()
        metrics["perf/tokens"] = float(sum(len(d.token_ids) for d in demos))
        if self.held_out and step == self.config.steps:
            metrics["eval/loss"] = await self._held_out_loss()
        self.books.record(step, metrics)
        if self.books.due(step, self.config.checkpoint.every):
            self.save(step)

    def save(self, step: int) -> None:
        self.books.save(step, self.trainer, {"data": self.stream.state()})

    async def _held_out_loss(self) -> float:
        with self.books.clock.span("evaluate"):
            batch: Batch = pack_samples([self.samples[d.key] for d in self.held_out])
            scored = await self.trainer.score(batch, {"old_logp"})
        return -fmean(scored.columns["old_logp"].tolist())
