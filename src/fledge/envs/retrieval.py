"""Passages: a made corpus, a full-text index over passages, and retrievers behind HTTP.

A retriever is a blocking `(query, k) -> passages`. An index is SQLite's FTS5 in memory, shared by
all episodes; an HTTP retriever may be any server. A retriever that cannot answer raises
`ToolFailure`: a policy must not learn that a search found nothing because a server was down.
"""

from __future__ import annotations

import functools
import http.client
import json
import random
import re
import sqlite3
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fledge.envs.tools import ToolFailure
from fledge.errors import ConfigError, DataError

LONGEST_BODY = 4_000_000
MOST_WORDS = 32
"""Of a query; the rest is ignored."""


class Passage(NamedTuple):
    title: str
    text: str


Retriever = Callable[[str, int], list[Passage]]


# ---- the index


class Index:
    """Full-text search over passages, ranked by BM25; equal queries give equal answers.

    >>> Index([Passage("Oslo", "Oslo lies in Norway."), Passage("Rome", "A city.")])("norway", 1)
    [Passage(title='Oslo', text='Oslo lies in Norway.')]
    """

    def __init__(self, passages: Iterable[Passage]) -> None:
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text)")
        self._connection.executemany("INSERT INTO passages VALUES (?, ?)", passages)

    def __call__(self, query: str, k: int) -> list[Passage]:
        # Quoted words joined by OR: whatever a policy writes, it is never FTS syntax.
        words = re.findall(r"\w+", query)[:MOST_WORDS]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        order = "ORDER BY bm25(passages, 2.0, 1.0), rowid LIMIT ?"
        sql = f"SELECT title, text FROM passages WHERE passages MATCH ? {order}"
        with self._lock:
            return [Passage(*row) for row in self._connection.execute(sql, (match, k))]


@functools.lru_cache(maxsize=8)
def made_index(seed: int) -> Index:
    return Index(world(seed).passages)


def file_index(path: str) -> Index:
    """An index over a JSONL file with `title` and `text` per line, made once per version of it."""
    try:
        changed = Path(path).stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"env.passages: {path!r} cannot be read: {error.strerror}") from None
    return _file_index(path, changed)


@functools.lru_cache(maxsize=4)
def _file_index(path: str, changed: int) -> Index:
    passages = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            passages.append(_passage(json.loads(line)))
        except ValueError as error:
            raise DataError(f"env.passages: line {number} of {path!r}: {error}") from None
    return Index(passages)


# ---- HTTP


