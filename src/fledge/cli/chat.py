"""`fledge chat`: a conversation with the newest checkpoint of a run, kept token by token.

The conversation is a list of token ids that only grows: replies stay as they were sampled, and the
renderer appends what the user says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from fledge.cli.show import printable
from fledge.config import TrainConfig
from fledge.data.render import make_renderer
from fledge.errors import DataError
from fledge.inference import NativeEngine
from fledge.orchestration import open_run
from fledge.types import Message, Sampling, user

REPLY_TOKENS = 256
"""Limit of one reply where the run has none of its own."""

CACHE_MB = 512


class Conversation:
    """One dialogue: `say` yields the reply in pieces of text."""

    def __init__(self, run: Path, temperature: float) -> None:
        config, policy = open_run(run)
        self._context = policy.context
        self._renderer = make_renderer(policy.tokenizer)
        self._engine = NativeEngine(policy, CACHE_MB)
        self._temperature = temperature
        self._seed = config.seed
        rollout = config.rollout if isinstance(config, TrainConfig) else None
        self._stop = tuple(rollout.stop) if rollout else ()
        self._limit = rollout.max_new_tokens if rollout else REPLY_TOKENS
        self.token_ids: list[int] = []
        self._messages: list[Message] = []
        self.turns = 0

    async def say(self, text: str) -> AsyncIterator[str]:
        renderer = self._renderer
        self._messages.append(user(text))
        prompt = renderer.extend(self.token_ids, self._messages[-1:]) if self.turns else None
        if prompt is None:  # the first turn, or a template that cannot go on from these tokens
            prompt = renderer.start(self._messages)
        sampling = self._sampling(prompt)
        sampled: list[int] = []
        shown = 0
        async for token, _ in self._engine.stream(prompt, sampling):
            sampled.append(token)
            reply = renderer.parse(sampled).content
            # A character may be spread over tokens; until it is whole it reads as U+FFFD. And what
            # turns out to be a thought or a call is no longer part of the text.
            if not reply.endswith("\ufffd") and len(reply) >= shown:
                yield reply[shown:]
                shown = len(reply)
        reply_message = renderer.parse(sampled)
        yield reply_message.content[shown:]
        self._messages.append(reply_message)
        self.token_ids = [*prompt, *sampled]
        self.turns += 1

    def _sampling(self, prompt: Sequence[int]) -> Sampling:
        room = self._context - len(prompt)
        if room < 1:
            raise DataError(
                f"the message and the conversation before it have {len(prompt)} tokens, the "
                f"model's context is {self._context}; start again, or say less"
            )
        return Sampling(
            max_new_tokens=min(self._limit, room),
            temperature=self._temperature,
            stop=self._stop,
            stop_ids=self._renderer.stop_ids,
            seed=self._seed + self.turns,
        )


def chat(run: Path, prompt: str | None, temperature: float) -> None:
    """Answer `prompt`, or talk until the end of input or Ctrl-C."""
    conversation = Conversation(run, temperature)
    # One loop for all turns, but not around `input`: there Ctrl-C must work at the first press.
    with asyncio.Runner() as runner:
        if prompt is not None:
            runner.run(_answer(conversation, prompt))
            return
        print(f"{run}: this model only knows what its run taught it. Ctrl-D or Ctrl-C to leave.")
        try:
            while True:
                text = input("you> ").strip()
                if text:
                    runner.run(_answer(conversation, text))
        except (EOFError, KeyboardInterrupt):
            print()


async def _answer(conversation: Conversation, text: str) -> None:
    async for piece in conversation.say(text):
        print(printable(piece), end="", flush=True)
    print()
