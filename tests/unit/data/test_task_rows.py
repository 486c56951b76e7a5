import builtins
import datetime
import json
import random

import pytest

from fledge.config import Plugin
from fledge.data import tasks as module
from fledge.data.sources import GENERATORS
from fledge.data.tasks import filter_by_length, fingerprint, load_rows, split_off, to_tasks
from fledge.errors import DataError, PluginError
from fledge.types import Task

HERE = __name__
ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}]


def load(name, **arguments):
    return load_rows(Plugin(name=str(name), **arguments), "data.train")


def refused(said, name, error=DataError, **arguments):
    with pytest.raises(error, match=said) as caught:
        load(name, **arguments)
    assert str(caught.value).startswith("data.train")
    assert "\n" not in str(caught.value)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def generate(n: int, start: int = 0):
    for i in range(start, start + n):
        yield {"prompt": str(i)}


def gives_text():
    return ["a"]


def raises():
    raise KeyError("seed")


# --- sources ---


def test_jsonl_skips_blank_lines_and_a_byte_order_mark(tmp_path):
    text = "\ufeff" + json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1]) + "\n"
    assert load(write(tmp_path / "x.jsonl", text)) == ROWS


def test_jsonl_keeps_line_separators_that_json_allows_inside_text(tmp_path):
    row = {"prompt": "a\u2028b\x85c"}
    assert load(write(tmp_path / "x.jsonl", json.dumps(row, ensure_ascii=False))) == [row]


def test_json_list(tmp_path):
    assert load(write(tmp_path / "x.json", json.dumps(ROWS, indent=1))) == ROWS


def test_malformed_files_name_the_line(tmp_path):
    good = json.dumps(ROWS[0])
    refused(r"line 3 of .*x\.jsonl.*JSON", write(tmp_path / "x.jsonl", f"{good}\n\n{{oops\n"))
    refused(r"line 2 .*must be an object.*int", write(tmp_path / "y.jsonl", f"{good}\n7\n"))
    refused(r"JSON.*line 2", write(tmp_path / "x.json", "[1,\n oops]"))
    refused(r"must hold a list", write(tmp_path / "y.json", good))
    refused(r"item 2 must be an object", write(tmp_path / "z.json", f"[{good}, 7]"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    refused(r"UTF-8", tmp_path / "latin.jsonl")


def test_missing_empty_and_unknown_sources_are_named(tmp_path):
    refused(r"file 'x\.jsonl' does not exist", "x.jsonl")
    refused(r"has no rows", write(tmp_path / "empty.jsonl", "\n\n"))
    refused(r"unknown extension .*\.jsonl", write(tmp_path / "x.csv", "a,b"))
    refused(r"did you mean 'arithmetic'", "arithmetik")
    refused(r"no file, folder", "./nowhere")
    refused(
        r"data\.train\.split: .*no such argument",
        write(tmp_path / "x.jsonl", "{}"),
        PluginError,
        split="a",
    )


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "x.parquet")
    assert load(tmp_path / "x.parquet") == ROWS
    refused(r"not readable Parquet", write(tmp_path / "y.parquet", "not parquet"))


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_missing_extra_says_what_to_install(tmp_path, monkeypatch, package):
    real = builtins.__import__

    def fake(name, *rest, **kwargs):
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    source = write(tmp_path / "x.parquet", "") if package == "pyarrow" else "owner/name"
    refused(rf"{package}; run: pip install 'fledge\[data\]'", source)


def test_saved_dataset_with_and_without_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "two")
    assert load(tmp_path / "one") == ROWS
    assert load(tmp_path / "two") == ROWS
    assert load(tmp_path / "two", split="test") == ROWS[1:]
    refused(r"data\.train\.split: .*'dev'.*train, test", tmp_path / "two", split="dev")
    refused(r"data\.train\.split: .*no splits", tmp_path / "one", split="train")
    refused(r"data\.train\.subset", tmp_path / "one", subset="main")


