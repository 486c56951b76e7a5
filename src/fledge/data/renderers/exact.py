"""The renderer of a known family: every token is put where it is by us, and nothing is tokenised
twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

from fledge.data.renderers.codec import Codec, Markup
from fledge.data.renderers.families import CHATML, FORMATS, Family
from fledge.data.renderers.thinking import split_thinking, thinks, write_thinking
from fledge.data.renderers.toolcalls import ToolFormat
from fledge.types import Message, Tool

Thinking = Literal["keep", "strip"]


class FamilyRenderer:
    """A `Renderer` from the pieces of a family.

    An assistant's turn is its header, then its text tokenised alone: the way in which it is
    sampled. Other turns are tokenised with their header, as chat templates do.
    """

    append_only = True

    def __init__(
        self,
        tokenizer: Any,
        family: Family = CHATML,
        *,
        thinking: Thinking = "keep",
        tool_format: str = "auto",
    ) -> None:
        self.family = family
        self.thinking = thinking
        self.codec = codec = Codec(tokenizer)
        codec.special_id(family.start, family.speaks)
        self._end_id = codec.special_id(family.end, family.speaks)
        self.format = FORMATS[family.tool_format if tool_format == "auto" else tool_format]
        others = [codec.added[text] for text in family.also_ends if codec.has(text)]
        self._ends = (self._end_id, *others)
        eos = tokenizer.eos_token_id
        self._stop_ids = self._ends if eos is None or eos in self._ends else (*self._ends, eos)
        self._gap = codec.encode([family.gap])
        self._opening = codec.encode([family.head("assistant")])

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end-of-turn token, then others that end a reply."""
        return self._stop_ids

    def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The whole prompt, the assistant's header included."""
        ids = [token for token, _ in self._conversation(messages, tools)]
        return ids + self._opening

    def extend(
        self, previous: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int] | None:
        """`previous` (prompt and reply, exactly as sampled), then `messages` and the assistant's
        header.

        A reply that was cut short gets its end-of-turn token here, as context. None where the
        prompt would have to change: thinking that is to be dropped, or tools that `previous` was
        not told of. No tools mean those that it was told of.
        """
        if tools and not self._announced(previous, tools):
            return None
        if self.thinking == "strip" and asks(messages) and self._has_thought(previous):
            return None
        ids = list(previous)
        if not ids or ids[-1] not in self._ends:
            ids.append(self._end_id)
        ids += self._gap
        ids += (token for token, _ in self._turns(messages, tools))
        return ids + self._opening

    def parse(self, completion: Sequence[int], tools: Sequence[Tool] = ()) -> Message:
        """A reply without its stop token: what it thought, what it said, and its calls. Other
        special tokens stay visible: hiding one would let a reply that is not the answer read like
        it.
        """
        text = self.codec.decode(without_stop(completion, self._stop_ids))
        return parse_reply(text, self.format, tools)

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[list[int], list[bool]]:
        """A finished conversation, and for each token whether an assistant would have sampled it.

        It ends with the last end-of-turn token, as a sampled episode does.
        """
        pairs = list(self._conversation(messages, tools))
        if pairs and self._gap:
            pairs = pairs[: -len(self._gap)]
        return [token for token, _ in pairs], [sampled for _, sampled in pairs]

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> Iterator[tuple[int, bool]]:
        if not messages and not tools:
            return
        family, rest = self.family, list(messages)
        if family.begin and self.codec.has(family.begin):
            yield self.codec.added[family.begin], False
        given = rest.pop(0).content if rest and rest[0].role == "system" else None
        asked = family.announces_in == "user" and bool(rest) and rest[0].role == "user"
        body = self._system(given, tools, announce=not asked)
        if body is not None:
            yield from self._context("system", body)
        if asked and tools:
            content = family.text(rest.pop(0).content)
            yield from self._context("user", [*self.format.announce(tools), content])
        yield from self._turns(rest, tools, last_question(rest))

    def _system(
        self, given: str | None, tools: Sequence[Tool], *, announce: bool
    ) -> list[str] | None:
        """The first system turn; None where there is nothing to say in it."""
        family = self.family
        content = given if given is not None else family.default_system or None
        announcement = self.format.announce(tools) if tools and announce else []
        if content is None and not announcement and not family.preamble:
            return None
        preamble = family.preamble
        if tools and preamble:
            preamble = family.tools_preamble + preamble
        pieces: list[str] = [Markup(preamble)]
        if content is not None:
            pieces.append(family.text(content))
            pieces += ["\n\n"] if announcement else []
        return pieces + announcement

    def _turns(
        self, messages: Sequence[Message], tools: Sequence[Tool], question: int = 0
    ) -> Iterator[tuple[int, bool]]:
        """Turns with their provenance; thinking before the place `question` is past."""
        for answers, numbered in groupby(enumerate(messages), lambda item: item[1].role == "tool"):
            if answers:
                yield from self._answers([message.content for _, message in numbered])
                continue
            for place, message in numbered:
                if message.role == "assistant":
                    yield from self._reply(message, tools, past=place < question)
                else:
                    yield from self._context(message.role, [self.family.text(message.content)])

    def _reply(
        self, message: Message, tools: Sequence[Tool], *, past: bool
    ) -> Iterator[tuple[int, bool]]:
        stripped = past and self.thinking == "strip" and bool(message.reasoning)
        pieces = [] if stripped else write_thinking(message.reasoning)
        pieces.append(message.content)
        if message.tool_calls:
            pieces += ["\n"] if message.content else []
            pieces += self.format.write(message.tool_calls, tools)
        yield from ((token, False) for token in self._opening)
        # Without its thinking a reply is not what an assistant would sample.
        sampled = not stripped
        yield from ((token, sampled) for token in self.codec.encode(pieces))
        yield self._end_id, sampled
        yield from ((token, False) for token in self._gap)

    def _answers(self, contents: Sequence[str]) -> Iterator[tuple[int, bool]]:
        """Answers of tools that come together: in one turn, or one turn each."""
        if not self.family.joins_answers:
            for content in contents:
                yield from self._context("tool", self.family.tool_answer(content))
            return
        pieces: list[str] = []
        for content in contents:
            pieces += [Markup("\n")] if pieces else []
            pieces += self.family.tool_answer(content)
        yield from self._context("tool", pieces)

    def _context(self, role: str, pieces: Sequence[str]) -> Iterator[tuple[int, bool]]:
        family = self.family
        ids = self.codec.encode([family.head(role), *pieces, Markup(family.end)])
        yield from ((token, False) for token in (*ids, *self._gap))

    def _announced(self, previous: Sequence[int], tools: Sequence[Tool]) -> bool:
        announcement = self.codec.decode(self.codec.encode(self.format.announce(tools)))
        return announcement in self.codec.decode(previous)

    def _has_thought(self, previous: Sequence[int]) -> bool:
        return has_thought(previous, self._opening, self.codec)


def parse_reply(
    text: str, form: ToolFormat, tools: Sequence[Tool], opened: bool = False
) -> Message:
    """The text of a reply as a message; `opened` where the prompt has begun the thinking."""
    reasoning, said = split_thinking(text, opened)
    content, calls = form.read(said, tools)
    return Message("assistant", content, calls, reasoning)


def without_stop(completion: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    ids = list(completion)
    return ids[:-1] if ids and ids[-1] in stop_ids else ids


def last_question(messages: Sequence[Message]) -> int:
    """The place of the last user message: where thinking is dropped, it is that before it."""
    return max((i for i, message in enumerate(messages) if message.role == "user"), default=0)


def asks(messages: Sequence[Message]) -> bool:
    return any(message.role == "user" for message in messages)


def has_thought(previous: Sequence[int], opening: Sequence[int], codec: Codec) -> bool:
    """Whether a reply in `previous` begins with thinking. A reply begins after the assistant's
    header, which no text can spell.
    """
    ids, head = list(previous), list(opening)
    places = (i + len(head) for i in range(len(ids)) if ids[i : i + len(head)] == head)
    return any(thinks(codec.decode(ids[place:])) for place in places)
