"""Buffers: found where they are re-assigned, taken from the first rank, or as a hook says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

import meshdist as md
from meshdist.ddp.replicas import ModelBuffers
from meshdist.errors import KindError


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("nothing", None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(1))
        self.inner = Inner()

    def forward(self) -> torch.Tensor:
        self.count = self.count + 1  # another tensor from now on
        return self.weight * self.inner.scale.sum()


def test_buffers_are_named_as_the_module_names_them_and_found_where_they_are_now() -> None:
    net = Net()
    buffers = ModelBuffers(net, ())
    assert [*buffers.named()] == ["count", "inner.scale"]
    net()
    assert buffers.named()["count"] is net.count and net.count.item() == 1.0
    net.inner.scale = None
    assert [*buffers.named()] == ["count"]


def test_ignored_buffers_are_left_alone() -> None:
    assert [*ModelBuffers(Net(), {"inner.scale"}).named()] == ["count"]
    assert ModelBuffers(nn.Linear(1, 1), ()).named() == {}


def test_the_first_rank_gives_its_buffers() -> None:
    def program() -> list[Any]:
        net = Net()
        net.count.fill_(5.0 + md.get_rank())
        net.inner.scale = torch.full((2,), 7.0 + md.get_rank())
        buffers = ModelBuffers(net, {"inner.scale"})
        assert buffers.is_synchronised_now(is_before=True)
        assert not buffers.is_synchronised_now(is_before=False)
        assert buffers.synchronise(md.group.WORLD) == []
        return [net.count.item(), net.inner.scale[0].item()]

    assert md.simulate(program, 2) == [[5.0, 7.0], [5.0, 8.0]]


@pytest.mark.parametrize("location", [None, Location.PRE_FORWARD, Location.POST_FORWARD])
def test_a_hook_takes_the_place_of_the_broadcast(location: Location | None) -> None:
    def program() -> list[Any]:
        seen: list[Any] = []

        def hook(state: str, named: dict[str, torch.Tensor]) -> None:
            seen.append([state, {name: tensor.sum().item() for name, tensor in named.items()}])
            md.all_reduce(named["count"], md.ReduceOp.MAX)

        model = md.DDP(Net())
        given = () if location is None else (location,)
        model._register_buffer_comm_hook("state", hook, *given)
        model.module.count.fill_(10.0 * md.get_rank())
        model().sum().backward()
        return [seen, model.module.count.item()]

    is_before = location is Location.PRE_FORWARD
    for rank, (seen, count) in enumerate(md.simulate(program, 2)):
        held = 10.0 * rank + (not is_before)
        assert seen == [["state", {"count": held, "inner.scale": 2.0}]]
        assert count == 11.0


def test_what_a_hook_returns_is_awaited_at_the_end_of_the_backward() -> None:
    class Slow:
        def __init__(self, events: list[str]) -> None:
            self.events = events

        def wait(self) -> None:
            self.events.append("wait")

    def program() -> list[str]:
        events: list[str] = []
        model = md.DDP(Net())
        model._register_buffer_comm_hook(None, lambda *_: [Slow(events), Slow(events)])
        loss = model().sum()
        events.append("backward")
        loss.backward()
        events.append("done")
        model().sum().backward()
        return events

    assert md.simulate(program, 2) == [["backward", "wait", "wait", "done", "wait", "wait"]] * 2


def test_a_hook_that_cannot_be_called_is_rejected() -> None:
    def program() -> str:
        model = md.DDP(Net())
        with pytest.raises(KindError) as error:
            model._register_buffer_comm_hook(None, "all_reduce")
        return str(error.value)

    assert (
        md.simulate(program, 2)
        == [
            "the buffer communication hook is of type str\n"
            "  expected: a function of the state and a dict of buffers by name\n"
            "  fix:      pass the state first, then the hook"
        ]
        * 2
    )


def outside_of_training(model: nn.Module) -> None:
    with torch.no_grad():
        model()


def under_no_sync(model: Any) -> None:
    with model.no_sync():
        model().sum().backward()


@pytest.mark.parametrize(
    ("between", "is_equal"), [(outside_of_training, True), (under_no_sync, False)]
)
def test_after_a_forward_under_no_sync_buffers_stay_local_for_one_forward(
    between: Callable[[Any], None], is_equal: bool
) -> None:
    def program() -> list[float]:
        model = md.DDP(Net())
        seen = []
        between(model)
        for _ in range(2):
            model.module.inner.scale.fill_(1.0 + md.get_rank())
            model().sum().backward()
            seen.append(model.module.inner.scale[0].item())
        return seen

    assert md.simulate(program, 2) == [[1.0, 1.0], [1.0 if is_equal else 2.0, 1.0]]
