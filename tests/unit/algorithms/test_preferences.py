"""Preference losses: closed forms, derivatives, and gradients that no cut of the pairs changes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.algorithms.preferences import (
    PREFERENCES,
    Preference,
    bradley_terry,
    dpo,
    ipo,
    make_preference,
    of_scores,
)
from fledge.algorithms.reduce import token_weights
from fledge.algorithms.tokens import Tokens
from fledge.config.schema import OptimConfig, Plugin
from fledge.data.batch import Batch, pack_pairs
from fledge.errors import PluginError
from fledge.trainer import Critic, LocalTrainer, copy_of
from fledge.types import Pair, Sample
from helpers import VOCABULARY, make_exact, run, stock, tiny_policy

SIDES = ([1, 1, -1], [1, -1, -1, -1])
"""Two pairs: replies of 2 and 1 tokens, and of 1 and 3."""


def tokens(**columns: Any) -> Tokens:
    side = torch.tensor([s for pair in SIDES for s in pair], dtype=torch.float64)
    value = columns.pop("value", None)
    logp = columns.pop("logp", torch.zeros_like(side))
    lengths = torch.tensor([len(pair) for pair in SIDES])
    return Tokens.of({"side": side, **columns}, logp, torch.zeros_like(logp), lengths, value)


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOGP = real(-1.0, -2.0, -0.5, -3.0, -1.5, -0.25, -1.0)
REF = real(-1.5, -1.75, -0.25, -2.0, -2.0, -0.5, -1.25)
# Log-ratios: chosen 0.25 and rejected -0.25; chosen -1.0 and rejected 1.0.


def pair_mean(loss: Tensor, x: Tokens) -> Tensor:
    """What the trainer minimises with `sequence_mean`."""
    count = len(x.lengths)
    weights = token_weights("sequence_mean", x.lengths.tolist(), range(count), range(count), 1)
    return (loss * torch.tensor(weights, dtype=loss.dtype)[x.sequence]).sum()


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_dpo_is_its_formula():
    loss, stats = dpo(tokens(logp=LOGP, ref_logp=REF), beta=0.5)
    first, second = softplus(-0.25), softplus(1.0)
    assert loss.tolist() == pytest.approx([first] * 3 + [second] * 4)
    means = {name: values.nanmean().item() for name, values in stats.items()}
    assert means == pytest.approx(
        {
            "pair/accuracy": 0.5,
            "pair/margin": (0.25 - 1.0) / 2,
            "pair/chosen_reward": 0.5 * (0.25 - 1.0) / 2,
            "pair/rejected_reward": 0.5 * (-0.25 + 1.0) / 2,
        }
    )
    assert all((~v.isnan()).sum() == 2 for v in stats.values()), "one entry per pair"


def test_smoothed_labels_are_a_mixture_of_both_orders():
    x = tokens(logp=LOGP, ref_logp=REF)
    plain = dpo(x, beta=0.5)[0]
    swapped = dpo(tokens(logp=LOGP, ref_logp=REF, side=-x.side), beta=0.5)[0]
    smoothed = dpo(x, beta=0.5, label_smoothing=0.2)[0]
    assert torch.allclose(smoothed, 0.8 * plain + 0.2 * swapped)


def test_the_chosen_reply_can_be_held_up_by_its_likelihood():
    logp = LOGP.clone().requires_grad_()
    plain = dpo(tokens(logp=LOGP, ref_logp=REF), beta=0.5)[0]
    held = dpo(tokens(logp=logp, ref_logp=REF), beta=0.5, nll=0.2)[0]
    likelihood = real(-1.5, -1.5, -1.5, -3.0, -3.0, -3.0, -3.0)  # means over the chosen tokens
    assert torch.allclose(held.detach(), plain - 0.2 * likelihood)
    more = torch.autograd.grad(held.sum(), logp)[0]
    less = torch.autograd.grad(dpo(tokens(logp=logp, ref_logp=REF), beta=0.5)[0].sum(), logp)[0]
    moved = (more - less).tolist()
    assert moved == pytest.approx([-0.2 * 3 / 2, -0.2 * 3 / 2, 0, -0.2 * 4, 0, 0, 0])


@pytest.mark.parametrize("beta", [0.05, 1.0])
def test_at_the_reference_dpo_is_log_2_and_no_order_is_right(beta: float):
    loss, stats = dpo(tokens(logp=LOGP, ref_logp=LOGP), beta=beta)
    assert torch.allclose(loss, torch.full_like(loss, math.log(2)))
    assert stats["pair/accuracy"].nanmean() == 0.5
    assert stats["pair/margin"].nanmean() == 0


def test_ipo_is_its_formula():
    x = tokens(logp=LOGP, ref_logp=REF)
    sums, stats = ipo(x, beta=0.25, average=False)
    assert sums.tolist() == pytest.approx([(0.5 - 2) ** 2] * 3 + [(-2.0 - 2) ** 2] * 4)
    assert stats["pair/margin"].nanmean().item() == pytest.approx(0.25 * (0.5 - 2.0) / 2)
    means, stats = ipo(x, beta=0.25)
    gaps = (0.125 + 0.25, -1.0 - 1.0 / 3)
    expected = [(gaps[0] - 2) ** 2] * 3 + [(gaps[1] - 2) ** 2] * 4
    assert means.tolist() == pytest.approx(expected)
    assert stats["pair/chosen_reward"].nanmean().item() == pytest.approx(0.25 * (0.125 - 1) / 2)


def test_averaged_ipo_does_not_care_how_long_replies_are():
    """Both replies said twice over: the same loss, unless log-ratios are summed."""

    def loss(times: int, average: bool) -> float:
        side = torch.tensor([1.0] * (2 * times) + [-1.0] * times)
        logp = torch.tensor([0.5, -1.0] * times + [-0.75] * times)
        ref = torch.zeros_like(logp)
        lengths = torch.tensor([len(side)])
        x = Tokens.of({"side": side, "ref_logp": ref}, logp, ref, lengths)
        return ipo(x, average=average)[0][0].item()

    assert loss(1, True) == pytest.approx(loss(2, True))
    assert loss(1, False) != pytest.approx(loss(2, False))


def test_bradley_terry_is_its_formula():
    value = real(2.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.0)
    loss, stats = bradley_terry(tokens(value=value))
    assert loss.tolist() == pytest.approx([softplus(-1.5)] * 3 + [softplus(0.0)] * 4)
    assert stats["pair/accuracy"].nanmean() == 0.75, "a tie is half right"
    assert stats["pair/margin"].nanmean() == 0.75


@pytest.mark.parametrize("column", ["logp", "ref_logp"])
@pytest.mark.parametrize("extreme", [-1e30, -math.inf, -5e3, 0.0])
@pytest.mark.parametrize("loss", [dpo, functools.partial(dpo, label_smoothing=0.1), ipo])
def test_extreme_log_probs_give_finite_losses_and_gradients(loss, extreme, column):
    for place in range(len(LOGP)):
        columns = {"logp": LOGP.clone(), "ref_logp": REF.clone()}
        columns[column][place] = extreme
        columns["logp"].requires_grad_()
        found, stats = loss(tokens(**columns), beta=2.0)
        assert found.isfinite().all()
        found.sum().backward()
        assert columns["logp"].grad.isfinite().all()
        assert all(v.nansum().isfinite() for v in stats.values())


DIFFERENTIATED = {
    "dpo": dpo,
    "dpo_smoothed": functools.partial(dpo, beta=0.7, label_smoothing=0.2),
    "ipo": ipo,
    "ipo_sums": functools.partial(ipo, beta=0.7, average=False),
    "bradley_terry": bradley_terry,
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_equal_finite_differences(name: str):
    column = "value" if name == "bradley_terry" else "logp"

    def total(at: Tensor) -> Tensor:
        x = tokens(**{column: at, "ref_logp": REF})
        return pair_mean(DIFFERENTIATED[name](x)[0], x)

    at = LOGP.clone().requires_grad_()
    total(at).backward()
    step = 1e-6
    for place in range(len(LOGP)):
        move = torch.zeros_like(LOGP)
        move[place] = step
        slope = (total(LOGP + move) - total(LOGP - move)).item() / (2 * step)
        assert at.grad[place].item() == pytest.approx(slope, rel=1e-7, abs=1e-9)


def test_the_gradient_of_dpo_weighs_pairs_by_how_wrong_they_are():
    logp = LOGP.clone().requires_grad_()
    x = tokens(logp=logp, ref_logp=REF)
    pair_mean(dpo(x, beta=0.5)[0], x).backward()
    wrong = [1 / (1 + math.exp(0.25)), 1 / (1 + math.exp(-1.0))]
    expected = [-0.5 * w * s / 2 for w, pair in zip(wrong, SIDES, strict=True) for s in pair]
    assert logp.grad.tolist() == pytest.approx(expected)


# ---- by name


def test_losses_are_found_by_name_and_say_what_they_train():
    kinds = {name: make_preference(Plugin(name=name)).of_scores for name in PREFERENCES}
    assert kinds == {"dpo": False, "ipo": False, "bradley_terry": True}
    marked = of_scores(lambda x: (x.value, {}))
    assert make_preference(Plugin(name=marked)).of_scores
    made = make_preference(Plugin(name="dpo", beta=2))
    x = tokens(logp=LOGP, ref_logp=REF)
    assert torch.equal(made(x)[0], dpo(x, beta=2.0)[0])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "dpoo"}, r"^loss: 'dpoo' is not built in; did you mean 'dpo'"),
        ({"name": "dpo", "beta": 0}, r"^loss\.beta: .*greater than 0"),
        ({"name": "dpo", "beta": math.inf}, r"^loss\.beta"),
        ({"name": "dpo", "label_smoothing": 0.5}, r"^loss\.label_smoothing: .*less than 0\.5"),
        ({"name": "ipo", "tau": 1}, r"^loss\.tau: ipo has no such argument"),
        ({"name": "bradley_terry", "beta": 1}, r"^loss\.beta"),
    ],
)
def test_a_bad_name_or_argument_is_refused_under_its_key(spec: dict[str, Any], said: str):
    with pytest.raises(PluginError, match=said):
        make_preference(Plugin(**spec))


def test_what_a_loss_of_your_own_returns_is_checked_under_its_key():
    x = tokens(logp=LOGP, ref_logp=REF)
    with pytest.raises(PluginError, match=r"^loss: returned shape \(\)"):
        make_preference(Plugin(name=lambda x: (x.logp.sum(), {})))(x)
    with pytest.raises(PluginError, match=r"^loss: ZeroDivisionError"):
        make_preference(Plugin(name=lambda x: 1 / 0))(x)


# ---- through a trainer


def pairs() -> list[Pair]:
    """Ragged, each pair with a prompt of its own."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())

    def half(prompt: tuple[int, ...], length: int) -> Sample:
        return Sample((*prompt, *ids(length)), (*([0.0] * len(prompt)), *([1.0] * length)))

    shapes = [(5, 2, 7), (9, 4, 1), (3, 6, 6), (7, 1, 3)]
    return [
        Pair(half(prompt, chosen), half(prompt, rejected))
        for prompt, chosen, rejected in ((ids(p), c, r) for p, c, r in shapes)
    ]


