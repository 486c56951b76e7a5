"""Pages of the key/value cache: who owns which, which can be shared, which may be taken. No torch
here.

A full page is known by the tokens it holds *and all before them*, so requests with the same
beginning share pages: samples of one prompt, and the turns of one conversation. Pages nobody uses
stay findable until the room is needed (least recently used goes first). Every page carries the
weight version it was computed under and is never handed out under another one.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from fledge.errors import WeightSyncError


class BlockPool:
    """Page 0 is scratch and never handed out.

    >>> pool = BlockPool(blocks=4, size=2)
    >>> mine = pool.allocate(2, version=0)
    >>> pool.remember([5, 6, 7, 8], mine, computed=4); pool.release(mine)
    >>> pool.lookup([5, 6, 9, 9, 9], version=0) == mine[:1]
    True
    """

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.total = blocks - 1
        self._free = list(range(blocks - 1, 0, -1))
        self._users = [0] * blocks
        self._version = [-1] * blocks
        # A page is known by (the page before it, its own tokens): exact, so a hash collision cannot
        # mix up two prompts.
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._next_name = itertools.count(1)
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def allocate(self, count: int, version: int) -> list[int]:
        """Fresh pages; the caller has checked `available`."""
        assert count <= self.available, "asked for more pages than there are"
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
            self._version[block] = version
        return taken

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._known[key]

    def lookup(self, tokens: Sequence[int], version: int) -> list[int]:
        """Pages that already hold the beginning of `tokens`, one user added to each. The last token
        is never covered.
        """
        found = []
        name = 0
        for start in range(0, len(tokens) - self.size, self.size):
            entry = self._known.get((name, tuple(tokens[start : start + self.size])))
            if entry is None:
                break
            name, block = entry
            self.check([block], version)
            found.append(block)
        self.share(found)
        return found

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._users[block] == 0:
                del self._idle[block]
            self._users[block] += 1

    def remember(self, tokens: Sequence[int], blocks: Sequence[int], computed: int) -> None:
        """Make the full pages among the first `computed` tokens findable."""
        name = 0
        for index in range(computed // self.size):
            key = (name, tuple(tokens[index * self.size : (index + 1) * self.size]))
            if key not in self._known:
                self._known[key] = (next(self._next_name), blocks[index])
                self._key_of[blocks[index]] = key
            name = self._known[key][0]

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            assert self._users[block] >= 0, "a page was released twice"
            if self._users[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def check(self, blocks: Sequence[int], version: int) -> None:
        """Refuse pages that were computed under other weights."""
        for block in blocks:
            if self._version[block] != version:
                raise WeightSyncError(
                    f"a cache page of weight version {self._version[block]} would be read under "
                    f"version {version}"
                )

    def clear(self) -> None:
        """Forget everything that can be found again: new weights make it wrong."""
        assert not any(self._users), "pages are still in use"
        self._free.extend(self._idle)
        self._idle.clear()
        self._known.clear()
        self._key_of.clear()
