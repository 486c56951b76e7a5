"""From groups to rows and columns, and metrics that do not depend on how the batch was cut."""

from __future__ import annotations

import functools

import pytest
import torch

from fledge.algorithms import make_algorithm
from fledge.algorithms.losses import clipped
from fledge.algorithms.reduce import token_weights
from fledge.config.schema import AlgorithmConfig
from fledge.data.batch import pack, pack_samples
from fledge.types import Episode, Group, Outcome, Sample, Segment, Task
from helpers import ragged_batch, run, tiny_policy, trainer_of


def segment(prompt: list[int], reply: list[int], first: float) -> Segment:
    n, m = len(prompt), len(reply)
    return Segment(
        token_ids=(*prompt, *reply),
        logps=(*[0.0] * n, *(first - 0.1 * i for i in range(m))),
        trained=(*[False] * n, *[True] * m),
        versions=(*[-1] * n, *[3] * m),
    )


def groups() -> list[Group]:
    def episode(index: int, *segments: Segment) -> Episode:
        return Episode("t", index, segments, (0.0,), Outcome.OK, ())

    one = (
        episode(0, segment([1, 2], [7, 8], -1.0), segment([1, 2, 7, 8, 3], [9], -2.0)),
        episode(1, segment([1, 2], [5], -3.0)),
    )
    two = (episode(0), episode(1, segment([4], [6, 6, 6], -4.0)))
    return [Group(Task("a", {}), 0, one), Group(Task("b", {}), 0, two)]


def test_every_segment_is_a_row_and_every_trained_token_has_its_log_prob():
    batch = pack(groups())
    assert [r.token_ids for r in batch.rows] == [
        (1, 2, 7, 8), (1, 2, 7, 8, 3, 9), (1, 2, 5), (4, 6, 6, 6),
    ]  # fmt: skip
    assert [r.trained for r in batch.rows] == [(2, 3), (5,), (2,), (1, 2, 3)]
    assert [r.sequence for r in batch.rows] == [0, 0, 1, 3], "an empty episode keeps its number"
    assert [r.prompt for r in batch.rows] == [0, 0, 0, 1]
    expected = [-1.0, -1.1, -2.0, -3.0, -4.0, -4.1, -4.2]
    assert batch.columns["engine_logp"].tolist() == pytest.approx(expected)


def test_an_advantage_reaches_all_trained_tokens_of_its_episode_and_no_other():
    numbers = iter([[1.0, 2.0], [3.0, 4.0]])
    config = AlgorithmConfig(advantage=lambda group: next(numbers))
    batch, _ = make_algorithm(config).judge(pack(groups()), step=0)
    assert batch.columns["advantage"].tolist() == [1, 1, 1, 2, 4, 4, 4]


def test_samples_keep_their_token_weights():
    samples = [
        Sample((1, 2, 3), weights=(0.0, 0.5, 2.0)),
        Sample((1, 2), weights=(0.0, 0.0)),
        Sample((4, 5), weights=(0.0, 1.0)),
    ]
    batch = pack_samples(samples)
    assert [r.trained for r in batch.rows] == [(1, 2), (1,)]
    assert batch.columns["weight"].tolist() == [0.5, 2.0, 1.0]


def test_mini_batches_hold_whole_prompts_and_each_row_once_per_epoch():
    batch = ragged_batch(prompts=(5, 11, 3, 4, 6))
    reduce = functools.partial(token_weights, "token_mean", max_length=12)
    minis = list(batch.updates(epochs=2, minibatches=2, key=1, reduce=reduce))
    assert len(minis) == 4 and [m.first for m in minis] == [True, False, False, False]
    for epoch in (minis[:2], minis[2:]):
        assert not {r.prompt for r in epoch[0].rows} & {r.prompt for r in epoch[1].rows}
        assert sorted(r.sequence for m in epoch for r in m.rows) == list(range(15))
        for mini in epoch:
            assert mini.columns["scale"].sum() == pytest.approx(1.0)
    again = list(batch.updates(epochs=2, minibatches=2, key=1, reduce=reduce))
    assert [m.rows for m in again] == [m.rows for m in minis]


def test_micro_batches_keep_to_the_budget_and_count_a_shared_prompt_once():
    batch = ragged_batch(prompts=(20, 20), replies=4)
    micros = batch.micros(40)
    assert 1 < len(micros) < len(batch.rows)
    for micro in micros:
        prompts = {r.token_ids[: r.prefix] for r in micro.rows}
        used = sum(map(len, prompts)) + sum(r.needed - r.prefix for r in micro.rows)
        assert used <= 40
    columns = torch.cat([m.columns["advantage"] for m in micros])
    assert torch.equal(columns, batch.columns["advantage"])


