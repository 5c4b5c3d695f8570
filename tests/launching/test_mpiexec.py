"""Which mpiexec is taken, and what it is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshdist.launching.rank_environment import find_mpiexec, mpiexec_environment


def test_the_mpiexec_beside_the_interpreter_is_taken_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir()
        (folder / "mpiexec").write_text("#!/bin/sh\n")
        (folder / "mpiexec").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(mine / "python"))
    monkeypatch.setenv("PATH", str(other))
    assert find_mpiexec() == str(mine / "mpiexec")
    (mine / "mpiexec").unlink()
    assert find_mpiexec() == str(other / "mpiexec")
    (other / "mpiexec").unlink()
    assert find_mpiexec() is None


def test_more_ranks_than_cores_are_allowed_unless_somebody_has_said_otherwise() -> None:
    policy = "PRTE_MCA_rmaps_default_mapping_policy"
    found = mpiexec_environment({"RANK": "3", "LOCAL_RANK": "1", "HOME": "/x"})
    assert (found["HOME"], found[policy], found["OMP_NUM_THREADS"]) == ("/x", ":oversubscribe", "1")
    assert "RANK" not in found and "LOCAL_RANK" not in found
    mine = {policy: "core", "OMP_NUM_THREADS": "4"}
    assert found["OMPI_MCA_rmaps_base_oversubscribe"] == "1"  # Open MPI 4's name for it
    assert mpiexec_environment(mine).items() >= mine.items()
