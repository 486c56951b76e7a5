"""Running a tokenizer's chat template, which is somebody else's program: what it may be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fledge.data.renderers.toolcalls import described
from fledge.types import Message, Tool

TODAY = "26 Jul 2024"
"""For templates that ask for the date: a prompt must not depend on the day of the run."""


def template_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    prompt: bool = True,
    template: str | None = None,
) -> str:
    """What the template makes of a conversation; with `prompt`, up to where a reply begins."""
    text: str = tokenizer.apply_chat_template(
        list(messages),
        tools=list(tools) or None,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=prompt,
        date_string=TODAY,
    )
    return text


def template_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    template: str | None = None,
) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            dicts(messages),
            tools=[described(tool) for tool in tools] or None,
            chat_template=template,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            date_string=TODAY,
        )
    )


def dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the form that chat templates know. Calls that could not be read have no place
    in it.
    """
    return [_dict(message) for message in messages]


def _dict(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    calls = [
        {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
        for c in message.tool_calls
        if c.status == "ok"
    ]
    if calls:
        found["tool_calls"] = calls
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool:
        found["name"] = message.tool
    return found
