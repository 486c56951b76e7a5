"""Blocking code of users, off the event loop: one daemon thread per call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a thread of its own.

    There is no queue, so a timeout around this counts the call and nothing else. Nobody joins the
    thread, so a call that never returns cannot keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function(*arguments)
        except (StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit) as ended:
            # These would end the loop or cannot travel through a future.
            error = RuntimeError(f"{type(ended).__name__}: {ended}")
        except Exception as failed:
            error = failed
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, daemon=True, name="fledge-grader").start()
    return await done
