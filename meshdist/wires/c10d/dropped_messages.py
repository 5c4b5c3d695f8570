"""Messages over Gloo whose Work the program has dropped.

Gloo cancels a message whose Work ends before the message has come or gone. Where the other side has
sent or asked for it by then, nothing that follows between the two arrives any more. So such a
message is kept until it is done. Gloo learns of that only while a thread waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any

__all__ = ["DroppedMessages"]

_MOST_THREADS = 8  # as many messages that never come hold up no other


class DroppedMessages:
    """Dropped messages of one communicator; threads wait ``patience``, as good as for ever."""

    def __init__(self, patience: timedelta) -> None:
        self._patience = patience
        self._unfinished: deque[Any] = deque()
        self._from_anyone: list[Any] = []
        self._threads: set[threading.Thread] = set()

    def add(self, work: Any, *, is_from_anyone: bool) -> None:
        """Keep one; called in any thread at any time, by the garbage collector.

        No thread waits for one that may come from anyone, since none could be freed when the group
        ends.
        """
        (self._from_anyone if is_from_anyone else self._unfinished).append(work)

    def look(self) -> None:
        """Let a thread wait for those that were added; called now and then."""
        if self._unfinished and len(self._threads) < _MOST_THREADS:
            thread = threading.Thread(target=self._finish, name="meshdist-dropped", daemon=True)
            self._threads.add(thread)
            thread.start()

    def close(self) -> bool:
        """Let go of all of them; returns whether threads wait, which end with the connections."""
        self._unfinished.clear()
        self._from_anyone.clear()
        return bool(self._threads)

    def _finish(self) -> None:
        with suppress(IndexError):  # none is left
            while True:
                work = self._unfinished.popleft()
                with suppress(RuntimeError):  # its other side, or the group, has ended
                    work.wait(self._patience)
                del work
        self._threads.discard(threading.current_thread())