def test_folder_of_files_and_a_hub_name_that_cannot_be_reached(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "files"
    folder.mkdir()
    write(folder / "train.jsonl", "\n".join(map(json.dumps, ROWS)))
    assert load(folder) == ROWS
    refused(r"split 'nope'", folder, split="nope")

    def offline(name, subset, split):
        raise ConnectionError(f"{name} {subset} {split}\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    refused(r"split 'train', subset 'main'.*owner/name main train$", "owner/name", subset="main")


def test_generator_functions_take_typed_arguments():
    name = f"{HERE}:generate"
    assert load(name, n="2", start=5) == [{"prompt": "5"}, {"prompt": "6"}]
    refused(r"data\.train\.n", name, PluginError)
    refused(r"data\.train\.n", name, PluginError, n="many")
    refused(r"no rows", name, n=0)
    refused(r"must be an object.*str", f"{HERE}:gives_text")
    refused(r"generator .*failed: KeyError", f"{HERE}:raises")
    refused(r"cannot import", "no_such_module_x:f", PluginError)


def test_built_in_generators_all_work():
    assert all(load(name) for name in GENERATORS)
    assert len(load("arithmetic", split="eval")) == 500
    refused(r"data\.train\.split", "arithmetic", PluginError, split="tset")


# --- tasks ---


def test_names_come_from_the_row_or_from_its_content():
    assert [t.key for t in to_tasks([{"id": 7}, {"key": "b"}, {"id": "c", "key": "d"}])] == [
        "7",
        "b",
        "c",
    ]
    (one,), (other,) = to_tasks([{"a": 1, "b": 2}]), to_tasks([{"b": 2, "a": 1}])
    assert one.key == other.key
    assert one.key != to_tasks([{"a": 1, "b": 3}])[0].key
    assert len(one.key) == 12


def test_equal_rows_become_one_task_and_a_clash_of_ids_is_refused():
    assert len(to_tasks([ROWS[0], ROWS[1], dict(ROWS[0])])) == 2
    assert len(to_tasks([{"id": 1, "p": "x"}, {"id": 1, "p": "x"}])) == 1
    with pytest.raises(DataError, match=r"data\.eval: rows 1 and 3 differ .*'1'"):
        to_tasks([{"id": 1, "p": "x"}, {"id": 2, "p": "x"}, {"id": 1, "p": "y"}], "data.eval")
    for bad in (None, "", True, 1.5, [1]):
        with pytest.raises(DataError, match=r"row 1: 'id'"):
            to_tasks([{"id": bad}])


def test_rows_with_dates_have_stable_names_and_objects_are_refused():
    row = {"when": datetime.date(2020, 1, 2), "raw": b"\x00"}
    assert to_tasks([row])[0].key == to_tasks([dict(row)])[0].key
    with pytest.raises(DataError, match=r"row 1.*object"):
        to_tasks([{"x": object()}])


def tasks_of(n):
    return [Task(str(i), {"prompt": str(i)}) for i in range(n)]


def test_split_ignores_order_and_depends_on_the_seed():
    tasks = tasks_of(100)
    train, held_out = split_off(tasks, 20, seed=0)
    assert len(held_out) == 20
    assert sorted(t.key for t in train + held_out) == sorted(t.key for t in tasks)
    shuffled = random.Random(1).sample(tasks, 100)
    assert {t.key for t in split_off(shuffled, 20, seed=0)[1]} == {t.key for t in held_out}
    assert {t.key for t in split_off(tasks, 20, seed=1)[1]} != {t.key for t in held_out}
    # A task keeps its side when others are added, up to those that the newcomers displace.
    grown = {t.key for t in split_off(tasks_of(105), 20, seed=0)[1]}
    assert len(grown & {t.key for t in held_out}) >= 15
    assert split_off(tasks, 0, seed=0) == (tasks, [])
    with pytest.raises(DataError, match=r"data\.eval_size: 100 of 100"):
        split_off(tasks, 100, seed=0)


def test_fingerprint_sees_content_and_not_order():
    tasks = tasks_of(10)
    assert fingerprint(tasks) == fingerprint(tasks[::-1])
    assert fingerprint(tasks) != fingerprint(tasks[:9])
    changed = [*tasks[:9], Task("9", {"prompt": "changed"})]
    assert fingerprint(tasks) != fingerprint(changed)
    renamed = [*tasks[:9], Task("x", tasks[9].data)]
    assert fingerprint(tasks) != fingerprint(renamed)


def test_filter_keeps_the_limit_itself_and_counts():
    tasks = tasks_of(12)
    kept, dropped = filter_by_length(tasks, lambda t: len(t.key), 1)
    assert ([t.key for t in kept], dropped) == ([str(i) for i in range(10)], 2)
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens: 0 drops all 12 .* 1 tokens"):
        filter_by_length(tasks, lambda t: len(t.key), 0)


def test_heavy_packages_are_not_imported_by_the_module():
    assert not {"datasets", "pyarrow"} & set(vars(module))