def ends() -> list[Pair]:
    """The same conversations, as a reward model sees them."""

    def end(sample: Sample) -> Sample:
        return Sample((*sample.token_ids, 0), (*([0.0] * len(sample.token_ids)), 1.0))

    return [Pair(end(pair.chosen), end(pair.rejected)) for pair in pairs()]


@functools.cache
def trainer(name: str, double: bool) -> LocalTrainer:
    """With a reference that differs from the policy, or a head that is not zero."""
    policy = tiny_policy()
    if double:
        make_exact(policy.model)
    if name == "bradley_terry":
        critic = Critic(policy, OptimConfig())
        torch.manual_seed(1)
        if double:
            critic.value_head.double()
        torch.nn.init.normal_(critic.value_head.linear.weight, std=0.3)
        return critic
    reference = copy_of(policy, frozen=True)
    generator = torch.Generator().manual_seed(2)
    for parameter in reference.module.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.data += 0.05 * noise
    return LocalTrainer(policy, OptimConfig(), frozen={"ref_logp": reference})


def mini_batch(name: str, made: LocalTrainer) -> Batch:
    if name == "bradley_terry":
        batch = pack_pairs(ends())
    else:
        batch = run(made.score(pack_pairs(pairs()), {"ref_logp"}))
    return batch.weighed(functools.partial(token_weights, "sequence_mean", max_length=1))


