"""JAX's collectives along a mesh axis: functional, differentiable, on pytrees.

``axis_name`` is an axis of the current mesh (``with mesh:``, or ``mesh=``), a tuple of axes,
flattened with the first as major, or a 1-D mesh, ``mesh["tp"]``. ``x`` is an array of torch, NumPy
or CuPy, or an optree pytree of arrays and Python numbers. Results have the structure, library and
device of ``x``, in new memory. Torch tensors carry gradients
(``docs/explanation/gradients_of_collectives.md``), also inside
torch.func transforms.

Unlike in JAX, Python numbers can differ between ranks: ``psum``, ``pmean``, ``pmax``, ``pmin`` and
``pbroadcast`` send them and return Python numbers. ``axis_size("tp")`` counts ranks for free. Other
collectives accept only arrays. Leaves need equal paths and shapes on every rank, else every rank
raises MismatchError.
"""

from typing import TYPE_CHECKING

from .axes import axis_index, axis_size
from .data_movement import (
    all_gather,
    all_to_all,
    pbroadcast,
    ppermute,
    pshuffle,
    pswapaxes,
    ragged_all_to_all,
)
from .reductions import pcast, pmax, pmean, pmin, psum, psum_scatter, pvary

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "pvary",
    "ragged_all_to_all",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker would think that the module has every name

    def __getattr__(name: str) -> object:
        import sys

        from ..absent_names import where_else

        text = where_else(name, __name__) or f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])


del TYPE_CHECKING  # dir() aside, the module has its public names alone
