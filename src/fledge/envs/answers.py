r"""What the built-in environments share: what a reply says, the answer in it, the fields of a row,
and rows drawn for a split.

Everything reads text in linear time and never raises for what a policy wrote: an answer that cannot
be read is None. Nothing here gives a reward.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import deque
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, Literal

from fledge.errors import DataError
from fledge.types import Task

Split = Literal["train", "tuning", "eval"]
Row = dict[str, Any]

LONGEST_NUMBER = 40
"""Characters; more digits than that are no answer, and int() would refuse some of them."""

PATIENCE = 3000
"""Draws in a row without a new problem, after which a split counts as used up."""

_HIDDEN = re.compile(
    r"<think>.*?(?:</think>|\Z)"  # a thought, also one that was cut
    r"|<!--.*?(?:-->|\Z)"
    r"|^[ \t]*(`{3,}|~{3,}).*?(?:^[ \t]*\1[`~]*[ \t]*$|\Z)"  # a fenced block, also a cut one
    r"|^[ \t]*>[^\n]*$",  # a quotation
    re.DOTALL | re.MULTILINE,
)
_HASHES = re.compile(r"(?<!#)####(?!#)([^\n]*)")
_STARTS_A_NUMBER = re.compile(r"[-+\u2212$\u20ac\u00a3*\\(` \t]{0,8}[0-9.]")
_LABEL = re.compile(r"(?im)^[ \t*_#]*(?:the[ \t]+)?(?:final[ \t]+)?answer[ \t*_]*:([^\n]*)$")
_BOX = "\\boxed{"
_GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:[ ][0-9]{3})+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*[$\u20ac\u00a3]?\s*(?P<inner>-?)"
    rf"(?P<whole>{_GROUPED}|[0-9]+)?(?P<part>\.[0-9]*)?\s*(?P<unit>.*)",
    re.DOTALL,
)
_UNIT = re.compile(
    r"[%$\u20ac\u00a3\u00b0]|(?:[A-Za-z\u00b0'/. -]+(?:\^[23]|[\u00b2\u00b3])?){1,3}"
)
_SCALES = re.compile(r"\b(?:k|hundred|thousand|million|billion|trillion|or|and|not|to)\b", re.I)
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit|mbox)\{([^{}]*)\}")


def said(text: str) -> str:
    """The reply without its thoughts, quotations, comments and fenced blocks.

    An answer there is a plan, an echo or an example; only what is said in the open counts.

    >>> said("> write #### 7\\n<think>#### 8</think>So: #### 9").strip()
    'So: #### 9'
    """
    # Some templates open the thought in the prompt, so the reply holds only its end.
    _, _, rest = text.rpartition("</think>")
    return _HIDDEN.sub("", rest)


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""Place and content of the last `\boxed{...}`; None where it was never closed.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}")
    (15, '\\frac{1}{2}')
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    for place in range(start + len(_BOX), len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return start, text[start + len(_BOX) : place].strip()
    return start, ""


def last_tagged(text: str, tag: str) -> str | None:
    """Content of the last `<tag>...</tag>`; None when that tag was opened again and never closed.

    >>> last_tagged("<answer>1</answer> or <answer> 2 </answer>", "answer")
    '2'
    """
    _, opened, rest = text.rpartition(f"<{tag}>")
    content, closed, _ = rest.partition(f"</{tag}>")
    return content.strip() if opened and closed else None


def last_hashed(text: str) -> tuple[int, str] | None:
    """Place and rest of the line of the last `#### N`; a heading of words is none.

    >>> last_hashed("#### 7 eggs")
    (0, '7 eggs')
    """
    return _last(m for m in _HASHES.finditer(text) if _STARTS_A_NUMBER.match(m[1]))


def last_labelled(text: str) -> tuple[int, str] | None:
    """Place and rest of the last line that begins with `Answer:`.

    >>> last_labelled("Answer: 7")
    (0, '7')
    """
    return _last(_LABEL.finditer(text))


def latest(*found: tuple[int, str] | None) -> str | None:
    """The answer that stands last, whatever its form."""
    return max((f for f in found if f is not None), default=(0, None))[1]


def number_of(text: str) -> Fraction | None:
    r"""The one number that `text` is, whatever it is dressed in: currency, thousands, units, marks.

    Two numbers are none, and neither is a number with a word that changes it.

    >>> number_of("$1,450,000.00 dollars."), number_of(r"18\text{ eggs}")
    (Fraction(1450000, 1), Fraction(18, 1))
    >>> number_of("1 2 3 4"), number_of("4 or 5"), number_of("5 million")
    (None, None, None)
    """
    text = _undressed(text)
    if len(text) > 2 * LONGEST_NUMBER:
        return None
    found = _NUMBER.fullmatch(text)
    assert found is not None  # every part is optional
    digits = re.sub("[ ,]", "", found["whole"] or "") + (found["part"] or "").rstrip(".")
    unit = found["unit"].strip()
    if not digits or len(digits) > LONGEST_NUMBER or (found["sign"] and found["inner"]):
        return None
    if unit and (not _UNIT.fullmatch(unit) or _SCALES.search(unit)):
        return None
    return Fraction(digits) * (-1 if "-" in (found["sign"], found["inner"]) else 1)


def _undressed(text: str) -> str:
    """Without TeX and Markdown around it: r"\\$1{,}000^\\circ" is "$1,000"."""
    text = _WORDS.sub(r" \1 ", text[: 4 * LONGEST_NUMBER + 1])
    for old, new in _PLAIN:
        text = text.replace(old, new)
    text = text.strip(" \t\n*`")
    if text.startswith("$") and text.endswith("$") and len(text) > 1:
        text = text[1:-1]
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return text.strip().removesuffix(".").strip(" *")


_PLAIN = (
    ("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\,", ","), ("\\!", ""), ("\\;", " "), ("\\ ", " "),
    ("~", " "), ("\u00a0", " "), ("\u202f", " "), ("\u2009", " "), ("\u2212", "-"),
    ("^{\\circ}", "\u00b0"), ("^\\circ", "\u00b0"), ("\\(", ""), ("\\)", ""), ("**", ""),
)  # fmt: skip


def _last(matches: Iterable[re.Match[str]]) -> tuple[int, str] | None:
    found = deque(matches, maxlen=1)
    return (found[0].start(), found[0][1].strip()) if found else None


def field_of(task: Task, key: str, setting: str) -> Any:
    """A field of the task's row; `setting` is the argument that names it in a recipe."""
    if key not in task.data:
        raise DataError(
            f"env.{setting}: task {task.key!r} has no field {key!r} "
            f"(it has: {', '.join(map(str, task.data)) or 'none'})"
        )
    return task.data[key]


