"""The common part of collectives that are linear, as autograd Functions in the form of torch.func.

A dim is cut into a block for each member of a group, and blocks are joined again; nothing is sent.
Blocks are a tensor whose dim 0 counts the members. *Tiled*, a dim of k n is k blocks of n, and the
result has as many dims; else a dim of k is k blocks without it.

A wrapper that averages over ranks which have made a loss together divides by their number once
more. So collectives with an invariant result keep the line of their call where there is a wrapper,
and the first such collective that a backward comes to is noted; the wrapper warns when that
backward has ended, be the collective behind the model or in it, as in a batch norm by hand. In
``pvary(pmean(x))`` the
backward comes first to the cast, whose sum makes up for the mean: the wrapper does not warn.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.autograd import Function

from ..arguments import get_integer
from ..arrays import describe
from ..checking.call_sites import call_site, show_site
from ..collectives.torch_private import call_function
from ..errors import ShapeError
from ..groups.process_group import ProcessGroup


def keep_line(node: Any, x: torch.Tensor, group: Any) -> None:
    """Store the program's line on ``node`` if a wrapper averages gradients within ``group``."""
    averaged = x.requires_grad and isinstance(group, ProcessGroup) and group.world.averaged
    if averaged and any(len(ranks.intersection(group.ranks)) > 1 for ranks in averaged):
        node.line = show_site(call_site())


def note_complete(node: Any, group: ProcessGroup, *, is_sum: bool = False) -> None:
    """Store in the world the line of the collective that a backward reaches first, "" if
    ``is_sum``."""
    world = group.world
    if hasattr(node, "line") and world.complete[0] != (task := torch._C._current_graph_task_id()):
        world.complete = task, group.ranks, "" if is_sum else f"{group.name}, {node.line}"


def get_dim(given: Any, num_dims: int, argument: str, operation: str) -> int:
    """Return a dim as a number from 0; negative dims count from the end; or raise."""
    dim = given
    if type(given) is not int:
        dim = get_integer(given, f"{operation}: {argument}", expected="a dim")
    if not -num_dims <= dim < num_dims:
        raise ShapeError(
            f"{operation}: {argument}={dim} is out of range for a tensor of {num_dims} dimensions",
            expected=f"a number from {-num_dims} to {num_dims - 1}"
            if num_dims
            else "an array with at least one dimension",
            fix=f"pass {argument} in this range" if num_dims else "pass x.reshape(1)",
        )
    return dim % num_dims  # type: ignore[no-any-return]


def cut(
    x: torch.Tensor, dim: int, group: ProcessGroup, operation: str, argument: str, *, tiled: bool
) -> torch.Tensor:
    """Return ``x`` cut along ``dim`` into a block per member, stacked in dim 0; or raise.

    Args:
        tiled: whether the dim is split; else it counts the members, and goes.
    """
    length, size = x.shape[dim], group.size()
    if length % size if tiled else length != size:
        others = [
            str(other)
            for other, its_length in enumerate(x.shape)
            if other != dim and not (its_length % size if tiled else its_length != size)
        ]
        fix = f"pad dimension {dim} to {-(-length // size) * size}" if tiled else None
        if others:
            fits = f"pass {argument}={others[0]}"
            fix = f"{fix}, or {fits}" if fix else fits
        elif not tiled and length % size == 0:
            fix = "pass tiled=True to split it into equal blocks"
        raise ShapeError(
            f"{operation} cannot split dimension {dim} of size {length} into {size} "
            + ("equal blocks" if tiled else "blocks of one index each"),
            where=f"rank {group.world.rank}, {group.name}; argument x, {describe(x)}",
            expected=f"x.shape[{dim}] "
            + (f"divisible by {size}" if tiled else f"equal to {size}")
            + ", the number of ranks",
            fix=fix,
        )
    if tiled:
        x = x.unflatten(dim, (size, length // size))
    return x.movedim(dim, 0) if dim else x


def stack_blocks(blocks: torch.Tensor, dim: int, *, tiled: bool) -> torch.Tensor:
    """Return dim 0's blocks joined along ``dim``, if not ``tiled`` as a new dim; undoes ``cut``."""
    if dim:
        blocks = blocks.movedim(0, dim)
    return blocks.flatten(dim, dim + 1) if tiled else blocks


class LinearFunction(Function):
    """A linear collective on a tensor, whose forward derivative is the collective itself.

    Attributes:
        takes_blocks, gives_blocks: whether dim 0 of the argument, of the result, counts the group's
            members. The dim of a batch then stands behind it.
    """

    # Subclasses have `forward(x, *rest)`, and `backward(ctx, grad)`, which finds them in ctx.rest.
    takes_blocks: ClassVar[bool] = False
    gives_blocks: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)

        def vmap(
            info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any
        ) -> tuple[torch.Tensor, int]:
            batch = x.movedim(in_dims[0], int(cls.takes_blocks))
            return call_function(cls, batch, *rest), int(cls.gives_blocks)

        def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
            return call_function(cls, tangent, *ctx.rest)

        cls.vmap = staticmethod(vmap)  # type: ignore[method-assign]
        cls.jvp = staticmethod(jvp)  # type: ignore[method-assign]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Store all arguments but the tensor on the node, and the line of the call."""
        ctx.rest = inputs[1:]
        if inputs[0].requires_grad:
            keep_line(ctx, *inputs[:2])
