import asyncio
import gc
import hashlib
import os
import sqlite3
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.config import Plugin
from fledge.envs import databases
from fledge.envs.check import check_env
from fledge.envs.databases import DOMAINS, Limits, Made, SqlError, image, query
from fledge.envs.text2sql import (
    TEMPLATES,
    TextToSql,
    canonical,
    is_ordered,
    same_rows,
    table_of,
    tasks,
)
from fledge.errors import DataError
from fledge.plugins import check_arguments
from fledge.types import Message, Task, ToolCall, assistant

ROWS = tasks(count=60)
quick = settings(derandomize=True, database=None, deadline=None, max_examples=80)


def task(row=None, **changes):
    data = {**(row or ROWS[0]), **changes}
    return Task(data["question"], data)


def play(environment, *replies):
    async def episode():
        opening = await environment.reset()
        steps = []
        for reply in replies:
            steps.append(await environment.step(reply))
        await environment.close()
        return opening, steps

    return asyncio.run(episode())


def solve(row, sql, **arguments):
    _, (step,) = play(TextToSql(task(row), **arguments), solution(sql))
    assert step.terminated
    return step.reward


def solution(sql):
    return assistant(f"I think <solution>{sql}</solution>")


def looking(sql):
    return Message("assistant", "", tool_calls=(ToolCall("sql", {"query": sql}),))


# ---- tasks


def test_tasks_are_made_from_the_seed_alone():
    assert tasks(count=60) == ROWS != tasks(count=60, seed=1)
    assert {row["domain"] for row in ROWS} == set(DOMAINS)
    assert {type(row["seed"]) for row in ROWS} == {int}
    digest = hashlib.sha256(image(Made("shop", 3, 0))).hexdigest()
    image.cache_clear()
    assert digest == hashlib.sha256(image(Made("shop", 3, 0))).hexdigest()


def test_every_template_is_used_and_no_query_is_in_two_splits():
    train, held_out = tasks(count=400), tasks("eval", count=100)
    assert len(train) == 400 and len(held_out) == 100
    assert not {row["gold"] for row in train} & {row["gold"] for row in held_out}
    shapes = {row["gold"].split(" FROM ")[0].split("(")[0] + row["gold"][-12:-6] for row in train}
    assert len(shapes) >= len(TEMPLATES)


def test_the_shown_and_the_hidden_database_never_agree():
    for row in tasks(count=150, seed=5):
        shown, hidden = (
            query(Made(row["domain"], row["seed"], v), row["gold"]).rows for v in (0, 1)
        )
        assert shown and hidden and not same_rows(shown, hidden, ordered=False)


# ---- the reward


def test_the_oracle_is_right_and_garbage_is_bad_format():
    for row in ROWS:
        assert solve(row, row["gold"]) == 1.0
    for garbage in ("42", "", "SELECT 1", "<sql>SELECT 1", "x" * 100_000, "<solution>" * 1000):
        _, (step,) = play(TextToSql(task()), assistant(garbage))
        assert (step.reward, step.terminated) == (-1.0, True), garbage[:20]


def test_wrong_queries_earn_nothing():
    row = next(row for row in ROWS if "COUNT(*)" in row["gold"])
    table = row["gold"].split(" FROM ")[1].split()[0]
    for wrong in (
        "SELECT 1", "", "SELEC", f"SELECT COUNT(*) FROM {table}", "SELECT * FROM nowhere",
        f"{row['gold']}; {row['gold']}", "-- " + row["gold"], f"EXPLAIN {row['gold']}",
    ):  # fmt: skip
        assert solve(row, wrong) == 0.0, wrong


def test_more_rows_than_the_gold_query_returns_are_wrong():
    for row in ROWS[:20]:
        again = f"SELECT * FROM ({row['gold']})"
        assert solve(row, again) == 1.0
        assert solve(row, f"{again} UNION ALL {again}") == 0.0


def constants(row):
    """What a policy can do that copies what it has seen."""
    rows = query(Made(row["domain"], row["seed"], 0), row["gold"]).rows
    told = ["(" + ", ".join(quoted(v) for v in values) + ")" for values in rows]
    return f"SELECT * FROM (VALUES {', '.join(told)})"


def quoted(value):
    return "'" + value + "'" if isinstance(value, str) else repr(value)


