"""The README's first screen says what happens: its error, and its numbers, which reports have."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
import torch

import meshdist as md

ROOT = Path(__file__).resolve().parents[1]


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_error_is_what_such_a_program_raises() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        md.all_reduce(torch.ones(3 if md.get_rank() == 3 else 4), group=mesh["dp"])

    shown = re.search(r"<!-- error: begin -->\n```text\n(.*?)\n```", readme(), re.DOTALL)
    assert shown is not None
    with pytest.raises(md.MismatchError) as caught:
        md.simulate(program, 4)
    raised = re.sub(r" at \S+:\d+", " at train.py:7", str(caught.value))
    assert shown[1] == f"MismatchError: {raised}"


@pytest.mark.parametrize(
    ("num_bytes", "texts"),
    [(8, ("2.1 us", "276 us")), (64 << 20, ("10 ms", "52 ms"))],
)
def test_the_times_are_those_of_the_report(num_bytes: int, texts: tuple[str, str]) -> None:
    report = json.loads((ROOT / "benchmarks/reports/collectives_shm.json").read_text())
    (cell,) = (
        cell
        for cell in report["cells"]
        if (cell["operation"], cell["bytes"], cell["dtype"]) == ("all_reduce", num_bytes, "float32")
    )
    for side, text in zip(("meshdist/shm", "torch/gloo"), texts, strict=True):
        number, unit = text.split()
        seconds = statistics.median(cell["seconds"][side]) * {"us": 1e6, "ms": 1e3}[unit]
        assert f"{seconds:.{len(number.partition('.')[2])}f}" == number
        assert text in readme()
