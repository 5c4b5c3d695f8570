"""JAX's names for communication along a mesh axis: functional, differentiable, on pytrees.

``axis_name`` is the name of an axis of the mesh in force (``with mesh:``, or ``mesh=``), or a tuple
of names, which means those axes flattened, the first one major; or an axis itself, ``mesh["tp"]``.
``x`` is an array of torch, NumPy or CuPy, or any nesting of dicts, lists, tuples and other nodes
that optree knows, with arrays and Python numbers as leaves. Results have the nesting, the library
and the device of ``x`` and share no memory with it. Torch tensors carry gradients, by the table in
``docs/gradients.md``, also in torch.func's transforms.

Python numbers differ between ranks here, unlike in JAX: ``psum``, ``pmean``, ``pmax``, ``pmin`` and
``pbroadcast`` send them, and give Python numbers. ``axis_size("tp")`` counts ranks for free.
Collectives whose result differs between ranks, or has another shape, take arrays alone. Leaves, by
their paths,
and shapes must be equal on all ranks: else all of them raise MismatchError.
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
