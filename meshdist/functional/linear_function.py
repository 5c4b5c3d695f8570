"""Define linear collectives as autograd Functions that support torch.func.

``cut`` splits a dim into blocks, stacked in dim 0 with an index per rank, and ``stack_blocks``
joins them, both without communication. If *tiled*, a dim of size k n becomes k blocks of size n;
otherwise a dim of size k becomes k blocks without the dim.

If ranks compute a loss together, a wrapper that averages over them divides once too often. So if a
wrapper exists, collectives with an invariant result store their program line, and a backward
records the first that it reaches, also inside the model, as in a batch norm. The wrapper warns at
the end. It does not warn for ``pvary(pmean(x))``: the backward first reaches the cast, whose sum
compensates for the mean.
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
    """Store the line of the first collective that a backward reaches, "" if ``is_sum``."""
    world = group.world
    if hasattr(node, "line") and world.complete[0] != (task := torch._C._current_graph_task_id()):
        world.complete = task, group.ranks, "" if is_sum else f"{group.name}, {node.line}"


def get_dim(given: Any, num_dims: int, argument: str, operation: str) -> int:
    """Return a dim as a number from 0 (negative dims count from the end), or raise."""
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
    """Return ``x`` split along ``dim`` into a block per rank, stacked in dim 0; or raise.

    Args:
        tiled: keep the dim in the blocks; else its size must be the number of ranks.
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
        elif operation == "pswapaxes":  # has no tiled=
            fix = f"pass an array of size {size} in dimension {dim}"
        elif not tiled and length % size == 0:
            fix = "pass tiled=True to split it into equal blocks"
        elif not tiled:
            padded = -(-length // size) * size
            fix = f"pad dimension {dim} to {padded} and pass tiled=True to split it into blocks"
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
    """Join the blocks of dim 0 along ``dim``, a new dim unless ``tiled``; reverses ``cut``."""
    if dim:
        blocks = blocks.movedim(0, dim)
    return blocks.flatten(dim, dim + 1) if tiled else blocks


class LinearFunction(Function):
    """A linear collective on a tensor, its own forward derivative.

    Attributes:
        takes_blocks, gives_blocks: whether dim 0 of the argument, or result, counts the ranks; a
            batch dim is then second.
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
        ctx.rest = inputs[1:]
        if inputs[0].requires_grad:
            keep_line(ctx, *inputs[:2])
