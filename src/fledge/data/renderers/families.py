"""What the families write around a message. A family is a handful of pieces of text; how they are
put together is in `exact.py`, once for all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fledge.data.renderers.codec import Markup
from fledge.data.renderers.templates import TODAY, dicts, template_text
from fledge.data.renderers.toolcalls import Hermes, ToolFormat, dumps
from fledge.data.renderers.toolcalls_llama import Llama3Json, Pythonic
from fledge.data.renderers.toolcalls_xml import QwenXml
from fledge.types import system, user

FORMATS: Mapping[str, ToolFormat] = {
    made.name: made for made in (Hermes(), Llama3Json(), Pythonic(), QwenXml())
}


@dataclass(frozen=True)
class Family:
    """`{start}{header}{text}{end}{gap}` for each turn, after `begin` once.

    `default_system` is said where the conversation has no system message; `preamble` comes before
    every one, given or not. `announces_in` is the turn that tells of the tools.
    """

    name: str
    speaks: str
    start: str
    header: str
    end: str
    gap: str
    roles: Mapping[str, str]
    tool_format: str
    tool_answer: Callable[[str], list[str]]
    joins_answers: bool
    announces_in: Literal["system", "user"]
    begin: str = ""
    also_ends: tuple[str, ...] = ()
    trims: bool = False
    default_system: str = ""
    preamble: str = ""
    tools_preamble: str = ""

    def head(self, role: str) -> Markup:
        return Markup(self.start + self.header.format(role=self.roles.get(role, role)))

    def text(self, content: str) -> str:
        return content.strip() if self.trims else content


def _tagged_answer(content: str) -> list[str]:
    return [Markup("<tool_response>\n"), content, Markup("\n</tool_response>")]


def _quoted_answer(content: str) -> list[str]:
    return [dumps(content)]


CHATML = Family(
    name="chatml",
    speaks="ChatML",
    start="<|im_start|>",
    header="{role}\n",
    end="<|im_end|>",
    gap="\n",
    roles={"tool": "user"},
    tool_format="hermes",
    tool_answer=_tagged_answer,
    joins_answers=True,
    announces_in="system",
)

SMOLLM2 = replace(
    CHATML,
    name="smollm2",
    default_system="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
)

LLAMA3 = Family(
    name="llama3",
    speaks="Llama 3",
    begin="<|begin_of_text|>",
    start="<|start_header_id|>",
    header="{role}<|end_header_id|>\n\n",
    end="<|eot_id|>",
    also_ends=("<|eom_id|>",),
    gap="",
    roles={"tool": "ipython"},
    tool_format="llama3",
    tool_answer=_quoted_answer,
    joins_answers=False,
    announces_in="user",
    trims=True,
    preamble=f"Cutting Knowledge Date: December 2023\nToday Date: {TODAY}\n\n",
    tools_preamble="Environment: ipython\n",
)

FAMILIES: Mapping[str, Family] = {f.name: f for f in (CHATML, SMOLLM2, LLAMA3)}


def fitted(family: Family, tokenizer: Any) -> Family:
    """The family with the system text that this tokenizer's own template adds: models of one family
    differ in nothing so often. Without a template, or with one that fails, as it is.
    """
    if not getattr(tokenizer, "chat_template", None):
        return family
    try:
        alone = _system_text(family, template_text(tokenizer, dicts([user("x")])))
        given = _system_text(family, template_text(tokenizer, dicts([system("S"), user("x")])))
    except Exception:  # a template is somebody else's program
        return family
    if given == "S":
        return replace(family, default_system=alone or "", preamble="")
    if given is not None and given == f"{alone}S":
        return replace(family, default_system="", preamble=alone or "")
    return family


def _system_text(family: Family, text: str) -> str | None:
    head = re.escape(family.head("system"))
    found = re.search(f"{head}(.*?){re.escape(family.end)}", text, re.DOTALL)
    return found[1] if found else None
