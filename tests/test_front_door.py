"""The front door: every public name, found at first touch, and known to type checkers."""

from __future__ import annotations

import ast
import builtins
import importlib
import subprocess
import sys
from pathlib import Path
from rlcompleter import Completer

import pytest

import meshdist

ROOT = Path(__file__).resolve().parents[1]


def stub_names() -> dict[str, str]:
    """Return the room of each name that the stub imports."""
    tree = ast.parse((ROOT / "meshdist" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    found: dict[str, str] = {}
    for node in imports:
        for alias in node.names:
            assert alias.name == alias.asname  # else a strict checker holds it for private
            assert alias.name not in found  # no name in two rooms
            found[alias.name] = node.module or ""
    return found


STUB = stub_names()
ROOMS = {room: [name for name in STUB if STUB[name] == room] for room in {*STUB.values()} - {""}}


def test_the_front_door_has_the_names_of_the_stub() -> None:
    handed_out = STUB.keys() - set(dir(builtins))
    assert sorted(meshdist.__all__) == sorted(["__version__", *handed_out])
    assert dir(meshdist) == sorted({"__version__", *STUB})
    assert [name for name in STUB if not hasattr(meshdist, name)] == []


def test_completion_offers_the_names_that_begin_so() -> None:
    found = Completer({"meshdist": meshdist}).attr_matches("meshdist.init_")
    assert {name.partition("(")[0] for name in found} == {
        "meshdist.init_device_mesh",
        "meshdist.init_process_group",
    }


COMPLETES = """
import meshdist, rlcompleter

print(meshdist.errors.ShapeError is meshdist.ShapeError)
for room in ("meshdist", "meshdist.lax", "meshdist.errors", "meshdist.comm_hooks"):
    found = rlcompleter.Completer({"meshdist": meshdist}).attr_matches(f"{room}.")
    names = {name.rpartition(".")[2].partition("(")[0] for name in found}
    public = {*eval(room).__all__} | ({"breakpoint"} if room == "meshdist" else set())
    print(sorted(names ^ public - {"__version__"}))
"""


def test_completion_offers_public_names_alone_and_all_of_them() -> None:
    # In a fresh process, where no other import has put its name beside them.
    done = subprocess.run(
        [sys.executable, "-c", COMPLETES], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.stdout, done.stderr) == ("True\n" + "[]\n" * 4, "")


@pytest.mark.parametrize("name", meshdist.__all__)
def test_every_name_resolves(name: str) -> None:
    assert getattr(meshdist, name) is not None


@pytest.mark.parametrize(("room", "names"), sorted(ROOMS.items()))
def test_every_name_is_public_in_its_room(room: str, names: list[str]) -> None:
    module = importlib.import_module(f"meshdist.{room}")
    assert set(names) - set(dir(builtins)) <= set(module.__all__)
    assert not set(dir(builtins)).intersection(module.__all__)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(
        AttributeError, match=r"^module 'meshdist' has no attribute 'all_reduction'$"
    ):
        _ = meshdist.all_reduction


def test_the_front_door_imports_no_torch_until_a_name_is_touched() -> None:
    code = (
        "import sys, meshdist\n"
        "light = [m for m in ('torch', 'numpy', 'rich', 'optree') if m in sys.modules]\n"
        "meshdist.all_reduce\n"
        "print(light, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] True\n", "")


@pytest.mark.parametrize(
    ("platform", "told"),
    [
        (
            "win32",
            "meshdist does not run on Windows; it runs on Linux (complete) and macOS (without "
            "shared memory)",
        ),
        ("darwin", "imported"),
        ("linux", "imported"),
    ],
)
def test_platforms(platform: str, told: str) -> None:
    code = (
        f"import sys\nsys.platform = {platform!r}\n"
        "try:\n    import meshdist\n    print('imported')\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{told}\n", "")


def test_a_type_checker_knows_the_types(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import meshdist as md\n"
        "reveal_type(md.init_device_mesh('cpu', (2, 2)))\n"
        "reveal_type(md.simulate(lambda: 1.5, 2))\n"
        "reveal_type(md.lax.axis_size('tp'))\n"
        "md.all_reduction\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert said[:4] == [
        'note: Revealed type is "meshdist.mesh.device_mesh.DeviceMesh"',
        'note: Revealed type is "list[float]"',
        'note: Revealed type is "int"',
        'error: Module has no attribute "all_reduction"  [attr-defined]',
    ], done.stdout + done.stderr
