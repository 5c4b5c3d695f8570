"""A sample of what the library promises, over two hosts: verbs, DDP, a lost rank, the demo.

All of the verbs' suite runs over them in ``make soak``.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import meshdist as md
from tests.pool import Failure
from tests.two_hosts import TwoHosts
from tests.verbs.cases import judge, perform_all, sample

ROOT = Path(__file__).resolve().parents[1]
DEMO = f"{ROOT / 'examples' / 'train_lm.py'} --mesh dp=2,tp=2 --check"
TINY = "--layers=2 --width=32 --heads=4 --context=16 --batch=4 --lr=1e-2 --sample=8"
LAUNCHERS = {
    "torchrun": (
        "from torch.distributed.run import main; main()",
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host-a:29400",
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host-a:29400",
    ),
    "meshdist": (
        "from meshdist.cli.main import main; sys.exit(main())",
        "meshdist run -n 2 --nnodes 2 --node-rank 0 --master-addr host-a",
        "meshdist run -n 2 --nnodes 2 --node-rank 1 --master-addr host-a",
    ),
}


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_verbs(backend: str | None, two_hosts: TwoHosts) -> None:
    cases = sample(4, 2)
    found = two_hosts.run(perform_all, 4, cases, backend=backend, timeout_s=120.0)
    judge("two hosts", cases, found)


def test_a_wrapper_averages_over_hosts(two_hosts: TwoHosts) -> None:
    def program() -> list[list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
        wrapped, plain = md.DDP(model), [one.detach().clone() for one in model.parameters()]
        batch = torch.arange(12.0).reshape(4, 3)
        wrapped(batch[md.get_rank()]).sum().backward()
        hidden = batch @ plain[0].T + plain[1]
        expected = hidden.mean(0)  # of the last layer's weight: the inputs' mean
        found = model[1].weight.grad
        assert isinstance(found, torch.Tensor)
        return [found.flatten().tolist(), expected.tolist()]

    for found, expected in two_hosts.run(program, 4):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_rank_that_is_killed_on_the_other_host_is_named(two_hosts: TwoHosts) -> None:
    def program() -> str:
        md.all_reduce(torch.ones(1000))
        if md.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(md.MeshdistError) as caught:
            md.all_reduce(torch.ones(1000))
        return str(caught.value)

    *others, lost = two_hosts.outcomes(program, 4, backend=None, timeout_s=60.0)
    assert isinstance(lost, Failure)
    for text in others:
        assert not isinstance(text, Failure), text.exception
        assert "rank 3" in text


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_demo_is_launched_on_each_host(launcher: str, two_hosts: TwoHosts) -> None:
    text, *lines = LAUNCHERS[launcher]
    program = f"import os, sys\nsys.argv = os.environ['LINE'].split()\n{text}"
    said = [{"LINE": f"{line} {DEMO} {TINY} --steps=3"} for line in lines]
    first, second = two_hosts.start(program, said, hosts="AB", timeout_s=120.0)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "loss" in first.stdout, first.stdout
