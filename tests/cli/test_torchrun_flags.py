"""torchrun's flags: served with torchrun's meaning, or explained."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from meshdist.cli import run as run_command
from meshdist.cli.torchrun_flags import add_torchrun_flags, launch_settings, number_of_processes
from tests.inner import LaunchError, Output, num_cores

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "meshdist", "run"]
ENV = dict(os.environ, PYTHONPATH=str(ROOT))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_torchrun_flags(made, short=True)
    return made


def settings_of(*words: str) -> dict[str, Any]:
    settings = launch_settings(parser().parse_args(words))
    place = asdict(settings.pop("node"))
    return {**settings, **place}


def changed(*words: str) -> dict[str, Any]:
    """The settings that differ from those without words."""
    without = settings_of()
    return {name: x for name, x in settings_of(*words).items() if x != without[name]}


def flags_in(parser: argparse.ArgumentParser) -> set[str]:
    """The flags that a parser's help lists, each in each spelling."""
    lists = [found.split("  ")[0] for found in re.findall(r"^  (-.*)", parser.format_help(), re.M)]
    return {flag.split()[0] for some in lists for flag in some.split(", ")}


def is_known(flag: str) -> bool:
    """Whether a command line may have ``flag``; it may have to be followed by a value."""
    made = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_torchrun_flags(made, short=True)
    try:
        return flag not in made.parse_known_args([flag])[1]
    except argparse.ArgumentError as error:
        return error.message == "expected one argument"


def test_every_flag_of_torchrun_is_known_in_each_spelling() -> None:
    theirs = flags_in(get_args_parser()) - {"-h", "--help"}
    assert len(theirs) > 50
    assert [flag for flag in sorted(theirs) if not is_known(flag)] == []
    assert not is_known("--unknown") and not is_known("-z")
    assert flags_in(parser()) - theirs == {"-h", "--help", "-n"}


def test_what_is_left_out_is_as_with_torchrun() -> None:
    assert settings_of() == {
        "nprocs": 1,
        "nnodes": 1,
        "node_rank": 0,
        "master_addr": None,
        "master_port": None,
        "role": "default",
        "output": Output(),
        "signals": None,
        "stopping_s": None,
    }


SERVED: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("--nnodes=2", "--node_rank=1"), {"nnodes": 2, "node_rank": 1}),
    (("--master-addr=a", "--master_port=7"), {"master_addr": "a", "master_port": 7}),
    (("--standalone", "--nnodes=1", "--master-addr=a", "--master-port=7"), {}),
    (("--role=trainer",), {"role": "trainer"}),
    (("--shutdown-timeout=30",), {"stopping_s": 30.0}),
    (("--signals-to-handle=SIGTERM, SIGUSR1",), {"signals": [signal.SIGTERM, signal.SIGUSR1]}),
    (("--log-dir=x",), {"output": Output(log_dir="x", tee=3)}),
    (("--log-dir=x", "-r2"), {"output": Output(log_dir="x", redirects=2)}),
    (("-t", "0:3,2:1"), {"output": Output(tee={0: 3, 2: 1})}),
    (("--local-ranks-filter=0,2",), {"output": Output(shown=frozenset({0, 2}))}),
]


@pytest.mark.parametrize(("words", "expected"), SERVED)
def test_what_is_served(words: Sequence[str], expected: dict[str, Any]) -> None:
    assert changed(*words) == expected


def test_variables_of_torchrun_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    monkeypatch.setenv("PET_MODULE", "1")
    monkeypatch.setenv("PET_NO_PYTHON", "0")
    arguments = parser().parse_args(["--node-rank=2"])
    settings = launch_settings(arguments)
    assert (settings["nprocs"], settings["node"].node_rank) == (3, 2)
    assert (arguments.module, arguments.no_python) == (True, False)
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    with pytest.raises(LaunchError, match="does not support torchrun's --max-restarts"):
        settings_of()


def test_numbers_of_processes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert number_of_processes("12") == 12
    assert number_of_processes("cpu") == num_cores()
    for count, expected in ((0, num_cores()), (5, 5)):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda count=count: count)
        assert number_of_processes("auto") == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    assert number_of_processes("gpu") == 6
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(LaunchError) as caught:
        number_of_processes("gpu")
    assert str(caught.value).splitlines() == [
        "torch cannot use any gpu on this host",
        "  where:    --nproc-per-node, or -n",
        "  expected: a number, or cpu, gpu, xpu (or torch's name of another accelerator), or auto",
        "  fix:      pass a number, or -n auto, which starts one process per core without "
        "accelerators",
    ]
    for word in ("many", "2.0", "²", ""):
        with pytest.raises(LaunchError) as caught:
            number_of_processes(word)
        assert caught.value.summary == f"{word!r} is not a number of processes"


SIGNALS = "pass for example --signals-to-handle SIGTERM,SIGINT,SIGUSR1"
REFUSED = [
    (
        "--standalone --nnodes=2",
        "--standalone cannot be combined with --nnodes 2",
        "remove one of them",
    ),
    (
        "-r4",
        "'4' is not a choice of streams",
        "pass for example --redirects 3, or --redirects 0:3,1:2",
    ),
    (
        "--tee=0:1,x",
        "'0:1,x' is not a choice of streams",
        "pass for example --tee 3, or --tee 0:3,1:2",
    ),
    (
        "--local-ranks-filter=0,,1",
        "'0,,1' is not a list of local ranks",
        "pass for example --local-ranks-filter 0,2",
    ),
    ("--signals-to-handle=SIGKILL", "'SIGKILL' is not a signal that a program can handle", SIGNALS),
    ("--signals-to-handle=TERM", "'TERM' is not a signal that a program can handle", SIGNALS),
]


