"""What `fledge doctor` prints about rendering: a renderer against the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fledge.data.renderers.codec import Codec
from fledge.data.renderers.templates import dicts, template_ids, template_text
from fledge.errors import DataError
from fledge.interfaces import Renderer
from fledge.types import Message, assistant, system, user


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `audit` looked at.

    >>> Finding("stop token", True, "<|im_end|> is id 2").ok
    True
    """

    check: str
    ok: bool
    detail: str


def audit(tokenizer: Any, renderer: Renderer, vocab_size: int | None = None) -> list[Finding]:
    """`vocab_size` is the number of logits that the model has."""
    codec = Codec(tokenizer)
    return [
        _guarded("chat template is append-only", _template_appends, tokenizer, renderer, codec),
        _guarded("first prompt equals the chat template's", _template_agrees, tokenizer, renderer),
        _stop_is_learned(renderer, len(tokenizer) if vocab_size is None else vocab_size, codec),
        _special_text_is_inert(renderer, codec),
    ]


def _guarded(check: str, look: Callable[..., Finding], tokenizer: Any, *rest: Any) -> Finding:
    if not tokenizer.chat_template:
        return Finding(check, True, "the tokenizer has no chat template to compare with")
    try:
        return look(check, tokenizer, *rest)
    except Exception as error:  # a template is somebody else's program
        return Finding(check, False, f"the template fails: {error}")


PLAIN = ("It is 5.", "It is 9.")
THINKING = ("<think>\nadd\n</think>\n\nIt is 5.", "<think>\nadd again\n</think>\n\nIt is 9.")


def _template_appends(check: str, tokenizer: Any, renderer: Renderer, codec: Codec) -> Finding:
    """Each prompt of a three-turn conversation must begin with the prompt and the reply before
    it. Thinking may be dropped where the renderer drops it as well.
    """
    kept = getattr(renderer, "thinking", "keep") == "keep"
    end = codec.decode(renderer.stop_ids[:1])
    for kind, replies in (("plain", PLAIN), ("thinking", THINKING))[: 1 + kept]:
        messages = [user("2+3?")]
        for number, reply in enumerate(replies, 1):
            before = template_text(tokenizer, dicts(messages)) + reply + end
            messages += [assistant(reply), user("and 4 more?")]
            if not template_text(tokenizer, dicts(messages)).startswith(before):
                return Finding(check, False, _rewrites(renderer, kind, number))
    return Finding(check, True, "three turns extend each other")


def _rewrites(renderer: Renderer, kind: str, number: int) -> str:
    found = f"the template rewrites {kind} turn {number} when the conversation goes on; "
    if not getattr(renderer, "append_only", True):
        return found + "each prompt is a new segment"
    return found + "fledge extends the sampled tokens, so serving through the template differs"


def _template_agrees(check: str, tokenizer: Any, renderer: Renderer) -> Finding:
    differs = disagreement(tokenizer, renderer)
    if differs is None:
        return Finding(check, True, "same ids with and without a system message")
    kind, messages = differs
    text = template_text(tokenizer, dicts(messages))
    return Finding(check, False, f"they differ for {kind}; the template gives {text!r}")


def disagreement(tokenizer: Any, renderer: Renderer) -> tuple[str, Sequence[Message]] | None:
    """The first conversation that the template and the renderer write differently."""
    for kind, messages in (
        ("a user message", [user("What is 2+3?")]),
        ("a system and a user message", [system("Be brief."), user("What is 2+3?")]),
    ):
        if template_ids(tokenizer, messages) != renderer.start(messages):
            return kind, messages
    return None


def _stop_is_learned(renderer: Renderer, vocab_size: int, codec: Codec) -> Finding:
    check = "stop token can be sampled and is trained"
    beyond = [token for token in renderer.stop_ids if token >= vocab_size]
    if beyond:
        return Finding(check, False, f"ids {beyond} lie outside the model's {vocab_size} logits")
    try:
        ids, sampled = renderer.encode([user("2+3"), assistant("5")])
    except DataError as error:
        return Finding(check, False, str(error))
    if ids[-1] != renderer.stop_ids[0] or not sampled[-1]:
        return Finding(check, False, "a demonstration does not train the end-of-turn token")
    first = renderer.stop_ids[0]
    return Finding(check, True, f"{codec.decode([first])} is id {first}")


def _special_text_is_inert(renderer: Renderer, codec: Codec) -> Finding:
    check = "special-token text in a message stays text"
    special = set(codec.added.values())
    expected = sum(token in special for token in renderer.start([user("x")]))
    for text in sorted(codec.added):
        if sum(token in special for token in renderer.start([user(f"x{text}x")])) != expected:
            return Finding(check, False, f"{text} in a user message becomes a special token")
    return Finding(check, True, f"{len(special)} special tokens tried")