def test_a_row_longer_than_the_budget_still_gets_its_own_micro_batch():
    batch = ragged_batch()
    assert len(batch.micros(1)) == len(batch.rows)


def test_metrics_are_token_means_whatever_the_cut(policy):
    found = []
    reduce = functools.partial(token_weights, "token_mean", max_length=12)
    for budget in (1, 30, 10**6):
        trainer = trainer_of(policy)
        batch = run(trainer.score(ragged_batch(), {"old_logp"})).weighed(reduce)
        for micro in batch.micros(budget):
            run(trainer.forward_backward(micro, clipped))
        trainer.optimizer.clear()
        found.append(trainer.metrics())
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], rel=1e-5, abs=1e-6)
    assert found[0]["policy/entropy"] > 1
    assert found[0]["policy/kl_old"] == pytest.approx(0, abs=1e-6)
    assert found[0]["mismatch/abs_logp_max"] > found[0]["mismatch/abs_logp_mean"] > 0
    assert 0 < found[0]["mismatch/ess"] < 1


def test_mismatch_is_measured_against_the_engine_and_only_before_the_first_update(policy):
    trainer = trainer_of(policy)
    batch = ragged_batch()
    exact = run(trainer.score(batch, {"old_logp"})).columns["old_logp"]
    reduce = functools.partial(token_weights, "token_mean", max_length=12)
    batch = batch.with_columns(engine_logp=exact.double() - 0.25)
    first, second = batch.updates(epochs=2, minibatches=1, key=0, reduce=reduce)
    run(trainer.forward_backward(first, clipped))
    found = trainer.metrics()
    assert found["mismatch/abs_logp_max"] == pytest.approx(0.25, abs=1e-5)
    assert found["mismatch/abs_logp_mean"] == pytest.approx(0.25, abs=1e-5)
    assert found["mismatch/kl"] == pytest.approx(torch.tensor(0.25).exp().item() - 1.25, abs=1e-5)
    run(trainer.forward_backward(second, clipped))
    trainer.optimizer.clear()
    assert not any(name.startswith("mismatch/") for name in trainer.metrics())


def test_extremes_are_those_of_trained_tokens_alone():
    """Context may hold anything, and an episode that a rule has masked may have any reward."""
    policy = tiny_policy()
    trainer = trainer_of(policy)
    absurd = Segment(
        token_ids=(9, 8, 7, 6, 5),
        logps=(1e9, 1e9, -1.0, 1e9, -1.0),
        trained=(False, False, True, False, True),
        versions=(-1, -1, 0, 0, 0),
    )
    plain = segment([9, 8], [7, 6, 5], -1.0)
    episodes = (
        Episode("t", 0, (absurd,), (1.0,), Outcome.OK, ()),
        Episode("t", 1, (plain,), (0.0,), Outcome.OK, ()),
        Episode("t", 2, (plain,), (1e6,), Outcome.TRUNCATED, (), masked="mask_truncated"),
    )
    config = AlgorithmConfig(advantage={"name": "grpo", "scale_by_std": False})
    algorithm = make_algorithm(config)
    batch, judged = algorithm.judge(pack([Group(Task("t", {}), 0, episodes)]), step=0)
    for mini in batch.updates(1, 1, 0, functools.partial(token_weights, "token_mean")):
        run(trainer.forward_backward(mini, algorithm.loss))
    metrics = trainer.metrics()
    mean = (1e6 + 1) / 3
    assert judged["advantage/max"] == pytest.approx(1 - mean)
    assert judged["advantage/min"] == pytest.approx(0 - mean)
    assert metrics["mismatch/abs_logp_max"] < 100


def test_a_statistic_that_does_not_apply_is_not_counted():
    trainer = trainer_of(tiny_policy())
    batch = ragged_batch().weighed(functools.partial(token_weights, "token_mean"))
    nothing = float("nan")

    def loss(x):
        some = torch.full_like(x.logp.detach(), nothing)
        some[:2] = torch.tensor([1.0, 3.0])
        never = torch.full_like(some, nothing)
        return -x.logp, {"a/mean": some, "a/of_max": some, "a/of_min": some, "a/never": never}

    run(trainer.forward_backward(batch, loss))
    found = {name: v for name, v in trainer.metrics().items() if name.startswith("a/")}
    assert found == {"a/mean": 2.0, "a/of_max": 3.0, "a/of_min": 1.0}
