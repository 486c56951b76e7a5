"""Thinking, `<think>` ... `</think>` at the beginning of a reply: written, and read back."""

from __future__ import annotations

from fledge.data.renderers.codec import Markup

OPEN, CLOSE = "<think>", "</think>"


def write_thinking(reasoning: str) -> list[str]:
    return [Markup(f"{OPEN}\n"), reasoning, Markup(f"\n{CLOSE}\n\n")] if reasoning else []


def thinks(text: str) -> bool:
    return text.lstrip().startswith(OPEN)


def split_thinking(text: str, opened: bool = False) -> tuple[str, str]:
    """The reasoning and what is said after it; `opened` where the prompt has written the tag.

    Thinking that was cut short is reasoning to the end: nothing in it was said.

    >>> split_thinking("<think>\\nadd\\n</think>\\n\\n5")
    ('add', '5')
    >>> split_thinking("<think>ad")
    ('ad', '')
    """
    if thinks(text):
        text = text.lstrip().removeprefix(OPEN)
    elif not opened:
        return "", text
    reasoning, _, rest = text.partition(CLOSE)
    return reasoning.strip(), rest.lstrip("\n")
