"""Reading messages out of rows: the one place where a prompt becomes `Message` records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fledge.errors import DataError
from fledge.types import Message

ROLES = ("system", "user", "assistant", "tool")


def messages_of(value: object, where: str) -> list[Message]:
    """A prompt as messages; `where` is the field that an error names.

    >>> messages_of("2+2", "prompt")[0].role
    'user'
    >>> messages_of([{"role": "system", "content": "Add."}], "prompt")[0].role
    'system'
    """
    if isinstance(value, str):
        return [Message("user", value)]
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"{where}: must be text or a list of messages, got {_short(value)}")
    return [_message(item, f"{where}[{index}]") for index, item in enumerate(value)]


def _message(item: object, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f'{where}: must be {{"role": ..., "content": ...}}, got {_short(item)}')
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise DataError(f"{where}.role: must be one of {', '.join(ROLES)}, got {_short(role)}")
    if not isinstance(content, str):
        raise DataError(f"{where}.content: must be text, got {_short(content)}")
    return Message(role, content)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