def text_of(task: Task, key: str, setting: str) -> str:
    """A field that must be text; a number is written out, as some data sets hold answers."""
    value = field_of(task, key, setting)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise DataError(f"env.{setting}: {key!r} of task {task.key!r} must be text, got {value!r}")
    return str(value)


def draw(
    make: Callable[[random.Random], Row], identity: Callable[[Row], str], split: Split, count: int,
    seed: int,
) -> list[Row]:  # fmt: skip
    """`count` distinct rows of a split, the same for the same seed.

    Which split a problem is in depends on a hash of its identity and nothing else, so no seed and
    no count moves a problem from one split to another.
    """
    dice = random.Random(f"{split}/{seed}")
    found: dict[str, Row] = {}
    misses = 0
    while len(found) < count:
        row = make(dice)
        name = identity(row)
        new = name not in found and split_of(name) == split
        if new:
            found[name] = row
        misses = 0 if new else misses + 1
        if misses > PATIENCE:
            raise DataError(
                f"data: count={count} is more than split {split!r} holds; {len(found)} distinct "
                "problems were found; make it smaller"
            )
    return list(found.values())


def split_of(identity: str) -> Split:
    """One in ten is for `eval`, one in ten for `tuning`.

    >>> split_of("345+67")
    'train'
    """
    bucket = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8]) % 10
    return "eval" if bucket == 0 else "tuning" if bucket == 1 else "train"
