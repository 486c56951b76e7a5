"""SQLite for environments: made databases, and queries that can only read.

A made database is a function of its domain, its seed and its variant: two variants have one schema
and different rows. `query` runs one statement on a connection of its own, which may read and
nothing else, within limits of work and time. Nothing here writes a file.
"""

from __future__ import annotations

import functools
import itertools
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Row = tuple[Any, ...]
PARENTS = (10, 16)
CHILDREN = (36, 60)
"""Fewest and most rows of a table that is referred to, and of one that refers."""


class Column(NamedTuple):
    """One column; `draw` makes a value. A `label` names its row and is unique, a `category` repeats
    and is filtered and grouped by, a `number` is compared and added up.
    """

    name: str
    role: str
    draw: Callable[[random.Random], Any]
    type: str = "TEXT"

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")


class Table(NamedTuple):
    """`name` is the plural noun; `refers` are the tables whose rows it points to."""

    name: str
    columns: tuple[Column, ...]
    refers: tuple[str, ...] = ()

    def of(self, role: str) -> list[Column]:
        return [column for column in self.columns if column.role == role]

    @property
    def ddl(self) -> str:
        columns = ["id INTEGER PRIMARY KEY"]
        columns += [f"{reference(t)} INTEGER REFERENCES {t}(id)" for t in self.refers]
        columns += [f"{c.name} {c.type}" for c in self.columns]
        return f"CREATE TABLE {self.name} ({', '.join(columns)})"


def reference(table: str) -> str:
    """The column that points to a table.

    >>> reference("customers")
    'customer_id'
    """
    return f"{table.removesuffix('s')}_id"


def _among(*values: str) -> Callable[[random.Random], str]:
    return lambda dice: dice.choice(values)


def _whole(name: str, low: int, high: int) -> Column:
    return Column(name, "number", lambda dice: dice.randint(low, high), "INTEGER")


def _money(name: str, low: int, high: int) -> Column:
    # Quarters are exact in binary, so a sum does not depend on the order of its rows.
    return Column(name, "number", lambda dice: dice.randint(4 * low, 4 * high) / 4, "REAL")


def _category(name: str, *values: str) -> Column:
    return Column(name, "category", _among(*values))


def _label(*parts: Sequence[str], name: str = "name") -> Column:
    return Column(name, "label", lambda dice: " ".join(dice.choice(part) for part in parts))


FIRST = (
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gina",
    "Hugo",
    "Iris",
    "Jon",
    "Kira",
    "Leo",
    "Mia",
    "Ned",
    "Olga",
    "Pia",
)
LAST = (
    "Abel",
    "Brandt",
    "Costa",
    "Dietz",
    "Egger",
    "Fox",
    "Grant",
    "Hale",
    "Ito",
    "Jones",
    "Klein",
    "Lopez",
)
CITIES = ("Aachen", "Bergen", "Cork", "Dijon", "Espoo")
ADJECTIVES = (
    "Amber",
    "Blue",
    "Crimson",
    "Dusty",
    "Early",
    "Frozen",
    "Golden",
    "Hidden",
    "Iron",
    "Jade",
)
NOUNS = (
    "River",
    "Lantern",
    "Garden",
    "Harbour",
    "Mirror",
    "Orchard",
    "Tower",
    "Valley",
    "Window",
    "Forest",
)
THINGS = ("Lamp", "Chair", "Kettle", "Basket", "Clock", "Mug", "Rug", "Shelf", "Stool", "Vase")

DOMAINS: dict[str, tuple[Table, ...]] = {
    "shop": (
        Table(
            "customers", (_label(FIRST, LAST), _category("city", *CITIES), _whole("age", 18, 80))
        ),
        Table(
            "products",
            (
                _label(ADJECTIVES, THINGS),
                _category("category", "home", "garden", "office", "gift"),
                _money("price", 2, 90),
            ),
        ),
        Table(
            "orders",
            (_whole("quantity", 1, 9), _money("discount", 0, 12)),
            ("customers", "products"),
        ),
    ),
    "school": (
        Table("students", (_label(FIRST, LAST), _category("city", *CITIES), _whole("year", 1, 6))),
        Table(
            "courses",
            (
                _label(ADJECTIVES, NOUNS, name="title"),
                _category("field", "science", "arts", "sport", "languages"),
                _whole("credits", 1, 12),
            ),
        ),
        Table(
            "enrolments",
            (_whole("points", 0, 100), _whole("absences", 0, 9)),
            ("students", "courses"),
        ),
    ),
    "library": (
        Table("readers", (_label(FIRST, LAST), _category("city", *CITIES), _whole("age", 8, 90))),
        Table(
            "books",
            (
                _label(ADJECTIVES, NOUNS, name="title"),
                _category("genre", "crime", "poetry", "travel", "history"),
                _whole("pages", 60, 900),
            ),
        ),
        Table("loans", (_whole("days", 1, 60), _money("fine", 0, 8)), ("readers", "books")),
    ),
    "clinic": (
        Table("patients", (_label(FIRST, LAST), _category("city", *CITIES), _whole("age", 1, 95))),
        Table(
            "doctors",
            (
                _label(FIRST, LAST),
                _category("department", "surgery", "eyes", "teeth", "children"),
                _whole("experience", 1, 40),
            ),
        ),
        Table(
            "visits", (_money("cost", 20, 400), _whole("minutes", 5, 90)), ("patients", "doctors")
        ),
    ),
    "cinema": (
        Table("guests", (_label(FIRST, LAST), _category("city", *CITIES), _whole("age", 6, 85))),
        Table(
            "films",
            (
                _label(ADJECTIVES, NOUNS, name="title"),
                _category("genre", "drama", "comedy", "western", "animation"),
                _whole("length", 70, 200),
            ),
        ),
        Table("tickets", (_money("price", 5, 25), _whole("seat", 1, 150)), ("guests", "films")),
    ),
}


