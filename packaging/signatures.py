"""The signatures that docs/reference/collectives.md shows, written from the code.

    python packaging/signatures.py

A signature stands in the first cell of a table's row, or is that of P2POp or breakpoint. Under
"Functional collectives" names are those of ``lax``, under "Experts" those of ``experts``, under
"Attention" those of ``attention``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshdist as md

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "collectives.md"
_SPAN = re.compile(r"`(\w+)\(([^`]*)\)`")
_ANYWHERE = ("P2POp", "breakpoint")
_HOMES = {
    "## Functional collectives": md.lax,
    "## Experts": md.experts,
    "## Attention": md.attention,
}


def signature_text(function: Callable[..., Any]) -> str:
    """Return the parameters as a call shows them, with ``*`` before those given by name alone."""
    words: list[str] = []
    named_only = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not named_only:
            words.append("*")
            named_only = True
        default = parameter.default
        shown = "SUM" if default is md.ReduceOp.SUM else repr(default)
        words.append(parameter.name + ("" if default is parameter.empty else f"={shown}"))
    return ", ".join(words)


def with_signatures(page: str) -> str:
    """Return the text of the page with each signature as the code has it."""
    home: Any = md

    def written(span: re.Match[str]) -> str:
        function = getattr(home, span[1], None)
        return f"`{span[1]}({signature_text(function)})`" if function is not None else span[0]

    lines = []
    for line in page.split("\n"):
        if line.startswith("## "):
            home = _HOMES.get(line, md)
        if line.startswith("| `"):
            head, mark, rest = line[2:].partition(" | ")
            line = "| " + _SPAN.sub(written, head) + mark + rest
        for name in _ANYWHERE:
            shown = f"{name}({signature_text(getattr(md, name))})`"
            line = re.sub(rf"\b{name}\([^`]*\)`", shown, line)
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(with_signatures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
