"""The verbs, on one page: what each part must do to be replaceable. Protocols only; nothing here
runs.

`Batch` and `Loss` carry tensors, so they are opaque here; their real types live in
`fledge.data.batch` and `fledge.algorithms`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fledge.types import Completion, Group, Message, Proof, Sampling, Step, Task, Tool

Batch = Any
"""`fledge.data.batch.Batch`: packed token columns."""

Loss = Callable[[Any], tuple[Any, Mapping[str, Any]]]
"""`(Tokens) -> (one loss per trained token, statistics per token)`; see `fledge.algorithms.losses`.
"""

AdvantageOfGroup = Callable[[Sequence[Any]], list[float]]
"""`(episodes of one task) -> one advantage per episode`."""


@runtime_checkable
class Environment(Protocol):
    """One attempt at one task. Sees messages, never tokens. Used once, then closed.

    What the policy may call is in an attribute `tools`, read after `reset`, where there is one.
    """

    async def reset(self) -> Sequence[Message]: ...

    async def step(self, reply: Message) -> Step: ...

    async def close(self) -> None: ...


class Renderer(Protocol):
    """Messages to tokens and back, exactly.

    `extend` returns ids that start with `previous` unchanged, or None, which opens a new segment:
    never a silent re-render.
    """

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]: ...

    def extend(
        self, previous: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int] | None: ...

    def parse(self, completion: Sequence[int], tools: Sequence[Tool] = ()) -> Message:
        """The reply: its text, its reasoning, and its tool calls, each with a status."""
        ...

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[list[int], list[bool]]:
        """A finished conversation, and for each token whether an assistant would sample it."""
        ...


class InferenceEngine(Protocol):
    """Token ids in, token ids out, with log-probs and the weight version of each token."""

    @property
    def version(self) -> int: ...

    def session(self) -> AbstractContextManager[int]:
        """Announce an episode. Requests of sessions run in waves that do not depend on time; see
        `generate`.
        """
        ...

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, session: int | None = None
    ) -> Completion: ...

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[tuple[int, float]]: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def update(self, version: int) -> None:
        """From now on tokens are of `version`; nothing of another version may be read."""
        ...

    def fingerprint(self) -> Mapping[str, str]:
        """Name to content hash of every tensor that the engine's kernels read."""
        ...

    def addresses(self) -> Mapping[str, int]:
        """Name to address of the same tensors, for engines that share memory with the trainer."""
        ...

    async def close(self) -> None: ...


class Generator(Protocol):
    """One task to a group of n finished, scored, token-exact episodes."""

    async def generate(self, task: Task, n: int, *, epoch: int, seed: int) -> Group: ...


class Trainer(Protocol):
    """Owns the parameters. The same verbs serve one process, many ranks and a remote server."""

    async def score(self, batch: Batch, needs: Collection[str]) -> Batch: ...

    async def forward_backward(self, micro: Batch, loss: Loss) -> None: ...

    async def optim_step(self, learning_rate: float) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    def fingerprint(self) -> Mapping[str, str]: ...

    def addresses(self) -> Mapping[str, int]: ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...


class WeightTransport(Protocol):
    """Moves parameters from the trainer to engines and proves that they arrived."""

    async def publish(self, trainer: Trainer, engine: InferenceEngine, version: int) -> Proof: ...


class Tracker(Protocol):
    """A place that metrics are copied to (TensorBoard, W&B, MLflow)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
