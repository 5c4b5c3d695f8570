"""Unchanged programs of torch on shm give what they give on Gloo, and run under torchrun."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.torch_process_groups.worlds import on_torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "data_parallel": "train",
    "fully_sharded": "train",
    "tensor_parallel": "train",
    "checkpoint": "save_and_load",
    "functional_collectives": "collect",
    "fully_sharded_2d": "train",
    "zero_with_our_ddp": "train",
}
NUM_RANKS = {"fully_sharded_2d": 4}
CASES = pytest.mark.parametrize(("name", "function"), list(PROGRAMS.items()))


@CASES
def test_shm_gives_what_gloo_gives(name: str, function: str, pool: Pool) -> None:
    source = (ROOT / "examples" / "torch_programs" / f"{name}.py").read_text(encoding="utf-8")

    def program() -> Any:
        names: dict[str, Any] = {"__name__": name, "__doc__": ""}
        with warnings.catch_warnings():
            for category in (FutureWarning, DeprecationWarning):  # torch warns of its own names
                warnings.simplefilter("ignore", category)
            exec(compile(source, name, "exec"), names)
            return names[function]()

    num_ranks = NUM_RANKS.get(name, 2)
    ours, theirs = (on_torch(pool, program, num_ranks, backend) for backend in ("shm", "gloo"))
    if num_ranks == 2:
        assert ours == theirs
    else:  # a sum of more than two numbers depends on its order
        torch.testing.assert_close(ours, theirs)


# Each has a process of its own, forked once what all of them use of torch is there. The store that
# torchrun serves keeps apart what is of different attempts.
IN_TURN = """
import gc, os, runpy, sys
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp
import torch.distributed.tensor.parallel

gc.freeze()
for number, script in enumerate(sys.argv[1:]):
    child = os.fork()
    if child == 0:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"{script} failed")
"""


TOLD = {"checkpoint": "sums:", "functional_collectives": "results:"}


@pytest.mark.parametrize(
    "names",
    [
        ["data_parallel", "functional_collectives"],
        pytest.param([name for name in PROGRAMS if name not in NUM_RANKS], marks=pytest.mark.soak),
    ],
    ids=["two", "all"],
)
def test_launched(start: Callable[..., Any], tmp_path: Path, names: list[str]) -> None:
    program = tmp_path / "in_turn.py"
    program.write_text(IN_TURN)
    scripts = [Path("examples") / "torch_programs" / f"{name}.py" for name in names]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = start(*torchrun, program, *scripts)
    assert done.returncode == 0, done.stderr
    told = [line.partition(" ")[0] for line in done.stdout.splitlines()]
    words = [word for word in told if word in ("losses:", *TOLD.values())]
    assert words == [TOLD.get(name, "losses:") for name in names]
