"""Flags of other launchers."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import pytest

from meshdist.cli.flags import Parser, add_habits
from meshdist.cli.run import main
from meshdist.cli.torchrun_flags import add_torchrun_flags, launch_settings


def parser() -> argparse.ArgumentParser:
    made = Parser("meshdist run", "meshdist run [-n N]", "", "")
    add_torchrun_flags(made, short=True)
    add_habits(made)
    return made


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        *((f"{flag} 3", ("nprocs", 3)) for flag in ("-np", "--np", "--nproc", "--num_processes")),
        ("--num-gpus=3", ("nprocs", 3)),
        ("--num_machines 2 --machine_rank 1 --master-addr a", ("node_rank", 1)),
        ("--main-process-ip a --main_process_port 7", ("master_port", 7)),
    ],
)
def test_what_means_the_same_is_served(words: str, setting: tuple[str, object]) -> None:
    settings = launch_settings(parser().parse_args(words.split()))
    assert {**settings, **asdict(settings["place"])}[setting[0]] == setting[1]


def test_what_is_not_given_changes_nothing() -> None:
    plain = Parser("", "", "", "")
    add_torchrun_flags(plain, short=True)
    without = launch_settings(plain.parse_args([]))
    assert launch_settings(parser().parse_args([])) == without


@pytest.mark.parametrize(
    ("flag", "summary", "fix"),
    [
        ("-hostfile", "-hostfile is mpiexec's", "hand it on: --mpi-args='-hostfile ...'"),
        ("--oversubscribe", "--oversubscribe is mpiexec's, and needless here", "leave it out"),
        ("-x", "-x is mpiexec's", "NAME=VALUE meshdist run -n 4 script.py"),
        ("--config_file", "--config_file is accelerate's", "say -n, --nnodes"),
        ("--backend", "--backend is not known", "init_process_group('gloo'), in the program"),
    ],
)
def test_what_is_not_served_is_answered(
    flag: str, summary: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([flag, "value", "script.py"])
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"meshdist run: {summary}"
    assert last.startswith("  fix:      ")
    assert fix in last


def test_help_lists_none_of_them() -> None:
    text = parser().format_help()
    assert "--nproc-per-node" in text
    assert "-np " not in text and "--hostfile" not in text