def gradients(made: LocalTrainer, micros: Sequence[Batch], loss: Preference) -> dict[str, Tensor]:
    made.optimizer.clear()
    for micro in micros:
        run(made.forward_backward(micro, loss))
    found = {n: g.clone() for n, g in made.optimizer.gradients().items() if g is not None}
    found.pop("value_head.linear.bias", None)  # both replies have it, so it cancels
    made.optimizer.clear()
    return found


def check_equal(ours: dict[str, Tensor], other: dict[str, Tensor], allowed: float) -> None:
    assert ours.keys() == other.keys()
    for name, gradient in ours.items():
        assert gradient.norm() > 0, f"{name} has no gradient, so nothing was compared"
        gap = (gradient - other[name]).norm() / gradient.norm()
        assert gap <= allowed, f"{name} differs by {gap:.2g}"


@pytest.mark.parametrize(("double", "allowed"), [(True, 1e-10), (False, 1e-5)])
@pytest.mark.parametrize("name", PREFERENCES)
def test_every_cut_and_order_of_pairs_gives_the_same_gradient(name, double, allowed):
    made = trainer(name, double)
    batch, loss = mini_batch(name, made), make_preference(Plugin(name=name))
    rows = len(batch.rows)
    whole = gradients(made, batch.micros(10**9), loss)
    alone = [batch.select([i, i + 1]) for i in range(0, rows, 2)]
    backwards = [batch.select([i + side for i in range(rows - 2, -1, -2) for side in (0, 1)])]
    budget = batch.micros(50 if name == "bradley_terry" else 35)
    assert 1 < len(budget) < len(alone)
    assert all(len(micro.rows) % 2 == 0 for micro in budget), "a pair was torn apart"
    for cut in (alone, backwards, budget):
        check_equal(whole, gradients(made, cut, loss), allowed)


