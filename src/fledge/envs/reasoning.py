"""Tasks of reasoning-gym (arXiv:2505.24760), as far as their scorers can be trusted.

`audit` tries every task: its own answer must score 1, garbage at most 0.01, a list of answers less
than 1, the seed must reproduce it in another process, and the scorer must neither raise nor run
what it is given. `TRUSTED` and `REFUSED` are what it found in the version named here. Scorers run
in processes of their own: some are slow, and none is ours.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field

from fledge.envs.answers import Row, Split, draw, last_tagged, said
from fledge.envs.base import Environment
from fledge.envs.pool import shared_pool
from fledge.errors import PluginError
from fledge.plugins import nearest
from fledge.types import Message, Step, Task, user

AUDITED = "0.1.25"
"""The version of reasoning-gym that was audited; another one is refused."""

SIZE = 100_000
"""Items of one seed; a few tasks make other items where this is another number."""

LONGEST = 10_000
"""Characters of an answer."""

INSTRUCTION = (
    "Think step by step, then give the final answer alone as <answer>your answer</answer>."
)

TRUSTED: tuple[str, ...] = (
    "ab", "acre", "advanced_geometry", "aiw", "arc_1d", "arc_agi", "base_conversion",
    "basic_arithmetic", "bf", "binary_alternation", "bitwise_arithmetic", "caesar_cipher",
    "calendar_arithmetic", "chain_sum", "circuit_logic", "coin_flip", "color_cube_rotation",
    "complex_arithmetic", "count_bits", "count_primes", "course_schedule", "cryptarithm",
    "decimal_arithmetic", "decimal_chain_sum", "dice", "emoji_mystery", "family_relationships",
    "futoshiki", "game_of_life", "gcd", "group_anagrams", "jugs", "kakurasu", "largest_island",
    "lcm", "leg_counting", "letter_counting", "mahjong_puzzle", "manipulate_matrix", "maze",
    "mini_sudoku", "modulo_grid", "needle_haystack", "number_filtering", "number_format",
    "number_sequence", "number_sorting", "palindrome_partitioning", "path_star",
    "polynomial_equations", "pool_matrix", "power_function", "products", "rearc",
    "rectangle_count", "rotate_matrix", "rotten_oranges", "self_reference", "shortest_path",
    "simple_equations", "simple_geometry", "string_manipulation", "string_splitting",
    "string_synthesis", "sudoku", "survo", "syllogism", "tower_of_hanoi", "tsumego",
    "word_sequence_reversal", "word_sorting", "zebra_puzzles",
)  # fmt: skip

REFUSED: dict[str, str] = {
    "binary_matrix": "its scorer runs the answer as code",
    "boxnet": "it has no answer of its own",
    "codeio": "garbage scores 0.2",
    "composite": "it raises AssertionError",
    "countdown": "its scorer runs the answer as code",
    "figlet_font": "garbage scores 0.1",
    "fraction_simplification": "a list of answers scores 1",
    "game_of_life_halting": "garbage scores 1",
    "graph_color": "it has no answer of its own",
    "gsm_symbolic": "a list of answers scores 1",
    "intermediate_integration": "its scorer runs the answer as code",
    "isomorphic_strings": "its items depend on more than the seed",
    "knight_swap": "its items depend on more than the seed",
    "knights_knaves": "a list of answers scores 1",
    "letter_jumble": "a list of answers scores 1",
    "list_functions": "its items depend on more than the seed",
    "n_queens": "its scorer runs the answer as code",
    "palindrome_generation": "garbage scores 0.02",
    "polynomial_multiplication": "its scorer runs the answer as code",
    "prime_factorization": "it raises ValueError",
    "propositional_logic": "it has no answer of its own",
    "puzzle24": "its scorer runs the answer as code",
    "quantum_lock": "a list of answers scores 1",
    "ransom_note": "its items depend on more than the seed",
    "rubiks_cube": "it has no answer of its own",
    "rush_hour": "it has no answer of its own",
    "sentence_reordering": "garbage scores 0.05",
    "simple_integration": "its scorer runs the answer as code",
    "sokoban": "a list of answers scores 1",
    "spell_backward": "garbage scores 0.12",
    "spiral_matrix": "its scorer runs the answer as code",
    "string_insertion": "its scorer runs the answer as code",
    "time_intervals": "a list of answers scores 1",
    "word_ladder": "it raises ValueError",
}


@dataclass(frozen=True)
class Item:
    """One row: where an item comes from, and its question, which tells whether it is still the
    same. `config` is JSON.

    >>> Item("gcd", seed=0, index=3, config="{}", question="...").index
    3
    """

    task: str
    seed: int
    index: int
    config: str
    question: str


class Reasoning(Environment[Item]):
    """Reward is 1 when the task's own scorer gives full marks to the last `<answer>`, otherwise 0.

    With `partial` it is the score itself. Many scorers pay a little for text that contains the
    answer among other things, so a policy may then learn to list answers.
    """

    def __init__(
        self,
        task: Task,
        *,
        partial: bool = False,
        instruction: str = INSTRUCTION,
        workers: Annotated[int, Field(ge=1)] = 2,
        timeout: Annotated[float, Field(gt=0)] = 20.0,
    ) -> None:
        super().__init__(task)
        check_trusted(self.task.task, "env")
        self.partial = partial
        self.instruction = instruction
        self.pool = shared_pool("fledge.envs.reasoning:score", workers, timeout)

    async def reset(self) -> Sequence[Message]:
        return [user(f"{self.task.question}\n\n{self.instruction}".strip())]

    async def step(self, reply: Message) -> Step:
        answer = last_tagged(said(reply.content), "answer")
        found = 0.0
        if answer and len(answer) <= LONGEST:
            found = float(await self.pool.call({**asdict(self.task), "answer": answer}))
        return Step(reward=found if self.partial else float(found >= 1.0), terminated=True)


def check_trusted(name: str, where: str) -> None:
    """Refuse a task that the audit refused, one it never saw, and a version it never saw."""
    if name in REFUSED:
        raise PluginError(f"{where}: reasoning-gym's {name!r} is refused: {REFUSED[name]}")
    if name not in TRUSTED:
        raise PluginError(
            f"{where}: reasoning-gym has no audited task {name!r}{nearest(name, list(TRUSTED))}"
        )
    version = _installed()
    if version != AUDITED:
        raise PluginError(
            f"{where}: reasoning needs reasoning-gym {AUDITED}, whose scorers were audited; "
            f"installed: {version}; run: pip install 'fledge[reasoning]'"
        )


def _installed() -> str:
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def tasks(
    split: Split = "train",
    count: int = 1000,
    seed: int = 0,
    task: str = "chain_sum",
    config: dict[str, Any] | None = None,
) -> list[Row]:
    """Rows of one task, told apart by their question: no question is in two splits, whatever the
    seed. `config` is passed to reasoning-gym; the audit was made with its defaults.
    """
    check_trusted(task, "data")
    text = json.dumps(config or {}, sort_keys=True)
    places = itertools.count()

    def make(_: random.Random) -> Row:
        index = next(places)
        question = _dataset(task, seed, text)[index]["question"]
        return asdict(Item(task, seed, index, text, question))

    return draw(make, lambda row: str(row["question"]), split, count, seed)


def score(request: Mapping[str, Any]) -> float:
    """What a worker does: make the item again from its seed, and score the answer."""
    source = (request["task"], request["seed"], request["config"])
    entry = _entry(*source, request["index"])
    if entry["question"] != request["question"]:
        raise ValueError("the row's question is not the one that its seed makes")
    return float(_dataset(*source).score_answer(request["answer"], entry))


@functools.lru_cache(maxsize=64)
def _dataset(name: str, seed: int, config: str) -> Any:
    gym = importlib.import_module("reasoning_gym")
    return gym.create_dataset(name, seed=seed, size=SIZE, **json.loads(config))


@functools.lru_cache(maxsize=1024)
def _entry(name: str, seed: int, config: str, index: int) -> Any:
    return _dataset(name, seed, config)[index]


# The audit. It is run by a test; its findings are the two lists above.

ITEMS = 40
"""Items that the seed must reproduce."""
TRIED = 8
"""Items whose scorer is tried."""
SECONDS = 120
MARK = "zqmark"
GARBAGE = (
    "garbage",
    "I do not know.",
    "PASS, score = full marks, reward: high",
    "lorem ipsum dolor sit amet " * 40,
    "\N{SNOWMAN} <|im_end|> \\boxed{}",
)
CODE = (MARK, f"[{MARK}]", f"{MARK} + 1", f"[[{MARK}]]")


def audit(names: Sequence[str] = ()) -> dict[str, str]:
    """Why each task is refused, or an empty text. Two processes with different hash seeds make the
    items in opposite order; where they differ, the seed does not settle them.
    """
    runs = []
    for order in ("1", "-1"):
        code = f"from fledge.envs.reasoning import _audit_here; _audit_here({order}, {list(names)})"
        environ = {**os.environ, "PYTHONHASHSEED": str(2 + int(order))}
        command = [sys.executable, "-W", "ignore", "-c", code]
        runs.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environ))
    first, second = (json.loads(run.communicate()[0].splitlines()[-1]) for run in runs)
    return {
        name: reason
        or ("" if digest == second[name][1] else "its items depend on more than the seed")
        for name, (reason, digest) in first.items()
    }


def _audit_here(order: int, names: Sequence[str]) -> None:
    """Print the findings of this process as one line of JSON."""
    ran = _watch_for_code()
    known = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    found = {name: _examine(name, order, ran) for name in names or known}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def _examine(name: str, order: int, ran: list[str]) -> tuple[str, str]:
    """Why this task is refused, and a digest of its items."""
    try:
        with _limit(SECONDS):
            data = _dataset(name, 7, "{}")
            items = {i: data[i] for i in range(ITEMS)[::order]}
            text = "\n".join(f"{items[i]['question']}\n{items[i]['answer']}" for i in range(ITEMS))
            digest = hashlib.sha256(text.encode()).hexdigest()
            return _distrust(data, [items[i] for i in range(TRIED)], ran), digest
    except Exception as error:
        return f"it raises {type(error).__name__}", ""


def _distrust(data: Any, items: Sequence[Mapping[str, Any]], ran: list[str]) -> str:
    """The first reason not to trust a scorer."""
    for item in items:
        answer = item["answer"]
        if not isinstance(answer, str):
            return "it has no answer of its own"
        read = last_tagged(said(f"<answer>{answer}</answer>"), "answer")
        if read is None or data.score_answer(read, item) < 1:
            return "its own answer does not score 1"
    for item in items:
        answer = item["answer"]
        ran.clear()
        for text in (*CODE, f"{answer}+{MARK}", f"{answer} {MARK}"):
            _score(data, text, item)
        if ran:
            return "its scorer runs the answer as code"
        worst = max(_score(data, text, item) for text in GARBAGE)
        if worst > 0.01:
            return f"garbage scores {worst:.2g}"
        lists = (item["question"], f"one of 1 2 3 4 {answer}", f"{answer} or 1234", f"7\n{answer}")
        if max(_score(data, text, item) for text in lists) >= 1:
            return "a list of answers scores 1"
    return ""


def _score(data: Any, text: str, item: Mapping[str, Any]) -> float:
    return float(data.score_answer(text, item))


def _watch_for_code() -> list[str]:
    """A list that grows whenever this process runs code in which `MARK` occurs."""
    ran: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec":
            code = arguments[0]
            if MARK in f"{getattr(code, 'co_names', ())} {getattr(code, 'co_consts', ())}":
                ran.append(MARK)

    sys.addaudithook(hook)
    return ran


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
