"""Rows of preferences: what is read, what is trained, what is refused and how."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

import fledge.data.pairs as module
from fledge.data.batch import pack_pairs
from fledge.data.pairs import comparison_of, encode_pair, encode_scored_pair
from fledge.data.render import ChatMLRenderer, make_renderer
from fledge.errors import DataError
from fledge.types import assistant, system, user

TINY = Path(module.__file__).parent.parent / "models" / "tiny"
WHERE = "data.train: row 2"
ROW = {"prompt": "2+2", "chosen": "4", "rejected": "five"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return make_renderer(tokenizer)


def said(*messages):
    return [{"role": m.role, "content": m.content} for m in messages]


PROMPT = [system("Add."), user("2+2")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": said(*PROMPT), "chosen": "4", "rejected": "5"},
        {
            "prompt": said(*PROMPT),
            "chosen": said(assistant("4")),
            "rejected": said(assistant("5")),
        },
        {
            "prompt": said(*PROMPT),
            "chosen": said(*PROMPT, assistant("4")),
            "rejected": said(*PROMPT, assistant("5")),
        },
    ],
)
def test_every_way_to_write_a_pair(row):
    found = comparison_of({"extra": 1, **row}, WHERE)
    assert found.prompt == PROMPT
    assert (found.chosen, found.rejected) == ([assistant("4")], [assistant("5")])


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "x", "chosen": "a"}, r" has no 'rejected'.*it has: prompt, chosen"),
        ({"chosen": "a", "rejected": "b"}, r" has no 'prompt'"),
        ({}, r" has no 'prompt'.*it has: none"),
        ({**ROW, "prompt": 3}, r": prompt: must be text or a list"),
        ({**ROW, "chosen": None}, r": chosen: must be text or a list"),
        ({**ROW, "chosen": ""}, r": chosen: the reply is empty"),
        ({**ROW, "rejected": said(assistant(""))}, r": rejected: the reply is empty"),
        ({**ROW, "rejected": "4"}, r": chosen and rejected are the same"),
        ({**ROW, "rejected": said(user("2+2"), assistant("4"))}, r": chosen and rejected are the"),
        ({**ROW, "chosen": said(user("2+2"))}, r": chosen: must be a reply"),
        ({**ROW, "chosen": said(user("3+3"), assistant("4"))}, r": chosen: must be a reply"),
        ({**ROW, "rejected": said(assistant("4"), user("no"))}, r": rejected: must be a reply"),
        ({**ROW, "chosen": [{"role": "bot", "content": "x"}]}, r": chosen\[0\]\.role"),
    ],
)
def test_malformed_rows_name_key_row_and_field(row, text):
    with pytest.raises(DataError, match=rf"^data\.train: row 2{text}"):
        comparison_of(row, WHERE)


def test_only_replies_are_trained_with_their_end_token(renderer, tokenizer):
    pair = encode_pair(renderer, ROW, WHERE)
    start = renderer.start([user("2+2")])
    for sample, reply in ((pair.chosen, "4"), (pair.rejected, "five")):
        assert list(sample.token_ids[: len(start)]) == start
        trained = [sample.token_ids[place] for place in sample.trained]
        assert tokenizer.decode(trained) == f"{reply}<|im_end|>"
        assert sample.trained == tuple(range(len(start), len(sample.token_ids)))


def test_what_the_assistant_said_in_the_prompt_is_context(renderer, tokenizer):
    talk = [user("2+2"), assistant("4"), user("and 1?")]
    reply = [assistant("5"), user("sure?"), assistant("yes")]
    row = {"prompt": said(*talk), "chosen": said(*reply), "rejected": "6"}
    chosen = encode_pair(renderer, row, WHERE).chosen
    trained = [chosen.token_ids[place] for place in chosen.trained]
    assert tokenizer.decode(trained) == "5<|im_end|>yes<|im_end|>"


def test_both_halves_share_their_prompt(renderer):
    batch = pack_pairs([encode_pair(renderer, ROW, WHERE)])
    chosen, rejected = batch.rows
    assert chosen.token_ids[: chosen.prefix] == rejected.token_ids[: rejected.prefix]
    assert batch.columns["side"].tolist() == [1.0] * len(chosen.trained) + [-1.0] * len(
        rejected.trained
    )


def test_a_reward_model_sees_the_end_of_the_whole_conversation(renderer):
    pair = encode_scored_pair(renderer, ROW, WHERE)
    for sample, reply in ((pair.chosen, "4"), (pair.rejected, "five")):
        ids, _ = renderer.encode([user("2+2"), assistant(reply)])
        assert list(sample.token_ids[:-1]) == ids
        assert sample.trained == (len(ids),)


def test_a_renderer_that_writes_the_prompt_anew_is_refused(tokenizer):
    class Rewriting(ChatMLRenderer):
        def start(self, messages):
            return super().start([system("Be kind."), *messages])

    with pytest.raises(DataError, match=r"^data\.train: row 2: chosen: the tokens .* its prompt"):
        encode_pair(Rewriting(tokenizer), ROW, WHERE)
