"""Pages and admission, without a model: who runs, who waits, and whose tokens lie in which page."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

import fledge.inference.blocks
import fledge.inference.scheduler
from fledge.errors import EngineError, WeightSyncError
from fledge.inference.blocks import BlockPool
from fledge.inference.scheduler import Admission, Request, Scheduler
from fledge.types import Sampling

SIZE = 4
WITHOUT_TORCH = {"__future__", "collections", "dataclasses", "itertools", "collections.abc"}


@pytest.mark.parametrize("module", [fledge.inference.blocks, fledge.inference.scheduler])
def test_scheduling_needs_no_torch(module):
    tree = ast.parse(Path(module.__file__).read_text())
    named = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    named |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    ours = {"fledge.errors", "fledge.types", "fledge.inference.blocks"}
    assert named <= WITHOUT_TORCH | ours


def scheduler_of(pages: int) -> Scheduler:
    return Scheduler(BlockPool(pages + 1, SIZE))


def request(length: int, new: int, *, session: int | None = None, first: int = 0) -> Request:
    prompt = tuple(range(first, first + length))
    return Request(prompt, Sampling(max_new_tokens=new), session)


def everyone(admissions: list[Admission]) -> list[Request]:
    return [member for admission in admissions for member in admission.members]


# ---- pages


def test_all_pages_come_back_after_finish_and_cancel():
    scheduler = scheduler_of(10)
    running, cancelled, waiting = request(5, 3), request(7, 6, first=50), request(20, 20, first=99)
    for r in (running, cancelled, waiting):
        scheduler.submit(r)
    assert everyone(scheduler.admit()) == [running, cancelled]
    assert scheduler.pool.available == 10 - 2 - 4
    running.sampled += [1, 2, 3]
    scheduler.finish(running, "length")
    scheduler.cancel(cancelled)
    scheduler.cancel(waiting)
    assert scheduler.pool.available == scheduler.pool.total == 10
    assert not scheduler.busy and not scheduler.everything()
    assert [r.stop_reason for r in (running, cancelled, waiting)] == [
        "length", "cancelled", "cancelled",
    ]  # fmt: skip


def test_cancelling_twice_gives_pages_back_once():
    scheduler = scheduler_of(4)
    r = request(5, 3)
    scheduler.submit(r)
    scheduler.admit()
    scheduler.cancel(r)
    scheduler.cancel(r)
    assert scheduler.pool.available == 4


def test_a_page_cannot_be_released_twice():
    pool = BlockPool(4, SIZE)
    pages = pool.allocate(1, version=0)
    pool.release(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(pages)


def test_the_scratch_page_is_never_handed_out():
    pool = BlockPool(4, SIZE)
    assert sorted(pool.allocate(3, version=0)) == [1, 2, 3]
    assert pool.available == 0


def test_a_beginning_is_found_only_as_a_whole_and_never_covers_the_last_token():
    pool = BlockPool(8, SIZE)
    mine = pool.allocate(3, version=0)
    tokens = list(range(12))
    pool.remember(tokens, mine, computed=11)
    pool.release(mine)
    assert pool.lookup(tokens, 0) == mine[:2], "page 3 was not full"
    assert pool.lookup(tokens[:8], 0) == mine[:1], "the last token must be computed"
    assert pool.lookup([99, *tokens[1:]], 0) == []
    assert pool.lookup(tokens[4:], 0) == [], "same tokens elsewhere are other keys and values"


def test_least_recently_used_pages_go_first():
    pool = BlockPool(3, SIZE)
    for first in (0, 100):
        page = pool.allocate(1, version=0)
        pool.remember(list(range(first, first + 4)), page, computed=4)
        pool.release(page)
    pool.release(pool.lookup([0, 1, 2, 3, 9], 0))  # used again, so 100.. is now the oldest
    pool.allocate(1, version=0)
    assert pool.lookup([100, 101, 102, 103, 9], 0) == []
    assert len(pool.lookup([0, 1, 2, 3, 9], 0)) == 1


def test_a_page_of_another_version_is_refused():
    pool = BlockPool(4, SIZE)
    page = pool.allocate(1, version=3)
    pool.remember([0, 1, 2, 3], page, computed=4)
    pool.release(page)
    with pytest.raises(WeightSyncError, match="version 3 would be read under version 4"):
        pool.lookup([0, 1, 2, 3, 4], version=4)
    pool.clear()
    assert pool.lookup([0, 1, 2, 3, 4], version=4) == [] and pool.available == 3


# ---- admission


def test_a_request_that_can_never_fit_is_refused_by_the_name_of_the_setting():
    scheduler = scheduler_of(5)
    with pytest.raises(EngineError, match=r"needs 6 cache pages.*only 5.*engine\.cache_mb"):
        scheduler.submit(request(15, 6))
    assert not scheduler.busy


def test_requests_beyond_the_memory_wait_and_keep_their_order():
    scheduler = scheduler_of(6)
    big, small, third = request(6, 10), request(4, 4, first=50), request(2, 1, first=90)
    for r in (big, small, third):
        scheduler.submit(r)
    assert everyone(scheduler.admit()) == [big, small]
    assert scheduler.admit() == []
    big.sampled.append(1)
    scheduler.finish(big, "stop")
    assert everyone(scheduler.admit()) == [third]


def test_pages_for_all_tokens_that_may_come_are_reserved_at_the_start():
    scheduler = scheduler_of(6)
    scheduler.submit(request(1, 20))
    (r,) = everyone(scheduler.admit())
    assert len(r.blocks) == 6 and len(set(r.blocks)) == 6


def test_equal_prompts_are_one_admission_that_shares_full_pages():
    scheduler = scheduler_of(20)
    group = [request(9, 3) for _ in range(4)]
    for r in [*group, request(9, 3, first=40)]:
        scheduler.submit(r)
    admissions = scheduler.admit()
    assert [len(a.members) for a in admissions] == [4, 1]
    leader, *followers = admissions[0].members
    for follower in followers:
        assert follower.blocks[:2] == leader.blocks[:2]
        assert follower.blocks[2] != leader.blocks[2], "the page that is still written is shared"
    assert scheduler.pool.available == 20 - (2 + 4) - 3
    for r in group:
        r.sampled.append(1)
        scheduler.finish(r, "stop")
    assert scheduler.pool.available == 20 - 3


# ---- waves


def test_a_wave_waits_for_every_open_session_and_runs_in_session_order():
    scheduler = scheduler_of(40)
    scheduler.sessions |= {1, 2, 3}
    second, first, third = (request(2, 2, session=n) for n in (2, 1, 3))
    scheduler.submit(second)
    scheduler.submit(first)
    assert scheduler.admit() == []
    scheduler.submit(third)
    assert everyone(scheduler.admit()) == [first, second, third]


def test_the_next_wave_waits_for_the_last_request_of_this_one():
    scheduler = scheduler_of(40)
    scheduler.sessions |= {1, 2}
    one, two = (request(2, 2, session=n) for n in (1, 2))
    scheduler.submit(one)
    scheduler.submit(two)
    scheduler.admit()
    one.sampled.append(5)
    scheduler.finish(one, "stop")
    again = request(3, 2, session=1)
    scheduler.submit(again)
    assert scheduler.admit() == []
    two.sampled.append(5)
    scheduler.finish(two, "stop")
    assert scheduler.admit() == [], "session 2 is still open and may ask again"
    scheduler.sessions.discard(2)
    assert everyone(scheduler.admit()) == [again]


def test_a_request_without_a_session_joins_while_a_wave_runs():
    scheduler = scheduler_of(40)
    scheduler.sessions |= {1}
    scheduler.submit(request(2, 2, session=1))
    scheduler.admit()
    free = request(2, 2, first=30)
    scheduler.submit(free)
    assert everyone(scheduler.admit()) == [free]


def test_a_request_without_a_session_does_not_wait_behind_sessions_that_wait():
    """An environment that asks the engine itself would otherwise wait for its own wave."""
    scheduler = scheduler_of(40)
    scheduler.sessions |= {1, 2}
    scheduler.submit(request(2, 2, session=1))
    free = request(2, 2, first=30)
    scheduler.submit(free)
    assert everyone(scheduler.admit()) == [free]


def test_a_wave_larger_than_the_memory_is_played_out_before_the_next_begins():
    scheduler = scheduler_of(4)
    scheduler.sessions |= {1, 2, 3}
    asks = [request(4, 4, session=n, first=20 * n) for n in (1, 2, 3)]
    for r in asks:
        scheduler.submit(r)
    assert everyone(scheduler.admit()) == asks[:2]
    asks[0].sampled.append(1)
    scheduler.finish(asks[0], "stop")
    scheduler.submit(request(4, 4, session=1, first=200))
    assert everyone(scheduler.admit()) == [asks[2]]


# ---- a model of the memory


class Memory:
    """Plays the runner: every slot holds the exact beginning that its keys and values stand for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def write(self, r: Request, start: int, end: int) -> None:
        tokens = (*r.prompt, *r.sampled)
        for place in range(start, end):
            self.slots[r.blocks[place // SIZE], place % SIZE] = tokens[: place + 1]

    def check(self, r: Request, end: int) -> None:
        tokens = (*r.prompt, *r.sampled)
        for place in range(end):
            held = self.slots.get((r.blocks[place // SIZE], place % SIZE))
            assert held == tokens[: place + 1], "a request reads what is not its own"

    def turn(self, rng: random.Random) -> None:
        admissions = self.scheduler.admit()
        for admission in admissions:
            leader = admission.leader
            self.check(leader, leader.cached)
            self.write(leader, leader.cached, len(leader.prompt))
        for admission in admissions:
            page = len(admission.leader.prompt) // SIZE
            for follower in admission.followers:
                for slot in range(len(admission.leader.prompt) % SIZE):
                    copied = self.slots[admission.leader.blocks[page], slot]
                    self.slots[follower.blocks[page], slot] = copied
            for r in admission.members:
                self.check(r, len(r.prompt))
        for admission in admissions:
            for r in admission.members:
                self.sample(r, rng)
            if admission.leader.blocks:
                leader = admission.leader
                self.scheduler.pool.remember(leader.prompt, leader.blocks, len(leader.prompt))
        for r in list(self.scheduler.running):
            self.write(r, r.place, r.place + 1)
        for r in list(self.scheduler.running):
            self.check(r, r.place + 1)
            self.sample(r, rng)

    def sample(self, r: Request, rng: random.Random) -> None:
        r.sampled.append(rng.randrange(2))
        if len(r.sampled) >= r.sampling.max_new_tokens or rng.random() < 0.1:
            self.scheduler.finish(r, "stop")


@pytest.mark.parametrize("seed", range(6))
def test_no_request_ever_reads_tokens_that_are_not_its_own(seed: int):
    """Random traffic over an alphabet of two letters, so beginnings are shared all the time."""
    rng = random.Random(seed)
    scheduler = scheduler_of(pages=rng.randint(6, 16))
    memory = Memory(scheduler)
    finished: list[Request] = []
    reused = 0
    for _ in range(250):
        if rng.random() < 0.6:
            old = rng.choice(finished) if finished and rng.random() < 0.5 else None
            begin = (*old.prompt, *old.sampled)[:12] if old else ()
            prompt = (*begin, *(rng.randrange(2) for _ in range(rng.randint(1, 8))))
            r = Request(prompt, Sampling(max_new_tokens=rng.randint(1, 5)))
            if -(-r.most_tokens // SIZE) <= scheduler.pool.total:
                for _ in range(rng.choice((1, 1, 3))):
                    r = Request(prompt, r.sampling)
                    scheduler.submit(r)
                    finished.append(r)
        if rng.random() < 0.1 and scheduler.everything():
            scheduler.cancel(rng.choice(scheduler.everything()))
        memory.turn(rng)
        finished = [r for r in finished if r.stop_reason != "cancelled"][-20:]
        reused += sum(r.cached > 0 for r in scheduler.running)
    while scheduler.busy:
        memory.turn(rng)
    assert reused > 20, "the traffic never reused a page, so this proved nothing"
    assert scheduler.pool.available == scheduler.pool.total
    assert not any(scheduler.pool._users)
