"""Episodes keep their exact tokens; a failure is attributed, retried and counted, never scored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from fledge.data.render import make_renderer
from fledge.envs import Environment
from fledge.errors import EngineError, PluginError, RewardError
from fledge.inference import NativeEngine
from fledge.rollout import EpisodeGenerator, Limits, generator
from fledge.types import Completion, Group, Message, Outcome, Sampling, Step, Task, user
from helpers import run

PROMPT = [1, 40, 41]
STOP = 2
REPLY = Completion((7, 8, STOP), (-0.5, -0.25, -0.125), (-9.0,) * 3, (4,) * 3, "stop")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "BACK_OFF", 0.0)


class Renderer:
    stop_ids = (STOP,)

    def start(self, messages, tools=()):
        return list(PROMPT)

    def parse(self, completion, tools=()):
        return Message("assistant", " ".join(map(str, completion)))


@dataclass
class Engine:
    """Says what it is told to, and remembers what it was asked."""

    says: Completion = REPLY
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
        return self.says


class Plays(Environment[Task]):
    """Does what its class says; counts how often it was made and closed."""

    made = closed = 0
    answer: object = Step(reward=0.5, terminated=True, info={"length": 3.0})

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        type(self).made += 1
        self.number = type(self).made

    async def reset(self):
        return [user("go")]

    async def step(self, reply):
        return self.answer

    async def close(self):
        type(self).closed += 1


def environment(**methods) -> type[Plays]:
    return type("MyEnv", (Plays,), {"made": 0, "closed": 0, **methods})


def play(
    env: type,
    n: int = 1,
    engine: Engine | None = None,
    retries: int = 2,
    timeout: float = 5.0,
    **options: object,
) -> Group:
    sampling = Sampling(8, top_p=0.9, stop_ids=(STOP,))
    bounds = {name: options.pop(name) for name in tuple(options) if hasattr(Limits, name)}
    limits = Limits(timeout, retries, **bounds)
    made = EpisodeGenerator(engine or Engine(), Renderer(), env, sampling, limits, **options)
    return run(made.generate(Task("my-task", {}), n, epoch=3, seed=100), seconds=10)


# ---- tokens


def test_an_episode_is_the_prompt_and_the_completion_token_by_token():
    engine = Engine()
    (episode,) = play(environment(), engine=engine).episodes
    (segment,) = episode.segments
    assert segment.token_ids == (*PROMPT, 7, 8, STOP)
    assert engine.asked[0][0] == tuple(PROMPT)
    assert segment.logps == (0, 0, 0, -0.5, -0.25, -0.125), "those of the distribution sampled from"
    assert segment.versions == (-1, -1, -1, 4, 4, 4)


def test_only_sampled_tokens_are_trained_the_stop_token_included():
    (episode,) = play(environment()).episodes
    assert episode.segments[0].trained == (False, False, False, True, True, True)
    assert episode.response_length == 3


def test_a_finished_episode_carries_reward_messages_and_info():
    group = play(environment(), n=2)
    assert (group.task.key, group.epoch, group.dropped) == ("my-task", 3, {})
    for index, episode in enumerate(group.episodes):
        assert (episode.index, episode.reward, episode.outcome) == (index, 0.5, Outcome.OK)
        assert [m.role for m in episode.messages] == ["user", "assistant"]
        assert episode.info == {"length": 3.0}


def test_episodes_of_a_group_draw_with_their_own_seeds():
    engine = Engine()
    play(environment(), n=4, engine=engine)
    assert [s.seed for _, s in engine.asked] == [100, 101, 102, 103]


# ---- rewards with named parts

PARTS = Step(components={"right": 1.0, "short": -0.5}, terminated=True)


def test_a_reward_with_parts_is_their_weighed_sum():
    (episode,) = play(environment(answer=PARTS)).episodes
    assert episode.reward == 0.5 and episode.components == {"right": 1.0, "short": -0.5}
    (weighed,) = play(environment(answer=PARTS), weights={"short": 0.1}).episodes
    assert weighed.reward == pytest.approx(0.95)
    assert weighed.components == episode.components, "they are kept as the environment gave them"


@pytest.mark.parametrize(
    ("answer", "weights", "said"),
    [
        (PARTS, {"shrot": 1.0}, r"rollout\.reward_weights: .*no part named 'shrot'.*right, short"),
        (Step(reward=1.0, terminated=True), {"right": 1.0}, r"rollout\.reward_weights: .*no part"),
        (replace(PARTS, reward=1.0), {}, r"gave the reward 1 and components"),
    ],
)
def test_parts_that_do_not_add_up_are_refused(answer, weights, said):
    with pytest.raises(PluginError, match=said):
        play(environment(answer=answer), weights=weights)


def test_a_part_that_is_no_number_is_refused_by_its_name():
    bad = Step(components={"right": float("nan")}, terminated=True)
    with pytest.raises(RewardError, match=r"task 'my-task', right gave the reward nan"):
        play(environment(answer=bad))


# ---- a greedy episode for comparison


def test_a_greedy_episode_is_played_beside_the_group_and_not_in_it():
    engine = Engine()
    group = play(environment(), n=2, engine=engine, greedy=True)
    assert len(group.episodes) == 2 and group.greedy is not None and group.greedy.index == 2
    samplings = [sampling for _, sampling in engine.asked]
    assert [s.greedy for s in samplings] == [False, False, True]
    assert [s.top_p for s in samplings] == [0.9, 0.9, 1.0]
    assert play(environment(), n=2).greedy is None


def test_a_greedy_episode_that_fails_is_missing_and_counted():
    class Fails(Plays):
        async def step(self, reply):
            if self.number >= 3:
                raise OSError("gone")
            return self.answer

    Fails.made = 0
    group = play(Fails, n=2, greedy=True, retries=0)
    assert group.greedy is None and len(group.episodes) == 2
    assert group.dropped == {"grader_error": 1}


def test_a_real_engine_and_renderer_give_exact_tokens(policy):
    renderer = make_renderer(policy.tokenizer)
    engine = NativeEngine(policy, cache_mb=1)
    sampling = Sampling(12, stop_ids=renderer.stop_ids)
    made = EpisodeGenerator(engine, renderer, environment(), sampling)
    group = run(made.generate(Task("t", {}), 3, epoch=0, seed=7))
    prompt = renderer.start([user("go")])
    for index, episode in enumerate(group.episodes):
        segment = episode.segments[0]
        alone = run(engine.generate(prompt, replace(sampling, seed=7 + index)))
        assert segment.token_ids == (*prompt, *alone.token_ids)
        assert sum(segment.trained) == len(alone.token_ids)
        cut = alone.token_ids[-1] not in renderer.stop_ids
        assert episode.outcome is (Outcome.TRUNCATED if cut else Outcome.OK)
    assert not engine.scheduler.sessions


# ---- truncation


def test_a_reply_that_hit_the_limit_is_truncated_and_keeps_its_reward():
    cut = Completion((7, 8), (-0.5, -0.25), (-0.5, -0.25), (4, 4), "length")
    (episode,) = play(environment(), engine=Engine(cut)).episodes
    assert (episode.outcome, episode.reward) == (Outcome.TRUNCATED, 0.5)


def test_a_limit_of_the_environment_truncates_and_keeps_the_reward():
    env = environment(answer=Step(reward=0.75, truncated=True))
    (episode,) = play(env).episodes
    assert (episode.outcome, episode.reward) == (Outcome.TRUNCATED, 0.75)


# ---- failures


def raising(error: Exception, times: int = 99):
    async def fail(self, *_):
        if self.number <= times:
            raise error
        return [user("go")] if not _ else Step(reward=1.0, terminated=True)

    return fail


@pytest.mark.parametrize(
    ("method", "outcome"), [("reset", "infra_abort"), ("step", "grader_error")]
)
def test_a_failing_environment_is_retried_then_dropped_and_counted(method: str, outcome: str):
    env = environment(**{method: raising(OSError("no disk"))})
    engine = Engine()
    group = play(env, n=2, engine=engine, retries=2)
    assert group.episodes == () and group.dropped == {outcome: 2}
    assert env.made == 6 and env.closed == 6, "each attempt is a fresh environment, closed again"
    for episode in group.discarded:
        assert episode.outcome == outcome and not episode.outcome.usable
        assert "no disk" in episode.error and episode.rewards == () == episode.segments
    assert engine.open == 0


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_failure_that_passes_leaves_no_trace(method: str):
    env = environment(**{method: raising(OSError("hiccup"), times=1)})
    group = play(env, retries=1)
    assert len(group.episodes) == 1 and group.dropped == {} and env.made == 2


def test_without_retries_the_first_failure_is_final():
    env = environment(step=raising(OSError("no disk")))
    assert play(env, retries=0).dropped == {"grader_error": 1} and env.made == 1


def test_only_the_failed_episode_leaves_the_group():
    env = environment(step=raising(OSError("no disk"), times=1))
    group = play(env, n=3, retries=0)
    assert len(group.episodes) == 2 and group.dropped == {"grader_error": 1}
    assert [e.index for e in group.episodes] == [1, 2] and group.discarded[0].index == 0


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_that_takes_too_long_hits_the_time_limit(method: str):
    async def sleep(self, *_):
        await asyncio.sleep(30)

    env = environment(**{method: sleep})
    group = play(env, retries=1, timeout=0.02)
    assert group.dropped == {"time_limit": 1} and env.made == env.closed == 2
    assert f"{method} took longer than rollout.timeout=0.02" in group.discarded[0].error


def test_a_failure_to_close_changes_nothing():
    async def fail(self):
        raise OSError("cannot close")

    assert play(environment(close=fail)).episodes[0].reward == 0.5


# ---- rewards that are none


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "x", 10**400, [1.0]])
def test_a_reward_that_is_no_finite_number_stops_the_run_and_names_the_environment(reward):
    env = environment(answer=Step(reward=reward, terminated=True))
    with pytest.raises(RewardError, match=r"MyEnv, task 'my-task', gave the reward"):
        play(env)
    assert env.closed == env.made == 1


@pytest.mark.parametrize("answer", [None, 1.0, ("reward", 1)])
def test_a_step_that_is_no_step_names_the_environment(answer):
    with pytest.raises(PluginError, match=r"MyEnv\.step returned"):
        play(environment(answer=answer))


def test_an_environment_that_goes_on_without_a_word_is_refused_by_name():
    with pytest.raises(PluginError, match="MyEnv goes on without a message"):
        play(environment(answer=Step(reward=1.0)))


def test_a_failure_of_the_engine_is_not_blamed_on_the_environment():
    class Broken(Engine):
        async def generate(self, token_ids, sampling, session=None):
            raise EngineError("the engine is closed")

    env = environment()
    with pytest.raises(EngineError):
        play(env, engine=Broken())
    assert env.made == env.closed == 1
