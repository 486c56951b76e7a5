"""The exact tokens of an episode while it is played: what was sampled, and what stood around it.

A turn either extends the ids of the turn before it, unchanged, or opens a new segment. Nothing is
ever tokenised again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fledge.errors import PluginError
from fledge.plugins import blame
from fledge.types import Completion, Episode, Segment

MaskFunction = Callable[[Episode], Sequence[Sequence[bool]]]
"""`(episode) -> for each segment, for each token, whether it may be trained`."""


@dataclass
class Transcript:
    """Segments in the making. `ids` is the whole of the present one."""

    _ids: list[int] = field(default_factory=list)
    _logps: list[float] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _finished: list[Segment] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return self._ids

    @property
    def tokens(self) -> int:
        """Sampled so far, in all segments."""
        now = sum(version >= 0 for version in self._versions)
        return now + sum(v >= 0 for s in self._finished for v in s.versions)

    def show(self, prompt: Sequence[int]) -> None:
        """The policy is about to see `prompt`: what is new in it is context. A prompt that does not
        begin with the present ids opens a new segment.
        """
        known = len(self._ids)
        if list(prompt[:known]) != self._ids:
            self._close()
            known = 0
        new = list(prompt[known:])
        self._ids += new
        self._logps += [0.0] * len(new)
        self._versions += [-1] * len(new)

    def say(self, completion: Completion) -> None:
        """The policy said this, right after what it was shown."""
        self._ids += completion.token_ids
        self._logps += completion.logps
        self._versions += completion.versions

    def _close(self) -> None:
        if any(version >= 0 for version in self._versions):
            trained = tuple(version >= 0 for version in self._versions)
            self._finished.append(
                Segment(tuple(self._ids), tuple(self._logps), trained, tuple(self._versions))
            )
        self._ids, self._logps, self._versions = [], [], []

    def segments(self) -> tuple[Segment, ...]:
        """Everything up to the last sampled token; what came after it was never answered."""
        last = max((i for i, v in enumerate(self._versions) if v >= 0), default=-1) + 1
        del self._ids[last:], self._logps[last:], self._versions[last:]
        self._close()
        return tuple(self._finished)


def masked(episode: Episode, mask: MaskFunction, name: str) -> Episode:
    """The episode with some of its tokens cleared by a user's function. It may clear what was
    sampled, and never sets what was not; each cleared token carries the function's name.
    """
    key = "rollout.mask"
    with blame(key):
        wanted = [[bool(keep) for keep in tokens] for tokens in mask(episode)]
    if [len(tokens) for tokens in wanted] != [len(s.token_ids) for s in episode.segments]:
        raise PluginError(
            f"{key}: must return one list per segment with one entry per token; task "
            f"{episode.task_key!r} has {[len(s.token_ids) for s in episode.segments]} tokens"
        )
    segments = []
    for segment, keep in zip(episode.segments, wanted, strict=True):
        if any(k and v < 0 for k, v in zip(keep, segment.versions, strict=True)):
            raise PluginError(
                f"{key}: {name} asks to train a token of task {episode.task_key!r} that the policy "
                "did not sample; clear tokens, never set them"
            )
        before = segment.trained
        trained = tuple(was and now for was, now in zip(before, keep, strict=True))
        cleared = tuple(
            name if was and not now else rule
            for was, now, rule in zip(before, keep, segment.cleared_by, strict=True)
        )
        segments.append(replace(segment, trained=trained, cleared=cleared))
    return replace(episode, segments=tuple(segments))
