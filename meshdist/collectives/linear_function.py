"""The common part of verbs that are linear, as autograd Functions in the form of torch.func."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.autograd import Function

from .complete_losses import keep_line
from .torch_private import call_function

__all__ = ["LinearFunction"]


class LinearFunction(Function):
    """A linear verb on one tensor; what follows the tensor tells where its parts go.

    A subclass has ``forward(x, *rest)`` and ``backward(ctx, grad)``, which finds ``rest`` in
    ``ctx.rest``. Its forward derivative is the verb itself, and so is the verb on a batch.

    Attributes:
        takes_blocks, gives_blocks: whether dim 0 of the argument, of the result, counts the group's
            members. A batch's dim then stands behind it.
    """

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
        """Keep what follows the tensor."""
        ctx.rest = inputs[1:]
        keep_line(ctx, *inputs[:2])
