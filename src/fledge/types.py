"""The nouns: frozen records that pass between the parts. No torch, no behaviour beyond views.

Token columns (`token_ids`, `logps`, `trained`, `versions`) always have one entry per token and are
aligned with the token they describe: `logps[t]` is the log-probability of `token_ids[t]` given
everything before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
StopReason = Literal["stop", "length", "cancelled"]


CallStatus = Literal["ok", "bad_json", "bad_shape", "unfinished"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant asks for. One that could not be read has another status than `ok`,
    no arguments, and its text in `raw`: it is never turned into a call that nobody wrote.

    >>> ToolCall("add", {"a": 2, "b": 2}).status
    'ok'
    """

    name: str
    arguments: Mapping[str, Any]
    status: CallStatus = "ok"
    raw: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Tool:
    """What a policy is told about a tool: `parameters` is a JSON schema of its arguments.

    >>> Tool("now", "The time.", {"type": "object", "properties": {}}).name
    'now'
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `reasoning` is what an assistant thought before it spoke; `tool` is the
    name of the tool whose answer this is.

    >>> Message("user", "2+2").content
    '2+2'
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    tool: str = ""


def system(content: str) -> Message:
    return Message("system", content)


def user(content: str) -> Message:
    return Message("user", content)


def assistant(content: str) -> Message:
    return Message("assistant", content)


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do: what an environment is built from. `key` is stable across runs and names it
    in every log.

    >>> Task("34+57", {"prompt": "34+57", "answer": "91"}).data["answer"]
    '91'
    """

    key: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers to a reply.

    `terminated` means that the task is over; `truncated` that a limit of the environment ended it.
    A reward with named parts is given as `components` instead of `reward`; it is their sum, weighed
    by `rollout.reward_weights`.

    >>> Step(reward=1.0, terminated=True).messages
    ()
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, float] = field(default_factory=dict)
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. Log-probs returned are those of the distribution drawn from.

    Temperature 0 is greedy. `top_k=0`, `top_p=1` and `min_p=0` switch the filters off.

    >>> Sampling(temperature=0.0, max_new_tokens=8).greedy
    True
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens that an engine sampled for one request.

    The sampled stop token is part of it; the text of a stop string is, too. `logps` belong to the
    distribution sampled from, `plain_logps` to the softmax at temperature 1; `versions[t]` is the
    weight version that produced token t.

    >>> c = Completion((9, 1), (-0.1, -0.2), (-0.1, -0.2), versions=(3, 3), stop_reason="stop")
    >>> len(c.token_ids), c.stop_reason
    (2, 'stop')
    """

    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    plain_logps: tuple[float, ...]
    versions: tuple[int, ...]
    stop_reason: StopReason


class Outcome(StrEnum):
    """How an episode ended. A failed rollout is data, never a reward of 0.

    `ok` and `truncated` are trained on; a `policy_error` keeps the reward the environment gave it;
    `infra_abort`, `grader_error` and `time_limit` are retried, then dropped from their group and
    counted.
    """

    OK = "ok"
    TRUNCATED = "truncated"
    TIME_LIMIT = "time_limit"
    POLICY_ERROR = "policy_error"
    INFRA_ABORT = "infra_abort"
    GRADER_ERROR = "grader_error"

    @property
    def usable(self) -> bool:
        return self in (Outcome.OK, Outcome.TRUNCATED, Outcome.POLICY_ERROR)


@dataclass(frozen=True, slots=True)
class Segment:
    """An exact run of tokens, as the engine saw and sampled them.

    Only sampled tokens are trained; `logps` is 0 and `versions` is -1 where a token was not
    sampled. `rewards`, if there are any, arrive at single tokens, on top of the turn's. `cleared`,
    if any, names for each sampled token that is not trained the rule that cleared it.

    >>> s = Segment((5, 6, 1), (0.0, -0.7, -0.1), (False, True, True), versions=(-1, 4, 4))
    >>> sum(s.trained), s.turns
    (2, (-1, 0, 0))
    """

    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    trained: tuple[bool, ...]
    versions: tuple[int, ...]
    rewards: tuple[float, ...] = ()
    cleared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        assert len(self.logps) == len(self.trained) == len(self.versions) == n, (
            "columns differ in length"
        )
        assert len(self.rewards) in (0, n), "rewards differ in length"
        assert len(self.cleared) in (0, n), "cleared differs in length"
        assert not any(t and v < 0 for t, v in zip(self.trained, self.versions, strict=True)), (
            "a token that was not sampled is marked as trained"
        )

    @property
    def cleared_by(self) -> tuple[str, ...]:
        """The rule that cleared each token, empty where none did."""
        return self.cleared or ("",) * len(self.token_ids)

    @property
    def turns(self) -> tuple[int, ...]:
        """Which of the segment's replies each token is part of, -1 where it was not sampled: two
        replies always have something between them.
        """
        found, turn, inside = [], -1, False
        for version in self.versions:
            turn += version >= 0 and not inside
            inside = version >= 0
            found.append(turn if inside else -1)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished attempt at a task: exact tokens, rewards per turn, and how it ended.

    `index` is its place in the group; `messages` is the readable view, `segments` is what is
    trained. `components` are the named parts of the reward, before their weights; `masked` names
    the rule that took the episode out of training, if one did: it still counts in its group.

    >>> Episode("34+57", 0, segments=(), rewards=(0.0, 1.0), outcome=Outcome.OK, messages=()).reward
    1.0
    """

    task_key: str
    index: int
    segments: tuple[Segment, ...]
    rewards: tuple[float, ...]
    outcome: Outcome
    messages: tuple[Message, ...]
    info: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    components: Mapping[str, float] = field(default_factory=dict)
    masked: str = ""

    @property
    def reward(self) -> float:
        return float(sum(self.rewards) + sum(sum(s.rewards) for s in self.segments))

    @property
    def response_length(self) -> int:
        return sum(s.trained.count(True) for s in self.segments)


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task that a baseline may compare. Dropped ones are gone from `episodes`
    but counted. `greedy` is an extra one without randomness, played only for estimators that ask.

    >>> Group(Task("t", {}), 0, episodes=(), dropped={"infra_abort": 1}).dropped["infra_abort"]
    1
    """

    task: Task
    epoch: int
    episodes: tuple[Episode, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)
    discarded: tuple[Episode, ...] = ()
    greedy: Episode | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A supervised sequence: each token's weight in the loss, 0 where it is context.

    >>> Sample(token_ids=(5, 6, 7), weights=(0.0, 1.0, 1.0)).trained
    (1, 2)
    """

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def trained(self) -> tuple[int, ...]:
        """Places of the tokens that are trained."""
        return tuple(place for place, weight in enumerate(self.weights) if weight)


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference: of two replies to one prompt, the chosen one is better.

    >>> Pair(Sample((5, 6), (0.0, 1.0)), Sample((5, 7), (0.0, 1.0))).chosen.trained
    (1,)
    """

    chosen: Sample
    rejected: Sample


@dataclass(frozen=True, slots=True)
class Proof:
    """What a publish has shown: which version, how many tensors, and how far the canary was off.

    >>> Proof(version=3, tensors=46, digest="9f2c", canary_gap=2e-7).version
    3
    """

    version: int
    tensors: int
    digest: str
    canary_gap: float
