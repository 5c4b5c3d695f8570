"""Load a module's public names on first use.

The module's stub (``.pyi``) imports each name from a module of this package; type checkers read the
same stub.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from types import FunctionType

__all__ = ["LazyNames", "reject_absent"]

_PACKAGE = __name__.rpartition(".")[0]
_FOLDER = __file__.removesuffix("lazy_names.py")
_DOORS = (_PACKAGE, f"{_PACKAGE}.distributed", f"{_PACKAGE}.lax")


class LazyNames:
    """The names that a module's stub imports, loaded at first use."""

    def __init__(self, module: str, file: str) -> None:
        """Read the stub of ``module``: its ``file`` with "i" appended."""
        self._module = module
        self._homes: dict[str, str] = {}
        self._other_listener = ""
        self.listed: list[str] = []  # what dir() of the module gives
        with open(f"{file}i", encoding="utf-8") as stub:
            lines = ast.parse(stub.read()).body
        for line in lines:
            if not isinstance(line, ast.ImportFrom):
                continue
            names = [alias.name for alias in line.names]
            if names == ["*"]:  # all of another stub; later names are not listed
                self._other_listener = f"{_PACKAGE}.{line.module}"
                continue
            self._homes.update(dict.fromkeys(names, line.module or ""))
            if not self._other_listener:
                self.listed += names

    def load(self, name: str) -> object:
        """Return the object ``name``, and set it as the module's attribute."""
        if name not in self._homes:
            found = self._from_other_listener(name)
        elif home := self._homes[name]:
            found = getattr(import_module(f"{_PACKAGE}.{home}"), name)
        else:
            found = import_module(f"{_PACKAGE}.{name}")
        if "torch" in sys.modules:  # there may be groups, which have the collectives as methods
            import_module(".collectives", _PACKAGE)
            if isinstance(found, FunctionType) and _FOLDER in found.__code__.co_filename:
                import_module(".runtime.graph_breaks", _PACKAGE).untraced(found)
        setattr(sys.modules[self._module], name, found)
        return found

    def _from_other_listener(self, name: str) -> object:
        if self._other_listener and name in dir(other := import_module(self._other_listener)):
            return getattr(other, name)
        text = _text_of_absent(self._module, name)
        raise AttributeError(
            text or f"module {self._module!r} has no attribute {name!r}",
            name=name,
            obj=sys.modules[self._module],
        )


def reject_absent(name: str, *_path_and_target: object) -> None:
    """Raise ImportError with a hint if the package lacks ``name``; as a finder, find nothing."""
    # `from meshdist import FSDP` ignores the error of __getattr__ and tries to import
    # meshdist.FSDP. It also ignores a ModuleNotFoundError of that import, so a finder has to raise.
    module, _, last = name.rpartition(".")
    if module in _DOORS and (text := _text_of_absent(module, last)) is not None:
        raise ImportError(text, name=name)


def _text_of_absent(module: str, name: str) -> str | None:
    """Return a hint on where ``name``, missing in ``module``, is; None if unknown."""
    from .absent_names import where_else
    from .error_text import explain

    if module == _DOORS[1] and name in dir(sys.modules[_PACKAGE]):
        return explain(f"{module} has no {name}", fix=f"from {_PACKAGE} import {name}")
    return where_else(name, module)
