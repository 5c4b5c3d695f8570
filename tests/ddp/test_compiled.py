"""torch.compile: the same gradients whatever is compiled, and overlap where blocks are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.ddp import sending
from tests.pool import Pool

# torch 2.13 warns so of any compiled block that follows another.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

NUM_STEPS = 3  # the buckets are rebuilt before the second


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def wrapped(what: str, backend: Any) -> nn.Module:
    """A replica of which ``what`` is compiled; each of its parameters has a bucket of its own."""
    net = Net()
    if what == "blocks":
        for block in net.blocks:
            block.compile(backend=backend)
    if what == "module":
        net.compile(backend=backend)
    model = md.DDP(net, bucket_cap_mb=1e-6)
    if what == "wrapper":
        return torch.compile(model, backend=backend)
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for step in range(NUM_STEPS):
        model.zero_grad()
        model(torch.ones(2, 3) * (1 + step + md.get_rank())).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """On rank 0 an R for each reduction that starts; compiled backwards are for the backend."""
    import torch._dynamo

    told: list[str] = []
    all_reduce = sending.all_reduce

    def telling(*args: Any, **kwargs: Any) -> Any:
        if md.get_rank() == 0:
            told.append("R")
        return all_reduce(*args, **kwargs)

    monkeypatch.setattr(sending, "all_reduce", telling)
    torch._dynamo.reset()
    yield told
    torch._dynamo.reset()


def telling_backend(events: list[str]) -> Any:
    """A backend that tells on rank 0 of each compiled backward, by a B."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compile_backward(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*args: torch.Tensor) -> Any:
            if md.get_rank() == 0:
                events.append("B")
            return graph(*args)

        return make_boxed_func(run)

    return aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=compile_backward
    )


@pytest.mark.parametrize(
    ("what", "first", "order"),
    [
        ("blocks", "BBRRRR", "BRRBRR"),
        ("module", "BRRRR", "BRRRR"),
        ("wrapper", "BRRRR", "BRRRR"),
        ("nothing", "RRRR", "RRRR"),
    ],
)
def test_reductions_start_behind_each_compiled_backward_but_the_first(
    events: list[str], what: str, first: str, order: str
) -> None:
    def program() -> list[torch.Tensor]:
        return gradients(wrapped(what, telling_backend(events)))

    found = md.simulate(program, 2)
    assert "".join(events) == first + order * (NUM_STEPS - 1)
    expected = md.simulate(lambda: gradients(md.DDP(Net())), 2)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_compiled_wrapper_trains_on_processes(pool: Pool) -> None:
    def program() -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled = gradients(wrapped("wrapper", "aot_eager"))
        plain = gradients(md.DDP(Net()))
        return all(torch.allclose(*pair) for pair in zip(compiled, plain, strict=True))

    assert pool.run(program, 2, timeout_s=120) == [True, True]
