"""An endless stream of tasks whose position is three numbers: resumable at any task, epoch
boundaries included.

The order of an epoch is a pure function of (seed, epoch) and the tasks; nothing is drawn that a
checkpoint must keep.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from fledge.data.tasks import task_digest
from fledge.errors import CheckpointError, DataError
from fledge.types import Task


class TaskStream:
    """Each task exactly once per epoch, epoch after epoch.

    >>> stream = TaskStream([Task("a", {}), Task("b", {})], seed=0, shuffle=False)
    >>> [(epoch, task.key) for epoch, task in (stream.next() for _ in range(3))]
    [(0, 'a'), (0, 'b'), (1, 'a')]
    """

    def __init__(self, tasks: Sequence[Task], seed: int, shuffle: bool) -> None:
        if not tasks:
            raise DataError("data.train: there are no tasks to draw from")
        # Sorted before shuffling: a file with its rows in another order gives the same stream.
        self._tasks = sorted(tasks, key=lambda task: task.key) if shuffle else list(tasks)
        self._seed = seed
        self._shuffle = shuffle
        self._identity = self._identify()
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def next(self) -> tuple[int, Task]:
        """The epoch and the next task of it."""
        if self._position == len(self._tasks):
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)
        task = self._tasks[self._order[self._position]]
        self._position += 1
        return self._epoch, task

    def state(self) -> dict[str, Any]:
        """Plain JSON: how far the stream has come, and which stream it is."""
        return {"epoch": self._epoch, "position": self._position, "stream": self._identity}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; refused when the tasks, the seed or the shuffling are
        others.
        """
        if state["stream"] != self._identity:
            raise CheckpointError(
                "data.train, data.shuffle or seed differ from those of the checkpoint, which "
                "would change the order of tasks; restore them or start in another run_dir"
            )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= len(self._tasks):
            raise CheckpointError(f"damaged data position: epoch {epoch}, task {position}")
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        if self._shuffle:
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order

    def _identify(self) -> str:
        digest = hashlib.sha256(f"{self._seed}:{self._shuffle}".encode())
        for task in self._tasks:
            digest.update(task_digest(task).encode())
        return digest.hexdigest()[:16]
