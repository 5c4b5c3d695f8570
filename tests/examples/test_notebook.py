"""The notebook runs, and shows what it says it shows."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("nbclient")
from tests.examples.notebook import executed, read


def shown(notebook: Any) -> list[list[str]]:
    """What each cell of code shows: texts, and of pictures that there is one."""
    return [
        [
            output.get("text") or output["data"].get("text/plain", "")
            for output in cell["outputs"]
            if output["output_type"] in ("stream", "execute_result")
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_the_notebook_shows_what_it_was_written_with() -> None:
    written, found = read(), executed()
    assert shown(found) == shown(written)
    text = str(shown(found))
    assert "deadlock: no simulated rank can go on" in text
    assert "ipdb> tensor([1.])" in text
    layout = next(cell for cell in found.cells if cell.source.endswith("\nlayout"))
    assert layout.outputs[0]["data"]["image/svg+xml"].startswith("<svg")
