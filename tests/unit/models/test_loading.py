"""Loading a model as it is: overrides, refusals, and the attention that is proven at start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fledge.config.schema import ModelConfig
from fledge.errors import ConfigError, ModelError
from fledge.models import attention
from fledge.models.attention import PackedLayout, Span, fledge_attention
from fledge.models.fingerprint import module_tensors, tensor_hash
from fledge.models.load import load_policy, restore_weights, save_weights
from helpers import CONFIGS, SHAPE, stock, tiny_policy, write_model


def load(path: Path | str = "tiny", **settings):
    settings = {"random_init": True, "device": "cpu", **settings}
    return load_policy(ModelConfig(path=str(path), **settings), seed=0)


# ---- overrides


def test_overrides_change_the_models_own_config():
    policy = tiny_policy(max_position_embeddings=96, rms_norm_eps=1e-3)
    assert policy.context == 96 and policy.config.rms_norm_eps == 1e-3
    assert policy.config.hidden_size == SHAPE["hidden_size"]


def test_a_partial_rope_override_keeps_the_other_rope_fields():
    policy = tiny_policy(rope_parameters={"rope_type": "linear", "factor": 2.0})
    rope = policy.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 2.0, 100.0)


def test_an_unknown_override_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"max_position_embedding: .*'max_position_embeddings'"):
        load(overrides={"max_position_embedding": 64})


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_refused(kind: str):
    rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    with pytest.raises(ModelError, match=rf"rope_parameters.*'{kind}'"):
        load(overrides={**SHAPE, "rope_parameters": rope})


def test_a_model_that_comes_with_dynamic_rope_is_refused_without_overrides(tmp_path: Path):
    folder = write_model(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="'dynamic'"):
        load(folder)


# ---- refusals


def test_a_missing_folder_is_refused_by_name():
    with pytest.raises(ModelError, match=r"model\.path: './nowhere' is no folder here"):
        load("./nowhere")


def test_a_folder_without_a_config_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"model\.path"):
        load(tmp_path)


def test_a_folder_without_weights_says_how_to_start_fresh(tmp_path: Path):
    with pytest.raises(ModelError, match=r"model\.random_init=true"):
        load(write_model(tmp_path, "llama"), random_init=False)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused():
    with pytest.raises(ModelError, match="ids up to 511, but the model knows 100"):
        load(overrides={**SHAPE, "vocab_size": 100})


@pytest.mark.parametrize(("model_type", "wants"), [("gemma2", "softcap"), ("gpt_oss", "s_aux")])
def test_a_model_that_wants_another_attention_is_refused(model_type, wants, tmp_path: Path):
    """Gemma 2 caps its attention scores, gpt-oss adds sinks: ours would silently leave that out."""
    folder = write_model(tmp_path, "llama")
    config = {**CONFIGS["llama"], "model_type": model_type, "query_pre_attn_scalar": 16}
    config |= {"num_local_experts": 2, "num_experts_per_tok": 1} if model_type == "gpt_oss" else {}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"model\.path: \w+ asks for {wants}"):
        load(folder)


def test_an_attention_that_is_wrong_is_found_at_start(monkeypatch):
    right = attention.PackedLayout.attend

    def wrong(self, layer, q, k, v, scale, window):
        return right(self, layer, q, k, v, scale * 1.1, window)

    monkeypatch.setattr(attention.PackedLayout, "attend", wrong)
    with pytest.raises(ModelError, match="other logits"):
        tiny_policy()


def test_without_a_layout_the_attention_refuses_to_guess():
    policy = tiny_policy()
    with pytest.raises(ModelError, match="needs a layout"):
        policy.model(input_ids=torch.tensor([[5, 6]]))


@pytest.mark.parametrize("keyword", ["softcap", "s_aux", "sinks", "position_bias"])
def test_keywords_that_change_the_result_are_refused_by_name(keyword: str):
    x = torch.zeros(1, 2, 3, 4)
    layout = PackedLayout.of_lengths([3], torch.device("cpu"))
    module = torch.nn.Module()
    module.layer_idx = 0
    fledge_attention(module, x, x, x, None, layout=layout, **{keyword: None})
    with pytest.raises(ModelError, match=keyword):
        fledge_attention(module, x, x, x, None, layout=layout, **{keyword: 1.0})
    with pytest.raises(ModelError, match="dropout"):
        fledge_attention(module, x, x, x, None, layout=layout, dropout=0.1)
    with pytest.raises(ModelError, match="attention_mask"):
        fledge_attention(module, x, x, x, torch.zeros(1), layout=layout)


# ---- starting weights


def test_the_seed_decides_the_weights_and_the_dtype_only_rounds_them():
    one, same, other = tiny_policy(seed=1), tiny_policy(seed=1), tiny_policy(seed=2)
    low = tiny_policy(seed=1, dtype="bf16")
    for name, weight in one.model.named_parameters():
        assert torch.equal(weight, dict(same.model.named_parameters())[name])
        assert torch.equal(weight.bfloat16(), dict(low.model.named_parameters())[name])
    assert not torch.equal(one.head.weight, other.head.weight)


def test_weights_saved_are_the_weights_loaded(tmp_path: Path):
    policy, other = tiny_policy(seed=1), tiny_policy(seed=2)
    save_weights(policy, tmp_path, merge=False)
    restore_weights(other, tmp_path)
    ours, theirs = module_tensors(policy.model), module_tensors(other.model)
    assert {n: tensor_hash(t) for n, t in ours.items()} == {
        n: tensor_hash(t) for n, t in theirs.items()
    }


def test_an_export_loads_through_fledge_again(tmp_path: Path):
    policy = tiny_policy(seed=3)
    stock(policy, tmp_path)
    again = load(tmp_path, random_init=False)
    assert again.fingerprint() == policy.fingerprint()
    for name, weight in policy.model.named_parameters():
        assert torch.equal(weight, dict(again.model.named_parameters())[name])


def test_the_identity_of_a_policy_is_its_architecture_not_its_weights():
    assert tiny_policy(seed=1).fingerprint() == tiny_policy(seed=2).fingerprint()
    assert tiny_policy().fingerprint() != tiny_policy(rms_norm_eps=1e-3).fingerprint()


# ---- layouts


def naive_attention(q, k, v, window: int | None) -> torch.Tensor:
    """One sequence, token by token: `[T, H, D]`."""
    out = []
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    for t in range(len(q)):
        first = 0 if window is None else max(0, t - window + 1)
        scores = torch.einsum("hd,lhd->hl", q[t], k[first : t + 1]) * 0.5
        out.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v[first : t + 1]))
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 3])
def test_packed_sequences_see_themselves_and_their_prefix_and_nothing_else(window: int | None):
    generator = torch.Generator().manual_seed(0)
    spans = [
        Span(0, 6),
        Span(6, 4, prefix_start=0, prefix=6),
        Span(10, 9, prefix_start=0, prefix=6),
        Span(19, 1),
        Span(20, 2, prefix_start=19, prefix=1),
        Span(22, 13),
    ]
    q = torch.randn(35, 4, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(35, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    ours = PackedLayout.of(spans, torch.device("cpu")).attend(0, q, k, v, 0.5, window)
    for span in spans:
        places = [
            *range(span.prefix_start, span.prefix_start + span.prefix),
            *range(span.start, span.start + span.length),
        ]
        expected = naive_attention(q[places], k[places], v[places], window)[span.prefix :]
        found = ours[span.start : span.start + span.length]
        assert (found - expected).abs().max() < 1e-12


# ---- fingerprints


def test_a_tensor_hash_sees_changed_moved_and_swapped_values():
    base = torch.arange(20_000, dtype=torch.float32).view(100, 200)
    changed, swapped = base.clone(), base.clone()
    changed[50, 50] += 0.001
    swapped[0, 0], swapped[99, 199] = base[99, 199], base[0, 0]
    far = base.clone().flatten()
    far[[5, 5 + 8191]] = far[[5 + 8191, 5]]
    variants = [base, changed, swapped, far.view(100, 200), base.view(200, 100), base.double()]
    variants += [base.T.contiguous(), -base, torch.zeros(100, 200)]
    assert len({tensor_hash(t) for t in variants}) == len(variants)


def test_a_tensor_hash_does_not_see_the_layout_in_memory():
    base = torch.randn(7, 5)
    assert tensor_hash(base) == tensor_hash(base.t().contiguous().t())


def test_a_fingerprint_names_every_parameter_and_buffer_once():
    policy = tiny_policy(tie_word_embeddings=True)
    names = set(module_tensors(policy.model))
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert names >= {n for n, _ in policy.model.named_buffers()}
