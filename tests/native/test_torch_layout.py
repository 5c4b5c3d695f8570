"""What the core reads of a tensor where torch keeps it is what torch says of it in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pool import Pool

PROGRAM = """
import sys, torch, meshdist as md
from meshdist.backends.native_core import core

md.init_process_group("shm", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
path = None

def told(make):
    \"\"\"Whether the fast path takes it, how often autograd has been told, and what it has.\"\"\"
    x = make()
    before = None if x.is_inference() else x._version
    taken = md.group.WORLD.fast_path.all_reduce(x, md.ReduceOp.AVG)
    after = None if before is None else x._version - before
    return taken, after, x.detach().tolist()

def inference():
    with torch.inference_mode():
        return torch.ones(2)

md.all_reduce(torch.ones(2))
leaf = torch.ones(2, requires_grad=True)
cases = {
    "plain": lambda: torch.ones(2, 3),
    "view": lambda: torch.ones(2, 3).view(6)[2:],
    "empty": lambda: torch.ones(0),
    "scalar": lambda: torch.tensor(2.0),
    "whole": lambda: torch.ones(2, dtype=torch.float64),
    "detached": lambda: leaf.detach(),
    "leaf": lambda: leaf,
    "derived": lambda: leaf * 2,
    "negated": lambda: torch._neg_view(torch.ones(2)),
    "strided": lambda: torch.ones(4)[::2],
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "inference": inference,
    "no longer": lambda: leaf.clone().detach_(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "meta": lambda: torch.ones(2, device="meta").to("meta"),
}
print(core.knows_torch())
for name, make in cases.items():
    if name != "meta":
        print(name, *told(make))
print("meta", md.group.WORLD.fast_path.all_reduce(cases["meta"](), md.ReduceOp.AVG))
x = torch.ones(2)
y = (x * leaf).sum()  # keeps x for its backward
md.all_reduce(x)
try:
    y.backward()
except RuntimeError as error:
    print("modified by an inplace operation" in str(error))
"""


@pytest.fixture(scope="module")
def answers(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the program prints where the core reads torch's objects (""), and where it may not."""
    folder = tmp_path_factory.mktemp("stores")
    found = {}
    for choice in ("", "0"):
        environment = {"MESHDIST_TORCH_LAYOUT": choice}
        (ended,) = pool.start(
            PROGRAM, [environment], str(folder / f"store{choice}"), has_teardown=False
        )
        assert ended.returncode == 0, ended.stderr
        found[choice] = ended.stdout.splitlines()
    return found


def test_it_is_found_in_this_torch_unless_switched_off(answers: dict[str, list[str]]) -> None:
    assert (answers[""][0], answers["0"][0]) == ("True", "False")


def test_it_says_what_python_says(answers: dict[str, list[str]]) -> None:
    assert answers[""][1:] == answers["0"][1:]


def test_what_is_written_is_told_to_autograd_once(answers: dict[str, list[str]]) -> None:
    taken = [line.split() for line in answers[""][1:] if " None " in f"{line} "]
    assert {line[0]: line[2] for line in taken if line[0] in ("plain", "view", "detached")} == {
        "plain": "1",
        "view": "1",
        "detached": "1",
    }
    assert answers[""][-1] == "True"


FIRST_CALL = """
import sys, torch, meshdist as md
from meshdist.backends.native_core import core

md.init_process_group("shm", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
with eval(sys.argv[2]):
    md.all_reduce(torch.ones(2, device="cpu"))
print(core.knows_torch())
"""


@pytest.mark.parametrize(
    "context", ["torch.no_grad()", "torch.inference_mode()", "torch.device('meta')"]
)
def test_it_is_found_whatever_the_first_call_is_in(
    context: str, pool: Pool, tmp_path: Path
) -> None:
    (ended,) = pool.start(FIRST_CALL, [{}], str(tmp_path / "store"), context, has_teardown=False)
    assert ended.stdout.strip() == "True", ended.stderr
