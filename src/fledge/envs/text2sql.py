"""Questions about a database, answered in SQL: the environment, its scoring and its tasks.

The policy may look at one database and is scored on two. The second has the same schema and other
rows, and nothing it returns is ever shown, so that an answer copied from the first is worth
nothing. The tasks are made here too; `databases` has the data and the guarded connection.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fledge.envs.databases import (
    DOMAINS,
    Column,
    Limits,
    Made,
    Result,
    Row,
    Source,
    SqlError,
    Table,
    query,
    reference,
    schema_of,
)
from fledge.envs.threads import in_thread
from fledge.envs.tools import TagEnvironment, Toolbox
from fledge.errors import DataError
from fledge.types import Message, Step, Task, user

SHOWN_ROWS = 20
SHOWN_CELL = 60
VARIANTS = (0, 1)
"""Of a made database: the one that is shown, and the hidden one."""

PROMPT = """Answer a question about a SQLite database with one SQL query.

{schema}

Question: {question}

You have {turns} turns. To look at the data, call the tool `sql` or write <sql>SELECT ...</sql>; \
you will see the result. When you are sure, write <solution>SELECT ...</solution> with the query \
that answers the question. It is also run on another database with the same schema. \
One action per reply."""


@dataclass(frozen=True)
class Question:
    """One row. The databases are either made (`domain`, `seed`) or two or more files of one schema,
    of which the first is shown.

    >>> Question("How many orders are there?", "SELECT COUNT(*) FROM orders", domain="shop").seed
    0
    """

    question: str
    gold: str
    domain: str = ""
    seed: int = 0
    databases: tuple[str, ...] = ()

    @property
    def sources(self) -> list[Source]:
        if self.databases:
            return [Path(name) for name in self.databases]
        return [Made(self.domain, self.seed, variant) for variant in VARIANTS]


class TextToSql(TagEnvironment[Question]):
    """Reward is 1 when the solution returns what the gold query returns on every database, 0 when
    it does not, and -1 for bad format or no solution within `max_turns`.
    """

    call_tag = "sql"
    answer_tag = "solution"
    bad_format_reward = -1.0
    unfinished_reward = -1.0

    def __init__(
        self,
        task: Task,
        *,
        max_turns: Annotated[int, Field(ge=1)] = 5,
        max_output: Annotated[int, Field(ge=100)] = 2000,
        max_work: Annotated[int, Field(ge=100_000)] = 20_000_000,
        query_seconds: Annotated[float, Field(gt=0)] = 5.0,
    ) -> None:
        # The query's own limit comes first, so that no thread outlives the toolbox's.
        toolbox = Toolbox([self.sql], timeout=2 * query_seconds + 5, max_output=max_output)
        super().__init__(task, toolbox, max_turns=max_turns)
        _check(self.task, task.key)
        self.limits = Limits(max_work, query_seconds)
        self.sources = self.task.sources

    async def reset(self) -> Sequence[Message]:
        schema = schema_of(self.sources[0])
        asked = self.task.question
        return [user(PROMPT.format(schema=schema, question=asked, turns=self.max_turns))]

    def sql(self, query: str) -> str:
        """Run one SELECT statement on the database and see its first rows."""
        return table_of(run(self.sources[0], query, SHOWN_ROWS, self.limits))

    async def grade(self, answer: str) -> Step:
        right = await in_thread(self._right, answer)
        return Step(reward=float(right), terminated=True)

    def _right(self, answer: str) -> bool:
        ordered = is_ordered(self.task.gold)
        for source in self.sources:
            try:
                expected = run(source, self.task.gold, limits=self.limits)
            except SqlError as error:
                raise DataError(f"env: task {self.key!r}: gold: {error}") from None
            try:
                found = run(source, answer, len(expected.rows), self.limits)
            except SqlError:
                return False
            if found.more or not same_rows(found.rows, expected.rows, ordered):
                return False
        return True


run = query
"""A method of `TextToSql` has a parameter named `query`, which is what the policy is told."""


def _check(question: Question, key: str) -> None:
    where = f"env: task {key!r}:"
    if question.databases and len(question.databases) < 2:
        raise DataError(f"{where} databases: name two or more; with one, constants would be right")
    if not question.databases and question.domain not in DOMAINS:
        known = ", ".join(DOMAINS)
        raise DataError(f"{where} domain: {question.domain!r} is not made here (known: {known})")
    for name in question.databases:
        if not Path(name).is_file():
            raise DataError(f"{where} databases: {name!r} is no file")


# ---- comparing


def same_rows(found: Sequence[Row], expected: Sequence[Row], ordered: bool) -> bool:
    """Equal as lists if `ordered`, else as multisets; names of columns play no part.

    >>> same_rows([(1.0,), ("a",)], [("a",), (1,)], ordered=False)
    True
    """
    ours, theirs = ([tuple(map(canonical, row)) for row in rows] for rows in (found, expected))
    return ours == theirs if ordered else Counter(ours) == Counter(theirs)


def canonical(value: Any) -> tuple[str, Any]:
    """What decides whether two values are equal: 2 and 2.0 are, 2 and '2' are not, and sums may
    differ in the digits that depend on the order of addition.

    >>> canonical(0.1 + 0.2) == canonical(0.3)
    True
    """
    if isinstance(value, float) and math.isfinite(value):
        exact = value if value.is_integer() else float(f"{value:.12g}")
        value = int(exact) if exact.is_integer() else exact
    return ("number" if isinstance(value, int | float) else type(value).__name__), value


IGNORED = re.compile(
    r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/", re.S
)


def is_ordered(sql: str) -> bool:
    """Whether the statement itself is sorted, not only a part of it.

    >>> is_ordered("SELECT a FROM (SELECT a FROM t ORDER BY a)")
    False
    """
    text = IGNORED.sub(" x ", sql)
    inner = None
    while inner != text:
        inner, text = text, re.sub(r"\([^()]*\)", " x ", text)
    return re.search(r"\border\s+by\b", text, re.IGNORECASE) is not None


def table_of(result: Result) -> str:
    """A result as text, bounded in rows and in the length of each value."""
    lines = [" | ".join(map(_cell, row)) for row in (result.columns, *result.rows)]
    count = len(result.rows)
    more = f"... cut, only the first {count} rows" if result.more else f"({count} rows)"
    return "\n".join([*lines, more])


def _cell(value: Any) -> str:
    text = "NULL" if value is None else str(value)
    return text if len(text) <= SHOWN_CELL else f"{text[: SHOWN_CELL - 3]}..."


# ---- tasks

EVALUATED = 10
"""Every tenth query, chosen by a hash of its text, is kept for evaluation."""
SEEDS = 20
"""Made databases per domain."""
LONGEST_RESULT = 40

Template = Callable[[Sequence[Table], random.Random], tuple[str, str]]


def tasks(
    split: Literal["train", "eval"] = "train",
    count: Annotated[int, Field(ge=1, le=20_000)] = 1000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows with `question`, `gold`, `domain` and `seed`. A gold query belongs to one split,
    whatever the seed; on both its databases it returns something, and not the same.
    """
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in _candidates(split, seed):
        name = (row["question"], row["domain"], row["seed"])
        if name not in found and _tells_apart(row):
            found[name] = row
            if len(found) == count:
                break
    return list(found.values())


