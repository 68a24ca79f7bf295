"""An event loop in a thread of its own, for an asynchronous library behind methods that are called from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["LoopThread"]

T = TypeVar("T")
_JOIN_S = 10.0


class LoopThread:
    """Runs what it is given, in the order in which it comes.

    >>> loop = LoopThread("example")
    >>> loop.call(asyncio.sleep(0, "done"))
    'done'
    >>> loop.close()
    """

    def __init__(self, name: str) -> None:
        """Args:
        name: Of the thread.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def call(self, work: Awaitable[T]) -> T:
        """Run `work` in the loop and wait for what it gives. Never from inside the loop."""

        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def post(self, act: Callable[..., object], *arguments: Any) -> None:
        """Have `act` called in the loop; nothing happens once it is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act, *arguments)

    def close(self) -> None:
        """Cancel what runs and end the thread. Idempotent."""
        if self._thread.is_alive():
            self.call(_cancel_others())
            self.post(self._loop.stop)
            self._thread.join(_JOIN_S)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
