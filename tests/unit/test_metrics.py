"""Metrics: means that do not depend on the cut, and what a batch of groups says."""

import math

import pytest

from fledge.log import Clock
from fledge.metrics import Ledger, pass_at_k, rollout_metrics
from fledge.types import Episode, Group, Outcome, Segment, Task


def episode(reward, outcome=Outcome.OK, version=3, tokens=2, **info):
    segment = Segment(
        token_ids=(1,) * (tokens + 1),
        logps=(0.0,) * (tokens + 1),
        trained=(False, *[True] * tokens),
        versions=(-1, *[version] * tokens),
    )
    return Episode("t", 0, (segment,), (reward,), outcome, (), info=info)


def test_a_mean_does_not_depend_on_how_it_was_added_up():
    whole, cut = Ledger(), Ledger()
    whole.add("x", 10.0, 4)
    for total, count in ((1.0, 1), (9.0, 3)):
        cut.add("x", total, count)
    assert whole.drain() == cut.drain() == {"x": 2.5}
    assert cut.drain() == {}


def test_extremes_keep_the_extreme():
    ledger = Ledger()
    for value in (0.3, -2.0, 0.1):
        ledger.extreme("a_max", value)
        ledger.extreme("b_min", value)
    assert ledger.drain() == {"a_max": 0.3, "b_min": -2.0}


def test_rollout_metrics_of_two_groups():
    flat = Group(Task("a", {}), 0, (episode(1.0), episode(1.0)))
    mixed = Group(
        Task("b", {}),
        0,
        (episode(0.0, Outcome.TRUNCATED, version=2, tokens=4, hops=2.0), episode(1.0)),
        dropped={"grader_error": 1},
        discarded=(Episode("b", 2, (), (), Outcome.GRADER_ERROR, ()),),
    )
    found = rollout_metrics([flat, mixed], version=4)
    assert found["reward/mean"] == 0.75
    assert found["group/zero_std_frac"] == 0.5
    assert found["response/truncated_frac"] == 0.25
    assert found["response/len_mean"] == 2.5
    assert found["stale/versions_max"] == 2
    assert found["outcome/grader_error_frac"] == pytest.approx(1 / 5)
    assert found["outcome/ok_frac"] == pytest.approx(3 / 5)
    assert found["env/hops"] == 2.0


def test_pass_at_k_is_the_unbiased_estimate():
    for n, correct, k in ((4, 1, 2), (8, 3, 4), (5, 0, 5), (5, 5, 1)):
        exact = 1 - math.comb(n - correct, k) / math.comb(n, k)
        assert pass_at_k(correct, n, k) == pytest.approx(exact)


def test_spans_add_up_and_listeners_hear_of_phases():
    clock, heard = Clock(), []
    clock.listeners.append(heard.append)
    with clock.span("a"), clock.span("b"):
        assert clock.current == "b"
    with clock.span("a"):
        pass
    lap = clock.lap()
    assert heard == ["a", "b", "a"]
    assert set(lap) == {"a", "b", "total"}
    assert set(clock.lap()) == {"total"}
