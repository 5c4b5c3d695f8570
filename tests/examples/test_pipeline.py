"""The pipeline's example under each schedule, on simulated ranks and processes: equal to one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import meshdist as md
from tests.pool import Pool, places

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pipeline.py"
SCHEDULES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
SHORT = ["--check", "--steps", "4"]
CHECKED = re.compile(r"check: largest difference (\S+) .*: (\w+)")


@pytest.fixture
def pipeline(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("pipeline")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_simulated_ranks(
    pipeline: ModuleType, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    words = ["--schedule", schedule, "--mesh", "pp=2,dp=2", "--simulate", "4", *SHORT]
    assert pipeline.main(words) == 0
    ((difference, outcome),) = CHECKED.findall(capsys.readouterr().out)
    assert float(difference) < 1e-15
    assert outcome == "equal"


def test_one_rank_and_four_stages(pipeline: ModuleType) -> None:
    assert pipeline.main(["--mesh", "pp=1", "--simulate", "1", *SHORT]) == 0
    words = ["--mesh", "pp=4", "--simulate", "4", "--schedule", "Interleaved1F1B", *SHORT]
    assert pipeline.main(words) == 0


@pytest.mark.parametrize(
    "schedule",
    [
        "1F1B",
        pytest.param("Interleaved1F1B", marks=pytest.mark.soak),
        pytest.param("ZBVZeroBubble", marks=pytest.mark.soak),
    ],
)
def test_on_processes(pool: Pool, schedule: str) -> None:
    words = ["--schedule", schedule, "--mesh", "pp=2,dp=2", *SHORT]
    ended = pool.start(SCRIPT, places(4), *words, has_teardown=False)
    assert [done.returncode for done in ended] == [0] * 4, ended
    said = "".join(done.stdout for done in ended)
    assert [outcome for _, outcome in CHECKED.findall(said)] == ["equal"]


def test_a_difference_is_found(
    pipeline: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bare(module: object, device_mesh: object) -> object:
        """In place of the wrapper that averages."""
        return module

    monkeypatch.setattr(md, "DDP", bare)
    assert pipeline.main(["--mesh", "pp=2,dp=2", "--simulate", "4", *SHORT]) == 1
    ((difference, outcome),) = CHECKED.findall(capsys.readouterr().out)
    assert float(difference) > 1e-6
    assert outcome == "DIFFERENT"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--mesh", "pp=3"], "--layers 8 must divide among the 3 stages"),
        (["--mesh", "pp=2,dp=3"], "--batch must be a multiple of 3 dp ranks x 4 microbatches"),
        (["--mesh", "pp=2", "--simulate", "3"], "--mesh has 2 ranks, and --simulate 3"),
        (["--mesh", "pp=2,tp=2"], "invalid axes value: 'pp=2,tp=2'"),
    ],
)
def test_wrong_words(
    pipeline: ModuleType, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    with pytest.raises(SystemExit):
        pipeline.main(words)
    assert told in capsys.readouterr().err


def test_another_number_of_ranks(pipeline: ModuleType) -> None:
    args = pipeline.parse(["--mesh", "pp=2"])
    with pytest.raises(SystemExit, match="--mesh has 2 ranks, and 4 were started"):
        md.simulate(pipeline.run, 4, (args,))
