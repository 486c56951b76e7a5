"""Episodes of several turns: exact tokens, rewards on their own turn, budgets that keep what was
earned, masks that only ever clear.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

from fledge.data.batch import pack
from fledge.data.render import make_renderer
from fledge.envs import Environment, ToolFailure
from fledge.errors import PluginError, PolicyError
from fledge.inference import NativeEngine
from fledge.rollout import EpisodeGenerator, Limits, generator
from fledge.types import Completion, Episode, Message, Outcome, Sampling, Step, Task, Tool, user
from helpers import run

STOP = 2


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "BACK_OFF", 0.0)


class Letters:
    """A renderer in which each character is a token; 1 begins and 2 ends a turn."""

    stop_ids = (STOP,)

    def __init__(self, appends: bool = True) -> None:
        self.appends = appends
        self.tools: list[tuple[Tool, ...]] = []

    def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        self.tools.append(tuple(tools))
        if not self.appends:  # a template that writes history differently each time
            messages = [user(str(len(messages))), *messages]
        return [t for m in messages for t in (1, *map(ord, m.content), STOP)] + [1]

    def extend(self, previous, messages, tools=()):
        if not self.appends:
            return None
        ids = list(previous) if previous[-1] == STOP else [*previous, STOP]
        return ids + self.start(messages, tools)

    def parse(self, completion: Sequence[int], tools: Sequence[Tool] = ()) -> Message:
        return Message("assistant", "".join(chr(t) for t in completion if t != STOP))


@dataclass
class Echo:
    """An engine that says `word` and stops, unless it is cut short."""

    word: str = "ab"
    asked: list[tuple[tuple[int, ...], Sampling]] = field(default_factory=list)
    open: int = 0

    @contextmanager
    def session(self) -> Iterator[int]:
        self.open += 1
        try:
            yield self.open
        finally:
            self.open -= 1

    async def generate(self, token_ids, sampling, session=None) -> Completion:
        self.asked.append((tuple(token_ids), sampling))
        await asyncio.sleep(0)
        ids = (*map(ord, self.word), STOP)[: sampling.max_new_tokens]
        reason = "stop" if ids[-1] == STOP else "length"
        return Completion(ids, (-0.5,) * len(ids), (-0.5,) * len(ids), (3,) * len(ids), reason)


class Counts(Environment[Task]):
    """Ends after `turns` replies; turn k earns k."""

    turns = 3
    says = "next"

    async def reset(self):
        self.seen = 0
        return [user("go")]

    async def step(self, reply):
        self.seen += 1
        over = self.seen >= self.turns
        return Step(() if over else [user(self.says)], float(self.seen), terminated=over)


def play(env=Counts, n=1, *, engine=None, renderer=None, words=8, mask=None, **limits):
    made = EpisodeGenerator(
        engine or Echo(),
        renderer or Letters(),
        env,
        Sampling(words, stop_ids=(STOP,)),
        Limits(**{"timeout": 5.0, "retries": 0, **limits}),
        mask=mask,
    )
    return run(made.generate(Task("t", {}), n, epoch=0, seed=7), seconds=20)


def only(group) -> Episode:
    (episode,) = group.episodes
    return episode


# ---- tokens and rewards


def test_every_turn_extends_the_one_before_it_token_by_token():
    engine = Echo()
    episode = only(play(engine=engine))
    (segment,) = episode.segments
    shown = [ids for ids, _ in engine.asked]
    for number, prompt in enumerate(shown):
        assert segment.token_ids[: len(prompt)] == prompt, f"turn {number} saw something else"
    assert [m.content for m in episode.messages] == ["go", "ab", "next", "ab", "next", "ab"]
    assert episode.rewards == (1.0, 2.0, 3.0) and episode.outcome is Outcome.OK
    sampled = [t for t, trained in zip(segment.token_ids, segment.trained, strict=True) if trained]
    assert sampled == [*map(ord, "ab"), STOP] * 3, "what was sampled is trained, stops included"
    assert all((v == 3) == t for v, t in zip(segment.versions, segment.trained, strict=True))


def test_each_reward_arrives_at_the_end_of_its_own_turn():
    batch = pack([play()])
    assert batch.columns["turn"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert batch.columns["reward"].tolist() == [0, 0, 1, 0, 0, 2, 0, 0, 3]


def test_a_renderer_that_cannot_go_on_opens_a_new_segment():
    engine = Echo()
    episode = only(play(engine=engine, renderer=Letters(appends=False)))
    assert len(episode.segments) == 3
    for segment, (prompt, _) in zip(episode.segments, engine.asked, strict=True):
        assert segment.token_ids == (*prompt, *map(ord, "ab"), STOP)
        assert sum(segment.trained) == 3
    assert pack([play(renderer=Letters(appends=False))]).columns["turn"].tolist() == [
        0, 0, 0, 1, 1, 1, 2, 2, 2,
    ]  # fmt: skip


def test_turns_draw_with_seeds_of_their_own():
    engine = Echo()
    play(n=3, engine=engine)
    seeds = [sampling.seed for _, sampling in engine.asked]
    assert len(set(seeds)) == 9 and {7, 8, 9} <= set(seeds)


def test_tools_of_the_environment_reach_the_renderer():
    tool = Tool("now", "The time.", {"type": "object", "properties": {}})

    class Offers(Counts):
        tools = (tool,)

    renderer = Letters()
    play(Offers, renderer=renderer)
    assert renderer.tools and all(tools == (tool,) for tools in renderer.tools)


def test_a_real_engine_and_renderer_play_several_turns_exactly(policy):
    renderer = make_renderer(policy.tokenizer)
    engine = NativeEngine(policy, 4)
    asked = []

    class Spy:
        session = engine.session

        async def generate(self, token_ids, sampling, session=None):
            said = await engine.generate(token_ids, sampling, session)
            asked.append((list(token_ids), said))
            return said

    made = EpisodeGenerator(
        Spy(), renderer, Counts, Sampling(4, stop_ids=renderer.stop_ids), Limits(context=256)
    )
    group = run(made.generate(Task("t", {}), 1, epoch=0, seed=3), seconds=60)
    (segment,) = only(group).segments
    place = 0
    for prompt, said in asked:
        assert list(segment.token_ids[: len(prompt)]) == prompt
        place = len(prompt) + len(said.token_ids)
        assert segment.token_ids[len(prompt) : place] == said.token_ids
        assert segment.logps[len(prompt) : place] == said.logps
    assert place == len(segment.token_ids)
    run(engine.close())


# ---- budgets


@pytest.mark.parametrize(
    ("limits", "rewards"),
    [({"turns": 2}, (1.0, 2.0)), ({"tokens": 4}, (1.0, 2.0)), ({"tokens": 3}, (1.0,))],
)
def test_a_budget_cuts_the_episode_and_keeps_what_it_has_earned(limits, rewards):
    episode = only(play(**limits))
    assert (episode.rewards, episode.outcome) == (rewards, Outcome.TRUNCATED)
    assert episode.response_length == min(limits.get("tokens", 6), 6)
    assert episode.segments[0].trained[-1], "what nobody answered is not kept"


def test_a_conversation_that_outgrows_the_model_ends():
    first = len(Letters().start([user("go")]))
    episode = only(play(context=first + 3 + 6))
    assert episode.outcome is Outcome.TRUNCATED and episode.rewards == (1.0,)


def test_what_the_environment_says_may_be_cut_to_fit():
    class Talks(Counts):
        turns, says = 2, "x" * 300

    assert only(play(Talks, context=220)).outcome is Outcome.TRUNCATED
    episode = only(play(Talks, context=220, overflow="truncate"))
    assert episode.outcome is Outcome.OK and len(episode.segments) == 1
    assert 200 < len(episode.segments[0].token_ids) <= 220
    assert "[... cut ...]" in "".join(map(chr, episode.segments[0].token_ids))


def test_the_oldest_exchanges_may_be_forgotten():
    class Talks(Counts):
        turns, says = 6, "x" * 40

    engine = Echo()
    episode = only(play(Talks, engine=engine, context=120, overflow="sliding"))
    assert episode.outcome is Outcome.OK and len(episode.rewards) == 6
    assert len(episode.segments) > 1
    for prompt, _ in engine.asked:
        assert len(prompt) < 120
        assert "".join(map(chr, prompt)).startswith("\x01go"), "the task itself is never forgotten"
    assert sum(sum(s.trained) for s in episode.segments) == 6 * 3


def test_an_episode_that_takes_too_long_is_set_aside():
    class Slow(Counts):
        async def step(self, reply):
            await asyncio.sleep(30)

    group = play(Slow, seconds=0.1)
    assert not group.episodes and group.dropped == {"time_limit": 1}
    assert "rollout.max_seconds=0.1" in group.discarded[0].error


# ---- whose fault


def test_a_mistake_of_the_policy_is_trained_on_with_the_reward_it_got():
    class Strict(Counts):
        async def step(self, reply):
            raise PolicyError("no such move", reward=-1.0)

    episode = only(play(Strict))
    assert (episode.outcome, episode.rewards) == (Outcome.POLICY_ERROR, (-1.0,))
    assert episode.response_length == 3


def test_a_failure_may_say_whose_it_is():
    class Unplugged(Counts):
        async def step(self, reply):
            raise ToolFailure("the server does not answer")

    assert play(Unplugged).dropped == {"infra_abort": 1}


def test_a_group_that_lost_too_many_is_filled_up():
    class Flaky(Counts):
        made = 0

        def __init__(self, task):
            super().__init__(task)
            type(self).made += 1
            self.number = type(self).made

        async def step(self, reply):
            if self.number <= 3:
                raise OSError("gone")
            return await super().step(reply)

    group = play(Flaky, n=4, least=3)
    assert len(group.episodes) == 4 and group.dropped == {"grader_error": 3}
    assert len({e.index for e in (*group.episodes, *group.discarded)}) == 7
    Flaky.made = 0
    assert len(play(Flaky, n=4, least=0).episodes) == 1


# ---- masks


def last_turn_only(episode: Episode):
    return [[turn == max(segment.turns) for turn in segment.turns] for segment in episode.segments]


def test_a_mask_clears_tokens_under_its_name():
    segment = only(play(mask=last_turn_only)).segments[0]
    assert sum(segment.trained) == 3
    assert Counter(segment.cleared) == {"last_turn_only": 6, "": len(segment.token_ids) - 6}
    assert all(not (t and c) for t, c in zip(segment.trained, segment.cleared, strict=True))


def everything(episode: Episode):
    return [[True] * len(s.token_ids) for s in episode.segments]


def too_short(episode: Episode):
    return [[True]]


def broken(episode: Episode):
    return episode["nothing"]


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (everything, "did not sample"),
        (too_short, "one list per segment"),
        (broken, "TypeError"),
    ],
)
def test_a_mask_that_sets_or_breaks_is_refused_by_name(mask, said):
    with pytest.raises(PluginError, match=rf"rollout\.mask: .*{said}"):
        play(mask=mask)


# ---- chaos, and what it all costs


class Chaos(Environment[Task]):
    """Hangs, crashes, answers rubbish, leaks files, or takes its time; by the task's number."""

    leaks: ClassVar[list[int]] = []

    async def reset(self):
        self.kind = int(self.key) % 8
        self.seen = 0
        if self.kind == 0:
            await asyncio.sleep(60)
        if self.kind == 1:
            raise RuntimeError("no server")
        return [user("go")]

    async def step(self, reply):
        self.seen += 1
        if self.kind == 2:
            raise OSError("grader is gone")
        if self.kind == 3:
            await asyncio.sleep(60)
        if self.kind == 4:
            raise PolicyError("nonsense", reward=-0.5)
        if self.kind == 5:
            self.leaks.append(os.open(os.devnull, os.O_RDONLY))
        if self.kind == 6:
            await asyncio.sleep(0.001 * (int(self.key) % 50) ** 2 / 10)
        return Step([user("on")], 0.25, terminated=self.seen == 2)

    async def close(self):
        while self.leaks:
            os.close(self.leaks.pop())
        if self.kind == 7:
            raise RuntimeError("cannot even close")


