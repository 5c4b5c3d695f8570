"""What a member does where MPI does not start; ``test_communicator`` tests the rest over MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

import meshdist as md
from meshdist.backends.mpi import connect as module
from tests.inner import Opening, my_process_info


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
        "  fix:      run `meshdist doctor`, which reports what MPI lacks"
    )


@pytest.mark.parametrize(("rank", "size"), [(5, 8), (5, 2), (-1, 2), (1 << 40, 2)])
def test_members_of_other_worlds_of_mpi_are_rejected(
    rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 2)
    monkeypatch.setattr(module, "start_mpi", lambda: SimpleNamespace(COMM_WORLD=world))
    store = md.HashStore()
    other = {"process_info": my_process_info().to_json(), "rank": rank, "size": size, "tag": 1}
    store.set("mpi/1", json.dumps(other))
    two = Opening(store, lambda: store, (3, 4), 0, "cpu", timedelta(seconds=5), name="a group")
    with pytest.raises(md.BackendError) as caught:
        module.open_link(two)
    sizes = "2, 8" if size == 8 else "2"
    assert str(caught.value) == (
        "the ranks of this group do not belong to one MPI world\n"
        "  where:    rank 3, a group\n"
        "  expected: processes started by one mpiexec\n"
        "  found:    2 processes, with 2 different MPI rank(s), in MPI worlds of "
        f"{sizes} rank(s)\n"
        "  fix:      start the program with `mpiexec -n 4 python script.py` or "
        "`meshdist run --launcher mpi -n 4 script.py`"
    )


def test_what_a_signals_handler_raises_leaves_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        open_alone(monkeypatch, ZeroDivisionError("mine"))


def test_a_process_that_is_ended_loses_nothing_that_it_has_written() -> None:
    program = (
        "from types import SimpleNamespace\n"
        "from meshdist.backends.mpi.connect import _end_with\n"
        "print('the last line', end='')\n"
        "_end_with(ValueError('late'), SimpleNamespace(ranks=(4, 6), rank=1))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "the last line")
    assert done.stderr.startswith(
        "meshdist: rank 6 exits, because nothing else can end the MPI call"
    )
    assert done.stderr.endswith("\nValueError: late\n")
