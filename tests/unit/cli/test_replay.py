"""`fledge replay`: what was sampled, what was trained and why not, from the run directory alone."""

from __future__ import annotations

import pytest

from fledge.cli.main import run as command
from fledge.cli.replay import CLEARED, CONTEXT, TEMPLATE, TRAINED, styles
from fledge.config import TrainConfig, load_config
from fledge.orchestration import train
from fledge.orchestration.rundir import live_lines


def clear_the_first(episode):
    return [
        [version >= 0 and i != s.versions.index(0) for i, version in enumerate(s.versions)]
        for s in episode.segments
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay") / "run"
    recipe = {
        "run_dir": str(folder),
        "steps": 1,
        "console": "quiet",
        "env": "arithmetic",
        "model": {"random_init": True, "device": "cpu"},
        "data": {"train": {"name": "arithmetic", "split": "eval"}},
        "rollout": {
            "group_size": 2,
            "groups_per_step": 2,
            "max_new_tokens": 4,
            "mask": clear_the_first,
        },
    }
    train(load_config(TrainConfig, recipe, [], environ={}))
    return folder


def test_colours_say_where_a_token_came_from():
    segment = {"ids": [1, 40, 2, 7, 8], "sampled": [[3, 5, 0]], "cleared": [[3, "rule"]]}
    assert styles(segment, {1, 2}) == [TEMPLATE, CONTEXT, TEMPLATE, CLEARED, TRAINED]


def test_an_episode_is_shown_token_by_token(folder, capsys):
    first = next(iter(live_lines(folder, "episodes")))
    assert command(["replay", str(folder), "1"]) == 0
    shown = capsys.readouterr().out
    assert f"task {first['task_key']}/0: {first['outcome']}" in shown
    (segment,) = first["segments"]
    for token, logp in zip(segment["ids"][-len(segment["logps"]) :], segment["logps"], strict=True):
        assert f"{token} " in shown and f"{logp:.4f}" in shown
    assert shown.count("clear_the_first") == 1


def test_without_an_episode_they_are_listed(folder, capsys):
    assert command(["replay", str(folder)]) == 0
    shown = capsys.readouterr().out
    for number, line in enumerate(live_lines(folder, "episodes"), 1):
        assert f" {number} " in shown and line["task_key"] in shown


@pytest.mark.parametrize("which", ["task", "task/index"])
def test_an_episode_can_be_named_by_its_task(which, folder, capsys):
    last = list(live_lines(folder, "episodes"))[-1]
    name = last["task_key"] if which == "task" else f"{last['task_key']}/{last['index']}"
    assert command(["replay", str(folder), name]) == 0
    assert f"task {last['task_key']}/{last['index']}" in capsys.readouterr().out


def test_what_is_not_there_is_said_in_one_line(folder, tmp_path, capsys):
    assert command(["replay", str(folder), "99"]) == 2
    assert "episode '99': there is none" in capsys.readouterr().err
    assert command(["replay", str(tmp_path)]) == 2
    assert "there are no episodes" in capsys.readouterr().err
