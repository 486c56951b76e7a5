import importlib.util
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

import fledge.data.render as module

TINY = Path(module.__file__).parent.parent / "models" / "tiny"
SCRIPT = Path(__file__).parents[3] / "scripts" / "make_tokenizer.py"
TOKENIZER = AutoTokenizer.from_pretrained(TINY)


def test_the_script_writes_the_files_in_the_package(tmp_path):
    spec = importlib.util.spec_from_file_location("make_tokenizer", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write(tmp_path)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes(), name


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("naïve 日本語 👩‍👩‍👧 \r\n\t  don't , x . \x00\u2028")
@settings(deadline=None)
def test_any_text_survives_the_round_trip(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    if not any(special in text for special in TOKENIZER.all_special_tokens):
        assert TOKENIZER.decode(ids) == text


def test_each_digit_is_a_token_of_its_own():
    assert TOKENIZER.tokenize("345+0012=67") == list("345+0012=67")


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_turn_header_is_three_tokens(role):
    assert len(TOKENIZER.encode(f"<|im_start|>{role}\n", add_special_tokens=False)) == 3


def test_special_tokens_and_sizes_agree_with_the_model_config():
    config = AutoConfig.from_pretrained(TINY)
    assert len(TOKENIZER) == config.vocab_size == 512
    assert TOKENIZER.eos_token == "<|im_end|>"
    assert TOKENIZER.pad_token == "<|endoftext|>"
    assert (config.eos_token_id, config.pad_token_id) == (
        TOKENIZER.eos_token_id,
        TOKENIZER.pad_token_id,
    )
    assert config.model_type == "qwen3"
    assert config.tie_word_embeddings
    assert config.rope_parameters["rope_theta"] == 100.0
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (128, 2, 32)
