"""What to do when a conversation no longer fits the model: shorten what the environment just said,
or forget the oldest exchanges. Both end in a prompt that fits, or in None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fledge.types import Message

CUT = "\n[... cut ...]\n"
Fits = Callable[[Sequence[int]], bool]


def squeeze(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], list[int] | None],
    fits: Fits,
) -> list[int] | None:
    """The longest version of `messages` that fits, each cut in its middle to the same length; found
    by halving.
    """
    low, high = 0, max((len(m.content) for m in messages), default=0)
    best: list[int] | None = None
    while low <= high:
        length = (low + high) // 2
        prompt = render([replace(m, content=shortened(m.content, length)) for m in messages])
        if prompt is not None and fits(prompt):
            best, low = prompt, length + 1
        else:
            high = length - 1
    return best


def shortened(text: str, length: int) -> str:
    """Its beginning and its end, with a mark between them.

    >>> shortened("0123456789", 4)
    '01\\n[... cut ...]\\n89'
    """
    if len(text) <= length:
        return text
    head = (length + 1) // 2
    tail = length - head
    return f"{text[:head]}{CUT}{text[len(text) - tail :]}"


def slide(
    messages: Sequence[Message],
    opening: int,
    render: Callable[[Sequence[Message]], list[int]],
    fits: Fits,
) -> list[int] | None:
    """The opening and as many of the latest exchanges as fit. An exchange begins with a reply, so
    that no answer stands without what it answers.
    """
    starts = [i for i in range(opening, len(messages)) if messages[i].role == "assistant"]
    for start in starts[1:]:
        prompt = render([*messages[:opening], *messages[start:]])
        if fits(prompt):
            return prompt
    return None
