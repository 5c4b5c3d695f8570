"""python -m meshdist.launch takes torch.distributed.launch's flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshdist.launch import main

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = """
import json, os, sys
line = json.dumps([int(os.environ["LOCAL_RANK"]), sys.argv[1:]])
os.write(1, f"{line}\\n".encode())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def launch(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshdist.launch", *map(str, words)],
        cwd=cwd,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
    )


def told(done: subprocess.CompletedProcess[str]) -> list[object]:
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--nproc_per_node"])
def test_the_script_is_handed_its_local_rank(script: Path, flag: str) -> None:
    done = launch(f"{flag}=2", script, "--epochs", "3")
    assert told(done) == [[rank, [f"--local-rank={rank}", "--epochs", "3"]] for rank in range(2)]


@pytest.mark.parametrize("flag", ["--use-env", "--use_env", "--use-env=True", "--use_env=1"])
def test_with_use_env_it_is_not(script: Path, flag: str) -> None:
    done = launch("--nproc-per-node", 2, flag, script, "--epochs", "3")
    assert told(done) == [[rank, ["--epochs", "3"]] for rank in range(2)]


def test_with_use_env_false_it_is(script: Path) -> None:
    told_to_script = ["--local-rank=0", "--use-env=True"]
    assert told(launch("--use-env=False", script, "--use-env=True")) == [[0, told_to_script]]


def test_a_module_is_handed_it_too(script: Path) -> None:
    assert told(launch("-m", "script", "x", cwd=script.parent)) == [[0, ["--local-rank=0", "x"]]]


def test_the_flags_for_several_hosts_in_both_spellings(script: Path) -> None:
    words = ("--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--master-port=1234")
    for spelling in (words, [word.replace("-", "_").replace("__", "--") for word in words]):
        assert told(launch(*spelling, script)) == [[0, ["--local-rank=0"]]]


SIGNALS = """
import os, signal
wanted = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
heeded = [n.name for n in wanted if signal.getsignal(n) is not signal.SIG_IGN]
os.write(1, (" ".join(heeded) + "\\n").encode())
"""


@pytest.mark.parametrize(
    ("launcher", "heeded"),
    [
        ("meshdist", "SIGINT SIGQUIT"),  # nohup holds for the ranks, too
        pytest.param("torch", "SIGINT SIGHUP SIGQUIT", marks=pytest.mark.soak),
    ],
)
def test_ranks_heed_ctrl_c_also_where_the_launcher_was_started_in_the_background(
    tmp_path: Path, launcher: str, heeded: str
) -> None:
    path = tmp_path / "script.py"
    path.write_text(SIGNALS)
    module = "meshdist.launch" if launcher == "meshdist" else "torch.distributed.run"
    start = ["env", "--ignore-signal=INT,HUP", "--default-signal=QUIT", sys.executable]
    done = subprocess.run(
        [*start, "-m", module, "--nproc-per-node=2", str(path)],
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, f"{heeded}\n" * 2)


def test_no_python_needs_use_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--no-python", "true"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "python -m meshdist.launch: --no-python needs --use-env",
        "  expected: a program that reads LOCAL_RANK, since it gets no --local-rank",
        "  fix:      add --use-env",
    ]


def test_no_python_with_use_env() -> None:
    assert launch("--no-python", "--use-env", "false").returncode == 1
