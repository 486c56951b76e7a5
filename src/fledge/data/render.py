"""Messages to tokens and back, exactly, in ChatML: `<|im_start|>{role}\\n{content}<|im_end|>\\n`.

History is never tokenised again: `extend` appends to the ids as they were sampled. Text inside a
message never becomes a special token. `audit` compares all this with the tokenizer's own chat
template; the template itself renders nothing here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fledge.errors import ModelError
from fledge.types import Message, Tool, assistant, system, user

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"


class ChatMLRenderer:
    """The `Renderer` of models that speak ChatML (Qwen, SmolLM2, the tiny model of this package).

    An assistant turn is its header, then its content tokenised alone: the way in which it is
    sampled. Other turns are tokenised with their header, as chat templates do.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(
                f"model.path: {_name(tokenizer)} has no fast tokenizer (tokenizer.json), "
                f"which exact rendering needs"
            )
        # A private copy: the switch below would change every other user of the tokenizer.
        self._backend: Tokenizer = copy.deepcopy(backend)
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self._start_id = self._special_id(TURN_START, tokenizer)
        self._end_id = self._special_id(TURN_END, tokenizer)
        eos = tokenizer.eos_token_id
        self._stop_ids = (self._end_id,) if eos in (None, self._end_id) else (self._end_id, eos)
        self._newline = self._encode("\n")
        self._opening = [self._start_id, *self._encode("assistant\n")]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end-of-turn token, and the tokenizer's end-of-text token where that is another."""
        return self._stop_ids

    def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The whole prompt, the assistant's header included."""
        ids = [token for message in messages for token, _ in self._turn(message)]
        return ids + self._opening

    def extend(
        self, previous: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int]:
        """`previous` (prompt and reply, exactly as sampled), then `messages` and the assistant's
        header.

        A reply that was cut short gets its end-of-turn token here, as context.
        """
        ids = list(previous)
        if not ids or ids[-1] != self._end_id:
            ids.append(self._end_id)
        ids += self._newline
        for message in messages:
            ids += (token for token, _ in self._turn(message))
        return ids + self._opening

    def parse(self, completion: Sequence[int]) -> Message:
        """The text of a reply without its stop token. Other special tokens stay visible: hiding one
        would let a reply that is not the answer read like it."""
        ids = list(completion)
        if ids and ids[-1] in self._stop_ids:
            ids.pop()
        return assistant(self._backend.decode(ids, skip_special_tokens=False))

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """A finished conversation, and for each token whether an assistant would have sampled it.

        It ends with the last end-of-turn token, as a sampled episode does.
        """
        turns = [pair for message in messages for pair in self._turn(message)]
        if turns:
            turns = turns[: -len(self._newline)]
        return [token for token, _ in turns], [sampled for _, sampled in turns]

    def _turn(self, message: Message) -> Iterator[tuple[int, bool]]:
        """The tokens of one message with their provenance, the newline after it included."""
        if message.role == "assistant":
            yield from ((token, False) for token in self._opening)
            yield from ((token, True) for token in self._encode(message.content))
            yield self._end_id, True
        else:
            yield self._start_id, False
            yield from ((t, False) for t in self._encode(f"{message.role}\n{message.content}"))
            yield self._end_id, False
        yield from ((token, False) for token in self._newline)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _special_id(self, text: str, tokenizer: Any) -> int:
        found: int | None = self._backend.token_to_id(text)
        if found is None:
            raise ModelError(
                f"model.path: {_name(tokenizer)} has no token {text}, so it does not speak ChatML; "
                f"choose a chat model that does"
            )
        if found in self._encode(f"a {text} b"):
            raise ModelError(
                f"model.path: {_name(tokenizer)} does not mark {text} as special, "
                f"so user text could forge a turn"
            )
        return found


