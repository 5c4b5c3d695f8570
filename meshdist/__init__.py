"""meshdist: N-D parallel programs against a named device mesh.

    import meshdist as md

    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    md.all_reduce(x, group=mesh["tp"])
    y = md.lax.psum(x, "tp", mesh=mesh)
    model = md.DistributedDataParallel(model, device_mesh=mesh["dp"])

This is the front door: ``__init__.pyi`` names everything public, and a module is loaded when one of
its names is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import FunctionType, SimpleNamespace

import lazy_loader

__version__ = "0.1.0"
_FOLDER = __file__.removesuffix("__init__.py")

if sys.platform == "win32":
    raise ImportError(
        "meshdist does not run on Windows; it runs on Linux (complete) and macOS (without shared "
        "memory)"
    )

_load, _, _names = lazy_loader.attach_stub(__name__, __file__)

# `from meshdist import *` leaves out the one name that would shadow a builtin.
__all__ = ["__version__", *(name for name in _names if name != "breakpoint")]


def _where_else(name: str) -> str | None:
    """The message for a name that torch.distributed or JAX has and this package lacks."""
    text: str | None = import_module(".absent_names", __name__).where_else(name)
    return text


def _refuse_absent(name: str, *_: object) -> None:
    """Let the import of an absent name say where to go; stands last among Python's finders.

    ``from meshdist import FSDP`` puts aside what ``__getattr__`` raises, and tries the import of
    ``meshdist.FSDP``. Of that it puts a ModuleNotFoundError aside, so a finder has to raise.
    """
    package, _, last = name.rpartition(".")
    if package == __name__ and (text := _where_else(last)) is not None:
        raise ImportError(text, name=name)


sys.meta_path.append(SimpleNamespace(find_spec=_refuse_absent))  # type: ignore[arg-type]


def __getattr__(name: str) -> object:
    if name not in _names:
        elsewhere = _where_else(name)
        text = elsewhere or f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    found = _load(name)
    if "torch" in sys.modules:  # there may be groups, which have the verbs as methods
        import_module(".collectives", __name__)
        if isinstance(found, FunctionType) and _FOLDER in found.__code__.co_filename:
            import_module(".runtime.untraced", __name__).untraced(found)
    return found


def __dir__() -> list[str]:
    return ["__version__", *_names]
