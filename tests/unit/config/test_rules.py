"""Settings that contradict each other are refused before any work, under the name of the key."""

import pytest

from fledge.config import PreferConfig, TrainConfig, load_config
from fledge.config.presets import LEARNING_RATES, PRESETS
from fledge.errors import ConfigError

RECIPE = {"env": "arithmetic", "data": {"train": "tasks.jsonl"}}


def resolve(*overrides: str, recipe: dict[str, object] = RECIPE) -> TrainConfig:
    return load_config(TrainConfig, recipe, overrides, {}).config


REFUSED = {
    "k1 in the loss": (
        ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k1"],
        r"algorithm\.kl\.estimator=k1 in the loss has zero expected gradient",
    ),
    "kl_cov with one update per batch": (
        ["algorithm.loss=kl_cov"],
        r"algorithm\.loss=kl_cov with one update per batch is exactly inert",
    ),
    "gspo without sequence_mean": (
        ["algorithm.loss=gspo"],
        r"algorithm\.loss=gspo is defined per sequence; set algorithm\.reduction=sequence_mean",
    ),
    "geo_mean without sequence_mean": (
        ["algorithm.name=gmpo", "algorithm.reduction=prompt_mean"],
        r"algorithm\.loss=geo_mean .* algorithm\.reduction=sequence_mean",
    ),
    "a group of one": (
        ["algorithm.name=rloo", "rollout.group_size=1"],
        r"rollout\.group_size=1 gives rloo nothing to compare",
    ),
    "more mini-batches than groups": (
        ["algorithm.minibatches=9"],
        r"algorithm\.minibatches must not exceed rollout\.groups_per_step",
    ),
    "maxrl with a punishment": (
        ["algorithm.name=maxrl", "algorithm.shaping.overlong_buffer=0.5"],
        r"maxrl needs rewards of 0 or more, but algorithm\.shaping\.overlong_buffer",
    ),
    "maxrl with KL in the reward": (
        ["algorithm.name=maxrl", "algorithm.kl.coef=0.1", "algorithm.kl.placement=reward"],
        r"maxrl needs rewards of 0 or more, but algorithm\.kl\.placement=reward",
    ),
    "a punishment that gdpo does not see": (
        ["algorithm.advantage=gdpo", "algorithm.shaping.overlong_buffer=0.5"],
        r"algorithm\.shaping\.overlong_buffer has no effect with algorithm\.advantage=gdpo",
    ),
    "weights that gdpo does not see": (
        ["algorithm.advantage=gdpo", "rollout.reward_weights={right: 2.0}"],
        r"rollout\.reward_weights has no effect with algorithm\.advantage=gdpo",
    ),
    "a correction without the trainer's log-probs": (
        ["algorithm.correction=[token_tis]", "algorithm.old=engine"],
        r"algorithm\.correction .* every weight would be 1; set algorithm\.old=recomputed",
    ),
    "a correction of a loss that corrects itself": (
        ["algorithm.correction=[token_tis]", "algorithm.loss=dppo"],
        r"algorithm\.correction with algorithm\.loss=dppo.*twice",
    ),
    "a correction of a loss that is told to correct itself": (
        ["algorithm.correction=[token_tis]", "algorithm.loss={name: cispo, anchor: engine}"],
        r"algorithm\.correction with algorithm\.loss=cispo.*twice",
    ),
    "a length for a reduction that has none": (
        ["algorithm.norm_length=100"],
        r"algorithm\.norm_length has no effect with algorithm\.reduction=token_mean",
    ),
    "top-p against the engine's log-probs": (
        ["rollout.top_p=0.9"],
        r"rollout\.top_p: .* algorithm\.old=engine compares log-probs of the whole one",
    ),
    "top-k with a correction": (
        ["rollout.top_k=5", "algorithm.correction=[icepop]"],
        r"rollout\.top_k: .* algorithm\.correction compares",
    ),
    "min-p with a loss that starts from the engine": (
        ["rollout.min_p=0.1", "algorithm.loss=dppo", "algorithm.old=recomputed"],
        r"rollout\.min_p: .* algorithm\.loss=dppo compares",
    ),
    "top-p with KL in the reward": (
        [
            "rollout.top_p=0.9",
            "algorithm.epochs=2",
            "algorithm.kl.coef=0.1",
            "algorithm.kl.placement=reward",
        ],
        r"rollout\.top_p: .* algorithm\.kl\.placement=reward compares",
    ),
    "a KL target without a KL": (
        ["algorithm.kl.target=0.1"],
        r"algorithm\.kl\.target .* algorithm\.kl\.placement=reward and algorithm\.kl\.coef",
    ),
    "a KL target in the loss": (
        ["algorithm.kl.target=0.1", "algorithm.kl.coef=0.1"],
        r"algorithm\.kl\.target steers the coefficient of a KL in the reward",
    ),
    "a reference that nobody reads": (
        ["algorithm.kl.ref_every=5"],
        r"algorithm\.kl\.ref_every has no effect without a KL term",
    ),
    "a KL that is exactly zero": (
        ["algorithm.kl.coef=0.1", "algorithm.kl.ref_every=1"],
        r"algorithm\.kl\.ref_every=1 .* the KL term is exactly 0",
    ),
    "distillation without a teacher": (
        ["algorithm.name=distill"],
        r"algorithm\.teacher: distillation needs a teacher",
    ),
    "a teacher that nobody listens to": (
        ["algorithm.teacher=tiny"],
        r"algorithm\.teacher has no effect with algorithm\.advantage=grpo",
    ),
    "adapters off where there are none": (
        ["algorithm.name=distill", "algorithm.teacher=base"],
        r"algorithm\.teacher=base .* set model\.lora",
    ),
    "adapters that imitate what they begin as": (
        ["algorithm.name=distill", "algorithm.teacher=base", "model.lora.rank=4"],
        r"algorithm\.teacher=base: .*nothing to imitate.*algorithm\.advantage\.reward",
    ),
    "a filter that does not see the parts of gdpo": (
        ["algorithm.advantage=gdpo", "algorithm.shaping.dynamic_sampling=filter"],
        r"algorithm\.shaping\.dynamic_sampling compares whole rewards",
    ),
    "a punishment that distillation does not see": (
        [
            "algorithm.name=distill",
            "algorithm.teacher=tiny",
            "algorithm.shaping.overlong_buffer=0.5",
        ],
        r"algorithm\.shaping\.overlong_buffer has no sense with algorithm\.advantage=distillation",
    ),
    "KL in a reward that distillation does not see": (
        [
            "algorithm.name=distill",
            "algorithm.teacher=tiny",
            "algorithm.kl.coef=0.1",
            "algorithm.kl.placement=reward",
        ],
        r"algorithm\.kl\.placement=reward has no sense with algorithm\.advantage=distillation",
    ),
    "turns of a group of one": (
        ["algorithm.advantage=turn", "rollout.group_size=1"],
        r"rollout\.group_size=1 gives turn nothing to compare",
    ),
    "a mask without bounds": (
        ["algorithm.correction=[{name: token_mask, low: null, high: null}]"],
        r"algorithm\.correction\[0\]: token_mask without a bound masks nothing",
    ),
    "no reward, said aloud": (
        ["env={name: reward, function: null}"],
        r"env\.function: there is nothing to reward with",
    ),
    "no reward at all": (
        ["env=reward"],
        r"env\.function: there is nothing to reward with",
    ),
    "a punishment of less than a token": (
        ["algorithm.shaping.overlong_buffer=0.01", "rollout.max_new_tokens=10"],
        r"algorithm\.shaping\.overlong_buffer=0\.01 .* less than one token",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_contradiction_is_refused_by_name(what: str):
    overrides, said = REFUSED[what]
    with pytest.raises(ConfigError, match=said):
        resolve(*overrides)


ACCEPTED = {
    "k1 in the reward": [
        "algorithm.kl.coef=0.1",
        "algorithm.kl.estimator=k1",
        "algorithm.kl.placement=reward",
    ],
    "an adaptive coefficient": [
        "algorithm.kl.coef=0.1",
        "algorithm.kl.target=0.05",
        "algorithm.kl.placement=reward",
    ],
    "k1 that is switched off": ["algorithm.kl.estimator=k1"],
    "kl_cov with two epochs": ["algorithm.loss=kl_cov", "algorithm.epochs=2"],
    "gspo with sequence_mean": ["algorithm.loss=gspo", "algorithm.reduction=sequence_mean"],
    "a correction": ["algorithm.correction=[token_tis, outlier_mask]"],
    "top-p against recomputed log-probs": ["rollout.top_p=0.9", "algorithm.old=recomputed"],
    "top-p without a ratio": ["rollout.top_p=0.9", "algorithm.name=rloo"],
    "a reference that follows": ["algorithm.kl.coef=0.1", "algorithm.kl.ref_every=5"],
    "a moved policy against its own reference": [
        "algorithm.kl.coef=0.1",
        "algorithm.kl.ref_every=1",
        "algorithm.epochs=2",
    ],
    "a teacher that holds back what the reward drives": [
        "algorithm.name=distill",
        "algorithm.teacher=base",
        "algorithm.advantage.reward=1.0",
        "model.lora.rank=4",
    ],
    "distillation without a reward": [
        "algorithm.name=distill",
        "algorithm.teacher=tiny",
        "env=reward",
    ],
    "groups of one without a group baseline": ["algorithm.name=reinforce", "rollout.group_size=1"],
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_fits_together_is_accepted(what: str):
    resolve(*ACCEPTED[what])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.loss=fledge.algorithms.losses:gspo"], "algorithm.loss=gspo is defined per"),
        (["algorithm.loss=fledge.algorithms.covariance:KlCov"], "kl_cov with one update"),
        (
            ["algorithm.loss=fledge.algorithms.losses:dppo", "algorithm.correction=[token_tis]"],
            "algorithm.loss=dppo",
        ),
        (
            ["algorithm.advantage=fledge.algorithms.returns:distillation"],
            "distillation needs a teacher",
        ),
        (["env=fledge.envs.function:RewardEnvironment"], "nothing to reward with"),
    ],
)
def test_another_spelling_of_a_built_in_does_not_get_past_the_rules(overrides, said):
    with pytest.raises(ConfigError, match=said):
        resolve(*overrides)


def test_with_a_reward_model_no_function_is_needed():
    recipe = {**RECIPE, "env": "reward", "reward_model": {"path": "somewhere"}}
    assert resolve(recipe=recipe).reward_model is not None


# ---- presets


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits_together(name: str):
    extra = ["algorithm.teacher=tiny"] if name == "distill" else []
    assert resolve(f"algorithm.name={name}", *extra).algorithm.name == name


def test_a_preset_replaces_that_of_the_recipe_and_keeps_its_other_settings():
    recipe = {**RECIPE, "algorithm": {"name": "grpo", "entropy_coef": 0.01}}
    config = resolve("algorithm.name=dapo", recipe=recipe)
    assert config.algorithm.shaping.dynamic_sampling == "filter"
    assert config.algorithm.entropy_coef == 0.01


def test_a_preset_can_be_mixed_with_anything():
    config = resolve("algorithm.name=dapo", "algorithm.advantage=rloo", "algorithm.loss.high=0.3")
    assert config.algorithm.advantage.name == "rloo"
    assert config.algorithm.loss.arguments == {"low": 0.2, "high": 0.3}
    assert config.algorithm.shaping.dynamic_sampling == "filter"


def test_resolving_a_preset_does_not_change_it():
    before = repr(PRESETS)
    resolve("algorithm.name=dapo", "algorithm.loss.high=0.9", "algorithm.shaping.max_rounds=9")
    assert repr(PRESETS) == before


# ---- learning rates


def test_adapters_get_ten_times_the_rate_of_all_weights():
    full = load_config(TrainConfig, RECIPE, [], {})
    lora = load_config(TrainConfig, RECIPE, ["model.lora.rank=8"], {})
    assert full.config.optim.lr == LEARNING_RATES["train"]
    assert lora.config.optim.lr == pytest.approx(10 * full.config.optim.lr)
    assert full.origin("optim.lr") == "default of train with all weights"
    assert lora.origin("optim.lr") == "default of train with LoRA"
    assert not full.was_set("optim.lr")


def test_the_rate_is_that_of_what_is_trained_in_the_end():
    recipe = {**RECIPE, "model": {"lora": {"rank": 4}}}
    assert resolve(recipe=recipe).optim.lr == pytest.approx(10 * LEARNING_RATES["train"])
    assert resolve("model.lora=null", recipe=recipe).optim.lr == LEARNING_RATES["train"]


@pytest.mark.parametrize(
    ("overrides", "method"),
    [
        ([], "prefer"),
        (["loss=bradley_terry"], "reward_model"),
        (["loss=fledge.algorithms.preferences:bradley_terry"], "reward_model"),
        (["loss=ipo", "loss.beta=0.2"], "prefer"),
    ],
)
def test_a_reward_model_has_a_rate_of_its_own(overrides, method):
    recipe = {"data": {"train": "pairs.jsonl"}}
    found = load_config(PreferConfig, recipe, overrides, {})
    assert found.config.optim.lr == LEARNING_RATES[method]


def test_a_rate_that_somebody_chose_stays():
    assert resolve("model.lora.rank=8", "optim.lr=3e-5").optim.lr == 3e-5
