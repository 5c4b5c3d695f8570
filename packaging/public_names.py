"""The table of docs/reference/names.md, which says where each public name is; made from the stubs.

python packaging/public_names.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import meshdist as md

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "names.md"
HEAD = "| name | is | defined in |\n|---|---|---|\n"


def homes() -> dict[str, str]:
    """Return the module of the package that defines each public name; "" for a module itself."""
    found = {}
    for stub in ("__init__.pyi", "distributed.pyi"):  # the first has some names from the second
        tree = ast.parse((ROOT / "meshdist" / stub).read_text(encoding="utf-8"))
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        found |= {alias.name: node.module or "" for node in imports for alias in node.names}
    del found["*"]
    return found


def places_of(name: str) -> list[str]:
    """Return how a program may write a name; first where it should."""
    places = [f"`md.{name}`"] if name in dir(md) else []
    if name in dir(md.distributed):
        places.append(f"`dist.{name}`")
    if name in md.errors.__all__:
        places.append(f"`md.errors.{name}`")
    return places or [f"`md.{name}`, not listed"]


def rows() -> Iterator[str]:
    """Yield the lines of the table, by name."""
    for name, module in sorted(homes().items(), key=lambda item: (item[0].lower(), item[0])):
        home = module.replace(".", "/") or name
        file = f"{home}/" if (ROOT / "meshdist" / home).is_dir() else f"{home}.py"
        yield f"| `{name}` | {', '.join(places_of(name))} | `{file}` |\n"


def with_table(page: str) -> str:
    """Return the text of the page with the table as the stubs have it."""
    above, head, _ = page.partition(HEAD)
    return above + head + "".join(rows())


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
