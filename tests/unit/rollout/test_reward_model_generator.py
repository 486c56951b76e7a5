"""A learned reward on top of another generator's episodes."""

import math

import pytest

from fledge.errors import RewardError
from fledge.rollout.reward_model import RewardModelGenerator
from fledge.types import Episode, Group, Message, Outcome, Task, assistant, user
from helpers import run

TASK = Task("t1", {})


def episode(reply: str, *, rewards=(0.5,), outcome=Outcome.OK, after=(), components=None):
    messages = (user("hello"), assistant(reply), *after)
    return Episode("t1", 0, (), rewards, outcome, messages, components=components or {})


class Fake:
    """Gives out the same group, and remembers what it was asked."""

    def __init__(self, *episodes: Episode, greedy: Episode | None = None) -> None:
        failed = (Episode("t1", 9, (), (), Outcome.GRADER_ERROR, (), error="x"),)
        self.group = Group(TASK, 3, episodes, {"grader_error": 1}, failed, greedy)
        self.asked: list[object] = []

    async def generate(self, task, n, *, epoch, seed):
        self.asked.append((task, n, epoch, seed))
        return self.group


def lengths(conversations):
    """A reward model that likes long last messages."""
    return [float(len(talk[-1].content)) for talk in conversations]


def generate(inner, score=lengths, weight=1.0):
    generator = RewardModelGenerator(inner, score, weight)
    return run(generator.generate(TASK, 2, epoch=3, seed=7))


def test_the_score_is_added_to_the_last_turn_and_kept_raw():
    inner = Fake(episode("abc"), episode("abcde", rewards=(1.0, 2.0), components={"right": 3.0}))
    group = generate(inner, weight=0.5)
    assert inner.asked == [(TASK, 2, 3, 7)]
    first, second = group.episodes
    assert (first.rewards, first.components) == ((2.0,), {"env": 0.5, "reward_model": 3.0})
    assert second.rewards == (1.0, 4.5)
    assert second.components == {"right": 3.0, "reward_model": 5.0}
    assert second.reward == 5.5
    assert inner.group.episodes[0].rewards == (0.5,), "the inner group is not changed"
    assert (group.dropped, group.discarded, group.epoch) == (
        inner.group.dropped,
        inner.group.discarded,
        3,
    )


def test_every_usable_outcome_is_scored():
    outcomes = [o for o in Outcome if o.usable]
    group = generate(Fake(*(episode("ab", outcome=o) for o in outcomes)))
    assert [e.rewards for e in group.episodes] == [(2.5,)] * len(outcomes)


def test_all_replies_of_a_task_are_scored_in_one_call_with_the_greedy_one():
    calls = []

    def score(conversations):
        calls.append([talk[-1].content for talk in conversations])
        return lengths(conversations)

    group = generate(Fake(episode("a"), episode("bb"), greedy=episode("ccc")), score)
    assert calls == [["a", "bb", "ccc"]]
    assert group.greedy.rewards == (3.5,)
    assert [e.rewards for e in group.episodes] == [(1.5,), (2.5,)]


def test_a_failed_greedy_episode_has_no_score():
    failed = Episode("t1", 2, (), (), Outcome.GRADER_ERROR, ())
    group = generate(Fake(episode("a"), greedy=failed))
    assert group.greedy == failed
    assert group.episodes[0].rewards == (1.5,)


def test_what_the_environment_says_after_the_end_is_not_judged():
    last = Message("tool", "a long text of the environment")
    group = generate(Fake(episode("abc", after=(last,))))
    assert group.episodes[0].components == {"env": 0.5, "reward_model": 3.0}


def test_an_episode_without_a_reply_has_no_score():
    silent = Episode("t1", 0, (), (0.25,), Outcome.POLICY_ERROR, (user("hello"),))
    group = generate(Fake(silent, episode("ab")))
    assert group.episodes[0] == silent
    assert group.episodes[1].rewards == (2.5,)
    assert generate(Fake(silent), score=None).episodes == (silent,)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_names_the_task(score):
    with pytest.raises(RewardError, match=r"^reward_model: task 't1': .*not a finite number"):
        generate(Fake(episode("a"), episode("b")), lambda talks: [1.0, score])


def test_an_error_of_the_model_names_the_task():
    def fail(conversations):
        raise RewardError("the conversation has 600 tokens")

    with pytest.raises(RewardError, match=r"^reward_model: task 't1': the conversation has 600"):
        generate(Fake(episode("a")), fail)


def test_a_wrong_number_of_scores_is_a_bug():
    with pytest.raises(AssertionError):
        generate(Fake(episode("a"), episode("b")), lambda talks: [1.0])
