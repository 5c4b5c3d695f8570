"""Where the output of ranks goes; launches with files are tested with the flags that ask for it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from meshdist.launching.launcher import run_processes
from meshdist.launching.output import Console, Destination, Output, Stream
from meshdist.launching.rank_environment import LaunchError

PYTHON = [sys.executable, "-S", "-c"]


@pytest.mark.parametrize("kind", ["stdout", "stderr"])
def test_without_files_output_goes_to_the_console(kind: str) -> None:
    with contextlib.closing(Output().destination(kind, rank=5, local_rank=1)) as destination:
        assert destination == Destination(getattr(sys, kind), None, b"", kind)


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "logs")
    with pytest.raises(LaunchError) as caught:
        run_processes([*PYTHON, ""], 2, output=Output(log_dir=place, redirects=3))
    assert str(caught.value).splitlines() == [
        "cannot write the ranks' output to files: Not a directory",
        f"  where:    --log-dir, {place}",
        "  expected: a writable folder",
        "  fix:      pass another --log-dir",
    ]


def test_of_a_rank_whose_output_is_in_files_the_failure_is_shown_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = Output(log_dir=str(tmp_path), redirects=3, shown=())
    assert run_processes([*PYTHON, "raise ValueError('unwell')"], 1, output=output) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("ValueError: unwell") == 1
    header = next(line for line in err.splitlines() if line.startswith("meshdist: rank 0"))
    assert header.endswith("failed with exit code 1. The end of its stderr:")
    (log,) = tmp_path.rglob("stderr.log")
    assert log.read_text().endswith("ValueError: unwell\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_end_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    with (
        open(reader, "rb", buffering=0) as pipe,
        open(writer, "wb", buffering=0) as rank,
        open("/dev/full", "wb", buffering=0) as file,
    ):
        stream = Stream(pipe, Destination(sys.stdout, file), Console())
        for line in (b"one\n", b"two\n"):
            rank.write(line)
            assert stream.read()
    out, err = capsys.readouterr()
    assert out == "one\ntwo\n"
    assert err == "meshdist: stopped writing to /dev/full: No space left on device\n"
