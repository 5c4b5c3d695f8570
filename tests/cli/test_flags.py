"""What is typed wrong is explained, in one form, with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshdist.cli.run import main


def rejected(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    try:
        code = main(words)
    except SystemExit as leaving:  # argparse leaves by itself
        code = int(str(leaving.code))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    return err.splitlines()


def test_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert rejected(capsys, "-n", "2") == [
        "meshdist run: no program to start",
        "  expected: a script, or -m and a module, after the launcher's own arguments",
        "  fix:      meshdist run script.py",
    ]
    assert rejected(capsys, "-m")[-1] == "  fix:      meshdist run -m package.module"


def test_a_script_that_does_not_exist(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rejected(capsys, "-n", "2", "train.py", "--x") == [
        "meshdist run: script 'train.py' does not exist",
        f"  where:    directory {tmp_path}",
        "  expected: the path of a Python script",
        f"  found:    no file at {tmp_path}/train.py",
        "  fix:      correct the path, or pass -m for a module or --no-python for another program",
    ]


def test_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert rejected(capsys, "-n", "0", __file__) == [
        "meshdist run: cannot start 0 processes",
        "  where:    -n (nprocs)",
        "  expected: at least 1",
        "  found:    0",
        "  fix:      meshdist run -n 4 script.py",
    ]


def test_a_host_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert rejected(
        capsys, "--nnodes", "2", "--node-rank", "2", "--master-addr", "a", __file__
    ) == [
        "meshdist run: host number 2 does not exist in a job on 2 host(s)",
        "  where:    --node-rank",
        "  expected: 0 to 1: less than --nnodes",
        "  found:    2",
        "  fix:      pass a different --node-rank on each host, from 0",
    ]


def test_several_hosts_without_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert rejected(capsys, "--nnodes", "2", "--node-rank", "1", __file__) == [
        "meshdist run: a job on 2 hosts needs the address of host 0",
        "  where:    --master-addr",
        "  expected: a name or address of host 0 that every host can reach",
        "  found:    nothing",
        "  fix:      meshdist run --nnodes 2 --node-rank 1 --master-addr HOST0 -n 4 script.py",
    ]


def test_module_and_no_python(capsys: pytest.CaptureFixture[str]) -> None:
    lines = rejected(capsys, "-m", "--no-python", "x")
    assert lines[0] == "meshdist run: -m and --no-python cannot be combined"
    assert lines[-1] == "  fix:      remove one of them"


@pytest.mark.parametrize(
    ("words", "summary"),
    [
        (("--node-rank", "one"), "argument --node-rank/--node_rank: invalid int value"),
        (
            ("--shutdown-timeout=inf", "x.py"),
            "argument --shutdown-timeout/--shutdown_timeout: must be a number of seconds "
            "between 0 and 1,000,000, not 'inf'",
        ),
        (
            ("--shutdown-timeout=soon", "x.py"),
            "argument --shutdown-timeout/--shutdown_timeout: must be a number of seconds "
            "between 0 and 1,000,000, not 'soon'",
        ),
        (("--bogus", "x.py"), "unrecognized arguments: --bogus"),
        (("--nproc-per", "2", "x.py"), "unrecognized arguments: --nproc-per"),
    ],
)
def test_arguments_that_do_not_exist(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], summary: str
) -> None:
    lines = rejected(capsys, *words)
    assert lines[0].startswith(f"meshdist run: {summary}")
    assert lines[1].startswith("  expected: meshdist run [-n N]")
    assert lines[2] == "  fix:      run `meshdist run --help` for all options"
