"""Demonstrations: rows to conversations, conversations to samples whose weights come from
provenance.

Only what an assistant would have sampled (its words and its end-of-turn token) has weight 1. No
template tag and no search for markers in token ids decides that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fledge.errors import DataError
from fledge.interfaces import Renderer
from fledge.messages import messages_of
from fledge.types import Message, Sample, assistant


def to_conversations(rows: Iterable[Mapping[str, Any]], key: str) -> list[list[Message]]:
    """The messages of each row; `key` is the configuration key that an error names."""
    return [demo_messages(row, f"{key}: row {number}") for number, row in enumerate(rows, 1)]


def demo_messages(row: Mapping[str, Any], where: str) -> list[Message]:
    """`{"messages": [...]}` or `{"prompt": ..., "response": ...}`; a prompt is text or a list of
    messages.

    >>> [m.role for m in demo_messages({"prompt": "2+2", "response": "4"}, "data.train: row 1")]
    ['user', 'assistant']
    """
    if "messages" in row:
        found = messages_of(row["messages"], f"{where}: messages")
    elif "prompt" in row and "response" in row:
        prompt, response = row["prompt"], row["response"]
        if not isinstance(response, str):
            raise DataError(f"{where}: response must be text, got {type(response).__name__}")
        found = [*messages_of(prompt, f"{where}: prompt"), assistant(response)]
    else:
        fields = ", ".join(map(str, row)) or "none"
        raise DataError(f"{where} needs `messages`, or `prompt` and `response` (it has: {fields})")
    if not any(m.role == "assistant" for m in found):
        raise DataError(f"{where} has no assistant message, so there is nothing to learn from it")
    return found


def encode_demo(renderer: Renderer, messages: Sequence[Message]) -> Sample:
    """The conversation as one sample: weight 1 on assistant turns, each with its end-of-turn
    token.
    """
    token_ids, sampled = renderer.encode(messages)
    return Sample(
        token_ids=tuple(token_ids),
        weights=tuple(map(float, sampled)),
    )