@pytest.mark.parametrize(("words", "summary", "fix"), REFUSED)
def test_a_wrong_value_is_explained(words: str, summary: str, fix: str) -> None:
    with pytest.raises(LaunchError) as caught:
        settings_of(*words.split())
    assert (caught.value.summary, caught.value.fix) == (summary, fix)


UNSERVED = [
    *(("--rdzv-endpoint=a:12", "a b"), ("--rdzv_backend", "c10d"), ("--rdzv-id", "7")),
    *(("--rdzv-conf=timeout=9",), ("--local-addr=h0",), ("--max-restarts=0",)),
    *(("--monitor-interval", "0.5"), ("--start-method=fork",), ("--run-path",)),
    *(("--event-log-handler=null",), ("--logs-specs=mine",), ("--numa-binding", "node")),
    *(("--virtual-local-rank",), ("--duplicate-stdout-filters=a",)),
    ("--duplicate-stderr-filters=a,b",),
]


@pytest.mark.parametrize("words", UNSERVED)
def test_a_flag_of_torchrun_that_is_not_supported_is_named(
    words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command.main([*words, __file__]) == 2
    name = words[0].split("=")[0].replace("_", "-")
    assert capsys.readouterr().err.splitlines() == [
        f"meshdist run: this launcher does not support torchrun's {name}",
        "  expected: -n, and with several hosts --nnodes, --node-rank, --master-addr, "
        "--master-port; see --help",
        "  fix:      remove it, or start the program with torchrun, where it runs unchanged",
    ]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--nnodes=1:4", "argument --nnodes: invalid int value: '1:4'"),
        ("--hostfile=hosts", "unrecognized arguments: --hostfile=hosts"),
    ],
)
def test_another_wrong_flag_is_named(
    words: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_command.main([*words.split(), __file__])
    first, expected, fix = capsys.readouterr().err.splitlines()
    assert first == f"meshdist run: {found}"
    assert expected.startswith("  expected: meshdist run [-n N] [options] script.py ...")
    assert fix == "  fix:      run `meshdist run --help` for all options"


# -- launches ------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
rank = os.environ["RANK"]
print("out", rank)
print("err", rank, file=sys.stderr)
print(json.dumps([os.environ[name] for name in sys.argv[1:]]))
"""


def run(tmp_path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [*RUN, *(script if word == "SCRIPT" else word for word in words)]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=100, env=ENV, check=False
    )


def test_log_dir_keeps_the_output_in_torchruns_layout(tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    done = run(tmp_path, "-n", 2, "--log-dir", logs, "SCRIPT", "RANK")
    (folder,) = logs.glob("none_*/attempt_0")
    first, *errors = done.stderr.splitlines()
    assert first == f"meshdist: writing the ranks' output to {folder}"
    assert (done.returncode, sorted(errors)) == (0, ["err 0", "err 1"])
    assert sorted(done.stdout.splitlines()) == ['["0"]', '["1"]', "out 0", "out 1"]
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.log")}
    expected = {}
    for rank in range(2):
        expected[f"{rank}/stdout.log"] = f'out {rank}\n["{rank}"]\n'
        expected[f"{rank}/stderr.log"] = f"err {rank}\n"
    assert found == expected


def test_streams_are_redirected_and_shown_as_asked(tmp_path: Path) -> None:
    words = ("-n", 3, "--log-dir", tmp_path, "-r", "0:3,1:1", "-t", "2:2", "--prefix")
    done = run(tmp_path, *words, "--local-ranks-filter=1,2", "SCRIPT")
    (folder,) = tmp_path.glob("none_*/attempt_0")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[rank 2] []", "[rank 2] out 2"]
    assert sorted(done.stderr.splitlines()[1:]) == ["[rank 1] err 1", "[rank 2] err 2"]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.log"))
    assert files == ["0/stderr.log", "0/stdout.log", "1/stdout.log", "2/stderr.log"]
    assert (folder / "2" / "stderr.log").read_text() == "err 2\n"


def test_ranks_are_told_their_role(tmp_path: Path) -> None:
    names = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR")
    options = ("--role=worker", "--master-addr=127.0.0.2", "--nnodes=1")
    done = run(tmp_path, "-n", 2, *options, "SCRIPT", *names)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert sorted(lines) == [["worker", str(rank), "2", "1", "127.0.0.2"] for rank in range(2)]


def test_a_chosen_signal_ends_the_job_after_the_chosen_time(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        "def leave(*_):\n"
        "    time.sleep(4)\n"  # longer than a rank is given otherwise
        "    os.write(1, b'left')\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGUSR1, leave)\n"
        "os.write(1, b'.')\n"
        "while True: time.sleep(1)\n"
    )
    flags = ("--signals-to-handle=SIGUSR1", "--shutdown-timeout=60")
    job = subprocess.Popen([*RUN, *flags, str(script)], stdout=subprocess.PIPE, env=ENV)
    try:
        assert job.stdout is not None
        assert job.stdout.read(1) == b"."
        job.send_signal(signal.SIGUSR1)
        out, _ = job.communicate(timeout=60)
        assert (out, job.returncode) == (b"left", 128 + signal.SIGUSR1)
    finally:
        job.kill()
        job.communicate()