def _candidates(split: str, seed: int) -> Iterator[dict[str, Any]]:
    dice = random.Random(f"text2sql {seed}")
    while True:
        domain = dice.choice(list(DOMAINS))
        question, gold = dice.choice(TEMPLATES)(DOMAINS[domain], dice)
        held_out = int(hashlib.sha256(gold.encode()).hexdigest(), 16) % EVALUATED == 0
        place = dice.randrange(SEEDS)
        if held_out == (split == "eval"):
            yield {"question": question, "gold": gold, "domain": domain, "seed": place}


def _tells_apart(row: dict[str, Any]) -> bool:
    """Whether the two databases give different answers, neither empty nor endless."""
    shown, hidden = (_gold_rows(row["gold"], row["domain"], row["seed"], v) for v in VARIANTS)
    for rows in (shown, hidden):
        if not 0 < len(rows) <= LONGEST_RESULT or rows[0] == (None,):
            return False
    return not same_rows(shown, hidden, ordered=False)


@functools.lru_cache(maxsize=4096)
def _gold_rows(gold: str, domain: str, seed: int, variant: int) -> list[Row]:
    return query(Made(domain, seed, variant), gold, LONGEST_RESULT + 1).rows


def _parent(tables: Sequence[Table], dice: random.Random) -> Table:
    return dice.choice([table for table in tables if not table.refers])


