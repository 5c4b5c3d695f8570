"""All-reduce made of messages around a ring, compared with the collective that is there for it.

    meshdist run -n 4 examples/ring_allreduce.py
    torchrun --nproc-per-node 2 examples/ring_allreduce.py --numel 1000
    mpiexec -n 4 python examples/ring_allreduce.py

Every rank sends to its right neighbour and receives from its left one. The naive ring passes whole
tensors on; the chunked ring cuts them in as many chunks as there are ranks, first adds every chunk
up on its way around (a reduce-scatter), then passes the sums around (an all-gather). Prints how far
each is from all_reduce and what each costs; exits with 1 if one of them is wrong.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import meshdist.distributed as dist

LIMIT = 1e-5  # largest difference allowed, relative to the largest sum; the sums are float32


def neighbours(group: Any = None) -> tuple[int, int]:
    """Return the group ranks to the left and to the right of this one."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return (rank - 1) % size, (rank + 1) % size


def naive_ring(tensor: torch.Tensor, group: Any = None) -> None:
    """Sum ``tensor`` over the group in place; each of p ranks sends p - 1 whole tensors.

    Every rank adds in an order of its own, so the last bits of floating sums differ between ranks.
    """
    left, right = neighbours(group)
    send_buff, recv_buff = tensor.clone(), torch.empty_like(tensor)
    for _ in range(dist.get_world_size(group) - 1):
        sending = dist.isend(send_buff, group_dst=right, group=group)
        dist.recv(recv_buff, group_src=left, group=group)
        tensor += recv_buff
        sending.wait()  # only now may the sent buffer be written
        send_buff, recv_buff = recv_buff, send_buff  # pass on what has come


def chunked_ring(tensor: torch.Tensor, group: Any = None) -> None:
    """Sum ``tensor`` over the group in place; each of p ranks sends 2 (p - 1) / p of a tensor.

    Any number of elements will do: chunks differ by at most one, and some are empty where there
    are more ranks than elements. Every chunk is added up in one order, so all ranks end with equal
    bits.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    left, right = neighbours(group)
    flat = tensor.contiguous().view(-1)  # the tensor's own memory, where that is contiguous
    chunks = flat.tensor_split(size)
    arriving = torch.empty_like(chunks[0])  # the first chunk is a largest one
    for step in range(2 * (size - 1)):
        leaves, comes = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        sending = dist.isend(leaves, group_dst=right, group=group)
        if step < size - 1:  # the left neighbour's sum so far: add ours, it is passed on next
            partial_sum = arriving[: comes.numel()]
            dist.recv(partial_sum, group_src=left, group=group)
            comes += partial_sum
        else:  # a complete sum: keep it, pass it on
            dist.recv(comes, group_src=left, group=group)
        sending.wait()
    if not tensor.is_contiguous():
        tensor.copy_(flat.view_as(tensor))


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "naive ring": naive_ring,
    "chunked ring": chunked_ring,
    "all_reduce": dist.all_reduce,
}


def differences(x: torch.Tensor) -> dict[str, float]:
    """Return by how much each way is off all_reduce anywhere, relative to the largest sum."""
    expected = x.clone()
    dist.all_reduce(expected)
    off = torch.zeros(len(WAYS))
    for place, way in enumerate(WAYS.values()):
        result = x.clone()
        way(result)
        off[place] = (result - expected).abs().max() / expected.abs().max()
    dist.all_reduce(off, op=dist.ReduceOp.MAX)
    return dict(zip(WAYS, off.tolist(), strict=True))


def median_times(x: torch.Tensor, repeats: int) -> dict[str, float]:
    """Return the seconds that each way takes, the slowest rank's, as the median of ``repeats``."""
    times = torch.zeros(len(WAYS), repeats)
    for repeat in range(repeats):
        for place, way in enumerate(WAYS.values()):  # in turns, so that all see the same machine
            result = x.clone()
            dist.barrier()
            start = time.perf_counter()
            way(result)
            times[place, repeat] = time.perf_counter() - start
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return dict(zip(WAYS, times.median(1).values.tolist(), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--numel", type=int, default=1_000_003, help="elements of the tensor")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds")
    args = parser.parse_args(argv)
    if min(args.numel, args.repeats) < 1:
        parser.error("--numel and --repeats are at least 1")

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.rand(args.numel, generator=torch.Generator().manual_seed(rank))
    off = differences(x)  # also warms up what is timed below
    seconds = median_times(x, args.repeats)
    is_equal = max(off.values()) <= LIMIT
    if rank == 0:
        print(f"ranks: {size}; {args.numel:,} float32 each; median of {args.repeats} rounds")
        for name in WAYS:
            print(f"{name:<12}  difference {off[name]:.1e}  {1e3 * seconds[name]:9.3f} ms")
        print(f"limit {LIMIT:.0e}: {'equal' if is_equal else 'NOT EQUAL'}")
    dist.destroy_process_group()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
