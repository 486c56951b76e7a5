"""The bundle: how parts from the configuration come together, and what is scored for them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fledge.algorithms import Tokens, Trajectories, make_algorithm, on_batch
from fledge.algorithms.algorithm import keyed_draws, trajectories_of
from fledge.algorithms.kl import k1, k2, k3
from fledge.config.schema import AlgorithmConfig
from fledge.data.batch import pack
from fledge.errors import PluginError
from fledge.types import Episode, Group, Outcome, Segment, Task


def segment(reply: int, logp: float = -1.0) -> Segment:
    return Segment(
        token_ids=(1, 2, *range(3, 3 + reply)),
        logps=(0.0, 0.0, *[logp] * reply),
        trained=(False, False, *[True] * reply),
        versions=(-1, -1, *[0] * reply),
    )


def group(*rewards: float, key: str = "t", reply: int = 2) -> Group:
    episodes = tuple(
        Episode(key, i, (segment(reply),), (r,), Outcome.OK, ()) for i, r in enumerate(rewards)
    )
    return Group(Task(key, {}), 0, episodes)


def algorithm(**settings: object):
    return make_algorithm(AlgorithmConfig(**settings))


def judged(algo, *groups: Group, **columns: Tensor) -> tuple[Tensor, dict[str, float]]:
    batch, metrics = algo.judge(pack(groups).with_columns(**columns), step=0)
    return batch.columns["advantage"], metrics


def tokens(logp: Tensor, **columns: Tensor) -> Tokens:
    given = {"engine_logp": logp.detach(), "advantage": torch.ones_like(logp), **columns}
    return Tokens.of(given, logp, torch.zeros_like(logp), torch.tensor([len(logp)]))


# ---- judging


def test_a_group_estimator_goes_group_by_group_and_reaches_every_token():
    found, metrics = judged(algorithm(), group(0, 2), group(5, 5, 5), group(1, 0, reply=1))
    half = 1 / math.sqrt(2)
    assert found.tolist() == pytest.approx(
        [-half, -half, half, half, *[0] * 6, half, -half], abs=1e-5
    )
    assert metrics["advantage/max"] == pytest.approx(half, abs=1e-5)
    assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-6)


def too_few(group):
    return [0.0]


def not_finite(group):
    return [float("nan")] * len(group)


def broken(group):
    raise KeyError("oops")


@on_batch()
def per_episode(t: Trajectories) -> Tensor:
    return t.episode_reward


@on_batch()
def infinite(t: Trajectories) -> Tensor:
    return t.per_token(1 / t.episode_reward)


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (too_few, "1 advantages for the 2 episodes of task 'sum'"),
        (not_finite, "not finite for task 'sum'"),
        (broken, "KeyError"),
        (per_episode, "must return one number per trained token"),
        (infinite, "not finite for task 'sum'"),
    ],
)
def test_an_estimator_that_cannot_be_trusted_is_refused_by_name(estimator, said):
    with pytest.raises(PluginError, match=rf"algorithm\.advantage: .*{said}"):
        judged(algorithm(advantage=estimator), group(1, 0, key="sum"))


def test_an_argument_that_an_estimator_does_not_have_is_refused_with_the_nearest():
    with pytest.raises(PluginError, match=r"scale_by_sdt.*scale_by_std"):
        algorithm(advantage={"name": "grpo", "scale_by_sdt": False})


def test_arguments_have_an_effect():
    plain = algorithm(advantage={"name": "grpo", "scale_by_std": False})
    assert judged(plain, group(0, 3, reply=1))[0].tolist() == [-1.5, 1.5]
    wide = algorithm(loss={"name": "clipped", "high": 0.5})
    x = tokens(torch.zeros(1), old_logp=torch.full((1,), -1.0))
    assert wide.loss(x)[0].item() == pytest.approx(-1.5)
    assert algorithm(advantage={"name": "gae", "lam": 0.5}).needs == {"value"}


def test_state_of_estimator_and_coefficient_survive():
    settings = {
        "advantage": {"name": "reinforce", "decay": 0.5},
        "kl": {"coef": 0.5, "placement": "reward", "target": 0.01, "horizon": 4},
    }
    ours, other = algorithm(**settings), algorithm(**settings)
    reference = torch.full((4,), -2.0)
    judged(ours, group(2.0, 4.0), ref_logp=reference)
    other.restore(ours.state())
    again = [judged(a, group(1.0, 0.0), ref_logp=reference) for a in (ours, other)]
    assert torch.equal(again[0][0], again[1][0]) and again[0][1] == again[1][1]
    assert again[0][1]["kl/coef"] > 0.5, "the KL was above its target"


# ---- KL in the reward


def test_kl_in_the_reward_is_taken_off_where_it_arises():
    algo = algorithm(
        advantage="reinforce++", kl={"coef": 0.5, "placement": "reward", "estimator": "k1"}
    )
    reference = torch.tensor([-1.5, -1.0, -2.0, -1.0])
    advantage, metrics = judged(algo, group(1.0, 0.0), ref_logp=reference)
    kl = -1.0 - reference  # the engine's log-probs are -1
    to_go = torch.tensor(
        [
            1.0 - 0.5 * (kl[0] + kl[1]),
            1.0 - 0.5 * kl[1],
            0.0 - 0.5 * (kl[2] + kl[3]),
            0.0 - 0.5 * kl[3],
        ]
    )
    expected = (to_go - to_go.mean()) / to_go.std()
    assert advantage.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert metrics["policy/kl_ref"] == pytest.approx(kl.mean().item())


def test_kl_in_the_reward_reaches_estimators_of_groups():
    algo = algorithm(
        advantage={"name": "grpo", "scale_by_std": False},
        kl={"coef": 1.0, "placement": "reward", "estimator": "k1"},
    )
    reference = torch.tensor([-2.0, -2.0, -1.0, -1.0])  # KL 1 + 1 in the first, 0 in the second
    advantage, _ = judged(algo, group(3.0, 0.0), ref_logp=reference)
    assert advantage.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_an_episode_without_trained_tokens_still_counts_in_its_group():
    masked = group(0.0, 3.0)
    first, second = masked.episodes
    masked = replace(masked, episodes=(replace(first, masked="mask_truncated"), second))
    algo = algorithm(advantage={"name": "grpo", "scale_by_std": False})
    assert judged(algo, masked)[0].tolist() == [1.5, 1.5]


def test_a_batch_without_trained_tokens_is_no_accident():
    silent = pack([replace(group(1.0), episodes=())])
    for name in ("grpo", "reinforce++", "gae", "gdpo"):
        batch, metrics = algorithm(advantage=name, epochs=2).judge(silent, step=0)
        assert batch is silent and metrics == {}
        assert list(batch.updates(2, 2, 0, lambda *columns: [])) == []


# ---- the loss


def test_side_terms_are_added_with_their_coefficients_and_reported():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    reference, entropy = torch.tensor([-1.5, -1.0]), torch.tensor([0.3, 0.7])
    x = replace(tokens(logp, ref_logp=reference), entropy=entropy)
    plain, _ = algorithm().loss(x)
    both, stats = algorithm(kl={"coef": 0.5}, entropy_coef=0.25).loss(x)
    assert torch.allclose(both, plain + 0.5 * k3(logp, reference) - 0.25 * entropy)
    assert {"term/policy", "term/kl", "term/entropy", "policy/kl_ref"} <= stats.keys()
    assert stats["term/entropy"].tolist() == pytest.approx([0.3, 0.7])


@pytest.mark.parametrize(("name", "estimate"), [("k2", k2), ("k3", k3)])
def test_the_estimator_of_the_kl_is_the_one_that_was_named(name, estimate):
    logp, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    stats = algorithm(kl={"coef": 1.0, "estimator": name}).loss(tokens(logp, ref_logp=reference))[1]
    assert torch.equal(stats["policy/kl_ref"], estimate(logp, reference))
    assert not torch.equal(k1(logp, reference), estimate(logp, reference))


def test_corrections_multiply_the_policy_term_and_nothing_else():
    logp = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    engine = torch.tensor([-1.0, -1.0 - math.log(4), -1.0 - math.log(1.5)])
    columns = {"engine_logp": engine, "ref_logp": torch.zeros(3)}
    settings = {"kl": {"coef": 0.5}}
    plain = algorithm(**settings, old="recomputed").loss(tokens(logp, **columns))[0]
    both = algorithm(
        **settings,
        correction=[{"name": "token_tis", "cap": 2.0}, {"name": "token_mask", "high": 3}],
    )
    loss, stats = both.loss(tokens(logp, **columns))
    kl = 0.5 * k3(logp, torch.zeros(3))
    weight = torch.tensor([1.0, 0.0, 1.5])  # 4 is capped to 2, then dropped by the mask above 3
    assert torch.allclose(loss - kl, (plain - kl) * weight)
    assert stats["correction/weight"].tolist() == pytest.approx(weight.tolist())
    assert stats["correction/dropped_frac"].tolist() == [0, 1, 0]


def test_with_one_update_the_forward_pass_itself_is_the_anchor():
    """No pass is spent on old log-probs that equal the present ones."""
    algo = algorithm(old="recomputed")
    assert algo.needs == frozenset() and algo.starts_here
    logp = torch.tensor([-1.0, -3.0], requires_grad=True)
    loss, _ = algo.loss(tokens(logp, engine_logp=torch.tensor([-9.0, -0.1])))
    assert loss.tolist() == [-1.0, -1.0], "ratios are 1 whatever the engine thought"
    loss.sum().backward()
    assert logp.grad.tolist() == [-1.0, -1.0]


def test_bounded_log_ratios_are_counted():
    logp = torch.tensor([-30.0, -1.0, -torch.inf], requires_grad=True)
    stats = algorithm().loss(tokens(logp, engine_logp=torch.tensor([-1.0, -1.0, -1.0])))[1]
    assert stats["policy/clamped_frac"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, set()),
        ({"kl": {"coef": 0.1}}, {"ref_logp"}),
        ({"epochs": 2}, {"old_logp"}),
        ({"minibatches": 2}, {"old_logp"}),
        ({"epochs": 2, "old": "engine"}, set()),
        ({"correction": ["token_tis"]}, set()),
        ({"correction": ["token_tis"], "epochs": 2}, {"old_logp"}),
        ({"advantage": "gae"}, {"value"}),
        ({"advantage": "distillation", "teacher": "x"}, {"teacher_logp"}),
    ],
)
def test_only_what_is_needed_is_scored(settings, needs):
    assert algorithm(**settings).needs == needs


def test_a_value_head_adds_its_loss_to_the_policy():
    value = torch.tensor([0.5, 0.0], requires_grad=True)
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns = {"value": torch.tensor([0.4, 0.0]), "returns": torch.tensor([1.0, 1.0])}
    x = replace(tokens(logp, **columns), value=value)
    head = algorithm(advantage="gae", critic={"model": "head", "coef": 2.0})
    separate = algorithm(advantage="gae")
    difference = head.loss(x)[0] - separate.loss(x)[0]
    assert difference.tolist() == pytest.approx([2 * 0.5 * 0.25, 2 * 0.5 * 1.0])
    assert head.value_coef and not separate.value_coef


# ---- what is decided per mini-batch


def test_draws_depend_on_seed_step_and_token_alone():
    assert torch.equal(keyed_draws(9, 1, 2), keyed_draws(9, 1, 2))
    assert torch.equal(keyed_draws(9, 1, 2)[:4], keyed_draws(4, 1, 2))
    assert not torch.equal(keyed_draws(9, 1, 2), keyed_draws(9, 1, 3))
    assert not torch.equal(keyed_draws(9, 1, 2), keyed_draws(9, 2, 2))


def test_only_losses_that_look_at_a_mini_batch_make_it_be_scored():
    assert algorithm(loss="clip_cov").fresh == {"fresh_logp"}
    assert algorithm().fresh == frozenset()


def test_truncated_episodes_are_bootstrapped_and_finished_ones_are_not():
    cut = group(1.0, 1.0)
    first, second = cut.episodes
    cut = replace(cut, episodes=(replace(first, outcome=Outcome.TRUNCATED), second))
    column = torch.tensor([0.0, 0.7, 0.0, 0.9])  # at the last token of each row
    t = trajectories_of(pack([cut]).with_columns(value=torch.zeros(4), bootstrap=column))
    assert t.bootstrap.tolist() == pytest.approx([0.7, 0.0])