class Made(NamedTuple):
    """Names a made database."""

    domain: str
    seed: int
    variant: int


Source = Made | Path


@functools.lru_cache(maxsize=512)
def image(source: Made) -> bytes:
    """A made database as SQLite's bytes; equal arguments give equal bytes."""
    dice = random.Random(f"{source.domain} {source.seed} {source.variant}")
    sizes: dict[str, int] = {}
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for table in DOMAINS[source.domain]:
            sizes[table.name] = dice.randint(*(CHILDREN if table.refers else PARENTS))
            connection.execute(table.ddl)
            rows = _rows(table, sizes, dice)
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)
        return connection.serialize()


def _rows(table: Table, sizes: dict[str, int], dice: random.Random) -> list[Row]:
    taken: set[Any] = set()
    rows: list[Row] = []
    for number in range(1, sizes[table.name] + 1):
        # The last two are never referred to: there is always somebody without an order.
        points = [dice.randint(1, sizes[other] - 2) for other in table.refers]
        rows.append((number, *points, *(_value(c, dice, taken) for c in table.columns)))
    return rows


def _value(column: Column, dice: random.Random, taken: set[Any]) -> Any:
    value = column.draw(dice)
    while column.role == "label" and value in taken:
        value = column.draw(dice)
    if column.role == "label":
        taken.add(value)
    return value


def schema_of(source: Source) -> str:
    """The statements that made its tables, as a policy is shown them."""
    if isinstance(source, Made):
        return "\n".join(f"{table.ddl};" for table in DOMAINS[source.domain])
    found = query(source, "SELECT sql FROM sqlite_master WHERE type IN ('table', 'view')")
    return "\n".join(f"{statement};" for (statement,) in found.rows if statement)


# ---- reading


class SqlError(Exception):
    """Why a query was refused or stopped, in words for the one who wrote it."""


class Result(NamedTuple):
    """Rows of a query; `more` when there were more than were asked for."""

    columns: tuple[str, ...]
    rows: list[Row]
    more: bool


@dataclass(frozen=True)
class Limits:
    """How much one query may do. `work` counts SQLite's virtual instructions, so that the same
    query is stopped on every machine; `seconds` is for the few that do much in one instruction.
    """

    work: int = 20_000_000
    seconds: float = 5.0


LONGEST_QUERY = 10_000
LONGEST_VALUE = 100_000
MOST_COLUMNS = 100
MOST_DATA = 1_000_000
"""Characters of a whole result."""
TICK = 20_000
ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
FORBIDDEN_FUNCTIONS = {"load_extension", "fts3_tokenizer", "random", "randomblob"}
"""Doors to the host, and what would make a score depend on luck."""


def query(source: Source, sql: str, rows: int = 10_000, limits: Limits | None = None) -> Result:
    """The first `rows` of one statement that reads. Raises `SqlError` with a reason."""
    bounds = limits or Limits()
    with closing(_open(source)) as connection:
        spent = _guard(connection, bounds)
        try:
            cursor = connection.execute(sql)
            found = _fetch(cursor, rows + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            raise SqlError(_reason(error, spent())) from None
        if cursor.description is None:
            raise SqlError("nothing was selected; write one SELECT statement")
        columns = tuple(str(column[0]) for column in cursor.description)
        return Result(columns, found[:rows], len(found) > rows)


def _fetch(cursor: sqlite3.Cursor, rows: int) -> list[Row]:
    found: list[Row] = []
    size = 0
    for row in itertools.islice(cursor, rows):
        size += sum(len(value) for value in row if isinstance(value, str | bytes))
        if size > MOST_DATA:
            raise SqlError("the result is too large")
        found.append(row)
    return found


def _open(source: Source) -> sqlite3.Connection:
    """A private copy of a made database, or a file that SQLite may not write."""
    if isinstance(source, Made):
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.deserialize(image(source))
        return connection
    address = f"{source.resolve().as_uri()}?mode=ro&immutable=1"
    return sqlite3.connect(address, uri=True, isolation_level=None)


def _guard(connection: sqlite3.Connection, limits: Limits) -> Callable[[], bool]:
    """Nothing but reading, and not for ever; returns what tells whether a limit was reached."""
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, LONGEST_QUERY)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MOST_COLUMNS)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 200)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.text_factory = lambda value: value.decode("utf-8", "replace")
    connection.set_authorizer(_authorize)
    ticks = 0
    end = time.monotonic() + limits.seconds

    def spent() -> bool:
        return ticks * TICK >= limits.work or time.monotonic() > end

    def tick() -> int:
        nonlocal ticks
        ticks += 1
        return int(spent())

    connection.set_progress_handler(tick, TICK)
    return spent


def _authorize(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    forbidden = action not in ALLOWED or (
        action == sqlite3.SQLITE_FUNCTION and (name or "").lower() in FORBIDDEN_FUNCTIONS
    )
    return sqlite3.SQLITE_DENY if forbidden else sqlite3.SQLITE_OK


def _reason(error: Exception, spent: bool) -> str:
    text = str(error)
    if isinstance(error, UnicodeError):
        return "the query is not valid text"
    if spent and "interrupted" in text:
        return "the query was too much work and was stopped"
    if "not authorized" in text or "prohibited" in text:
        return f"only reading is allowed ({text})"
    return text
