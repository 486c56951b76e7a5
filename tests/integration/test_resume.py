"""A run that is killed, in whatever phase, ends exactly where an undisturbed run ends."""

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from fledge.config import TrainConfig, load_config
from fledge.errors import CheckpointError, ConfigError
from fledge.log import Clock
from fledge.orchestration import train
from fledge.orchestration.rundir import live_lines

STEPS, TASKS, GROUPS, SAMPLES = 20, 14, 4, 3
PHASES = ("generate", "score", "backward", "step", "publish", "save")


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with a data set, a reward function, and the result of an undisturbed run."""
    folder = tmp_path_factory.mktemp("resume")
    rows = [{"id": str(i), "prompt": f"{i}+{i + 7}"} for i in range(TASKS)]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "vowels.py").write_text(
        "def score(prompt, response, meta):\n"
        "    return sum(c in 'aeiou0123' for c in response) / 4\n"
        "def against(group):\n"
        "    mean = sum(e.reward for e in group) / len(group)\n"
        "    return [mean - e.reward for e in group]\n"
    )
    before = Path.cwd()
    os.chdir(folder)
    run(folder / "straight")
    yield folder
    os.chdir(before)


def run(folder, *overrides, kill=None):
    """Train in a forked process, which `kill(phase)` may end with SIGKILL; returns how it ended."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if kill is not None:
                listen_to_every_clock(kill)
            train(config(folder, *overrides))
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def config(folder, *overrides):
    recipe = {
        "run_dir": str(folder),
        "steps": STEPS,
        "console": "quiet",
        "env": {"name": "reward", "function": "vowels:score"},
        "model": {
            "device": "cpu",
            "random_init": True,
            "overrides": {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2},
        },
        "data": {"train": "tasks.jsonl", "eval_size": 2},
        "rollout": {"group_size": SAMPLES, "groups_per_step": GROUPS, "max_new_tokens": 6},
        "algorithm": {"name": "reinforce", "kl": {"coef": 0.01}},
        "optim": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 3},
        "eval": {"every": 7},
        "checkpoint": {"every": 3},
    }
    return load_config(TrainConfig, recipe, overrides, environ={})


def listen_to_every_clock(listener):
    make = Clock.__init__

    def patched(self):
        make(self)
        self.listeners.append(listener)

    Clock.__init__ = patched


def at_occurrence(phase, number):
    seen = Counter()

    def kill(name):
        seen[name] += 1
        if name == phase and seen[name] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def after_a_while(seconds):
    armed = []

    def kill(name):
        if not armed:
            armed.append(True)
            # A real SIGKILL out of nowhere: the alarm's default action would be SIGALRM's, so it is
            # replaced.
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, seconds)

    return kill


def result(folder):
    """All that must be equal: final weights and optimiser by content, metrics but for times."""
    last = Path(folder) / "checkpoints" / f"step_{STEPS}"
    files = ("weights/model.safetensors", "optimizer.safetensors")
    tensors = {name: (last / name).read_bytes() for name in files}
    metrics = []
    for line in live_lines(folder, "metrics"):
        timed = ("time", "perf/", "attempt")
        metrics.append({k: v for k, v in line.items() if not k.startswith(timed)})
    return tensors, metrics


def assert_same_as_straight(desk, folder):
    tensors, metrics = result(folder)
    expected_tensors, expected_metrics = result(desk / "straight")
    assert metrics == expected_metrics
    assert tensors == expected_tensors
    trained = Counter(
        (line["epoch"], line["task_key"], line["index"]) for line in live_lines(folder, "episodes")
    )
    assert set(trained.values()) == {1}
    assert len(trained) == STEPS * GROUPS * SAMPLES


@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_a_phase(desk, phase):
    folder = desk / f"killed-in-{phase}"
    number = 3 if phase == "save" else 11
    assert run(folder, kill=at_occurrence(phase, number)) == -signal.SIGKILL
    assert run(folder) == 0
    assert_same_as_straight(desk, folder)


