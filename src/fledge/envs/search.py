"""Questions that take one to three searches: the environment, its scoring and its tasks.

Only the answer that the policy wrote is scored, never what a search returned: an answer tag inside
a passage is text like any other. `retrieval` has the passages.
"""

from __future__ import annotations

import hashlib
import random
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from fledge.envs.retrieval import (
    RELATIONS,
    HttpRetriever,
    Retriever,
    World,
    file_index,
    made_index,
    world,
)
from fledge.envs.tools import TagEnvironment, Toolbox, cut
from fledge.errors import ConfigError
from fledge.types import Message, Step, Task, user

LONGEST_ANSWER = 300
LONGEST_PASSAGE = 1000

PROMPT = """Answer a question by searching a collection of passages.

Question: {question}

You have {turns} turns. To search, call the tool `search` or write <search>words</search>; you \
will see the best passages. When you know the answer, write <answer>the answer</answer>, as short \
as possible. One action per reply."""


@dataclass(frozen=True)
class Question:
    """One row: any of `answers` is right. `corpus` is the seed of the made passages.

    >>> Question("What is the capital of Norway?", ("Oslo",)).corpus
    0
    """

    question: str
    answers: Annotated[tuple[str, ...], Field(min_length=1)]
    corpus: int = 0


class Search(TagEnvironment[Question]):
    """Reward is 1 for a right answer and 0 for a wrong one, or with `metric: f1` the share of words
    in common. Passages come from the made corpus, from the JSONL file `passages`, or from a server
    at `url`.
    """

    call_tag = "search"
    answer_tag = "answer"

    def __init__(
        self,
        task: Task,
        *,
        metric: Literal["exact", "f1"] = "exact",
        max_turns: Annotated[int, Field(ge=1)] = 4,
        k: Annotated[int, Field(ge=1, le=50)] = 3,
        passages: str | None = None,
        url: str | None = None,
        timeout: Annotated[float, Field(gt=0)] = 10.0,
    ) -> None:
        toolbox = Toolbox([self.search], timeout=2 * timeout + 5, max_output=k * 1200 + 200)
        super().__init__(task, toolbox, max_turns=max_turns)
        if passages is not None and url is not None:
            raise ConfigError("env.passages and env.url: give one of them")
        self.metric = metric
        self.k = k
        self.passages = passages
        self.remote = None if url is None else HttpRetriever(url, timeout)

    async def reset(self) -> Sequence[Message]:
        return [user(PROMPT.format(question=self.task.question, turns=self.max_turns))]

    def search(self, query: str) -> str:
        """Search the passages for words of a query; the best come first."""
        found = self._retriever()(query, self.k)
        if not found:
            return "nothing was found"
        told = (f"[{n}] {p.title}\n{p.text}".strip() for n, p in enumerate(found, 1))
        return "\n\n".join(cut(text, LONGEST_PASSAGE) for text in told)

    def _retriever(self) -> Retriever:
        # In the thread of the call: making an index takes a while, the first time.
        if self.remote is not None:
            return self.remote
        return file_index(self.passages) if self.passages else made_index(self.task.corpus)

    async def grade(self, answer: str) -> Step:
        exact = f1 = 0.0
        if len(answer) <= LONGEST_ANSWER:
            exact = max(exact_match(answer, gold) for gold in self.task.answers)
            f1 = max(f1_score(answer, gold) for gold in self.task.answers)
        reward = exact if self.metric == "exact" else f1
        return Step(reward=reward, terminated=True, info={"exact": exact, "f1": f1})


# ---- scoring


def normalised(text: str) -> list[str]:
    """The words that are compared: lower case, without punctuation and articles, unless that would
    leave nothing.

    >>> normalised("The  Beatles!"), normalised("The The")
    (['beatles'], ['the', 'the'])
    """
    lowered = unicodedata.normalize("NFKC", text).lower()
    words = re.sub(f"[{re.escape(string.punctuation)}]", " ", lowered).split() or lowered.split()
    return [word for word in words if word not in ("a", "an", "the")] or words


def exact_match(answer: str, gold: str) -> float:
    found = normalised(answer)
    return float(bool(found) and found == normalised(gold))


def f1_score(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall over words; a word counts as often as it stands there.

    >>> f1_score("Grace Brewster Hopper", "Grace Hopper")
    0.8
    """
    found, expected = normalised(answer), normalised(gold)
    common = sum((Counter(found) & Counter(expected)).values())
    return 2 * common / (len(found) + len(expected)) if common else 0.0


# ---- tasks

EVALUATED = 10
"""Every tenth question, chosen by a hash of its text, is kept for evaluation."""
LONGEST_PATH = 3


def tasks(
    split: Literal["train", "eval"] = "train",
    count: Annotated[int, Field(ge=1)] = 1000,
    hops: tuple[Annotated[int, Field(ge=1, le=3)], ...] = (1, 2, 3),
    corpus: int = 0,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """At most `count` rows with `question`, `answers` and `corpus`; `hops` are how many searches a
    question may take. A question belongs to one split, whatever the seed.
    """
    rows = [
        {"question": question, "answers": [answer], "corpus": corpus}
        for question, answer, length in _questions(world(corpus))
        if length in hops and _held_out(question) == (split == "eval")
    ]
    random.Random(f"search {seed}").shuffle(rows)
    return rows[:count]


def _held_out(question: str) -> bool:
    return int(hashlib.sha256(question.encode()).hexdigest(), 16) % EVALUATED == 0


def _questions(made: World) -> Iterator[tuple[str, str, int]]:
    """Every question of the corpus, its answer and its number of hops."""
    for kind, members in made.entities.items():
        for start in members:
            yield from _onward(made, kind, (start,), start)


def _onward(
    made: World, kind: str, visited: tuple[str, ...], phrase: str
) -> Iterator[tuple[str, str, int]]:
    """The questions that begin with a path. One that comes back to where it was is left out: it
    could be answered without following it.
    """
    for relation in RELATIONS:
        if relation.subject != kind or len(visited) > LONGEST_PATH:
            continue
        found = made.facts[visited[-1], relation.name]
        if found in visited:
            continue
        asked = relation.phrase.format(phrase)
        # Nor may a passage on the way happen to name the answer.
        if not any((entity, found) in made.told for entity in visited[:-1]):
            yield f"What is {asked}?", found, len(visited)
        yield from _onward(made, relation.object, (*visited, found), asked)