def _child(tables: Sequence[Table]) -> Table:
    return next(table for table in tables if table.refers)


def _pick(table: Table, role: str, dice: random.Random) -> Column:
    return dice.choice(table.of(role))


def _edge(tables: Sequence[Table], dice: random.Random) -> tuple[Table, Table, str]:
    """A table, one that refers to it, and how they are joined."""
    parent, child = _parent(tables, dice), _child(tables)
    join = f"ON {child.name}.{reference(parent.name)} = {parent.name}.id"
    return parent, child, join


def _sample(column: Column, dice: random.Random) -> Any:
    return column.draw(dice)


def _counted(tables: Sequence[Table], dice: random.Random) -> tuple[str, str]:
    table = dice.choice(list(tables))
    number = _pick(table, "number", dice)
    limit = _sample(number, dice)
    word, sign = dice.choice([("more than", ">"), ("less than", "<"), ("at least", ">=")])
    return (
        f"For how many {table.name} is the {number.words} {word} {limit}?",
        f"SELECT COUNT(*) FROM {table.name} WHERE {number.name} {sign} {limit}",
    )


def _sorted(tables: Sequence[Table], dice: random.Random) -> tuple[str, str]:
    table = _parent(tables, dice)
    label, kind, number = (_pick(table, role, dice) for role in ("label", "category", "number"))
    value = _sample(kind, dice)
    word, direction = dice.choice([("highest", "DESC"), ("lowest", "ASC")])
    return (
        f"List the {label.words} and {number.words} of all {table.name} whose {kind.words} is "
        f"'{value}', {word} {number.words} first, equal ones by {label.words}.",
        f"SELECT {label.name}, {number.name} FROM {table.name} WHERE {kind.name} = '{value}' "
        f"ORDER BY {number.name} {direction}, {label.name}",
    )


AGGREGATES = {"average": "AVG", "total": "SUM", "largest": "MAX", "smallest": "MIN"}


def _grouped(tables: Sequence[Table], dice: random.Random) -> tuple[str, str]:
    table = _parent(tables, dice)
    kind, number = _pick(table, "category", dice), _pick(table, "number", dice)
    word, function = dice.choice(list(AGGREGATES.items()))
    return (
        f"For each {kind.words} of the {table.name}, give the {kind.words} and the {word} "
        f"{number.words}.",
        f"SELECT {kind.name}, {function}({number.name}) FROM {table.name} GROUP BY {kind.name}",
    )


def _having(tables: Sequence[Table], dice: random.Random) -> tuple[str, str]:
    table = _parent(tables, dice)
    kind, least = _pick(table, "category", dice), dice.randint(3, 5)
    return (
        f"Which {kind.words} values are shared by {least} or more {table.name}?",
        f"SELECT {kind.name} FROM {table.name} GROUP BY {kind.name} HAVING COUNT(*) >= {least}",
    )


