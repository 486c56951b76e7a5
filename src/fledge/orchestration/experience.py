"""Experience: tasks go out, groups come back, and no trained token is more than `max_lag` versions
old.

The rule is `window`: batch n is issued only when the version is at least n - max_lag, and step n
trains exactly batch n, waiting for its stragglers. So nothing is discarded, and with `max_lag = 0`
rollouts and updates take turns.

    consumes    tasks from the stream, in order
    produces    groups, batch by batch
    waits for   the generator (whose own waits have timeouts)
    unblocked   by `advance`, when new weights are served
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from fledge.data.stream import TaskStream
from fledge.interfaces import Generator
from fledge.types import Group, Task


@dataclass
class Taken:
    """A batch of groups, those that were turned down for it, and how often new tasks were drawn."""

    groups: list[Group]
    filtered: list[Group]
    rounds: int


class Experience:
    """Batches of groups in the order of their issue; the data position it saves is that of the
    oldest untrained batch.
    """

    def __init__(
        self,
        generator: Generator,
        stream: TaskStream,
        *,
        group_size: int,
        groups_per_step: int,
        seed: int,
        version: int,
        last_batch: int,
        max_lag: int = 0,
        keep: Callable[[Group], bool] | None = None,
        max_rounds: int = 0,
    ) -> None:
        self._generator = generator
        self._stream = stream
        self._group_size = group_size
        self._groups_per_step = groups_per_step
        self._seed = seed
        self._version = version
        self._last_batch = last_batch
        self._max_lag = max_lag
        self._keep = keep
        self._max_rounds = max_rounds
        self._next_batch = version
        self._in_flight: dict[int, list[asyncio.Task[Group]]] = {}
        self._positions: dict[int, Mapping[str, Any]] = {}

    async def __aenter__(self) -> Self:
        self._issue()
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [t for batch in self._in_flight.values() for t in batch]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._in_flight.clear()

    def _issue(self) -> None:
        """Send out every batch that the window admits."""
        while self._next_batch <= min(self._version + self._max_lag, self._last_batch):
            batch = self._next_batch
            self._positions[batch] = self._stream.state()
            self._in_flight[batch] = [self._play(batch, i) for i in range(self._groups_per_step)]
            self._next_batch += 1

    def _play(self, batch: int, index: int) -> asyncio.Task[Group]:
        epoch, task = self._stream.next()
        return asyncio.create_task(
            self._generate(task, epoch, episode_seed(self._seed, batch, index))
        )

    async def _generate(self, task: Task, epoch: int, seed: int) -> Group:
        return await self._generator.generate(task, self._group_size, epoch=epoch, seed=seed)

    async def take(self) -> Taken:
        """The batch of the current version, complete. What `keep` turns down is replaced by new
        tasks, round after round, until the batch is full or `max_rounds` are over.
        """
        found = Taken([], [], 0)
        issued = self._groups_per_step
        while True:
            groups = await asyncio.gather(*self._in_flight[self._version])
            for group in groups:
                good = self._keep is None or self._keep(group)
                (found.groups if good else found.filtered).append(group)
            missing = self._groups_per_step - len(found.groups)
            if not missing or found.rounds == self._max_rounds:
                del self._in_flight[self._version]
                return found
            found.rounds += 1
            more = range(issued, issued + missing)
            self._in_flight[self._version] = [self._play(self._version, i) for i in more]
            issued += missing

    def advance(self, version: int) -> None:
        """New weights are served: the window moves on."""
        self._positions.pop(self._version, None)
        self._version = version
        self._issue()

    def state(self, version: int) -> Mapping[str, Any]:
        """Where the stream was before the batch of `version` was issued; in-flight batches are
        played again on resume.
        """
        return self._positions.get(version, self._stream.state())


def episode_seed(*parts: int) -> int:
    """A 63-bit seed from integers; neighbours share nothing, and adding an episode's index keeps it
    apart.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
