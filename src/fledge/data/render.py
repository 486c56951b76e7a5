"""Messages to tokens and back, exactly.

History is never tokenised again: `extend` appends to the ids as they were sampled, or returns None.
Text inside a message never becomes a special token. Known families (`renderers/families.py`) are
written by us; every other model by its chat template, under the same contract. `audit` compares all
this with the tokenizer's own template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from fledge.data.renderers.audit import Finding, audit, disagreement
from fledge.data.renderers.codec import name_of
from fledge.data.renderers.custom import TemplateRenderer
from fledge.data.renderers.exact import FamilyRenderer, Thinking
from fledge.data.renderers.families import CHATML, FAMILIES, LLAMA3, Family, fitted
from fledge.data.renderers.templates import template_ids
from fledge.errors import ConfigError
from fledge.types import Tool, user

__all__ = [
    "ChatMLRenderer",
    "FamilyRenderer",
    "Finding",
    "TemplateRenderer",
    "audit",
    "make_renderer",
]

FamilyName = Literal["auto", "chatml", "smollm2", "llama3", "template"]
ToolFormatName = Literal["auto", "hermes", "llama3", "pythonic", "qwen_xml"]

ChatMLRenderer = FamilyRenderer
"""`FamilyRenderer` of its first family."""

PROBE = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})


def make_renderer(
    tokenizer: Any,
    *,
    family: FamilyName = "auto",
    template: str | Path | None = None,
    thinking: Thinking = "keep",
    tool_format: ToolFormatName = "auto",
) -> FamilyRenderer | TemplateRenderer:
    """The renderer that fits a tokenizer; one that we cannot render exactly is refused by name.

    `auto` is the family whose tokens the tokenizer has, unless its chat template writes something
    else: then the template itself. `template` is the path of a Jinja file to use in its place.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if template is not None or family == "template":
        text = _read(template) if template is not None else None
        if text is None and not has_template:
            raise ConfigError(
                f"model.family: {name_of(tokenizer)} has no chat template; set model.template"
            )
        return TemplateRenderer(tokenizer, text, thinking=thinking, tool_format=tool_format)
    if family != "auto":
        chosen = fitted(FAMILIES[family], tokenizer)
        return FamilyRenderer(tokenizer, chosen, thinking=thinking, tool_format=tool_format)
    found = _family(tokenizer)
    if found is None and has_template:
        return TemplateRenderer(tokenizer, thinking=thinking, tool_format=tool_format)
    made = FamilyRenderer(
        tokenizer, fitted(found or CHATML, tokenizer), thinking=thinking, tool_format=tool_format
    )
    if has_template and _differs(tokenizer, made, tool_format):
        return TemplateRenderer(tokenizer, thinking=thinking, tool_format=tool_format)
    return made


def _family(tokenizer: Any) -> Family | None:
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    return next((f for f in (CHATML, LLAMA3) if f.start in added and f.end in added), None)


def _differs(tokenizer: Any, made: FamilyRenderer, tool_format: str) -> bool:
    """Whether the template runs and writes another first prompt, or announces tools otherwise."""
    try:
        if disagreement(tokenizer, made) is not None:
            return True
        asked = [user("2+3?")]
        told = template_ids(tokenizer, asked, [PROBE])
    except Exception:  # a template is somebody else's program; the audit tells of it
        return False
    # A template that says nothing of tools leaves it to us how they are announced.
    silent = told == template_ids(tokenizer, asked)
    return tool_format == "auto" and not silent and told != made.start(asked, [PROBE])


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.template: cannot read {path}: {error}") from error
