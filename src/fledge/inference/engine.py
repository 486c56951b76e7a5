"""The native engine: continuous batching over the module that is being trained.

The pump is one task that lives only while there is work. Each turn of it admits requests, runs one
prefill and one decode step, and hands tokens to their owners; between turns everyone else gets the
loop, so requests can join, stream and be cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from fledge.errors import EngineError, FledgeError, WeightSyncError
from fledge.inference.blocks import BlockPool
from fledge.inference.runner import Drawn, Runner, bytes_per_block
from fledge.inference.scheduler import Request, Scheduler
from fledge.models.attention import BLOCK
from fledge.models.fingerprint import hashes, module_tensors
from fledge.models.load import Policy
from fledge.types import Completion, Sampling, StopReason


class NativeEngine:
    """Generates from a `Policy` in this process, without a copy of its weights.

    `cache_mb` bounds the key/value cache; requests that do not fit wait their turn.
    """

    def __init__(self, policy: Policy, cache_mb: int, version: int = 0) -> None:
        blocks = cache_mb * 2**20 // bytes_per_block(policy)
        if blocks < 2:
            raise EngineError(
                f"engine.cache_mb={cache_mb} does not hold a single page of this model's cache; "
                "raise it"
            )
        self.policy = policy
        self.scheduler = Scheduler(BlockPool(blocks, BLOCK))
        self.scheduler.version = version
        self._runner = Runner(policy, blocks)
        self._captured = module_tensors(policy.model)
        self._addresses = {name: t.data_ptr() for name, t in self._captured.items()}
        self._numbers = itertools.count()
        self._pump_task: asyncio.Task[None] | None = None
        self._paused = False
        self._closed = False
        self._failure: FledgeError | None = None
        self._waiters: dict[Request, Callable[[FledgeError], None]] = {}
        self.prefill_tokens = 0
        self.sampled_tokens = 0

    @property
    def version(self) -> int:
        return self.scheduler.version

    # ---- requests

    @contextmanager
    def session(self) -> Iterator[int]:
        """An episode: its requests are batched by the order of sessions, never by time."""
        number = next(self._numbers)
        self.scheduler.sessions.add(number)
        try:
            yield number
        finally:
            self.scheduler.sessions.discard(number)
            self._kick()

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, session: int | None = None
    ) -> Completion:
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = Request(tuple(token_ids), sampling, session, on_done=_setter(done))
        self._submit(request, _failer(done))
        try:
            return await done
        finally:
            self._forget(request)

    async def stream(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[tuple[int, float]]:
        """Tokens with their log-probs as they are drawn; closing the iterator cancels them."""
        queue: asyncio.Queue[tuple[int, float] | FledgeError | None] = asyncio.Queue()
        request = Request(
            tuple(token_ids),
            sampling,
            on_token=lambda token, logp: queue.put_nowait((token, logp)),
            on_done=lambda _: queue.put_nowait(None),
        )
        self._submit(request, queue.put_nowait)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, FledgeError):
                    raise item
                yield item
        finally:
            self._forget(request)

    def _submit(self, request: Request, fail: Callable[[FledgeError], None]) -> None:
        if self._closed:
            raise self._failure or EngineError("the engine is closed")
        if not request.prompt or request.sampling.max_new_tokens < 1:
            raise EngineError("a request needs at least one prompt token and one new token")
        if request.most_tokens > self.policy.context:
            raise EngineError(
                f"a prompt of {len(request.prompt)} tokens and up to "
                f"{request.sampling.max_new_tokens} new ones exceed the "
                f"model's context of {self.policy.context}; lower rollout.max_new_tokens, set "
                "data.max_prompt_tokens, "
                "or raise model.overrides.max_position_embeddings"
            )
        self.scheduler.submit(request)
        self._waiters[request] = fail
        self._kick()

    def _forget(self, request: Request) -> None:
        """The owner is gone: an unfinished request is cancelled."""
        self._waiters.pop(request, None)
        if request.stop_reason is None:
            self.scheduler.cancel(request)

    # ---- the pump

    def _kick(self) -> None:
        if self._paused or self._closed or not self.scheduler.busy:
            return
        if self._pump_task is None or self._pump_task.done():
            self._pump_task = asyncio.get_running_loop().create_task(self._pump())

    async def _pump(self) -> None:
        try:
            while not self._paused and self._turn():
                await asyncio.sleep(0)
        except Exception as error:
            self._fail_all(error)

    def _turn(self) -> bool:
        """One prefill and one decode step; False when nobody can go on."""
        admissions = self.scheduler.admit()
        if admissions:
            self.prefill_tokens += sum(len(a.leader.prompt) - a.leader.cached for a in admissions)
            self._deliver(self._runner.prefill(admissions))
            for admission in admissions:
                leader = admission.leader
                if leader.blocks:
                    self.scheduler.pool.remember(leader.prompt, leader.blocks, len(leader.prompt))
        running = list(self.scheduler.running)  # those who finish in this step count, too
        if running:
            for request in running:
                if request.version != self.version:
                    raise WeightSyncError(
                        f"a request of weight version {request.version} is still running under "
                        f"version {self.version}"
                    )
            self._deliver(self._runner.decode(running))
        return bool(admissions or running)

    def _deliver(self, drawn: Drawn) -> None:
        self.sampled_tokens += len(drawn)
        for request, token, logp, plain in drawn:
            request.sampled.append(token)
            request.logps.append(logp)
            request.plain_logps.append(plain)
            request.versions.append(request.version)
            if request.on_token is not None:
                request.on_token(token, logp)
            reason = self._stop_reason(request)
            if reason is not None:
                self.scheduler.finish(request, reason)
                if request.on_done is not None:
                    request.on_done(request.completion())

    def _stop_reason(self, request: Request) -> StopReason | None:
        sampling = request.sampling
        if request.sampled[-1] in sampling.stop_ids:
            return "stop"
        if sampling.stop and self._has_stop_string(request):
            return "stop"
        return "length" if len(request.sampled) >= sampling.max_new_tokens else None

    def _has_stop_string(self, request: Request) -> bool:
        # A token is at least one byte, so the newest match lies within as many tokens as the string
        # has bytes.
        longest = max(len(s.encode()) for s in request.sampling.stop)
        text = self.policy.tokenizer.decode(request.sampled[-longest - 1 :])
        return any(s in text for s in request.sampling.stop)

    def _fail_all(self, error: Exception) -> None:
        named = (
            error if isinstance(error, FledgeError) else EngineError(f"the engine failed: {error}")
        )
        named.__cause__ = None if named is error else error
        self._closed, self._failure = True, named
        for fail in list(self._waiters.values()):
            fail(named)

    # ---- control

    async def pause(self) -> None:
        """Stop between two steps; running requests keep their place."""
        self._paused = True
        if self._pump_task is not None:
            await self._pump_task

    async def resume(self) -> None:
        self._paused = False
        self._kick()

    async def update(self, version: int) -> None:
        """Serve the weights as they are now under a new version. The cache of the old version is
        forgotten.
        """
        if self.scheduler.running:
            raise WeightSyncError(
                f"{len(self.scheduler.running)} requests still run under version {self.version}; "
                "let them finish or cancel them before publishing"
            )
        self.scheduler.pool.clear()
        self.scheduler.version = version

    def fingerprint(self) -> Mapping[str, str]:
        return hashes(self._captured)

    def addresses(self) -> Mapping[str, int]:
        return self._addresses

    async def close(self) -> None:
        self._closed = True
        for request in self.scheduler.everything():
            self.scheduler.cancel(request)
        for fail in list(self._waiters.values()):
            fail(EngineError("the engine was closed"))
        await self.pause()


def _setter(future: asyncio.Future[Completion]) -> Callable[[Completion], None]:
    return lambda completion: None if future.done() else future.set_result(completion)


def _failer(future: asyncio.Future[Completion]) -> Callable[[FledgeError], None]:
    return lambda error: None if future.done() else future.set_exception(error)