class HttpError(Exception):
    """A request that got no usable answer; `status` is 0 where there was none at all."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the request's headers, and a key among them, to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def check_url(url: str, key: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{key}: must start with http:// or https://")
    return url


def post_json(url: str, body: object, timeout: float, headers: Mapping[str, str]) -> Any:
    """The JSON that a server answers; blocks. Raises `HttpError` for anything else."""
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **headers},
        method="POST",
    )
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(request, timeout=timeout) as response:
            text = response.read(LONGEST_BODY + 1)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(300).decode("utf-8", "replace").strip()
        raise HttpError(f"status {error.code}: {said}", error.code) from None
    except (OSError, http.client.HTTPException) as error:
        raise HttpError(f"{type(error).__name__}: {error}") from None
    if len(text) > LONGEST_BODY:
        raise HttpError(f"the answer is longer than {LONGEST_BODY} bytes")
    try:
        return json.loads(text)
    except ValueError:
        raise HttpError("the answer is not JSON") from None


class HttpRetriever:
    """`POST {"query": ..., "k": ...}` to a server that answers `{"passages": [...]}` or a list; a
    passage is text, or an object with `text` and perhaps `title`.
    """

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        self.url = check_url(url, "env.url")
        self.timeout = timeout

    def __call__(self, query: str, k: int) -> list[Passage]:
        try:
            found = post_json(self.url, {"query": query, "k": k}, self.timeout, {})
            items = found.get("passages") if isinstance(found, Mapping) else found
            if not isinstance(items, list):
                raise ValueError("the answer has no list of passages")
            return [_passage(item) for item in items[:k]]
        except (HttpError, ValueError) as error:
            raise ToolFailure(f"env.url: the retriever failed: {error}") from None


def _passage(item: object) -> Passage:
    if isinstance(item, str):
        return Passage("", item)
    if not isinstance(item, Mapping) or not isinstance(item.get("text"), str):
        raise ValueError("a passage must be text or an object with a text")
    return Passage(str(item.get("title") or ""), item["text"])


# ---- a made world


class Relation(NamedTuple):
    """A fact with one answer: `phrase` asks for it, `sentence` states it."""

    name: str
    subject: str
    object: str
    phrase: str
    sentence: str


RELATIONS = (
    Relation("author", "book", "person", "the author of {}", "{0} was written by {1}."),
    Relation("publisher", "book", "company", "the publisher of {}", "{0} is published by {1}."),
    Relation("birthplace", "person", "city", "the birthplace of {}", "{0} was born in {1}."),
    Relation("employer", "person", "company", "the employer of {}", "{0} works for {1}."),
    Relation("teacher", "person", "person", "the teacher of {}", "{0} was taught by {1}."),
    Relation("founder", "company", "person", "the founder of {}", "{0} was founded by {1}."),
    Relation("seat", "company", "city", "the home city of {}", "{0} has its seat in {1}."),
    Relation("country", "city", "country", "the country of {}", "{0} is a city in {1}."),
    Relation("river", "city", "river", "the river of {}", "{0} lies on the river {1}."),
    Relation("currency", "country", "currency", "the currency of {}", "In {0} one pays in {1}."),
)
SIZES = {"book": 80, "person": 80, "company": 30, "city": 40, "country": 12, "river": 15,
         "currency": 12}  # fmt: skip
FILLERS = (
    "Little is known about the early years.",
    "Several guides mention it in passing.",
    "Opinions about this have changed over time.",
    "A longer account is kept in the archive.",
)


class World(NamedTuple):
    """Entities by kind, one object for each relation of each subject (`facts`), which subject's
    passage tells of which object, and a passage per entity.
    """

    entities: dict[str, list[str]]
    facts: dict[tuple[str, str], str]
    told: set[tuple[str, str]]
    passages: list[Passage]


@functools.lru_cache(maxsize=8)
def world(seed: int) -> World:
    """Everything follows from the seed; no name is used twice."""
    dice = random.Random(f"world {seed}")
    names = _names(dice)
    entities = {kind: [next(names[kind]) for _ in range(n)] for kind, n in SIZES.items()}
    facts: dict[tuple[str, str], str] = {}
    passages: list[Passage] = []
    for kind, members in entities.items():
        for entity in members:
            own = [relation for relation in RELATIONS if relation.subject == kind]
            for relation in own:
                others = [name for name in entities[relation.object] if name != entity]
                facts[entity, relation.name] = dice.choice(others)
            passages.append(_told(entity, own, facts, dice))
    told = {(subject, found) for (subject, _), found in facts.items()}
    return World(entities, facts, told, passages)


def _told(
    entity: str,
    relations: list[Relation],
    facts: Mapping[tuple[str, str], str],
    dice: random.Random,
) -> Passage:
    told = [r.sentence.format(entity, facts[entity, r.name]) for r in relations]
    told += dice.sample(FILLERS, 2)
    dice.shuffle(told)
    return Passage(entity, " ".join(told))


def _names(dice: random.Random) -> dict[str, Iterator[str]]:
    """No word is part of two names: a guess at a common part would earn a share of an answer."""
    words = _words(dice)

    def some(pattern: str) -> Iterator[str]:
        while True:
            yield re.sub("_", lambda _: next(words), pattern)

    return {
        "book": some("The _ of _"),
        "person": some("_ _"),
        "company": some("_-_"),
        "city": some("_"),
        "country": some("_"),
        "river": some("_"),
        "currency": some("_"),
    }


def _words(dice: random.Random) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        parts = (dice.choice("bdfgklmnprstvz") + dice.choice("aeiou") for _ in range(3))
        word = "".join(parts).capitalize() + dice.choice(("", "n", "r", "s", "l"))
        if word not in seen:
            seen.add(word)
            yield word
