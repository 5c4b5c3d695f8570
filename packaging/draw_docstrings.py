"""Draws internal docstrings for a reader: can a stranger say what a function does from these alone?

    python packaging/draw_docstrings.py [--seed 1] [--count 50]

It prints signatures and docstrings of functions and classes that are not public, drawn from the
whole package, without their code. ``packaging/readers.md`` has what readers said of them.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator

from lint_docstrings import ROOT, public_names


def internal_docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each internal definition that has a docstring."""
    public = public_names()
    for file in sorted(ROOT.rglob("*.py")):
        names = {name for room, name in public if room == file}
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for top in tree.body:
            for node in ast.walk(top):
                if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if ast.get_docstring(node) is None or getattr(top, "name", "") in names:
                    continue
                head = ast.unparse(node).split("\n    ", 1)[0]
                owner = f"{top.name}." if isinstance(top, ast.ClassDef) and node is not top else ""
                place = f"{file.relative_to(ROOT.parent)} {owner}{node.name}"
                yield place, f"{head}\n    {ast.get_docstring(node)!r}"


def main() -> None:
    """Print the drawn definitions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    options = parser.parse_args()
    found = list(internal_docstrings())
    drawn = random.Random(options.seed).sample(found, options.count)
    for number, (place, text) in enumerate(drawn, 1):
        print(f"{number}. {place}\n{text}\n")


if __name__ == "__main__":
    main()
