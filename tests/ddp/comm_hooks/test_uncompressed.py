"""Plain averages, of dense and of sparse gradients."""

from __future__ import annotations

from typing import Any

import torch

import meshdist as md
from meshdist.ddp.comm_hooks.registered_hooks import RegisteredHook


def averaged(hook: Any, tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """What lies in a bucket of ``tensor`` once the hook has averaged it."""
    world = md.group.WORLD
    bucket = md.GradBucket(tensor, [tensor], [tensor], 0, True, world)
    RegisteredHook(group, hook, world).start(bucket).wait()
    return tensor


def test_a_dense_bucket_is_averaged_in_place() -> None:
    def program() -> list[float]:
        return averaged(md.comm_hooks.allreduce_hook, torch.tensor([3.0, md.get_rank()])).tolist()

    assert md.simulate(program, 3) == [[3.0, 1.0]] * 3


def test_another_group_than_the_wrappers() -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.tensor([1.0 * md.get_rank()])
        return averaged(md.comm_hooks.allreduce_hook, x, mesh["tp"]).tolist()

    assert md.simulate(program, 4) == [[0.5], [0.5], [2.5], [2.5]]


def test_a_sparse_bucket() -> None:
    def sparse(rank: int) -> torch.Tensor:
        """A row of its own, and one that all share."""
        values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
        indices = torch.tensor([[rank, 3]])
        return torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True)

    def program(name: str) -> list[Any]:
        x = averaged(getattr(md.comm_hooks, name), sparse(md.get_rank()))
        assert x.is_sparse
        return x.to_dense().tolist()  # type: ignore[no-any-return]

    expected = sum(sparse(rank).to_dense() for rank in range(3)) / 3
    assert md.simulate(program, 3, ("allreduce_hook",)) == [expected.tolist()] * 3
    for name in ("bf16_compress_hook", "fp16_compress_hook"):
        for found in md.simulate(program, 3, (name,)):
            torch.testing.assert_close(torch.tensor(found), expected, rtol=0.01, atol=0)


def test_nothing_is_sent_by_the_hook_that_does_nothing() -> None:
    def program() -> list[float]:
        x = torch.tensor([1.0 * md.get_rank()])
        if md.get_rank() == 0:  # alone: a collective would wait
            averaged(md.comm_hooks.noop_hook, x)
        return x.tolist()

    assert md.simulate(program, 2) == [[0.0], [1.0]]