def make_renderer(tokenizer: Any) -> ChatMLRenderer:
    """The renderer that fits a tokenizer; one that we cannot render exactly is refused by name."""
    return ChatMLRenderer(tokenizer)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `audit` looked at.

    >>> Finding("stop token", True, "<|im_end|> is id 2").ok
    True
    """

    check: str
    ok: bool
    detail: str


def audit(tokenizer: Any, renderer: ChatMLRenderer, vocab_size: int | None = None) -> list[Finding]:
    """What `fledge doctor` prints about rendering. `vocab_size` is the number of logits that the
    model has.
    """
    return [
        _guarded("chat template is append-only", _template_appends, tokenizer),
        _guarded("first prompt equals the chat template's", _template_agrees, tokenizer, renderer),
        _stop_is_learned(renderer, len(tokenizer) if vocab_size is None else vocab_size),
        _special_text_is_inert(tokenizer, renderer),
    ]


def _guarded(check: str, look: Callable[..., Finding], tokenizer: Any, *rest: Any) -> Finding:
    if not tokenizer.chat_template:
        return Finding(check, True, "the tokenizer has no chat template; fledge renders ChatML")
    try:
        return look(check, tokenizer, *rest)
    except Exception as error:  # a template is somebody else's program
        return Finding(check, False, f"the template fails: {error}")


PLAIN = ("It is 5.", "It is 9.")
THINKING = ("<think>\nadd\n</think>\n\nIt is 5.", "<think>\nadd again\n</think>\n\nIt is 9.")


def _template_appends(check: str, tokenizer: Any) -> Finding:
    """Each prompt of a three-turn conversation must begin with the prompt and the reply before
    it.
    """
    for kind, replies in (("plain", PLAIN), ("thinking", THINKING)):
        messages = [user("2+3?")]
        for number, reply in enumerate(replies, 1):
            before = _template_text(tokenizer, messages) + reply + TURN_END
            messages += [assistant(reply), user("and 4 more?")]
            if not _template_text(tokenizer, messages).startswith(before):
                return Finding(
                    check,
                    False,
                    f"the template rewrites {kind} turn {number} when the conversation goes on; "
                    f"fledge extends the sampled tokens, so serving through the template differs",
                )
    return Finding(check, True, "three turns extend each other")


def _template_agrees(check: str, tokenizer: Any, renderer: ChatMLRenderer) -> Finding:
    for kind, messages in (
        ("a user message", [user("What is 2+3?")]),
        ("a system and a user message", [system("Be brief."), user("What is 2+3?")]),
    ):
        theirs = tokenizer.apply_chat_template(
            _dicts(messages), tokenize=True, add_generation_prompt=True, return_dict=False
        )
        if list(theirs) != renderer.start(messages):
            text = _template_text(tokenizer, messages)
            return Finding(check, False, f"they differ for {kind}; the template gives {text!r}")
    return Finding(check, True, "same ids with and without a system message")


def _stop_is_learned(renderer: ChatMLRenderer, vocab_size: int) -> Finding:
    check = "stop token can be sampled and is trained"
    beyond = [token for token in renderer.stop_ids if token >= vocab_size]
    if beyond:
        return Finding(check, False, f"ids {beyond} lie outside the model's {vocab_size} logits")
    ids, sampled = renderer.encode([user("2+3"), assistant("5")])
    if ids[-1] != renderer.stop_ids[0] or not sampled[-1]:
        return Finding(check, False, "a demonstration does not train the end-of-turn token")
    return Finding(check, True, f"{TURN_END} is id {renderer.stop_ids[0]}")


def _special_text_is_inert(tokenizer: Any, renderer: ChatMLRenderer) -> Finding:
    check = "special-token text in a message stays text"
    special = set(tokenizer.all_special_ids)
    expected = sum(token in special for token in renderer.start([user("x")]))
    for text in sorted({*tokenizer.all_special_tokens, TURN_START, TURN_END}):
        if sum(token in special for token in renderer.start([user(f"x{text}x")])) != expected:
            return Finding(check, False, f"{text} in a user message becomes a special token")
    return Finding(check, True, f"{len(special)} special tokens tried")


def _template_text(tokenizer: Any, messages: Sequence[Message]) -> str:
    text: str = tokenizer.apply_chat_template(
        _dicts(messages), tokenize=False, add_generation_prompt=True
    )
    return text


def _dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
