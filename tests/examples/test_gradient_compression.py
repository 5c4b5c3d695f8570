"""Each hook learns what plain averages learn; one that does not is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import meshdist as md

SCRIPT = Path("examples") / "gradient_compression.py"
LINE = re.compile(r"^(\S+) +loss (\S+) +\S+ ms a step  weights (.*)$", re.MULTILINE)


@pytest.fixture
def compression(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("gradient_compression")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_under_simulate(
    compression: ModuleType, capsys: pytest.CaptureFixture[str], num_ranks: int
) -> None:
    argv = ["--check", "--width", "16", "--steps", "12"]
    assert md.simulate(compression.main, num_ranks, args=(argv,)) == [0] * num_ranks
    said = capsys.readouterr().out
    lines = LINE.findall(said)
    assert [name for name, *_ in lines] == list(compression.HOOKS)
    assert {weights for *_, weights in lines} == {"equal"}
    assert all(0 < float(loss) < 1 for _, loss, _ in lines)
    assert said.endswith("of plain: yes\n")


def turn_around(state: Any, bucket: md.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = md.comm_hooks.allreduce_hook(state, bucket)
    return future.then(lambda done: done.value().mul_(-1))


@pytest.mark.parametrize(
    ("hook", "said_of_weights"), [(turn_around, "equal"), (md.comm_hooks.noop_hook, "NOT EQUAL")]
)
def test_a_hook_that_is_wrong_is_found(
    compression: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    hook: Any,
    said_of_weights: str,
) -> None:
    monkeypatch.setitem(compression.HOOKS, "bf16", lambda: (None, hook))
    argv = ["--check", "--width", "16", "--steps", "12", "--hooks", "fp16", "bf16"]
    assert md.simulate(compression.main, 2, args=(argv,)) == [1, 1]
    said = capsys.readouterr().out
    found = [(name, weights) for name, _, weights in LINE.findall(said)]
    assert found == [("fp16", "equal"), ("bf16", said_of_weights)]
    assert said.endswith("of plain: NO\n")
    assert md.simulate(compression.main, 2, args=(argv[1:],)) == [0, 0]  # nothing was asked


@pytest.mark.parametrize("option", ["--steps=0", "--width=0"])
def test_options_that_mean_nothing(
    compression: ModuleType, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit):
        compression.main([option])
    assert "--steps and --width are at least 1" in capsys.readouterr().err


@pytest.mark.soak
def test_launched(start: Callable[..., Any]) -> None:
    words = ["--check", "--width", 16, "--steps", 8]
    done = start("-m", "meshdist", "run", "-n", 2, SCRIPT, *words)
    assert done.returncode == 0, done.stderr
    assert len(LINE.findall(done.stdout)) == 7 and "of plain: yes" in done.stdout
