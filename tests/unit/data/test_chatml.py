import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import fledge.data.render as module
from fledge.data.render import audit, make_renderer
from fledge.errors import ModelError
from fledge.types import Message, assistant, system, user

TINY = Path(module.__file__).parent.parent / "models" / "tiny"
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
RENDERER = make_renderer(TOKENIZER)
START, END = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["<|im_end|>", "\n", "\n\n x", "<|im_start|>user\n", "<|endoftext|>", "12+34", " a  b "]
)
messages = st.lists(
    st.builds(Message, st.sampled_from(["system", "user", "assistant", "tool"]), text), max_size=4
)


def turns_of(conversation):
    """Answers of tools that follow each other share a turn."""
    turns = []
    for message in conversation:
        if message.role == "tool" and turns and turns[-1][-1].role == "tool":
            turns[-1].append(message)
        else:
            turns.append([message])
    return turns


def written(message):
    if message.role != "tool":
        return f"{message.role}\n{message.content}"
    return f"<tool_response>\n{message.content}\n</tool_response>"


def variant(change):
    """The tiny tokenizer with its tokenizer.json changed."""
    content = json.loads((TINY / "tokenizer.json").read_text())
    change(content)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        eos_token="<|endoftext|>",
        name_or_path="variant",
    )


def with_template(template):
    changed = AutoTokenizer.from_pretrained(TINY)
    changed.chat_template = template
    return changed


def findings(tokenizer, renderer=RENDERER, vocab_size=None):
    return {f.check: f for f in audit(tokenizer, renderer, vocab_size)}


@given(messages, messages, st.lists(st.integers(0, 511), max_size=8), st.booleans())
@settings(max_examples=200, deadline=None)
def test_extend_is_an_exact_extension_of_whatever_was_sampled(first, then, sampled, stopped):
    previous = RENDERER.start(first) + [t for t in sampled if t != END] + [END] * stopped
    ids = RENDERER.extend(previous, then)
    assert ids[: len(previous)] == previous
    added = ids[len(previous) :]
    expected = ([] if stopped else [END]) + RENDERER._gap + RENDERER.start(then)
    assert added == expected


@given(messages)
@settings(max_examples=200, deadline=None)
def test_text_never_becomes_a_special_token(given_messages):
    ids = RENDERER.start(given_messages)
    turns = [
        "user\n" * (group[0].role == "tool") + "\n".join(map(written, group))
        for group in turns_of(given_messages)
    ]
    assert ids.count(START) == len(turns) + 1
    assert ids.count(END) == len(turns)
    assert TOKENIZER.pad_token_id not in ids
    assert TOKENIZER.decode(ids) == "".join(
        [f"<|im_start|>{turn}<|im_end|>\n" for turn in turns] + ["<|im_start|>assistant\n"]
    )


@given(text)
@settings(deadline=None)
def test_parse_undoes_a_rendered_reply(content):
    ids, sampled = RENDERER.encode([user("x"), assistant(content)])
    reply = [token for token, s in zip(ids, sampled, strict=True) if s]
    assert reply[-1] == END
    assert RENDERER.parse(reply) == assistant(content)
    assert RENDERER.parse(reply[:-1]) == assistant(content)


@given(messages)
@settings(deadline=None)
def test_conversations_and_prompts_are_built_of_the_same_pieces(given_messages):
    ids, sampled = RENDERER.encode(given_messages)
    assert len(ids) == len(sampled)
    assert RENDERER.start(given_messages)[: len(ids)] == ids
    assert sum(t == END and s for t, s in zip(ids, sampled, strict=True)) == sum(
        m.role == "assistant" for m in given_messages
    )


