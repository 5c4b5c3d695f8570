"""Unchanged programs of torch on shm give what they give on Gloo, and run under torchrun."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.torch_backends.worlds import on_torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "data_parallel": "train",
    "fully_sharded": "train",
    "tensor_parallel": "train",
    "checkpoint": "save_and_load",
    "functional_collectives": "collect",
}
CASES = pytest.mark.parametrize(("name", "function"), list(PROGRAMS.items()))


@CASES
def test_shm_gives_what_gloo_gives(name: str, function: str, pool: Pool) -> None:
    source = (ROOT / "examples" / "torch_programs" / f"{name}.py").read_text(encoding="utf-8")

    def program() -> Any:
        names: dict[str, Any] = {"__name__": name, "__doc__": ""}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch warns of its own names
            exec(compile(source, name, "exec"), names)
            return names[function]()

    ours, theirs = (on_torch(pool, program, 2, backend) for backend in ("shm", "gloo"))
    assert ours == theirs


@CASES
def test_launched(name: str, function: str, start: Callable[..., Any]) -> None:
    script = Path("examples") / "torch_programs" / f"{name}.py"
    done = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    assert done.returncode == 0, done.stderr
    assert any(word in done.stdout for word in ("losses:", "sums:", "results:"))
