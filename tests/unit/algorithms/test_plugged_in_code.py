"""Losses and estimators of users: whatever they do wrong is said under the name of their key."""

import pytest
import torch

from fledge.algorithms import make_algorithm, on_batch
from fledge.algorithms.algorithm import checked_loss
from fledge.algorithms.tokens import Tokens
from fledge.config.schema import AlgorithmConfig
from fledge.data.batch import pack
from fledge.errors import PluginError
from fledge.types import Episode, Group, Outcome, Segment, Task


def tokens():
    logp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    return Tokens.of({"advantage": torch.ones(3)}, logp, logp * 2, torch.tensor([3]))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda x: -x.logp, "must return"),
        (lambda x: (x.logp.sum(), {}), "returned shape"),
        (lambda x: (x.logp.detach(), {}), "nothing would train"),
        (lambda x: (x.logp, {"clip": 0.5}), "statistic 'clip'"),
        (lambda x: (x.logp, None), "must return"),
        (lambda x: (x.logp, [x.logp]), "must return"),
        (lambda x: (x.logp, {"policy/loss": x.logp}), "'policy/loss' is the name of a metric"),
        (lambda x: (x.logp, {"optim/grad_norm": x.logp}), "is the name of a metric"),
        (lambda x: {}["missing"], "KeyError"),
    ],
)
def test_a_loss_that_cannot_be_trusted_is_refused_by_name(loss, said):
    with pytest.raises(PluginError, match=f"algorithm.loss: .*{said}"):
        checked_loss(loss, tokens())


def test_a_good_loss_passes_and_its_statistics_carry_no_graph():
    loss, stats = checked_loss(lambda x: (-x.logp, {"p": x.logp.exp()}), tokens())
    assert loss.requires_grad and not stats["p"].requires_grad


@pytest.mark.parametrize("values", [[None, 1.0], ["x", 1.0], None, {0: 1.0, 1: 2.0}])
def test_an_estimator_that_returns_no_numbers_is_refused_by_name(values):
    algorithm = make_algorithm(AlgorithmConfig(advantage=lambda group: values))
    with pytest.raises(PluginError, match=r"algorithm\.advantage"):
        algorithm.judge(mini_batch(), step=0)


class NoPrepare:
    """A loss of a class: made once, called for each micro-batch."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, x: Tokens):
        return -self.scale * x.logp, {}


def test_a_loss_may_be_a_class_with_arguments():
    spec = {"name": NoPrepare, "scale": 3.0}
    loss, _ = make_algorithm(AlgorithmConfig(loss=spec)).loss(tokens())
    assert loss.tolist() == [3.0, 6.0, 1.5]
    with pytest.raises(PluginError, match=r"algorithm\.loss\.sclae.*scale"):
        make_algorithm(AlgorithmConfig(loss={"name": NoPrepare, "sclae": 3.0}))


@pytest.mark.parametrize(
    ("correction", "said"),
    [
        (lambda x, log_rho: 1 / 0, "ZeroDivisionError"),
        (lambda x, log_rho: 1.0, "must return one weight per token"),
        (lambda x, log_rho: log_rho[:1], "must return one weight per token"),
        (lambda x, log_rho: log_rho / 0, "a weight is not finite"),
    ],
)
def test_a_correction_that_cannot_be_trusted_is_refused_by_name(correction, said):
    algorithm = make_algorithm(AlgorithmConfig(correction=[correction]))
    with pytest.raises(PluginError, match=rf"algorithm\.correction: .*{said}"):
        algorithm.loss(tokens())


class Refuses:
    def __init__(self, *, size: int = 0) -> None:
        raise OSError("no such file")

    def __call__(self, x):
        return x


def test_a_class_that_cannot_be_made_is_named():
    with pytest.raises(PluginError, match=r"algorithm\.loss: .*Refuses: OSError: no such file"):
        make_algorithm(AlgorithmConfig(loss=Refuses))
    with pytest.raises(PluginError, match=r"algorithm\.advantage: .*Refuses: OSError"):
        make_algorithm(AlgorithmConfig(advantage=Refuses))


class Chooses:
    """A loss that looks at the mini-batch first, and may do it wrongly."""

    def __init__(self, *, answer: str = "good") -> None:
        self.answer = answer

    def prepare(self, x: Tokens, draw: torch.Tensor):
        return {"good": draw.float(), "short": draw[:1], "none": None, "broken": {}}[self.answer][
            ...
        ]

    def __call__(self, x: Tokens):
        return -x.logp * x.chosen, {}


class TakesNoDraw(Chooses):
    def prepare(self, x: Tokens):
        return x.logp


def mini_batch():
    segment = Segment((1, 2, 3), (0.0, -1.0, -1.0), (False, True, True), (-1, 0, 0))
    group = Group(Task("t", {}), 0, (Episode("t", 0, (segment,), (1.0,), Outcome.OK, ()),))
    return pack([group]).with_columns(fresh_logp=torch.tensor([-1.0, -2.0]))


@pytest.mark.parametrize(
    ("answer", "said"),
    [("short", "must return one number per token"), ("none", "TypeError"), ("broken", "KeyError")],
)
def test_a_choice_that_cannot_be_trusted_is_refused_by_name(answer, said):
    algorithm = make_algorithm(AlgorithmConfig(loss={"name": Chooses, "answer": answer}))
    batch, _ = algorithm.judge(mini_batch(), step=0)
    with pytest.raises(PluginError, match=rf"algorithm\.loss: prepare: .*{said}"):
        algorithm.prepare(batch)


def test_a_good_choice_reaches_the_loss():
    algorithm = make_algorithm(AlgorithmConfig(loss=Chooses))
    batch, _ = algorithm.judge(mini_batch(), step=0)
    assert torch.equal(algorithm.prepare(batch).columns["chosen"], batch.columns["draw"].float())


def test_a_loss_whose_prepare_cannot_be_called_is_refused_at_the_start():
    with pytest.raises(PluginError, match=r"algorithm\.loss: prepare: .*cannot be called"):
        make_algorithm(AlgorithmConfig(loss=TakesNoDraw))


@on_batch(needs={"taecher_logp"})
def wants_nonsense(t):
    return t.reward


@on_batch(needs={"teacher_logp"})
def wants_a_teacher(t):
    return t.reward


@on_batch(needs="value")
def forgets_returns(t):
    return t.reward


@on_batch()
def too_many(t):
    return t.reward, t.reward, t.reward


@on_batch()
def whole_numbers(t):
    return t.reward.long()


@pytest.mark.parametrize(
    ("estimator", "said"), [(too_many, "one number per trained"), (whole_numbers, "real numbers")]
)
def test_what_an_estimator_returns_must_be_one_real_number_per_token(estimator, said):
    algorithm = make_algorithm(AlgorithmConfig(advantage=estimator))
    with pytest.raises(PluginError, match=rf"algorithm\.advantage: .*{said}"):
        algorithm.judge(mini_batch(), step=0)


def test_what_an_estimator_needs_must_be_there():
    with pytest.raises(PluginError, match=r"algorithm\.advantage: .*'taecher_logp'.*nobody"):
        make_algorithm(AlgorithmConfig(advantage=wants_nonsense))
    with pytest.raises(PluginError, match=r"algorithm\.advantage: .*set algorithm\.teacher"):
        make_algorithm(AlgorithmConfig(advantage=wants_a_teacher))
    algorithm = make_algorithm(AlgorithmConfig(advantage=forgets_returns))
    with pytest.raises(PluginError, match=r"algorithm\.advantage: .*\(advantage, returns\)"):
        algorithm.judge(mini_batch().with_columns(value=torch.zeros(2)), step=0)
