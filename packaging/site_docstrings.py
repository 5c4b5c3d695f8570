"""Lets the reference show the examples of docstrings as code: griffe knows "Examples:" alone."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExamplesAsCode(griffe.Extension):
    """Renames the section "Example:" of every docstring of ours."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called with each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