def test_constants_from_the_shown_database_earn_nothing():
    for row in ROWS[:30]:
        shown = query(Made(row["domain"], row["seed"], 0), row["gold"])
        copied = query(Made(row["domain"], row["seed"], 0), constants(row))
        assert same_rows(copied.rows, shown.rows, ordered=True), "a fair copy"
        assert solve(row, constants(row)) == 0.0


def test_order_counts_where_the_gold_query_is_sorted():
    for row in ROWS:
        backwards = f"SELECT * FROM ({row['gold']}) ORDER BY 1 DESC, 2"
        if is_ordered(row["gold"]) and row["gold"].endswith("name"):
            assert solve(row, backwards) == 0.0
            break
    unordered = next(r for r in ROWS if "GROUP BY" in r["gold"] and not is_ordered(r["gold"]))
    assert solve(unordered, f"SELECT * FROM ({unordered['gold']}) ORDER BY 2 DESC, 1") == 1.0


def test_several_solutions_are_bad_format():
    gold = ROWS[0]["gold"]
    both = assistant(f"<solution>{gold}</solution> or <solution>SELECT 1</solution>")
    assert play(TextToSql(task()), both)[1][0].reward == -1.0


def test_an_endless_solution_is_stopped():
    bomb = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT COUNT(*) FROM r"
    began = time.monotonic()
    assert solve(ROWS[0], bomb, max_work=1_000_000) == 0.0
    _, steps = play(TextToSql(task(), max_work=1_000_000), looking(bomb))
    said = steps[0].messages[0].content
    assert said == "error: SqlError: the query was too much work and was stopped"
    assert time.monotonic() - began < 5


# ---- turns


def test_looking_then_solving():
    row = ROWS[0]
    table = DOMAINS[row["domain"]][0].name
    opening, steps = play(
        TextToSql(task(row)),
        assistant(f"<sql>SELECT COUNT(*) AS n FROM {table}</sql>"),
        looking(f"SELECT * FROM {table} ORDER BY id"),
        looking("SELECT x FROM nowhere"),
        solution(row["gold"]),
    )
    assert row["question"] in opening[0].content and f"CREATE TABLE {table}" in opening[0].content
    assert row["gold"] not in opening[0].content
    written, called, wrong, last = steps
    assert written.messages[0].role == "user"
    assert written.messages[0].content.startswith("<observation>\nn\n1")
    assert called.messages[0].role == "tool" and "id | name" in called.messages[0].content
    assert wrong.messages[0].content == "error: SqlError: no such table: nowhere"
    assert last.reward == 1.0
    assert last.info == {"bad_format": 0.0, "tool_calls": 3.0, "tool_errors": 1.0}


def test_no_solution_within_the_turns_is_bad_format():
    *before, last = play(TextToSql(task()), *[looking("SELECT 1")] * 5)[1]
    assert (last.reward, last.truncated) == (-1.0, True)
    assert not any(step.truncated or step.reward for step in before)


def test_what_a_query_returns_is_never_an_answer():
    gold = ROWS[0]["gold"].replace("'", "''")
    steps = play(TextToSql(task()), *[looking(f"SELECT '<solution>{gold}</solution>'")] * 5)[1]
    assert "<solution>" in steps[0].messages[0].content and steps[-1].reward == -1.0


def test_observations_are_bounded():
    environment = TextToSql(task(), max_output=500)
    wide = "SELECT " + ", ".join(["hex(zeroblob(5000))"] * 50)
    tall = (
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 999) SELECT n FROM r"
    )
    steps = play(environment, looking(wide), looking(tall))[1]
    assert all(len(step.messages[0].content) <= 500 for step in steps)
    assert steps[1].messages[0].content.endswith("20\n... cut, only the first 20 rows")
    huge = "SELECT " + ", ".join(["hex(zeroblob(40000))"] * 50)
    with pytest.raises(SqlError, match="too large"):
        query(Made("shop", 0, 0), huge)


# ---- reading and nothing else


@pytest.fixture
def files(tmp_path):
    names = []
    for variant in (0, 1):
        path = tmp_path / f"secret_{variant}.db"
        path.write_bytes(image(Made("shop", 3, variant)))
        names.append(str(path))
    return names


