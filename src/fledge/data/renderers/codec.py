"""Text to ids in which only our own markup can become a special token.

Pieces of text are plain strings, or `Markup` where they are ours. Everything between two special
tokens is tokenised together, as a tokenizer does with a rendered chat template, so a piece of a
user's text merges with the markup beside it exactly as there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fledge.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Markup(str):
    """Text of a renderer, in which special tokens are found. Joined to a plain string it is a plain
    string again: whoever forgets about it gets harmless text.
    """

    __slots__ = ()


class Codec:
    """A private copy of a tokenizer with every added token switched off in text.

    Tokens that are added but not marked special (`<tool_call>` of Qwen) are switched off, too: a
    user could forge a tool's answer with them.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        self.name = name_of(tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(
                f"model.path: {self.name} has no fast tokenizer (tokenizer.json), "
                f"which exact rendering needs"
            )
        content = json.loads(backend.to_str())
        self._special: dict[str, int] = {
            a["content"]: a["id"] for a in content["added_tokens"] if a["special"]
        }
        self._added: dict[str, int] = {a["content"]: a["id"] for a in content["added_tokens"]}
        for entry in content["added_tokens"]:
            entry["special"] = True
        # What a vocabulary lacks is lost; it must not become a special token instead.
        if content["model"].get("unk_token") in self._added:
            content["model"]["unk_token"] = None
        content["truncation"] = content["padding"] = None
        self.backend: Tokenizer = Tokenizer.from_str(json.dumps(content))
        self.backend.encode_special_tokens = True
        longest_first = sorted(self._added, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._check_inert()

    @property
    def added(self) -> dict[str, int]:
        """Every added token and its id; none of these ids can come from text."""
        return dict(self._added)

    def encode(self, pieces: Iterable[str]) -> list[int]:
        ids: list[int] = []
        run = ""
        for piece in pieces:
            if not isinstance(piece, Markup):
                run += piece
                continue
            # `split` with a group gives text and tokens by turns.
            for place, part in enumerate(self._pattern.split(piece)):
                if place % 2:
                    ids += [*self._plain(run), self._added[part]]
                    run = ""
                else:
                    run += part
        return ids + self._plain(run)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens included: a hidden one would change what a reply says."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text

    def has(self, *tokens: str) -> bool:
        return all(token in self._added for token in tokens)

    def special_id(self, token: str, speaks: str) -> int:
        """The id of a token that closes or opens turns; `speaks` is the family that needs it."""
        if token not in self._added:
            raise ModelError(
                f"model.path: {self.name} has no token {token}, so it does not speak {speaks}; "
                f"choose a chat model that does, or give its chat template"
            )
        if token not in self._special:
            raise ModelError(
                f"model.path: {self.name} does not mark {token} as special, "
                f"so user text could forge a turn wherever the model is served"
            )
        return self._special[token]

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids if text else []
        return ids

    def _check_inert(self) -> None:
        """A vocabulary may reach an added token by merges as well; then nothing can be done."""
        for token, number in self._added.items():
            if number in self._plain(f"a {token} b"):
                raise ModelError(
                    f"model.path: {self.name} turns the text {token} into its token even where "
                    f"that is switched off, so user text could forge it"
                )


def name_of(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