def _joined_count(tables: Sequence[Table], dice: random.Random) -> tuple[str, str]:
    parent, child, join = _edge(tables, dice)
    label = _pick(parent, "label", dice)
    return (
        f"Give the {label.words} of each of the {parent.name} and how many {child.name} refer to "
        f"it, also where there are none.",
        f"SELECT {parent.name}.{label.name}, COUNT({child.name}.id) FROM {parent.name} "
        f"LEFT JOIN {child.name} {join} GROUP BY {parent.name}.id",
    )


def _joined_total(tables: Sequence[Table], dice: random.Random) -> tuple[str, str]:
    parent, child, join = _edge(tables, dice)
    kind, number = _pick(parent, "category", dice), _pick(child, "number", dice)
    value = _sample(kind, dice)
    word, function = dice.choice(list(AGGREGATES.items()))
    return (
        f"What is the {word} {number.words} of the {child.name} that belong to {parent.name} whose "
        f"{kind.words} is '{value}'?",
        f"SELECT {function}({child.name}.{number.name}) FROM {child.name} "
        f"JOIN {parent.name} {join} WHERE {parent.name}.{kind.name} = '{value}'",
    )


def _top(tables: Sequence[Table], dice: random.Random) -> tuple[str, str]:
    parent, child, join = _edge(tables, dice)
    label, number = _pick(parent, "label", dice), _pick(child, "number", dice)
    count = dice.randint(2, 5)
    return (
        f"Which {count} {parent.name} have the largest total {number.words} over their "
        f"{child.name}? Give the {label.words} and the total, largest first, equal ones by "
        f"{label.words}.",
        f"SELECT {parent.name}.{label.name}, SUM({child.name}.{number.name}) AS total "
        f"FROM {parent.name} JOIN {child.name} {join} GROUP BY {parent.name}.id "
        f"ORDER BY total DESC, {parent.name}.{label.name} LIMIT {count}",
    )


def _never(tables: Sequence[Table], dice: random.Random) -> tuple[str, str]:
    parent, child, _ = _edge(tables, dice)
    label, number = _pick(parent, "label", dice), _pick(child, "number", dice)
    limit = _sample(number, dice)
    return (
        f"Give the {label.words} of all {parent.name} that have no {child.name} whose "
        f"{number.words} is above {limit}.",
        f"SELECT {label.name} FROM {parent.name} WHERE id NOT IN (SELECT {reference(parent.name)} "
        f"FROM {child.name} WHERE {number.name} > {limit})",
    )


def _above_average(tables: Sequence[Table], dice: random.Random) -> tuple[str, str]:
    table = _parent(tables, dice)
    label, number = _pick(table, "label", dice), _pick(table, "number", dice)
    return (
        f"Give the {label.words} of the {table.name} whose {number.words} is above the average of "
        f"all {table.name}.",
        f"SELECT {label.name} FROM {table.name} "
        f"WHERE {number.name} > (SELECT AVG({number.name}) FROM {table.name})",
    )


def _both_sides(tables: Sequence[Table], dice: random.Random) -> tuple[str, str]:
    child = _child(tables)
    left, right = dice.sample([table for table in tables if not table.refers], 2)
    label, kind, number = (
        _pick(left, "label", dice),
        _pick(right, "category", dice),
        _pick(left, "number", dice),
    )
    value, limit = _sample(kind, dice), _sample(number, dice)
    joins = " ".join(
        f"JOIN {t.name} ON {child.name}.{reference(t.name)} = {t.name}.id" for t in (left, right)
    )
    return (
        f"Which {left.name} whose {number.words} is at least {limit} have {child.name} together "
        f"with {right.name} whose {kind.words} is '{value}'? Give each {label.words} once.",
        f"SELECT DISTINCT {left.name}.{label.name} FROM {child.name} {joins} "
        f"WHERE {right.name}.{kind.name} = '{value}' AND {left.name}.{number.name} >= {limit}",
    )


TEMPLATES: tuple[Template, ...] = (
    _counted,
    _sorted,
    _grouped,
    _having,
    _joined_count,
    _joined_total,
    _top,
    _never,
    _above_average,
    _both_sides,
)
