"""The table of states: what each event does in each state of a wrapper, and a test of every cell.

A wrapper is *idle* until a synchronised forward, *awaited* from then on, *running* from the moment
at which outputs have their gradients to the end of the backward, and *ended* until the next forward
or ``check_gradients()``. It is *broken* once a reduction has failed, and *closed* once its hooks
are off. A backward that raised midway is a running one that has not ended.

Every cell runs on two simulated ranks, in the third step, when buckets are laid as gradients come.
The gradient of both weights is the rank's input, 1 on rank 0 and 2 on rank 1: "own" while it is
local, "average" where it is 1.5, "half" where rank 0 has averaged it with a rank that joined.
``last`` has its gradient first, and then ``first``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import MeshdistError

WARNS = "a backward reached parameters of a DistributedDataParallel but none of its outputs"


class Between(torch.autograd.Function):
    """Makes a call in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grad, None


class Net(nn.Module):
    """Two weights, and a call between their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        self.call: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = Between.apply(x * self.first, lambda: self.call())
        return (between * self.last).sum()


class Wrapped:
    """A wrapper on one rank, and what is seen of an event."""

    def __init__(self, *, may_fail: bool) -> None:
        self.rank = md.get_rank()
        self.x = torch.tensor([1.0 + self.rank])
        self.net = Net()
        self.model = md.DDP(self.net, bucket_cap_mb=1e-6)
        self.fails = False
        self.seen: list[str] = []
        if may_fail:
            self.model.register_comm_hook(None, self.average)
        for _ in range(2):
            self.step()
        self.net.zero_grad()

    def average(self, _: object, bucket: md.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.fails:
            raise ZeroDivisionError("in a hook")
        return md.comm_hooks.allreduce_hook(None, bucket)

    def step(self) -> None:
        self.model(self.x).backward()

    def backward(self, loss: torch.Tensor, call: Callable[[], object] = lambda: None) -> None:
        """Keep the graph; make the call once, between the two gradients."""

        def once() -> None:
            self.net.call = lambda: None
            with torch.enable_grad():
                call()

        self.net.call = once
        try:
            loss.backward(retain_graph=True)
        finally:
            self.net.call = lambda: None

    def look(self) -> None:
        """See both gradients."""
        x = self.x.item()
        words = {None: "none", x: "own", 1.5: "average", x / 2: "half", 4 * x: "beside"}
        grads = [None if p.grad is None else p.grad.item() for p in (self.net.last, self.net.first)]
        found = [words.get(grad, str(grad)) for grad in grads]
        self.seen.append(found[0] if found[0] == found[1] else f"{found[0]}, then {found[1]}")

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """See what is raised."""
        try:
            yield
        except ZeroDivisionError:
            self.seen.append("its own error")
        except MeshdistError as error:
            self.seen.append(str(error).splitlines()[0])


def reach(state: str, wrapped: Wrapped) -> torch.Tensor:
    """Bring the wrapper into any state but "running"; return the loss of its last forward."""
    loss = wrapped.model(wrapped.x)
    wrapped.fails = state == "broken"
    if state in ("idle", "ended", "broken"):
        with contextlib.suppress(ZeroDivisionError):
            wrapped.backward(loss)
    wrapped.fails = False
    if state == "idle":
        wrapped.model.check_gradients()
    if state == "closed":
        wrapped.model._remove_autograd_hooks()
    return loss


# -- events: behind each one both gradients are seen ----------------------------------------------


def is_running() -> bool:
    return torch._C._current_graph_task_id() != -1


def forward(wrapped: Wrapped, _: torch.Tensor) -> None:
    """One more through the wrapper; and its backward, where none runs."""
    if is_running():
        wrapped.model(wrapped.x)
    else:
        wrapped.net.zero_grad()
        wrapped.step()


def first_gradient(wrapped: Wrapped, loss: torch.Tensor) -> None:
    """A backward has reached the loss, and raises on both ranks behind its first gradient."""

    def see() -> None:
        came = [p.grad is not None for p in (wrapped.net.last, wrapped.net.first)]
        wrapped.seen.append({(True, False): "one of two"}.get(tuple(came), str(came)))
        raise ZeroDivisionError

    if is_running():
        wrapped.backward(loss, see)
    wrapped.net.zero_grad()
    try:
        wrapped.backward(loss, see)
    finally:
        wrapped.net.zero_grad()  # the reduction may run, or have ended


def gradient_beside_outputs(wrapped: Wrapped, _: torch.Tensor) -> None:
    if not is_running():
        wrapped.net.zero_grad()
    x = 4 * wrapped.x
    ((x * wrapped.net.first).sum() + (x * wrapped.net.last).sum()).backward()


def end_of_the_backward(wrapped: Wrapped, loss: torch.Tensor) -> None:
    """Of one that has reached the loss."""
    if not is_running():
        wrapped.net.zero_grad()
    wrapped.backward(loss)


def check_gradients(wrapped: Wrapped, _: torch.Tensor) -> None:
    wrapped.model.check_gradients()


def closing(wrapped: Wrapped, loss: torch.Tensor) -> None:
    """And then a backward that reaches the loss, where none runs."""
    wrapped.model._remove_autograd_hooks()
    if not is_running():
        wrapped.net.zero_grad()
        wrapped.backward(loss)


def exception(state: str, wrapped: Wrapped, loss: torch.Tensor) -> None:
    """Rank 1 raises, where a backward is awaited or runs, in place of it; then both check."""
    with wrapped.raising():
        if wrapped.rank == 1:
            if state == "running":
                wrapped.backward(loss, lambda: 1 / 0)
            raise ZeroDivisionError
        if state in ("awaited", "running"):
            wrapped.backward(loss)
    with wrapped.raising():
        wrapped.model.check_gradients()


def join(state: str, wrapped: Wrapped) -> None:
    """Rank 1 leaves the loop in this state, and rank 0 goes on with a step."""
    with wrapped.raising(), wrapped.model.join():
        if state != "running":
            reach(state, wrapped)
        else:
            loss = wrapped.model(wrapped.x)
            with wrapped.raising():
                wrapped.backward(loss, lambda: 1 / (1 - wrapped.rank))
        if wrapped.rank == 0:
            wrapped.net.zero_grad()
            wrapped.step()


EVENTS: dict[str, Callable[[Wrapped, torch.Tensor], None]] = {
    "a forward": forward,
    "the first gradient": first_gradient,
    "a gradient beside outputs": gradient_beside_outputs,
    "the end of the backward": end_of_the_backward,
    "check_gradients": check_gradients,
    "closing": closing,
}


def cell(state: str, event: str) -> tuple[list[str], str]:
    """What is seen of an event in a state; and of a step behind it, which begins anew."""
    wrapped = Wrapped(may_fail=state == "broken")
    if event == "join":
        join(state, wrapped)
    elif event == "an exception":
        exception(state, wrapped, reach("awaited" if state == "running" else state, wrapped))
    elif state != "running":
        loss = reach(state, wrapped)
        with wrapped.raising():
            EVENTS[event](wrapped, loss)
    else:
        loss = reach("awaited", wrapped)

        def inside() -> None:
            with wrapped.raising():
                EVENTS[event](wrapped, loss)

        with wrapped.raising():
            wrapped.backward(loss, inside)
    wrapped.look()
    seen, wrapped.seen = wrapped.seen, []
    wrapped.net.zero_grad()
    with wrapped.raising():
        wrapped.step()
    wrapped.look()
    return seen, wrapped.seen[0]


# -- the table ------------------------------------------------------------------------------------

RAISED = "its own error"
STOPPED = "cannot reduce gradients: an earlier all-reduce failed"
OVERLAPPING = "a backward began before the previous one ended"
INTERRUPTED = "the gradients of this step are wrong: a backward was interrupted"
UNEXPECTED = "unexpected gradients: the gradients of this step are dropped"
CHECKED = "cannot check gradients while a backward runs"
DIFFERENT = "collective mismatch: ranks made different calls as call 16"
LEFT = "deadlock: no simulated rank can continue"
UNSERVED = (
    "a rank that joined does not make this call, because no joinable of the context has a hook for "
    "it"
)

BEGUN = ["one of two", RAISED, "none"]
CUT = ([INTERRUPTED, "none"], [RAISED, INTERRUPTED, "none"])
Seen = list[str] | tuple[list[str], list[str]]

TABLE: dict[str, dict[str, Seen]] = {
    "idle": {
        "a forward": ["average"],
        "the first gradient": BEGUN,  # of one more backward on a retained graph
        "a gradient beside outputs": ["beside"],
        "the end of the backward": ["average"],
        "an exception": (["average"], [RAISED, "average"]),
        "check_gradients": ["average"],  # nothing is to check; gradients stay
        "join": (["half"], ["0.5"]),
        "closing": ["own"],
    },
    "awaited": {
        "a forward": ["average"],
        "the first gradient": BEGUN,
        "a gradient beside outputs": ["beside"],  # and warns
        "the end of the backward": ["average"],
        "an exception": CUT,
        "check_gradients": ["none"],  # all take part with zeros, and no rank had a backward
        "join": (["half"], ["0.5"]),
        "closing": ["own"],
    },
    "running": {
        "a forward": ["average"],  # a checkpoint computes again
        "the first gradient": [OVERLAPPING, "average"],
        "a gradient beside outputs": [UNEXPECTED, "none"],  # as a re-entrant checkpoint's, late
        "the end of the backward": [OVERLAPPING, "average"],
        "an exception": CUT,
        "check_gradients": [CHECKED, "average"],
        "join": ([DIFFERENT, STOPPED, "none"], [RAISED, UNSERVED, "average, then none"]),
        "closing": ["average"],  # it still ends on every rank
    },
    "ended": {
        "a forward": ["average"],
        "the first gradient": BEGUN,
        "a gradient beside outputs": ["beside"],
        "the end of the backward": ["average"],
        "an exception": (["average"], [RAISED, "average"]),
        "check_gradients": ["average"],
        "join": (["half"], ["0.5"]),
        "closing": ["own"],
    },
    "broken": {
        "a forward": [STOPPED, "none"],
        "the first gradient": [STOPPED, "none"],
        "a gradient beside outputs": ["beside"],
        "the end of the backward": [STOPPED, "none"],
        "an exception": ([STOPPED, "own, then none"], [RAISED, STOPPED, "own, then none"]),
        "check_gradients": [STOPPED, "own, then none"],
        "join": ([STOPPED, "none"], [LEFT, "own, then none"]),
        "closing": ["own"],
    },
    "closed": {
        "a forward": ["own"],
        "the first gradient": BEGUN,
        "a gradient beside outputs": ["beside"],
        "the end of the backward": ["own"],
        "an exception": (["none"], [RAISED, "none"]),
        "check_gradients": ["none"],
        "join": ([UNSERVED, "own"], [UNSERVED, "none"]),  # its hook still makes the calls
        "closing": ["own"],
    },
}
NEXT = {"broken": STOPPED, "closed": "own"}
"""What a step behind the event brings, where it is no average."""

CELLS = [(state, event) for state, row in TABLE.items() for event in row]


@pytest.mark.parametrize(("state", "event"), CELLS)
def test_each_event_in_each_state(state: str, event: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = md.simulate(cell, 2, (state, event))
    expected = TABLE[state][event]
    rows = expected if isinstance(expected, tuple) else (expected, expected)
    after = "own" if event == "closing" else NEXT.get(state, "average")
    both = (STOPPED, DIFFERENT) if (state, event) == ("running", "join") else (after, after)
    assert found == list(zip(rows, both, strict=True))
    warned = (state, event) == ("awaited", "a gradient beside outputs")
    assert [str(one.message)[: len(WARNS)] for one in caught] == [WARNS] * (2 if warned else 0)


def test_the_table_has_a_cell_for_every_event() -> None:
    for row in TABLE.values():
        assert set(row) == {*EVENTS, "an exception", "join"}
