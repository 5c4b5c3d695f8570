"""The names of torch.distributed that meshdist has, and those of torch's that go with them.

    import meshdist.distributed as dist

is the line that a program for torch changes. Beside torch.distributed's names stand those that
torch keeps elsewhere (``DistributedDataParallel``, ``DistributedSampler``, ``Join``, averagers of
models, communication hooks), the ways from DTensor and to it, ``World`` and ``shared_empty``. A
name that torch has and meshdist lacks says where to go.
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
