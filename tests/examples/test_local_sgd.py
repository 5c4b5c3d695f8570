"""Local SGD between hosts, DDP inside them: equal to one loop over the hosts' models."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import meshdist as md
from tests.pool import Pool, places

ROOT = Path(__file__).resolve().parents[2]
CHECKED = re.compile(r"check: weights of (\d) ranks (.*), largest difference (\S+)")


@pytest.fixture
def local_sgd(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("local_sgd")


@pytest.mark.soak
def test_on_two_processes(pool: Pool) -> None:
    script = ROOT / "examples" / "local_sgd.py"
    ended = pool.start(script, places(2), "--hosts", "2", "--check", has_teardown=False)
    assert [done.returncode for done in ended] == [0, 0], ended
    said = "".join(done.stdout for done in ended)
    ((ranks, outcome, found),) = CHECKED.findall(said)
    assert (ranks, outcome) == ("2", "agree")
    assert float(found) < 1e-4
    assert "between 2 hosts: 15 averages in place of 60" in said


@pytest.mark.parametrize("more", [[], ["--batch-norm"], ["--period", "7"]], ids=str)
def test_hosts_of_two_ranks_equal_the_run_alone(
    local_sgd: ModuleType, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    argv = ["--hosts", "2", "--check", "--steps", "23", *more]
    assert md.simulate(local_sgd.main, 4, (argv,)) == [0] * 4
    assert "weights of 4 ranks agree" in capsys.readouterr().out


def test_weights_that_part_are_found(
    local_sgd: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(self: object, params: object) -> None:
        """In place of the average."""

    monkeypatch.setattr(md.PeriodicModelAverager, "average_parameters", never)
    argv = ["--hosts", "2", "--check", "--steps", "10"]
    assert md.simulate(local_sgd.main, 2, (argv,)) == [1, 1]
    ((ranks, outcome, found),) = CHECKED.findall(capsys.readouterr().out)
    assert (ranks, outcome) == ("2", "DO NOT AGREE")
    assert float(found) > 1e-3


def test_hosts_that_do_not_divide_are_rejected(local_sgd: ModuleType) -> None:
    def program() -> str:
        with pytest.raises(SystemExit) as caught:
            local_sgd.main(["--hosts", "2"])
        return str(caught.value)

    assert "--hosts must divide the 3 ranks" in md.simulate(program, 3)[0]


def test_every_rank_reads_its_own_part(local_sgd: ModuleType) -> None:
    (first, labels), (second, _) = local_sgd.batches(2, 24)
    assert (first.shape, labels.shape) == ((24, 64), (24,))
    assert not torch.equal(first, second)
