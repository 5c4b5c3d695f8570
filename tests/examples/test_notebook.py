"""The notebook runs, and shows what it says it shows."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shown(notebook: dict[str, Any]) -> list[list[str]]:
    """What each cell of code shows, as text; a stream may come in any number of pieces."""
    cells = []
    for cell in notebook["cells"]:
        pieces = [
            (output.get("name"), "".join(output.get("text") or output["data"]["text/plain"]))
            for output in cell.get("outputs", ())
            if output["output_type"] in ("stream", "execute_result")
        ]
        streams = itertools.groupby(pieces, key=lambda piece: piece[0])
        if cell["cell_type"] == "code":
            cells.append(["".join(text for _, text in stream) for _, stream in streams])
    return cells


@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="needs nbclient")
def test_the_notebook_shows_what_it_was_written_with() -> None:
    # In a process of its own: where ipykernel is imported, errors take it for a notebook.
    command = [sys.executable, "-m", "tests.examples.notebook", "--print"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    written = json.loads((ROOT / "examples" / "first_mesh.ipynb").read_text(encoding="utf-8"))
    assert shown(found) == shown(written)
    text = str(shown(found))
    assert "deadlock: no simulated rank can continue" in text
    assert "ipdb> tensor([1.])" in text
    layout = next(cell for cell in found["cells"] if "".join(cell["source"]).endswith("\nlayout"))
    assert "".join(layout["outputs"][0]["data"]["image/svg+xml"]).startswith("<svg")
