"""Behind a backward whose reduction failed `del ddp` lets go of the model: it can be wrapped."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from tests.pool import Pool


def wrapped_again(how: str) -> tuple[str, bool, float]:
    """The error of a backward; whether ``del`` ended the wrapper; a gradient of the next one."""
    alone = [md.new_group([rank]) for rank in range(md.get_world_size())][md.get_rank()]
    group = md.new_group(timeout=timedelta(seconds=1 if how == "late" else 30))
    net = nn.Linear(1, 1)
    ddp = md.DDP(net, process_group=group)

    def step(model: nn.Module) -> None:
        model(torch.full((1, 1), 1.0 + md.get_rank())).sum().backward()

    def hook(state: object, bucket: md.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise ZeroDivisionError("in a hook")

    if how == "hook":
        ddp.register_comm_hook(None, hook)
    text = ""
    gc.disable()  # no cycle holds it
    try:
        if md.get_rank() == 0 or how != "late":
            if how == "abort":
                group.abort()
            try:
                step(ddp)
            except Exception as error:
                text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        was = weakref.ref(ddp)
        del ddp
        has_gone = was() is None
    finally:
        gc.enable()
    net.zero_grad()
    step(md.DDP(net, process_group=alone))
    return text, has_gone, net.weight.grad.item()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("late", "Error: all_reduce"),
        ("abort", "AbortedError: all_reduce"),
        ("hook", "ZeroDivisionError: in a hook"),
    ],
)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_wrapper_ends_whose_backward_failed(
    how: str, expected: str, backend: str, pool: Pool
) -> None:
    first, second = pool.run(wrapped_again, 2, how, backend=backend)
    assert expected in first[0]
    assert first[1:] == (True, 1.0) and second[1:] == (True, 2.0)


def test_a_failed_work_holds_no_frame_that_waited_for_it(pool: Pool) -> None:
    def program() -> list[bool]:
        group = md.new_group(timeout=timedelta(seconds=1))
        if md.get_rank() == 1:
            return [True]
        work = md.all_reduce(torch.ones(1), group=group, async_op=True)
        future = work.get_future()

        class Big:
            """Something that a frame holds."""

        def wait(waits: Any) -> weakref.ref[Big]:
            big = Big()
            with pytest.raises(md.errors.BackendError, match="all_reduce"):
                waits()
            return weakref.ref(big)

        gone = [wait(work.wait)() is None, wait(work.wait)() is None, wait(future.wait)() is None]
        return [*gone, str(work.exception()) == str(work.exception()) != ""]

    first, _ = pool.run(program, 2)
    assert all(first) and len(first) == 4