FORBIDDEN = [
    "DELETE FROM orders", "INSERT INTO orders DEFAULT VALUES", "UPDATE orders SET quantity = 1",
    "DROP TABLE orders", "CREATE TABLE x (a)", "CREATE TEMP TABLE x (a)",
    "CREATE VIEW x AS SELECT 1",
    "ATTACH ':memory:' AS x", "ATTACH 'x.db' AS x", "DETACH main", "PRAGMA query_only = OFF",
    "PRAGMA database_list", "SELECT * FROM pragma_database_list",
    "SELECT * FROM pragma_table_info('orders')", "VACUUM", "VACUUM INTO 'copy.db'", "BEGIN",
    "COMMIT", "REINDEX", "ANALYZE", "SELECT load_extension('x')", "SELECT random()",
    "WITH x AS (SELECT 1) DELETE FROM orders", "SELECT * FROM dbstat",
    "SELECT 1; DELETE FROM orders", "SELECT '\x00'", "SELECT '\ud800'", "SELECT " + "1" * 20_000,
    "SELECT zeroblob(1000000000)",
]  # fmt: skip


@pytest.mark.parametrize("sql", FORBIDDEN)
def test_nothing_but_reading_is_possible(sql, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    made = image(Made("shop", 3, 0))
    for source in (Made("shop", 3, 0), Path(files[0])):
        with pytest.raises(SqlError) as refused:
            query(source, sql)
        assert str(tmp_path) not in str(refused.value) and "secret" not in str(refused.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert image(Made("shop", 3, 0)) == made


@pytest.mark.parametrize(
    "sql",
    [
        "WITH c AS (SELECT 1 AS a) SELECT a FROM c",
        "SELECT name, row_number() OVER (ORDER BY age, id) FROM customers",
        "VALUES (1)",
        "SELECT name FROM sqlite_master",
        "SELECT CAST(x'ff' AS TEXT)",
        "SELECT strftime('%Y', '2024-02-03'), group_concat(city) FROM customers",
    ],
)
def test_whatever_reads_is_allowed(sql):
    assert query(Made("shop", 3, 0), sql).rows


def test_changing_the_database_does_not_change_the_score():
    row = ROWS[0]
    table = DOMAINS[row["domain"]][-1].name
    attack = looking(f"DELETE FROM {table}")
    _, (first, last) = play(TextToSql(task(row)), attack, solution(row["gold"]))
    assert "only reading is allowed" in first.messages[0].content and last.reward == 1.0


def test_without_the_authorizer_the_connection_is_still_read_only(monkeypatch):
    """Two locks, of which one is enough: read-only, and the list of what may be done."""
    monkeypatch.setattr(databases, "_authorize", lambda *_: sqlite3.SQLITE_OK)
    with pytest.raises(SqlError, match="readonly"):
        query(Made("shop", 3, 0), "DELETE FROM orders")


def test_a_query_has_a_time_limit_too():
    slow = "SELECT COUNT(*) FROM orders a, orders b, orders c, orders d, orders e"
    with pytest.raises(SqlError, match="too much work"):
        query(Made("shop", 0, 0), slow, limits=Limits(work=10**12, seconds=0.1))


def test_databases_of_ones_own(files):
    gold = "SELECT COUNT(*) FROM orders WHERE quantity > 4"
    row = {"question": "How many?", "gold": gold, "databases": files}
    assert solve(row, gold) == 1.0
    assert solve(row, "SELECT COUNT(*) FROM orders") == 0.0
    opening, _ = play(TextToSql(task(row)))
    assert "CREATE TABLE orders" in opening[0].content and "secret" not in opening[0].content


def test_rows_that_cannot_be_scored_are_refused(files):
    fine = {"question": "q", "gold": "SELECT 1"}
    with pytest.raises(DataError, match="two or more"):
        TextToSql(task({**fine, "databases": files[:1]}))
    with pytest.raises(DataError, match="is no file"):
        TextToSql(task({**fine, "databases": [files[0], "none.db"]}))
    with pytest.raises(DataError, match="'shp' is not made here"):
        TextToSql(task({**fine, "domain": "shp"}))
    with pytest.raises(DataError, match=r"gold: no such column: quantitty"):
        solve(task({**ROWS[0], "gold": "SELECT quantitty"}).data, "SELECT 1")


# ---- comparing

values = st.one_of(
    st.none(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, width=32),
    st.text(max_size=3),
    st.binary(max_size=2),
)
tables = st.lists(st.tuples(values, values), max_size=6)


@quick
@given(tables, st.randoms(use_true_random=False))
def test_order_plays_no_part_unless_it_must(rows, dice):
    mixed = list(rows)
    dice.shuffle(mixed)
    assert same_rows(mixed, rows, ordered=False) and same_rows(rows, rows, ordered=True)
    same = [[canonical(v) for v in row] for row in mixed] == [
        [canonical(v) for v in row] for row in rows
    ]
    assert same_rows(mixed, rows, ordered=True) == same


@quick
@given(tables, tables)
def test_comparison_is_symmetric_and_counts_duplicates(left, right):
    for ordered in (True, False):
        assert same_rows(left, right, ordered) == same_rows(right, left, ordered)
        if left:
            assert not same_rows([*left, left[0]], left, ordered)
            assert not same_rows([(*row, 1) for row in left], left, ordered)


@quick
@given(st.lists(st.floats(0.01, 1e6), min_size=2, max_size=20), st.randoms(use_true_random=False))
def test_a_sum_may_be_taken_in_any_order(numbers, dice):
    mixed = list(numbers)
    dice.shuffle(mixed)
    one, two = sum(numbers), sum(mixed)
    # Two neighbours may fall to both sides of a rounding boundary; both cannot.
    assert canonical(one) == canonical(two) or abs(one - two) <= 1e-12 * abs(one)


@quick
@given(st.integers(-(2**53), 2**53))
def test_whole_floats_are_integers_and_text_is_not(number):
    assert canonical(number) == canonical(float(number))
    assert canonical(number) != canonical(str(number))
    assert canonical(number) != canonical(number + 1)


def test_values_that_only_look_alike_differ():
    assert canonical(0.1 + 0.2) == canonical(0.3) and canonical(3 * 1.1) == canonical(3.3)
    for one, two in ((None, ""), (None, 0), ("a", b"a"), (0.1, 0.1001), (1, 1.5), ("A", "a")):
        assert canonical(one) != canonical(two)
    assert canonical(float("inf")) != canonical(float("-inf"))


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n  by a limit 3", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT row_number() OVER (ORDER BY (a)) FROM t", False),
        ("SELECT 'order by' FROM t -- order by\n", False),
        ('SELECT a AS "order by" FROM t /* order by */', False),
        ("SELECT ')' FROM t ORDER BY 1", True),
        ("SELECT a FROM t WHERE b IN (SELECT (c) FROM u) ORDER BY a", True),
        ("SELECT border, bye FROM t", False),
    ],
)
def test_what_counts_as_sorted(sql, ordered):
    assert is_ordered(sql) is ordered


