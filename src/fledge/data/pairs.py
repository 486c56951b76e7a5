"""Preference pairs: rows to two conversations with one prompt, conversations to samples.

Of a policy's pair only the replies are trained: what the assistant says after the prompt, known
from provenance. Of a reward model's pair only the end of each reply is: the place after its last
token, which is predicted from the whole conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fledge.errors import DataError
from fledge.interfaces import Renderer
from fledge.messages import messages_of
from fledge.types import Message, Pair, Sample, assistant

FIELDS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True)
class Comparison:
    """A row as messages.

    >>> row = {"prompt": "2+2", "chosen": "4", "rejected": "5"}
    >>> [m.content for m in comparison_of(row, "row 1").rejected]
    ['5']
    """

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def comparison_of(row: Mapping[str, Any], where: str) -> Comparison:
    """`{"prompt": ..., "chosen": ..., "rejected": ...}`, each of them text or a list of messages;
    `where` is the key and the row that an error names.
    """
    missing = [name for name in FIELDS if name not in row]
    if missing:
        fields = ", ".join(map(str, row)) or "none"
        raise DataError(
            f"{where} has no {missing[0]!r}: a pair needs `prompt`, `chosen` and `rejected` (it "
            f"has: {fields})"
        )
    prompt = messages_of(row["prompt"], f"{where}: prompt")
    chosen, rejected = (_reply(row[name], prompt, f"{where}: {name}") for name in FIELDS[1:])
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are the same, so nothing is preferred")
    return Comparison(prompt, chosen, rejected)


def _reply(value: object, prompt: Sequence[Message], where: str) -> list[Message]:
    """What comes after the prompt. Many data sets repeat the prompt in each half; that is taken
    off.
    """
    if isinstance(value, str):
        reply = [assistant(value)]
    else:
        reply = messages_of(value, where)
        if reply[: len(prompt)] == list(prompt):
            reply = reply[len(prompt) :]
    if not reply or reply[0].role != "assistant" or reply[-1].role != "assistant":
        raise DataError(
            f"{where}: must be a reply: text, or messages that begin and end with one of the "
            "assistant (the prompt may come before them)"
        )
    if not any(m.content for m in reply if m.role == "assistant"):
        raise DataError(f"{where}: the reply is empty")
    return reply


def encode_pair(renderer: Renderer, row: Mapping[str, Any], where: str) -> Pair:
    """For a policy: the tokens of both replies are trained, each with its end-of-turn token."""
    found = comparison_of(row, where)
    start = renderer.start(found.prompt)

    def half(name: str, reply: Sequence[Message]) -> Sample:
        ids, sampled = renderer.encode([*found.prompt, *reply])
        if ids[: len(start)] != start:
            raise DataError(
                f"{where}: {name}: the tokens of the conversation do not begin with those of its "
                "prompt, so what would be trained is not what the model would be asked"
            )
        trained = (0.0 if place < len(start) else float(s) for place, s in enumerate(sampled))
        return Sample(tuple(ids), tuple(trained))

    return Pair(half("chosen", found.chosen), half("rejected", found.rejected))


def encode_scored_pair(renderer: Renderer, row: Mapping[str, Any], where: str) -> Pair:
    """For a reward model: each conversation has one score, at its end."""
    found = comparison_of(row, where)
    return Pair(
        scored_sample(renderer, [*found.prompt, *found.chosen]),
        scored_sample(renderer, [*found.prompt, *found.rejected]),
    )


def scored_sample(renderer: Renderer, messages: Sequence[Message]) -> Sample:
    """One more place after the end-of-turn token: the hidden state before it has seen everything.
    What the token there would be plays no part.
    """
    ids, _ = renderer.encode(messages)
    return Sample((*ids, 0), (*([0.0] * len(ids)), 1.0))
