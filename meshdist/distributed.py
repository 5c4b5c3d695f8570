"""Provide the API of torch.distributed: a drop-in replacement.

    import meshdist.distributed as dist

It also has names from other torch modules (``DistributedDataParallel``, ``DistributedSampler``,
``Join``, model averagers, communication hooks), DTensor conversions, ``World`` and
``shared_empty``. If meshdist lacks a torch name, the error names the alternative.
"""

from __future__ import annotations

from .lazy_names import LazyNames

_lazy_names = LazyNames(__name__, __file__)

# `from meshdist.distributed import *` leaves out the one name that would shadow a builtin.
__all__ = [name for name in _lazy_names.listed if name != "breakpoint"]

# Python tries to import meshdist.distributed.FSDP, which raises an error with a hint, only if this
# module is a package.
__path__: list[str] = []


def __getattr__(name: str) -> object:
    return _lazy_names.load(name)


def __dir__() -> list[str]:
    return _lazy_names.listed
