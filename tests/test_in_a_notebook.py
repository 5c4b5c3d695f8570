"""What a person sees in a notebook's cells: errors, pictures, arrays of ranks that have ended."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from typing import Any

import pytest

import meshdist as md

CELLS = [
    "import torch, meshdist as md\nmesh = md.init_device_mesh('cpu', (2, 2))",
    """
def program():
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return md.ones((4, 4), sharding=md.NamedSharding(mesh, md.P("dp", "tp")))
x = md.simulate(program, 4)[0]
x.visualize()""",
    "x.visualize(svg=True)",
    "x.reshard(md.P())",
    "x.local.tolist(), x.shape",
    """
def wrap():
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    md.DDP(torch.nn.Linear(2, 2 + md.get_rank()), device_mesh=mesh["dp"])
md.simulate(wrap, 2)""",
    """
def differentiate():
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = md.DDP(torch.nn.Linear(2, 2), device_mesh=mesh["dp"])
    loss = model(torch.ones(1, 2)).sum()
    if md.get_rank(): md.barrier()
    loss.backward()
md.simulate(differentiate, 2)""",
    "md.set_debug_level(md.DebugLevel.DETAIL)\nmd.simulate(wrap, 2)",
]
RUN = """
import json, sys, nbformat, nbclient
cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, kernel_name="python3", allow_errors=True).execute()
print(json.dumps([cell["outputs"] for cell in notebook["cells"]]))
"""


def error_of(outputs: list[dict[str, Any]]) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(outputs[-1]["traceback"]))


def data_of(outputs: list[dict[str, Any]]) -> dict[str, str]:
    return {kind: "".join(text) for kind, text in outputs[-1]["data"].items()}


@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="needs nbclient")
def test_cells() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(CELLS),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    first, text, svg, ended, kept, ddp, backward, detail = json.loads(done.stdout.splitlines()[-1])
    assert "Error: a notebook or console is a single process: no launcher" in error_of(first)
    assert "    meshdist.simulate(program, 4)\n" in error_of(first)
    assert data_of(text)["text/plain"].startswith("float32[4@dp, 4@tp]\n┌──")
    assert data_of(svg)["image/svg+xml"].startswith("<svg ")
    assert "simulated ranks of this world have ended: simulate has returned" in error_of(ended)
    assert data_of(kept)["text/plain"] == "([[1.0, 1.0], [1.0, 1.0]], (4, 4))"
    assert "DistributedDataParallel: the ranks wrap different Linear" in error_of(ddp)
    assert "deadlock: no simulated rank can continue" in error_of(backward)
    for outputs in (first, ended, ddp, backward):
        assert "\nFile " not in error_of(outputs)  # frames of cells alone
    assert re.search(r"--> \d md.simulate\(wrap, 2\)", error_of(ddp))
    assert re.search(r"--> \d     md.DDP\(torch.nn.Linear", error_of(ddp))
    assert "/meshdist/ddp/replicas.py:" in error_of(detail)


CELL = """
import IPython.core.interactiveshell as interactive
shell = interactive.InteractiveShell.instance(colors="NoColor")
shell.run_cell("import torch, meshdist as md", store_history=True)
shell.run_cell('''
def program():
    if md.get_rank() == 0:
        md.all_reduce(torch.ones(2))
    else:
        md.broadcast(torch.ones(2), 0)
try:
    md.simulate(program, 3)
except md.errors.MismatchError as error:
    print(error)
''', store_history=True)
"""


@pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="needs IPython")
def test_reports_name_the_cell() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CELL], capture_output=True, text=True, timeout=100, check=True
    )
    assert "SUM) at Cell In[2], line 3 in program" in done.stdout
    assert " at Cell In[2], line 5 in program" in done.stdout


def test_the_fix_for_an_array_of_ranks_that_have_ended() -> None:
    def program(is_whole: bool) -> Any:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = md.ones((4,), sharding=md.NamedSharding(mesh, md.P("dp")))
        return x.reshard(md.P()) if is_whole else x

    part = md.simulate(program, 2, (False,))[1]
    with pytest.raises(md.GroupClosedError) as caught:
        part.reshard(md.P())
    for attribute in ("local", "shape", "sharding", "visualize()"):
        assert f"x.{attribute}" in str(caught.value.fix)
    assert "return the global array, x.reshard(md.P())" in str(caught.value.fix)
    assert len(caught.traceback) == 2  # this test's frame, and one of ours
    whole = md.simulate(program, 2, (True,))[1]
    assert whole.local.tolist() == [1.0] * 4
    assert repr(part.visualize()) == str(part.visualize())
