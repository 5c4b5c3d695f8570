"""Data parallelism alone: real images, recognised well, and as well as one process would."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import meshdist as md
from tests.pool import Pool, places

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
def test_on_two_processes(pool: Pool) -> None:
    ended = pool.start(ROOT / "examples" / "train_digits.py", places(2), has_teardown=False)
    assert [done.returncode for done in ended] == [0, 0], ended
    said = "".join(done.stdout for done in ended)
    (reached,) = re.findall(r"test accuracy (\S+)% \(360 images; ranks: 2\)", said)
    assert 95 < float(reached) <= 100


def test_a_network_that_did_not_learn_is_a_failure(
    load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    digits = load("train_digits")
    argv = ["--epochs", "1", "--lr", "0", "--batch", "720"]
    assert md.simulate(digits.main, 3, args=(argv,)) == [1, 1, 1]
    (reached,) = re.findall(r"test accuracy (\S+)% \(360", capsys.readouterr().out)
    assert float(reached) < 50


def test_every_rank_counts_its_share_of_the_test(load: Callable[[str], ModuleType]) -> None:
    digits = load("train_digits")
    _, test = digits.read_digits()

    def program() -> float:
        mesh = md.make_mesh((7,), ("dp",), device_type="cpu")  # 360 images do not divide by 7
        network = digits.make_network()
        for value in network.parameters():
            value.data.zero_()  # every answer is 0
        reached: float = digits.accuracy(network, test, mesh["dp"])
        return reached

    expected = sum(int(label) == 0 for _, label in test) / 360
    assert md.simulate(program, 7) == pytest.approx([expected] * 7)


def test_learning_and_test_images_are_apart(load: Callable[[str], ModuleType]) -> None:
    train, test = load("train_digits").read_digits()
    assert (len(train), len(test)) == (1437, 360)
    assert train.tensors[0].shape[1:] == (1, 8, 8)
    assert 0 <= train.tensors[0].min() < train.tensors[0].max() <= 1
