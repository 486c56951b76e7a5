"""Who runs next: admission by memory, waves for the deterministic path, and the life of a request.
No torch here.

A request is admitted when the pages for its prompt *and all tokens it may still sample* are there,
so a running request never has to be thrown out. Requests of a session (an episode) are admitted in
waves: a wave is everything that waits when nothing of a session runs and every open session waits.
So who shares a batch with whom depends on the order of sessions, never on time. Requests without a
session join at the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fledge.errors import EngineError
from fledge.inference.blocks import BlockPool
from fledge.types import Completion, Sampling, StopReason


@dataclass(eq=False)
class Request:
    """One prompt on its way to a completion."""

    prompt: tuple[int, ...]
    sampling: Sampling
    session: int | None = None
    version: int = -1
    on_token: Callable[[int, float], None] | None = None
    on_done: Callable[[Completion], None] | None = None
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    """Tokens at the beginning whose keys and values were found in the cache."""
    sampled: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    plain_logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None

    @property
    def place(self) -> int:
        """Position of the newest token, the one to be fed next."""
        return len(self.prompt) + len(self.sampled) - 1

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens

    def completion(self) -> Completion:
        assert self.stop_reason is not None
        return Completion(
            tuple(self.sampled),
            tuple(self.logps),
            tuple(self.plain_logps),
            tuple(self.versions),
            self.stop_reason,
        )


@dataclass(frozen=True)
class Admission:
    """Requests that start together and share one prefill: the leader computes, followers copy its
    last page.
    """

    leader: Request
    followers: tuple[Request, ...]

    @property
    def members(self) -> tuple[Request, ...]:
        return (self.leader, *self.followers)


class Scheduler:
    """Waiting and running requests over one pool of pages."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.version = 0
        self.running: list[Request] = []
        self.sessions: set[int] = set()
        self._waiting: deque[Request] = deque()
        self._next_wave: list[Request] = []
        self._wave: deque[Request] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.running or self._wave or self._waiting or self._next_wave)

    def submit(self, request: Request) -> None:
        need = self._pages(request)
        if need > self.pool.total:
            raise EngineError(
                f"a request of {request.most_tokens} tokens needs {need} cache pages, but there "
                f"are only {self.pool.total}; raise engine.cache_mb or lower rollout.max_new_tokens"
            )
        (self._waiting if request.session is None else self._next_wave).append(request)

    def admit(self) -> list[Admission]:
        """Start what fits now, grouped by identical prompts. In each queue order decides, and
        nobody overtakes.
        """
        self._open_wave()
        groups: dict[tuple[int, ...], list[Request]] = {}
        for queue in (self._wave, self._waiting):
            while queue:
                siblings = groups.get(queue[0].prompt)
                if not self._start(queue[0], siblings[0] if siblings else None):
                    break
                request = queue.popleft()
                groups.setdefault(request.prompt, []).append(request)
                self.running.append(request)
        return [Admission(leader, tuple(rest)) for leader, *rest in groups.values()]

    def _open_wave(self) -> None:
        """Begin the next wave when the last has ended and every open session waits."""
        if self._wave or any(r.session is not None for r in self.running):
            return
        if {r.session for r in self._next_wave} >= self.sessions:
            self._wave = deque(sorted(self._next_wave, key=lambda r: r.session or 0))
            self._next_wave = []

    def _start(self, request: Request, leader: Request | None) -> bool:
        """Reserve pages for the whole request, or leave it waiting. Full pages of a leader's prompt
        are shared.
        """
        request.version = self.version
        if leader is None:
            shared = self.pool.lookup(request.prompt, self.version)
            request.cached = len(shared) * self.pool.size
        else:
            shared = leader.blocks[: len(request.prompt) // self.pool.size]
            self.pool.share(shared)
        missing = self._pages(request) - len(shared)
        if missing > self.pool.available:
            self.pool.release(shared)
            return False
        request.blocks = [*shared, *self.pool.allocate(missing, self.version)]
        return True

    def finish(self, request: Request, reason: StopReason) -> None:
        """Leave the batch; what was computed stays findable for a next turn."""
        request.stop_reason = reason
        self.running.remove(request)
        tokens = (*request.prompt, *request.sampled)
        # The newest token was sampled but never fed, so its keys and values do not exist.
        self.pool.remember(tokens, request.blocks, computed=len(tokens) - 1)
        self.pool.release(request.blocks)
        request.blocks = []

    def cancel(self, request: Request) -> None:
        if request.stop_reason is not None:
            return
        for queue in (self._waiting, self._next_wave, self._wave):
            if request in queue:
                queue.remove(request)
                request.stop_reason = "cancelled"
                return
        self.finish(request, "cancelled")

    def everything(self) -> list[Request]:
        return [*self.running, *self._wave, *self._next_wave, *self._waiting]

    def _pages(self, request: Request) -> int:
        return -(-request.most_tokens // self.pool.size)