def test_killed_again_and_again_at_random_moments(desk):
    folder = desk / "killed-at-random"
    dice = random.Random(0)
    ends = [run(folder, kill=after_a_while(dice.uniform(0.05, 0.9))) for _ in range(6)]
    assert -signal.SIGKILL in ends
    assert run(folder) == 0
    assert_same_as_straight(desk, folder)


def test_resumed_at_an_epoch_boundary(desk):
    # 12 tasks and 4 groups a step: epoch 1 begins with step 4, right after the checkpoint of step
    # 3.
    folder = desk / "killed-at-epoch"
    assert run(folder, kill=at_occurrence("generate", 4)) == -signal.SIGKILL
    assert run(folder) == 0
    assert_same_as_straight(desk, folder)
    epochs = {line["step"]: line["epoch"] for line in live_lines(folder, "episodes")}
    assert epochs[3] == 0 and epochs[4] == 1


def test_more_steps_continue_a_finished_run(desk):
    folder = desk / "longer"
    assert run(folder, "steps=9", "optim.schedule=constant") == 0
    assert run(folder, "steps=12", "optim.schedule=constant") == 0
    straight = desk / "longer-straight"
    assert run(straight, "steps=12", "optim.schedule=constant") == 0
    weights = "checkpoints/step_12/weights/model.safetensors"
    assert (folder / weights).read_bytes() == (straight / weights).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_saves_and_the_run_goes_on_from_there(desk, number):
    folder = desk / f"stopped-{number.name}"
    seen = Counter()

    def interrupt(name):
        seen[name] += 1
        if name == "score" and seen[name] == 5:
            os.kill(os.getpid(), number)

    assert run(folder, kill=interrupt) == 0
    report = json.loads((folder / "report.json").read_text())
    assert (report["finished"], report["step"]) == (False, 5)
    assert (folder / "checkpoints" / "step_5").is_dir()
    assert run(folder) == 0
    assert_same_as_straight(desk, folder)


def test_a_changed_setting_or_data_set_is_refused_by_name(desk, capfd):
    folder = desk / "changed"
    assert run(folder, "steps=3") == 0
    with pytest.raises(CheckpointError, match=r"optim\.lr: 0\.01 -> 0\.02"):
        train(config(folder, "optim.lr=0.02"))
    rows = Path("tasks.jsonl").read_text()
    other = desk / "other.jsonl"
    other.write_text(rows.replace("0+7", "0+8"))
    with pytest.raises(CheckpointError, match=r"data\.fingerprint"):
        train(config(folder, f"data.train={other}"))
    moved = desk / "moved.jsonl"
    moved.write_text(rows)
    assert run(folder, "steps=4", f"data.train={moved}") == 0
    with pytest.raises(ConfigError, match="already at step 4"):
        train(config(folder, "steps=3"))


def test_more_steps_with_a_schedule_that_depends_on_them_warns(desk):
    folder = desk / "rescheduled"
    assert run(folder, "steps=3") == 0
    assert run(folder, "steps=5") == 0
    events = (folder / "events.jsonl").read_text()
    assert "steps changed from 3 to 5, and optim.schedule=cosine depends on it" in events


def test_the_best_evaluated_step_is_kept_even_between_regular_checkpoints(desk):
    """Trained against its reward, the policy gets worse, so the best step is not the last."""
    folder = desk / "best"
    settings = ["checkpoint.keep_best=true", "checkpoint.keep_last=1", "checkpoint.every=100"]
    settings += ["eval.every=1", "algorithm.advantage=vowels:against"]
    assert run(folder, *settings) == 0
    report = json.loads((folder / "report.json").read_text())
    scores = {int(s): e["average"] for s, e in report["evaluations"].items() if int(s)}
    best = max(scores, key=lambda step: (scores[step], step))
    kept = {int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").iterdir()}
    assert best < STEPS, scores
    assert kept == {best, STEPS}
