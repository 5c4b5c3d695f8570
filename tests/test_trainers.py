"""The programs of the page on trainers: torch's own; the others are run by `make trainers`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.pool import Pool, places
from tests.trainers import NUM_RANKS, RESULT, programs, run

ROOT = Path(__file__).resolve().parents[1]


def test_each_trainer_that_is_installed_has_a_program() -> None:
    found = programs()
    split = "Tensor-parallel transformers models"
    trainers = ["accelerate", "Lightning", "transformers' Trainer", split]
    assert list(found) == ["Plain torch", *trainers]
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    installed = re.search(r"^trainers = \[(.*?)\]", extras, re.MULTILINE)
    assert installed is not None
    imported = {
        name.split(".")[0]
        for program in found.values()
        for node in ast.walk(ast.parse(program))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert set(re.findall(r'"(\w+)', installed[1])) == imported - {"meshdist", "torch", "tempfile"}


def test_plain_torch_ends_with_equal_weights(pool: Pool) -> None:
    ended = pool.start(programs()["Plain torch"], places(NUM_RANKS), has_teardown=False)
    assert [done.returncode for done in ended] == [0] * NUM_RANKS, ended
    first, second = RESULT.findall("".join(done.stdout for done in ended))
    assert first == second


def test_a_failure_shows_what_the_program_said() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)exit status 1\n.*ZeroDivisionError"):
        run("1 / 0")
