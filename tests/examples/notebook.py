"""Executes the notebook of the examples, and writes its outputs into it.

python -m tests.examples.notebook            (with --print: to standard output instead)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_mesh.ipynb"


def executed() -> Any:
    """The notebook as it is after a run; an error in a cell is raised."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", record_timing=False)
    client.execute(cwd=str(NOTEBOOK.parent))
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        if "text" in output:  # a cell's file is named by its process
            output["text"] = re.sub(r"\S+ipykernel_\d+\S+\.py", "cell.py", output["text"])
    return notebook


if __name__ == "__main__":
    text = nbformat.writes(executed())
    if sys.argv[1:] == ["--print"]:
        print(text)
    else:
        NOTEBOOK.write_text(text + "\n", encoding="utf-8")
