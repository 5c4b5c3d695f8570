"""Provide the API of torch.distributed: a drop-in replacement.

    import meshdist.distributed as dist

The module also has names from other torch modules (``DistributedDataParallel``,
``DistributedSampler``, ``Join``, model averagers, communication hooks), the conversions from and to
DTensor, ``World`` and ``shared_empty``. If meshdist lacks a name of torch, the error names the
alternative.
"""

from __future__ import annotations

from .lazy_names import LazyNames

_lazy_names = LazyNames(__name__, __file__)

# `from meshdist.distributed import *` leaves out the one name that would shadow a builtin.
__all__ = [name for name in _lazy_names.listed if name != "breakpoint"]

# Python asks for the import of meshdist.distributed.FSDP, which says where FSDP is, only of a
# module that may have others inside.
__path__: list[str] = []


def __getattr__(name: str) -> object:
    return _lazy_names.load(name)


def __dir__() -> list[str]:
    return _lazy_names.listed
