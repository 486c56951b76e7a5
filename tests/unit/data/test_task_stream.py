import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.data.stream import TaskStream
from fledge.errors import CheckpointError, DataError
from fledge.types import Task


def tasks_of(n):
    return [Task(str(i), {"prompt": str(i)}) for i in range(n)]


def take(stream, n):
    return [(epoch, task.key) for epoch, task in (stream.next() for _ in range(n))]


@given(n=st.integers(1, 9), seed=st.integers(0, 5), shuffle=st.booleans(), cut=st.integers(0, 30))
def test_resuming_anywhere_continues_the_same_stream(n, seed, shuffle, cut):
    whole = take(TaskStream(tasks_of(n), seed, shuffle), cut + 20)
    first = TaskStream(tasks_of(n), seed, shuffle)
    assert take(first, cut) == whole[:cut]
    state = json.loads(json.dumps(first.state()))
    second = TaskStream(tasks_of(n), seed, shuffle)
    take(second, 3)
    second.restore(state)
    assert take(second, 20) == whole[cut:]


def test_resuming_at_an_epoch_boundary_begins_the_next_epoch():
    stream = TaskStream(tasks_of(4), 0, True)
    take(stream, 4)
    again = TaskStream(tasks_of(4), 0, True)
    again.restore(stream.state())
    found = take(again, 4)
    assert {epoch for epoch, _ in found} == {1}
    assert len({key for _, key in found}) == 4


def test_each_epoch_holds_each_task_once_in_an_order_of_its_own():
    stream = TaskStream(tasks_of(20), 0, True)
    epochs = [take(stream, 20) for _ in range(3)]
    for number, epoch in enumerate(epochs):
        assert {e for e, _ in epoch} == {number}
        assert sorted(key for _, key in epoch) == sorted(str(i) for i in range(20))
    assert len({tuple(key for _, key in epoch) for epoch in epochs}) == 3


def test_order_depends_on_the_seed_and_not_on_the_order_of_the_file():
    tasks = tasks_of(20)
    expected = take(TaskStream(tasks, 0, True), 40)
    assert take(TaskStream(tasks[::-1], 0, True), 40) == expected
    assert take(TaskStream(tasks, 1, True), 40) != expected


def test_without_shuffling_the_order_is_the_files():
    assert take(TaskStream(tasks_of(2)[::-1], 0, False), 3) == [(0, "1"), (0, "0"), (1, "1")]


@pytest.mark.parametrize(
    "other",
    [
        TaskStream(tasks_of(4), 0, True),
        TaskStream(tasks_of(5), 1, True),
        TaskStream(tasks_of(5), 0, False),
        TaskStream([*tasks_of(4), Task("4", {"prompt": "changed"})], 0, True),
    ],
)
def test_the_state_of_another_stream_is_refused(other):
    with pytest.raises(CheckpointError, match=r"data\.train, data\.shuffle or seed"):
        TaskStream(tasks_of(5), 0, True).restore(other.state())


def test_damaged_positions_and_empty_tasks_are_refused():
    stream = TaskStream(tasks_of(5), 0, True)
    with pytest.raises(CheckpointError, match="damaged"):
        stream.restore({**stream.state(), "position": 6})
    with pytest.raises(DataError, match=r"data\.train"):
        TaskStream([], 0, True)