def test_tables_are_readable():
    result = databases.Result(("a", "b"), [(1, None), ("x" * 99, 2.5)], more=False)
    assert table_of(result).splitlines() == [
        "a | b", "1 | NULL", "x" * 57 + "... | 2.5", "(2 rows)",
    ]  # fmt: skip


# ---- the contract


def test_it_passes_the_checker_and_its_arguments_are_checked():
    assert asyncio.run(check_env(TextToSql, [task(row) for row in ROWS[:3]])) == []
    plugin = Plugin(name="text2sql", max_turns=3)
    assert check_arguments(TextToSql, plugin.arguments, "env", positional=1) == {"max_turns": 3}


def test_many_episodes_at_once_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()
    threads, handles = threading.active_count(), len(os.listdir("/proc/self/fd"))

    async def episode(row):
        environment = TextToSql(task(row))
        await environment.reset()
        await environment.step(looking("SELECT * FROM sqlite_master"))
        step = await environment.step(solution(row["gold"]))
        await environment.close()
        return step.reward

    async def everything():
        handles_before = len(os.listdir("/proc/self/fd"))
        rewards = await asyncio.gather(*(episode(ROWS[i % len(ROWS)]) for i in range(64)))
        assert len(os.listdir("/proc/self/fd")) <= handles_before
        return rewards

    assert asyncio.run(everything()) == [1.0] * 64
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= handles and not list(tmp_path.iterdir())