def test_256_episodes_of_every_kind_of_trouble_are_counted_right_and_leave_nothing_behind():
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    engine = Echo()
    made = EpisodeGenerator(
        engine, Letters(), Chaos, Sampling(8, stop_ids=(STOP,)), Limits(timeout=0.5, retries=1)
    )

    async def all_at_once():
        tasks = [Task(str(i), {}) for i in range(256)]
        return await asyncio.gather(*(made.generate(t, 1, epoch=0, seed=0) for t in tasks))

    groups = run(all_at_once(), seconds=60)
    outcomes = Counter(e.outcome for g in groups for e in (*g.episodes, *g.discarded))
    assert outcomes == {
        Outcome.TIME_LIMIT: 64,
        Outcome.INFRA_ABORT: 32,
        Outcome.GRADER_ERROR: 32,
        Outcome.POLICY_ERROR: 32,
        Outcome.OK: 96,
    }
    rewards = Counter(e.reward for g in groups for e in g.episodes)
    assert rewards == {0.5: 96, -0.5: 32}, "no reward is invented"
    assert all(not e.segments and not e.rewards for g in groups for e in g.discarded)
    assert engine.open == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


class Waits(Environment[Task]):
    """Eight turns with an environment that takes its time."""

    latency = 0.2
    turns = 8

    async def reset(self):
        self.seen = 0
        return [user("Tell me more about it, please.")]

    async def step(self, reply):
        self.seen += 1
        await asyncio.sleep(self.latency)
        return Step([user("And then? " * 5)], 0.0, terminated=self.seen == self.turns)


