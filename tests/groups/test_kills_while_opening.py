"""A rank that is killed at a request to the store, as a group opens: the others are told soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from tests.inner import TimeoutStore
from tests.load import is_within
from tests.pool import Failure, Pool

SOON_S = 4.0
LATE_S = 0.5


def killed_at(request: str, key: str, *, is_done: bool = False) -> None:
    """Let this rank be killed at a request whose key has this part, or once that is answered."""
    ask: Callable[..., Any] = getattr(TimeoutStore, request)

    def ask_or_end(store: TimeoutStore, name: Any, *rest: Any) -> Any:
        if key in name and is_done:
            ask(store, name, *rest)
        if key in name:
            os.kill(os.getpid(), signal.SIGKILL)
        return ask(store, name, *rest)

    setattr(TimeoutStore, request, ask_or_end)


def late_to_count() -> None:
    """Let this rank be the last that is counted as having opened the group."""
    add = TimeoutStore.add

    def add_late(store: TimeoutStore, key: str, amount: int) -> int:
        if "/opened/" in key:
            time.sleep(LATE_S)
        return add(store, key, amount)

    TimeoutStore.add = add_late  # type: ignore[method-assign]


def told(open_group: Callable[[], Any], *at: Any, is_done: bool = False) -> tuple[str, float]:
    """The error of opening a group, and of its first collective, and when it came; rank 1 is
    killed.

    The others make a group without it then.
    """
    md.barrier()
    if md.get_rank() == 1:
        killed_at(*at, is_done=is_done)
        late_to_count()
        time.sleep(LATE_S)
    begin = time.monotonic()
    with pytest.raises(md.BackendError) as caught:
        md.all_reduce(torch.ones(2), group=open_group())
    took_s, x = time.monotonic() - begin, torch.ones(2)
    rest = md.new_group([0, 2])
    md.all_reduce(x, group=rest)
    md.destroy_process_group(rest)
    assert x.tolist() == [2.0, 2.0]
    return str(caught.value), took_s


def of_a_mesh() -> Any:
    return md.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))["dp"].get_group()


def in_another_order() -> Any:
    """A group that shares no communicator with the world."""
    return md.new_group([2, 1, 0], timeout=timedelta(minutes=2))


def survivors(pool: Pool, backend: str, *told_at: Any, **more: bool) -> list[str]:
    """The texts of the two ranks that live on, which have come soon."""
    found = pool.outcomes(lambda: told(*told_at, **more), 3, backend=backend, timeout_s=60.0)
    assert isinstance(found[1], Failure)
    texts = []
    for text, seconds in (found[0], found[2]):
        assert is_within(seconds, SOON_S)
        assert "rank 1 has ended" in text
        texts.append(text)
    return texts


AS_THE_LAST = {
    "before it writes the outcome": ("compare_set", "/outcome"),
    "before it says that all have opened": ("set", "/opened/all"),
}


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("when", AS_THE_LAST)
def test_the_last_to_come_is_killed(pool: Pool, backend: str, when: str) -> None:
    for text in survivors(pool, backend, of_a_mesh, *AS_THE_LAST[when]):
        assert text.startswith("all_reduce on axis 'dp' of DeviceMesh(dp=3) failed on backend")


CONNECTING = {
    "shared memory, before it comes": ("shm", "compare_set", "/outcome", False),
    "Gloo, before it begins": ("gloo", "set", "interfaces/", False),
    "Gloo, once others have its address": ("gloo", "set", "/0/1", True),
    "Gloo, before it knows all addresses": ("gloo", "get", "/0/2", False),
}


@pytest.mark.parametrize("when", CONNECTING)
def test_a_rank_is_killed_while_members_connect(pool: Pool, when: str) -> None:
    backend, request, key, is_done = CONNECTING[when]
    for text in survivors(pool, backend, in_another_order, request, key, is_done=is_done):
        opening = (
            f"group of ranks 0-2 could not be opened on backend '{backend}'\n  where:    rank "
        )
        if "address" not in when:
            assert text.startswith(opening)
            assert "\n  found:    rank 1 can no longer join\n" in text
        else:  # Gloo may have failed itself, or have connected others before
            assert text.startswith((opening, "all_reduce on group of ranks 0-2 failed on backend"))
