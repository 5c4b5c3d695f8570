"""What a member does where MPI does not start; ``test_communicator`` tests the rest over MPI."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import meshdist as md
from meshdist.wires.mpi import opening as module
from meshdist.wires.opening import Opening


def open_alone(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Open a group of one member, on which MPI's start raises ``error``."""

    def start() -> Any:
        raise error

    monkeypatch.setattr(module, "start_mpi", start)
    store = md.HashStore()
    alone = Opening(store, lambda: store, (3,), 0, "cpu", timedelta(seconds=5), name="a group")
    module.open_link(alone)


def test_every_member_raises_what_mpi_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(md.BackendError) as caught:
        open_alone(monkeypatch, ImportError("libmpi.so is not there"))
    assert str(caught.value) == (
        "MPI cannot be used for this group\n"
        "  where:    rank 3, a group\n"
        "  found:    ImportError: libmpi.so is not there\n"
        "  fix:      see what `meshdist doctor` says of MPI"
    )


def test_what_a_signals_handler_raises_leaves_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        open_alone(monkeypatch, ZeroDivisionError("mine"))