def by_hand(model: torch.nn.Module, reference: torch.nn.Module | None, weight: Tensor | None):
    """The mean over pairs, one conversation at a time through plain transformers."""

    def score(sample: Sample) -> Tensor:
        ids = torch.tensor([sample.token_ids])
        if reference is None:
            hidden = model.get_decoder()(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            return hidden[0, -1] @ weight
        places = torch.tensor(sample.trained)

        def logp(of: torch.nn.Module) -> Tensor:
            logps = of(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            return logps[places - 1, ids[0, places]].sum()

        return 0.1 * (logp(model) - logp(reference).detach())

    found = [score(p.chosen) - score(p.rejected) for p in (pairs() if reference else ends())]
    return -torch.nn.functional.logsigmoid(torch.stack(found)).mean()


@pytest.mark.parametrize("name", ["dpo", "bradley_terry"])
def test_gradients_equal_autograd_through_stock_transformers(name: str, tmp_path):
    made = trainer(name, double=True)
    batch, loss = mini_batch(name, made), make_preference(Plugin(name=name))

    def twin(policy: Any, folder: str) -> torch.nn.Module:
        found = make_exact(stock(policy, tmp_path / folder, torch.float64))
        found.set_attn_implementation("sdpa")  # eager rounds its softmax to fp32
        return found

    model = twin(made.policy, "model")
    if name == "dpo":
        total = by_hand(model, twin(made.frozen["ref_logp"], "reference"), None)
    else:
        total = by_hand(model, None, made.value_head.linear.weight.detach()[0])
    total.backward()
    ours = gradients(made, [batch], loss)
    theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    check_equal({n: ours[n] for n in theirs}, theirs, 1e-10)
    assert len(theirs) > 10