def throughput(policy, episodes: int, latency: float) -> tuple[float, float]:
    """Wall time as a multiple of the ideal, and CPU milliseconds per turn."""
    renderer = make_renderer(policy.tokenizer)
    words = policy.tokenizer.encode("one two three four " * 30)[:63]
    said = (*words, renderer.stop_ids[0])
    answer = Completion(said, (-0.5,) * 64, (-0.5,) * 64, (0,) * 64, "stop")

    class Stub(Echo):
        async def generate(self, token_ids, sampling, session=None):
            return answer

    env = type("Waiting", (Waits,), {"latency": latency})
    made = EpisodeGenerator(Stub(), renderer, env, Sampling(64), Limits())

    async def all_at_once():
        tasks = [Task(str(i), {}) for i in range(episodes)]
        return await asyncio.gather(*(made.generate(t, 1, epoch=0, seed=0) for t in tasks))

    cpu, wall = time.process_time(), time.monotonic()
    groups = run(all_at_once(), seconds=120)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    assert all(len(g.episodes[0].rewards) == 8 for g in groups)
    return wall / (8 * latency), 1000 * cpu / (episodes * 8)


def test_a_turn_costs_little(policy):
    _, cpu = throughput(policy, 100, 0.01)
    assert cpu <= 1.0, f"{cpu:.2f} ms of CPU per turn"


@pytest.mark.slow
def test_a_thousand_slow_episodes_wait_together(policy):
    wall, cpu = throughput(policy, 1000, 2.0)
    print(f"\n| {wall:.2f} times the ideal 16 s, {cpu:.2f} ms of CPU per turn")
    assert wall <= 1.3 and cpu <= 1.0


def test_replies_of_a_group_do_not_touch_each_other():
    group = play(n=3)
    assert len({id(e.messages) for e in group.episodes}) == 3
    assert replace(group.episodes[0], index=1) == group.episodes[1]
