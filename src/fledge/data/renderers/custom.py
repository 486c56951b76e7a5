"""The renderer of every other model: its chat template, run on text and trusted with nothing.

Spellings of special tokens in messages are replaced before the template sees them and put back as
plain text after it. Whether the template appends, so that a conversation may be extended, is tried
at construction; where it does not, each prompt is a new segment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fledge.data.renderers.codec import Codec, Markup
from fledge.data.renderers.exact import (
    Thinking,
    asks,
    has_thought,
    last_question,
    parse_reply,
    without_stop,
)
from fledge.data.renderers.families import FORMATS
from fledge.data.renderers.templates import dicts, template_ids, template_text
from fledge.data.renderers.thinking import OPEN as THINK
from fledge.data.renderers.thinking import write_thinking
from fledge.data.renderers.toolcalls import described
from fledge.errors import DataError, ModelError
from fledge.types import Message, Tool, ToolCall, assistant, system, user

SAID = "Fine."
STAND_IN = "\ue000{number}\ue001"
"""Private characters: no template looks for them, and no user's text with them is left alone."""

STAND_INS = re.compile("\ue000(\\d+)\ue001")

Dicts = list[dict[str, Any]]


class TemplateRenderer:
    """A `Renderer` around the tokenizer's chat template, or around the text of another one."""

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        *,
        thinking: Thinking = "keep",
        tool_format: str = "auto",
    ) -> None:
        self.thinking = thinking
        self.codec = Codec(tokenizer)
        self._tokenizer = tokenizer
        self._template: str = template or tokenizer.chat_template
        if tool_format == "auto":
            tool_format = guessed_format(self._template)
        self.format = FORMATS[tool_format]
        self._spellings = sorted({*self.codec.added, "\ue000"}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._spellings)))
        self._learn(tokenizer.eos_token_id)
        self.reason = self._why_not_append_only()

    @property
    def append_only(self) -> bool:
        """Whether the template has shown that a prompt goes on where the one before it ended."""
        return not self.reason

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The token that the template writes after a reply, and the tokenizer's end of text."""
        return self._stop_ids

    def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The whole prompt, as the template writes it."""
        return [token for token, _ in self._conversation(messages, tools, prompt=True)]

    def extend(
        self, previous: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int] | None:
        """`previous`, then what the template writes after a reply; None where that is not known."""
        if not self.append_only:
            return None
        if self.thinking == "strip" and asks(messages) and self._has_thought(previous):
            return None
        if tools and not self._announced(previous, tools):
            return None
        added = self._after_reply(messages, tools)
        if added is None:
            return None
        ids = list(previous)
        if not ids or ids[-1] != self._end_id:
            ids.append(self._end_id)
        return ids + self.codec.encode([Markup(self._gap), *added])

    def parse(self, completion: Sequence[int], tools: Sequence[Tool] = ()) -> Message:
        text = self.codec.decode(without_stop(completion, self._stop_ids))
        return parse_reply(text, self.format, tools, self._opens_thinking)

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[list[int], list[bool]]:
        """A finished conversation with provenance. Where the template rewrites what is past, only
        the last reply is what an assistant would sample.
        """
        pairs = self._conversation(messages, tools, prompt=False)
        gap = len(self.codec.encode([Markup(self._gap)]))
        if messages and gap:
            pairs = pairs[:-gap]
        if messages and messages[-1].role == "assistant" and not pairs[-1][1]:
            raise DataError(
                "the chat template writes a reply differently from what a model is asked to go on "
                "from, so what an assistant would sample is not known; set model.template"
            )
        return [token for token, _ in pairs], [sampled for _, sampled in pairs]

    # --- what the template writes -----------------------------------------------------------------

    def _text(self, messages: Dicts, tools: Sequence[Any], *, prompt: bool) -> str:
        try:
            return template_text(
                self._tokenizer, messages, tools, prompt=prompt, template=self._template
            )
        except Exception as error:  # a template is somebody else's program
            raise DataError(
                f"the chat template refuses a conversation of "
                f"{', '.join(m['role'] for m in messages) or 'no messages'}: {error}"
            ) from error

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool
    ) -> list[tuple[int, bool]]:
        if not messages:
            return []
        past = last_question(messages) if self.thinking == "strip" else 0
        shown = [
            Message(m.role, m.content, m.tool_calls, tool=m.tool) if i < past else m
            for i, m in enumerate(messages)
        ]
        hidden = self._given(self._told(shown, tools), tools)
        offered = self._hidden([described(tool) for tool in tools])
        whole = self._text(hidden, offered, prompt=prompt)
        dropped = {i for i in range(past) if messages[i].reasoning}
        return self._chained(whole, hidden, offered, dropped) or self._in_one(
            whole, hidden, offered
        )

    def _chained(
        self, whole: str, messages: Dicts, tools: Sequence[Any], dropped: set[int]
    ) -> list[tuple[int, bool]] | None:
        """Reply after reply, each tokenised alone; None where the template does not append."""
        pairs: list[tuple[int, bool]] = []
        done = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # Some templates refuse a conversation without a user; then it is tokenised in one.
            before = self._text(messages[:i], tools, prompt=True) if i else ""
            after = self._text(messages[: i + 1], tools, prompt=False)
            closing = self._end + self._gap
            if not (before.startswith(done) and after.startswith(before) and i):
                return None
            if not (whole.startswith(after) and after.endswith(closing)):
                return None
            sampled = i not in dropped
            said = self._pieces(after[len(before) : -len(closing)])
            pairs += ((t, False) for t in self.codec.encode(self._pieces(before[len(done) :])))
            pairs += ((t, sampled) for t in (*self.codec.encode(said), self._end_id))
            pairs += ((t, False) for t in self.codec.encode([Markup(self._gap)]))
            done = after
        rest = self.codec.encode(self._pieces(whole[len(done) :]))
        return pairs + [(t, False) for t in rest]

    def _in_one(self, whole: str, messages: Dicts, tools: Sequence[Any]) -> list[tuple[int, bool]]:
        """A conversation that cannot be taken apart: context, but for a reply at its end."""
        closing = self._end + self._gap
        if messages[-1]["role"] == "assistant" and whole.endswith(closing) and messages[:-1]:
            before = self._text(messages[:-1], tools, prompt=True)
            if whole.startswith(before):
                said = self._pieces(whole[len(before) : -len(closing)])
                return [
                    *((t, False) for t in self.codec.encode(self._pieces(before))),
                    *((t, True) for t in (*self.codec.encode(said), self._end_id)),
                    *((t, False) for t in self.codec.encode([Markup(self._gap)])),
                ]
        return [(t, False) for t in self.codec.encode(self._pieces(whole))]

    def _after_reply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[str] | None:
        """What comes between a reply and the next one. The reply is a stand-in: a template that
        appends writes the same after any other.
        """
        call = ToolCall(tools[0].name if tools else "f", {})
        calls = (call,) if messages and messages[0].role == "tool" else ()
        base = self._given([user("Go."), Message("assistant", SAID, calls)], tools)
        offered = self._hidden([described(tool) for tool in tools])
        before = self._text(base, offered, prompt=False)
        after = self._text(base + self._given(messages, tools), offered, prompt=True)
        return self._pieces(after[len(before) :]) if after.startswith(before) else None

    # --- what it leaves out -----------------------------------------------------------------------

    def _told(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The conversation with a word about the tools, where the template has none."""
        if not tools or self._announces:
            return list(messages)
        announcement = "".join(self.format.announce(tools))
        first, rest = messages[0], list(messages[1:])
        if first.role == "system":
            return [system(f"{first.content}\n\n{announcement}"), *rest]
        return [system(announcement), first, *rest]

    def _given(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Dicts:
        return [self._one_given(message, tools) for message in messages]

    def _one_given(self, message: Message, tools: Sequence[Tool]) -> dict[str, Any]:
        """What the template is given. Thinking and calls that it would leave out are said."""
        found: dict[str, Any] = self._hidden(dicts([message])[0])
        if message.reasoning and not self._writes_thinking:
            del found["reasoning_content"]
            found["content"] = self._said(write_thinking(message.reasoning)) + found["content"]
        calls = [c for c in message.tool_calls if c.status != "ok" or not self._writes_calls]
        if calls:
            if not self._writes_calls:
                found.pop("tool_calls", None)
            gap = "\n" if found["content"] else ""
            found["content"] += gap + self._said(self.format.write(calls, tools))
        return found

    def _said(self, pieces: Sequence[str]) -> str:
        return "".join(p if isinstance(p, Markup) else self._hidden(p) for p in pieces)

    def _announced(self, previous: Sequence[int], tools: Sequence[Tool]) -> bool:
        text = self.codec.decode(previous)
        if self._announces:
            return all(tool.name in text for tool in tools)
        return "".join(self.format.announce(tools)) in text

    # --- text of others ---------------------------------------------------------------------------

    def _hidden(self, value: Any) -> Any:
        """The same with every spelling of a special token in it replaced by a stand-in."""
        if isinstance(value, str):
            return self._pattern.sub(
                lambda m: STAND_IN.format(number=self._spellings.index(m[0])), value
            )
        if isinstance(value, Mapping):
            return {self._hidden(k): self._shown_or_hidden(k, v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(item) for item in value]
        return value

    def _shown_or_hidden(self, key: str, value: Any) -> Any:
        return value if key == "role" else self._hidden(value)

    def _pieces(self, text: str) -> list[str]:
        """Stand-ins back to the text that they stand for; the rest may hold special tokens."""
        return [
            self._spellings[int(part)] if place % 2 else Markup(part)
            for place, part in enumerate(STAND_INS.split(text))
        ]

    # --- what is tried at construction ------------------------------------------------------------

    def _learn(self, eos: int | None) -> None:
        """How a turn opens and closes, from one question and one reply."""
        asked = dicts([user("Go.")])
        try:
            without = self._text(asked, [], prompt=False)
            prompt = self._text(asked, [], prompt=True)
            done = self._text(asked + dicts([assistant(SAID)]), [], prompt=False)
        except DataError as error:
            raise ModelError(f"model.path: {self.codec.name}: {error}") from error
        _, found, closing = done.rpartition(SAID)
        first = self.codec.encode([Markup(closing.strip() or " ")])[0]
        text = self.codec.decode([first])
        if not found or text not in self.codec.added:
            if eos is None:
                raise ModelError(
                    f"model.path: the chat template of {self.codec.name} writes no special token "
                    f"after a reply, so a reply cannot be seen to end"
                )
            first, text = eos, self.codec.decode([eos])
        self._end_id, self._end = first, text
        self._gap = closing.partition(text)[2]
        self._stop_ids = (first,) if eos in (None, first) else (first, eos)
        opening = prompt[len(without) :] if prompt.startswith(without) else ""
        self._opening = self.codec.encode([Markup(opening)])
        self._opens_thinking = prompt.rstrip().endswith(THINK)
        self._writes_thinking = self._tries("Hm.", Message("assistant", SAID, reasoning="Hm."))
        self._writes_calls = self._tries(
            "probe", Message("assistant", "", (ToolCall("probe", {}),))
        )
        probe = Tool("probe", "", {"type": "object", "properties": {}})
        self._announces = "probe" in self._text(asked, [described(probe)], prompt=True)
        theirs = template_ids(self._tokenizer, [user("Go.")], template=self._template)
        if self.codec.encode([Markup(prompt)]) != theirs:
            raise ModelError(
                f"model.path: {self.codec.name} tokenises text beside special tokens in a way of "
                f"its own, so fledge cannot render it exactly"
            )

    def _tries(self, word: str, reply: Message) -> bool:
        """Whether the template writes a word of a reply; one that fails on it does not."""
        try:
            return word in self._text(dicts([user("Go."), reply]), [], prompt=False)
        except DataError:
            return False

    def _why_not_append_only(self) -> str:
        """Empty where each prompt of three conversations begins with the prompt, the reply and the
        end of turn before it.
        """
        for kind, first in (("", [user("2+3?")]), (" system", [system("Add."), user("2+3?")])):
            messages = dicts(first)
            for number, reply in enumerate(("It is 5.", "It is 9."), 1):
                try:
                    before = self._text(messages, [], prompt=True) + reply + self._end + self._gap
                    messages += dicts([assistant(reply), user("and 4 more?")])
                    after = self._text(messages, [], prompt=True)
                except DataError as error:
                    if kind:
                        break  # a template without system messages
                    return str(error)
                if not after.startswith(before):
                    return f"the template rewrites turn {number} when the conversation goes on"
        return ""

    def _has_thought(self, previous: Sequence[int]) -> bool:
        if self._opens_thinking or not self._opening:
            return True
        return has_thought(previous, self._opening, self.codec)


def guessed_format(template: str) -> str:
    """The tool format that a template's own text shows; Hermes where it shows none."""
    if "<function=" in template:
        return "qwen_xml"
    if "<tool_call>" not in template and "ipython" in template:
        return "llama3"
    return "hermes"
