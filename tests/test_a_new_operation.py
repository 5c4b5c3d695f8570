"""A new collective, and a new fact of a call that members compare, take changes of few files.

Both are put into one copy of the package by edits of its text, and used there by one program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import meshdist
from tests.inner import ShmBackend, core

PACKAGE = Path(meshdist.__file__).parent

BEGIN = """
import os, sys
from importlib.machinery import PathFinder
from pathlib import Path
sys.meta_path.insert(0, PathFinder)  # before what an editable install has put there
sys.path.insert(0, str(Path(__file__).parent))
import torch
import meshdist as md
assert Path(md.__file__).parent == Path(__file__).parent / "meshdist"
"""

Edits = dict[str, list[tuple[str, str]]]
"""By file, texts and what stands in their place."""

# The core has the moves of this collective already. One with moves of its own adds `native/codes.h`
# and a file of the core: seven in all.
OPERATION: Edits = {
    "operation_table.py": [
        (
            '        BackendOperation("barrier",',
            '        BackendOperation("total", TensorLayout.IN_PLACE, TensorLayout.ONE, '
            "reduces=True),\n"
            '        BackendOperation("barrier",',
        ),
        (
            '        OperationSpec("barrier",',
            '        OperationSpec("total", ("total",), (_in_place("tensor"), _OP), "I"),\n'
            '        OperationSpec("barrier",',
        ),
    ],
    "collectives/tensor_collectives.py": [
        ('    "barrier",\n', '    "barrier",\n    "total",\n'),
        (
            "@collective(has_fast_path=True, stays_off_streams=",
            textwrap.dedent('''\
                @collective()
                def total(
                    tensor: Any,
                    op: Reduction = ReduceOp.SUM,
                    group: GroupLike = None,
                    async_op: bool = False,
                ) -> Work | None:
                    """As ``all_reduce``."""
                    return prepare("total", group, tensor, op).run(async_op)


                @collective(has_fast_path=True, stays_off_streams='''),
        ),
    ],
    "distributed.pyi": [
        ("    barrier as barrier,\n", "    barrier as barrier,\n    total as total,\n")
    ],
    "backends/composed_collectives.py": [
        (
            "def reduce(backend: ComposingCommunicator",
            textwrap.dedent("""\
                def total(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
                    (x,), op = prepared.outputs, prepared.op
                    return backend.start(prepared.by("all_reduce", [x], [x], op))


                def reduce(backend: ComposingCommunicator"""),
        ),
        ("        reduce,\n", "        total,\n        reduce,\n"),
    ],
    "backends/shm/communicator.py": [
        (
            "        if TensorLayout.EACH in layouts:  # sizes",
            '        name = "all_reduce" if backend_operation == "total" else name\n'
            "        if TensorLayout.EACH in layouts:  # sizes",
        )
    ],
}

USES_OPERATION = """
from meshdist.backends.shm.communicator import ShmCommunicator
from meshdist.backends.c10d.gloo import GlooCommunicator

def program():
    rank, found = md.get_rank(), []
    for op in (md.ReduceOp.SUM, md.ReduceOp.MAX):
        x = torch.full((2,), rank + 1.0)
        md.total(x, op)
        found += x.tolist()
    y = torch.ones(2)
    md.total(y, async_op=True).wait()
    md.barrier()
    return found + y.tolist()

def uneven():
    x = torch.ones(1)
    for _, weight in md.uneven(range(1 + md.get_rank())):
        x *= weight
        md.total(x)
    return x.item()

def simulated():
    assert md.simulate(program, 3) == [[6.0, 6.0, 3.0, 3.0, 3.0, 3.0]] * 3
    assert md.simulate(uneven, 2) == [2.0, 2.0], "the rank without data adds nothing"
    def wrong():
        (md.total if md.get_rank() else md.all_reduce)(torch.ones(2))
    try:
        md.simulate(wrong, 2)
    except md.errors.MismatchError as error:
        assert "total((2,) float32, SUM)" in str(error), error
    else:
        raise AssertionError("no error")
    assert {"total"} <= {*ShmCommunicator.implementations} - {*GlooCommunicator.implementations}

def launched():
    assert program() == [3.0, 3.0, 2.0, 2.0, 2.0, 2.0]
"""

FIELD: Edits = {
    "checking/calls.py": [
        (
            "    peer: int | None = None\n    tag:",
            '    purpose: str = ""\n    peer: int | None = None\n    tag:',
        ),
        (
            "    layouts: tuple[Any, ...] = (),\n) -> Call:",
            '    layouts: tuple[Any, ...] = (),\n    purpose: str = "",\n) -> Call:',
        ),
        ("is_uneven, layouts]", "is_uneven, layouts, purpose]"),
        ("(), peer, tag]", '(), "", peer, tag]'),
        ("self.fingerprint if self.op_name else 0", "self.fingerprint"),
        (
            "crc32(call.op_name.encode()) if call.op_name else 0",
            "crc32((call.op_name + call.purpose).encode())",
        ),
        (
            "f\"{self.operation}({', '.join(arguments)}){op_name}\"",
            "f\"{self.operation}({', '.join(arguments)}){op_name} {self.purpose}\"",
        ),
    ],
    "backends/operation_args.py": [
        ('    op_name: str = ""\n', '    op_name: str = ""\n    purpose: str = ""\n')
    ],
    "groups/device_group.py": [
        (
            "sizes is not None, tuple(layouts))",
            "sizes is not None, tuple(layouts), prepared.purpose)",
        )
    ],
    "collectives/tensor_collectives.py": [
        (
            '        prepared = OperationArgs("barrier", "barrier", (), ())\n',
            '        prepared = OperationArgs("barrier", "barrier", (), ())\n'
            "        prepared.purpose = str(device_ids or '')\n",
        )
    ],
}

USES_FIELD = """
def disagree():
    md.barrier()
    try:
        md.barrier(device_ids=[md.get_rank() + 1])
    except md.errors.MismatchError as error:
        return str(error)

# Each rank of the launch is a process that imports torch: it serves every backend in turn.
simulated_texts = []
if os.environ["RANK"] == "0":
    simulated()
    simulated_texts = md.simulate(disagree, 2)
texts = []
for backend in sys.argv[1:]:
    md.init_process_group(backend)
    launched()
    texts.append(disagree())  # the group is unusable from here on
    md.destroy_process_group()
for text in simulated_texts + texts:
    assert "barrier() [1]" in text and "barrier() [2]" in text, text
print("as expected on", len(texts), "backends", flush=True)
"""


def put(edits: Edits, folder: Path) -> Path:
    """A copy of the package in which texts are edited, beside a program that uses it."""
    # Compiled files come along, but for those that some process is writing.
    left_out = shutil.ignore_patterns("native.*.so", "*.pyc.*")
    copy = shutil.copytree(PACKAGE, folder / "meshdist", copy_function=os.link, ignore=left_out)
    if core is not None:
        os.symlink(core.__file__, Path(copy) / "backends" / Path(core.__file__).name)
    for name, changes in edits.items():
        text = (PACKAGE / name).read_text()
        for before, after in changes:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        (Path(copy) / name).unlink()  # a link
        (Path(copy) / name).write_text(text)
    return folder / "program.py"


def test_each_takes_few_files(tmp_path: Path) -> None:
    assert (len(OPERATION), len(FIELD)) == (5, 4)
    both = {name: [*OPERATION.get(name, ()), *FIELD.get(name, ())] for name in OPERATION | FIELD}
    program = put(both, tmp_path)
    program.write_text(BEGIN + USES_OPERATION + USES_FIELD)
    backends = ["gloo", *(["shm"] if ShmBackend().is_available() else [])]
    command = [sys.executable, "-m", "meshdist", "run", "-n", "2", str(program), *backends]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    told = f"as expected on {len(backends)} backends\n"
    assert done.stdout.count(told) == 2, done.stdout + done.stderr
