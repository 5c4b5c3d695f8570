"""A program whose marked lines are wrong, and no others: type checkers find exactly these."""

from __future__ import annotations

import torch
import torch.distributed as dist

import meshdist as md
from meshdist import lax


def functional(x: torch.Tensor) -> None:
    lax.psum(x)  # wrong: no axis
    lax.psum(x, 0)  # wrong: an axis has a name
    lax.psum(x, {"dp", "tp"})  # wrong: a set has no order
    lax.psum(x, "tp", axis_index_groups=[[0, 1]])  # wrong: parts of an axis are axes
    lax.psum(x, "tp", mesh="tp")  # wrong: a name is no mesh
    lax.all_gather(x, "tp", axis="tp")  # wrong: a dim is a number
    summed: float = lax.psum(x, "tp")  # wrong: a tensor goes in, a tensor comes out
    count: int = lax.pmean(3, "tp")  # wrong: a mean is a quotient
    torch.stack(lax.all_gather(x, "tp"))  # wrong: one tensor comes out, not a list
    print(summed, count)


def in_place(x: torch.Tensor, theirs: dist.ProcessGroup) -> None:
    md.all_reduce(x, group="tp")  # wrong: an axis is mesh["tp"] here
    md.all_reduce(x, group=0)  # wrong: a rank is no group
    md.all_reduce(x, group=[0, 1])  # wrong: nor are ranks
    md.all_reduce(x, group=theirs)  # wrong: torch's groups are not ours
    md.all_reduce(x, "sum")  # wrong: a reduction is a ReduceOp
    md.all_reduce(x, op=torch.sum)  # wrong: not a function
    md.all_reduce(x, md.group.WORLD)  # wrong: the second argument is the reduction
    md.reduce(x, 0, op=max)  # wrong: not a function
    md.broadcast(x, src="tp")  # wrong: a source is a rank
    md.reduce_scatter_tensor(x, x, group="tp")  # wrong: as in all_reduce
    md.all_gather_object([None], x, group="tp")  # wrong: as in all_reduce
    md.send(x, 1, group="tp")  # wrong: as in all_reduce
    md.barrier("tp")  # wrong: as in all_reduce
    md.get_rank("tp")  # wrong: as in all_reduce
    md.uneven([x], "tp")  # wrong: as in all_reduce
    md.DDP(torch.nn.Linear(2, 2), process_group="dp")  # wrong: as in all_reduce


def doors() -> None:
    md.distributed.simulate(print, 2)  # wrong: ours stand on top
    md.find_current_mesh()  # wrong: it is get_current_mesh
