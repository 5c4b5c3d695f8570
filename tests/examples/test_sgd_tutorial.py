"""Synchronous SGD by hand: what it prints, and that it is the step of one big batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshdist as md
from tests.pool import Pool, places

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path("examples") / "sgd_tutorial.py"
CPU = torch.device("cpu")
CHECKED = re.compile(r"check: loss fell, (\S+) to (\S+); weights equal on (\d) ranks")


@pytest.fixture
def sgd(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("sgd_tutorial")


def told(said: str) -> dict[tuple[int, int], float]:
    """The mean losses that were printed, by rank and epoch."""
    lines = re.findall(r"^rank (\d+), epoch (\d+): mean loss (\S+)$", said, re.MULTILINE)
    return {(int(rank), int(epoch)): float(loss) for rank, epoch, loss in lines}


def assert_learned(said: str, num_ranks: int, epochs: int) -> None:
    losses = told(said)
    assert set(losses) == {(rank, epoch) for rank in range(num_ranks) for epoch in range(epochs)}
    ((first, last, ranks),) = CHECKED.findall(said)
    assert int(ranks) == num_ranks
    for loss, epoch in [(float(first), 0), (float(last), epochs - 1)]:
        mean = sum(losses[rank, epoch] for rank in range(num_ranks)) / num_ranks
        assert loss == pytest.approx(mean, abs=2e-4)
    assert float(last) < float(first)


# -- the data -------------------------------------------------------------------------------------


def test_parts_are_disjoint_and_of_integers(sgd: ModuleType) -> None:
    data = list(range(100, 111))
    partitioner = sgd.DataPartitioner(data, [0.5, 0.3, 0.2])
    parts = [list(partitioner.use(number)) for number in range(3)]
    assert [len(part) for part in parts] == [5, 3, 2]  # int(fraction * 11); one is left over
    everything = [value for part in parts for value in part]
    assert len(set(everything)) == 10
    assert set(everything) < set(data)
    assert everything != sorted(everything)  # shuffled


def test_the_seed_alone_decides_the_parts(sgd: ModuleType) -> None:
    def parts(**seed: int) -> list[list[int]]:
        found: list[list[int]] = sgd.DataPartitioner(range(50), [0.5, 0.5], **seed).parts
        return found

    assert parts() == parts(seed=1234) != parts(seed=1)


@pytest.mark.parametrize(("num_ranks", "images", "batch"), [(1, 1797, 128), (3, 599, 42)])
def test_every_rank_reads_its_part(
    sgd: ModuleType, num_ranks: int, images: int, batch: int
) -> None:
    def program() -> tuple[list[int], int, torch.Size]:
        loader = sgd.partition_dataset()
        return loader.dataset.indices, loader.batch_size, next(iter(loader))[0].shape

    found = md.simulate(program, num_ranks)
    for indices, batch_size, shape in found:
        assert len(indices) == images
        assert batch_size == batch
        assert shape == (batch, 1, 8, 8)
    assert len({index for indices, *_ in found for index in indices}) == num_ranks * images


# -- the step -------------------------------------------------------------------------------------


def test_ranks_together_take_the_steps_of_one_big_batch(sgd: ModuleType) -> None:
    images, labels = sgd.read_digits()[: 3 * 16]
    batches = [(images[at : at + 16], labels[at : at + 16]) for at in (0, 16, 32)]

    def program() -> tuple[list[torch.Tensor], list[float], bool]:
        torch.manual_seed(7)
        model, mine = sgd.Net(), slice(md.get_rank(), None, 2)
        losses = list(sgd.train(model, [(x[mine], y[mine]) for x, y in batches], 2, CPU))
        return [p.detach() for p in model.parameters()], losses, sgd.are_weights_equal(model)

    torch.manual_seed(7)
    whole = sgd.Net()  # one process, nothing of meshdist
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01, momentum=0.5)
    means = []
    for _ in range(2):
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.nll_loss(whole(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / 3)

    outcomes = md.simulate(program, 2)
    for weights, _, is_equal in outcomes:
        assert is_equal
        for found, expected in zip(weights, whole.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    both = [sum(one) / 2 for one in zip(*(losses for _, losses, _ in outcomes), strict=True)]
    assert both == pytest.approx(means, rel=1e-5)


def test_weights_that_differ_in_one_place_are_found_on_every_rank(sgd: ModuleType) -> None:
    def program(rank_that_differs: int) -> bool:
        torch.manual_seed(0)
        model = sgd.Net()
        if md.get_rank() == rank_that_differs:
            with torch.no_grad():
                model.out.bias[-1] += 1e-6
        equal: bool = sgd.are_weights_equal(model)
        return equal

    assert md.simulate(program, 3, args=(-1,)) == [True] * 3
    assert md.simulate(program, 3, args=(2,)) == [False] * 3
    assert md.simulate(program, 3, args=(0,)) == [False] * 3


@pytest.mark.parametrize(
    ("losses", "shift", "text"),
    [
        ([2.0, 1.0], 0.0, "check: loss fell, 2.0000 to 1.0000; weights equal on 2 ranks\n"),
        ([1.0, 2.0], 0.0, "check: loss DID NOT FALL, 1.0000 to 2.0000; weights equal on 2 ranks\n"),
        ([2.0, 1.0], 1.0, "check: loss fell, 2.0000 to 1.0000; weights NOT EQUAL on 2 ranks\n"),
        (
            [2.0, float("nan")],
            0.0,
            "check: loss DID NOT FALL, 2.0000 to nan; weights equal on 2 ranks\n",
        ),
    ],
)
def test_the_check_says_what_is_wrong(
    sgd: ModuleType,
    capsys: pytest.CaptureFixture[str],
    losses: list[float],
    shift: float,
    text: str,
) -> None:
    def program() -> bool:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        with torch.no_grad():
            model.bias += shift * md.get_rank()
        learned: bool = sgd.is_learned(losses, model, CPU)
        return learned

    is_fine = "NOT" not in text
    assert md.simulate(program, 2) == [is_fine] * 2
    assert capsys.readouterr().out == text


# -- the whole program ----------------------------------------------------------------------------


def test_main_under_simulate(sgd: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert md.simulate(sgd.main, 3, args=(["--epochs", "2", "--check"],)) == [0, 0, 0]
    assert_learned(capsys.readouterr().out, 3, 2)


def test_a_check_that_fails_is_a_failure(
    sgd: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sgd, "average_gradients", lambda model: None)  # every rank for itself
    assert md.simulate(sgd.main, 2, args=(["--epochs", "2", "--check"],)) == [1, 1]
    assert "weights NOT EQUAL on 2 ranks\n" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--epochs", "0"], ["--epochs", "1", "--check"]])
def test_options_that_mean_nothing(
    sgd: ModuleType, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit):
        sgd.main(options)
    expected = "--epochs is at least 1, and at least 2 for --check to compare"
    assert expected in capsys.readouterr().err


def test_on_two_processes(pool: Pool) -> None:
    ended = pool.start(ROOT / SCRIPT, places(2), "--epochs", "2", "--check", has_teardown=False)
    assert [done.returncode for done in ended] == [0, 0], ended
    assert_learned("".join(done.stdout for done in ended), 2, 2)


@pytest.mark.gpu
def test_launched_on_a_gpu(start: Callable[..., Any]) -> None:
    command = ["-m", "meshdist", "run", "-n", min(torch.cuda.device_count(), 4), SCRIPT]
    done = start(*command, "--epochs", 2, "--check", "--device", "cuda")
    assert done.returncode == 0, done.stderr
    assert_learned(done.stdout, min(torch.cuda.device_count(), 4), 2)