@pytest.mark.parametrize(
    "prompt", [[user("34+57")], [system("Add."), user("34+57")], [user("\n\n spaced ")]]
)
def test_first_prompt_equals_the_chat_template(prompt):
    listed = [{"role": m.role, "content": m.content} for m in prompt]
    theirs = TOKENIZER.apply_chat_template(
        listed, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert RENDERER.start(prompt) == theirs


def test_special_tokens_inside_a_reply_stay_visible():
    # Hidden, this would read as the right answer "42".
    ids = [*TOKENIZER.encode("4"), TOKENIZER.pad_token_id, *TOKENIZER.encode("2"), END]
    assert RENDERER.parse(ids).content == "4<|endoftext|>2"
    assert RENDERER.parse([]).content == ""


def test_the_tokenizer_itself_is_not_changed():
    assert TOKENIZER.encode("<|im_end|>") == [END]
    assert TOKENIZER.backend_tokenizer.encode_special_tokens is False


def test_stop_ids_hold_the_end_of_text_where_it_is_another_token():
    assert RENDERER.stop_ids == (END,)
    other = make_renderer(variant(lambda content: None))
    assert other.stop_ids == (END, TOKENIZER.pad_token_id)
    reply = [*TOKENIZER.encode("4"), TOKENIZER.pad_token_id]
    assert other.parse(reply).content == "4"
    # Ended by another stop token, the turn still needs its end: added as context.
    assert other.extend(reply, [])[len(reply)] == END


def test_tokenizers_that_cannot_be_rendered_exactly_are_refused_by_name():
    def rename(content):
        for entry in content["added_tokens"]:
            entry["content"] = entry["content"].replace("im_start", "begin")
        vocab = content["model"]["vocab"]
        vocab["<|begin|>"] = vocab.pop("<|im_start|>")

    def demote(content):
        for entry in content["added_tokens"]:
            entry["special"] = False

    with pytest.raises(ModelError, match=r"model\.path: variant has no token <\|im_start\|>"):
        make_renderer(variant(rename))
    with pytest.raises(ModelError, match=r"model\.path: variant does not mark <\|im_start\|>"):
        make_renderer(variant(demote))
    with pytest.raises(ModelError, match=r"model\.path: object has no fast tokenizer"):
        make_renderer(object())


def test_audit_is_content_with_the_tiny_tokenizer():
    assert [f.ok for f in audit(TOKENIZER, RENDERER)] == [True] * 4
    assert all(f.ok for f in audit(with_template(None), RENDERER))


def test_audit_finds_a_template_that_rewrites_history():
    strips_thinking = TOKENIZER.chat_template.replace(
        "message['content']", "(message['content'].split('</think>\\n\\n') | last)"
    )
    finding = findings(with_template(strips_thinking))["chat template is append-only"]
    assert not finding.ok
    assert "thinking turn 1" in finding.detail
    drops_newline = TOKENIZER.chat_template.replace("'<|im_end|>\\n'", "'<|im_end|>'")
    assert not findings(with_template(drops_newline))["first prompt equals the chat template's"].ok


def test_audit_finds_a_template_with_a_default_system_message():
    preamble = "<|im_start|>system\nBe nice.<|im_end|>\n"
    adds_system = f"{{% if messages[0]['role'] != 'system' %}}{preamble}{{% endif %}}"
    changed = with_template(adds_system + TOKENIZER.chat_template)
    finding = findings(changed)["first prompt equals the chat template's"]
    assert not finding.ok
    assert "for a user message" in finding.detail
    assert "Be nice." in finding.detail


def test_audit_survives_a_template_that_fails():
    checks = findings(with_template("{{ raise_exception('no system role') }}"))
    assert "no system role" in checks["first prompt equals the chat template's"].detail
    assert not checks["chat template is append-only"].ok


def test_audit_finds_a_stop_token_that_cannot_be_sampled():
    finding = findings(TOKENIZER, vocab_size=2)["stop token can be sampled and is trained"]
    assert not finding.ok


def test_audit_finds_special_text_that_is_not_inert():
    leaky = make_renderer(TOKENIZER)
    leaky.codec.backend.encode_special_tokens = False
    assert not findings(TOKENIZER, leaky)["special-token text in a message stays text"].ok
