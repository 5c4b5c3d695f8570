"""The whole training script: losses do not depend on the mesh or on a stop, and it is short."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.pool import Pool, places

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "training_script.py"
MOST_LINES = 200


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize(("mesh", "ranks"), [("dp=2,tp=2", 4), ("tp=3", 3), ("dp=1", 1)])
def test_losses_do_not_depend_on_the_mesh_or_on_a_stop(
    mesh: str,
    ranks: int,
    tmp_path: Path,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"--simulate {ranks} --mesh {mesh} --root {tmp_path} --check --dtype float32"
    argv = [str(SCRIPT), *words.split(), "--steps", "50", "--save-every", "10"]
    monkeypatch.setattr(sys, "argv", argv)
    assert load("training_script").main() == 0
    printed = capsys.readouterr().out
    assert "starts at step 25, epoch 0" in printed  # within the epoch of 41 batches
    assert re.search(r"accuracy \S+% of 203", printed)


def test_a_schedule_that_is_not_saved_is_found(
    tmp_path: Path, load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check fails if a part of the state is missing in the checkpoint."""
    script = load("training_script")
    whole = script.md.checkpoint.State

    def without_schedule(**parts: object) -> object:
        del parts["schedule"]
        return whole(**parts)

    monkeypatch.setattr(script.md.checkpoint, "State", without_schedule)
    words = f"--simulate 2 --mesh dp=2 --root {tmp_path} --check --dtype float32 --steps 50"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words.split()])
    assert script.main() == 1


def test_a_check_in_a_used_folder_is_an_error(
    tmp_path: Path,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "step-60").mkdir()
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--root", str(tmp_path), "--check"])
    with pytest.raises(SystemExit):
        load("training_script").main()
    assert "--check needs an empty --root" in capsys.readouterr().err


@pytest.mark.soak
def test_on_two_processes(pool: Pool, tmp_path: Path) -> None:
    words = ["--mesh", "dp=2", "--root", str(tmp_path), "--check", "--steps", "50"]
    ended = pool.start(SCRIPT, places(2), *words, has_teardown=False)
    assert [done.returncode for done in ended] == [0, 0], ended
