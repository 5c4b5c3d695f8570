"""meshdist: N-D parallel programs against a named device mesh.

    import meshdist as md

    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    md.all_reduce(x, group=mesh["tp"])
    y = md.lax.psum(x, "tp", mesh=mesh)
    model = md.DDP(model, device_mesh=mesh["dp"])

``__init__.pyi`` lists the public API; modules load on first use. ``meshdist.distributed`` has the
names of torch.distributed, ``meshdist.errors`` all errors; both resolve here as well.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

__version__ = "0.3.0"

if sys.platform == "win32":
    raise ImportError(
        "meshdist does not run on Windows; it runs on Linux (complete) and macOS (without shared "
        "memory)"
    )

from .lazy_names import LazyNames, reject_absent

_lazy_names = LazyNames(__name__, __file__)

# `from meshdist import *` leaves out the one name that would shadow a builtin.
__all__ = ["__version__", *(name for name in _lazy_names.listed if name != "breakpoint")]

sys.meta_path.append(SimpleNamespace(find_spec=reject_absent))  # type: ignore[arg-type]


def __getattr__(name: str) -> object:
    return _lazy_names.load(name)


def __dir__() -> list[str]:
    return ["__version__", *_lazy_names.listed]
