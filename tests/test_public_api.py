"""The doors: every public name, found at first touch, and known to type checkers.

``meshdist`` lists at most 70 names, ``meshdist.distributed`` has torch's, ``meshdist.errors`` all
errors. What stands behind the last two resolves on ``meshdist`` as well.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import subprocess
import sys
from pathlib import Path
from rlcompleter import Completer

import pytest

import meshdist
from meshdist import distributed, errors

ROOT = Path(__file__).resolve().parents[1]
MOST = 70


def imports_of(stub: str) -> list[tuple[str, str]]:
    """Return home and name of each import of a stub, in its order."""
    tree = ast.parse((ROOT / "meshdist" / stub).read_text(encoding="utf-8"))
    found: list[tuple[str, str]] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1
            for alias in node.names:
                if alias.name != "*":
                    assert alias.name == alias.asname  # else a strict checker holds it for private
                found.append((node.module or "", alias.name))
    return found


TOP = imports_of("__init__.pyi")
STAR = TOP.index(("distributed", "*"))
LISTED = [name for _, name in TOP[:STAR]]
UNLISTED = [name for _, name in TOP[STAR + 1 :]]
TORCHS = [name for _, name in imports_of("distributed.pyi")]
# Each home with its names; what the first stub has from the second one has its home there.
HOMES = {
    (home, name)
    for home, name in [*TOP, *imports_of("distributed.pyi")]
    if home not in ("", "distributed")
}
ROOMS = {
    home: sorted(name for room, name in HOMES if room == home)
    for home in {home for home, _ in HOMES}
}


def test_a_name_has_one_place_in_a_stub_and_one_home() -> None:
    for names in (LISTED + UNLISTED, TORCHS):
        assert [name for name in names if names.count(name) > 1] == []
    names = [name for _, name in HOMES]
    assert [name for name in names if names.count(name) > 1] == []
    assert {name for home, name in TOP[:STAR] if home == "distributed"} <= set(TORCHS)
    assert set(TORCHS) & set(UNLISTED) == set()


def test_the_doors_have_the_names_of_their_stubs() -> None:
    assert dir(meshdist) == sorted(["__version__", *LISTED])
    assert sorted(meshdist.__all__) == sorted({"__version__", *LISTED} - {"breakpoint"})
    assert dir(distributed) == sorted(TORCHS)
    assert sorted(distributed.__all__) == sorted({*TORCHS} - {"breakpoint"})


def test_few_names_stand_on_top() -> None:
    assert len(dir(meshdist)) <= MOST


def test_all_errors_resolve_on_top_and_those_that_others_derive_from_are_listed() -> None:
    kinds = {name: getattr(errors, name) for name in errors.__all__}
    assert {name: getattr(meshdist, name) for name in kinds} == kinds
    bases = {base for kind in kinds.values() for base in kind.__bases__}
    on_top = {name for name, kind in kinds.items() if kind in bases and name not in TORCHS}
    assert on_top == kinds.keys() & {*LISTED}
    assert len(on_top) == 5


@pytest.mark.parametrize("name", TORCHS)
def test_what_programs_for_torch_type_resolves_in_both_places(name: str) -> None:
    assert getattr(distributed, name) is getattr(meshdist, name) is not None


def test_a_star_brings_what_is_listed_and_hides_no_builtin() -> None:
    for module in (meshdist, distributed):
        names: dict[str, object] = {}
        exec(f"from {module.__name__} import *", names)
        assert names.keys() - {"__builtins__"} == {*module.__all__}
        assert {*dir(module)} - names.keys() == {"breakpoint"}


def test_completion_offers_the_names_that_begin_so() -> None:
    found = Completer({"meshdist": meshdist}).attr_matches("meshdist.init_")
    assert {name.partition("(")[0] for name in found} == {
        "meshdist.init_device_mesh",
        "meshdist.init_process_group",
    }


COMPLETES = """
import meshdist, rlcompleter

print(meshdist.errors.ShapeError is meshdist.ShapeError)
doors = ("meshdist", "meshdist.distributed", "meshdist.distributed.comm_hooks")
for room in (*doors, "meshdist.lax", "meshdist.errors"):
    found = rlcompleter.Completer({"meshdist": meshdist}).attr_matches(f"{room}.")
    names = {name.rpartition(".")[2].partition("(")[0] for name in found}
    public = {*eval(room).__all__} | ({"breakpoint"} if room in doors[:2] else set())
    print(sorted(names ^ public - {"__version__"}))
"""


def test_completion_offers_public_names_alone_and_all_of_them() -> None:
    # In a fresh process, where no other import has put its name beside them.
    done = subprocess.run(
        [sys.executable, "-c", COMPLETES], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.stdout, done.stderr) == ("True\n" + "[]\n" * 5, "")


@pytest.mark.parametrize("name", [*LISTED, *UNLISTED])
def test_every_name_resolves(name: str) -> None:
    assert getattr(meshdist, name) is not None


@pytest.mark.parametrize(("room", "names"), sorted(ROOMS.items()))
def test_every_name_is_public_in_its_room(room: str, names: list[str]) -> None:
    module = importlib.import_module(f"meshdist.{room}")
    assert set(names) - set(dir(builtins)) <= set(module.__all__)
    assert not set(dir(builtins)).intersection(module.__all__)


def test_a_name_that_is_not_there() -> None:
    for module in (meshdist, distributed):
        text = f"^module '{module.__name__}' has no attribute 'all_reduction'$"
        with pytest.raises(AttributeError, match=text):
            _ = module.all_reduction


def test_ours_that_torch_lacks_stand_on_top_alone() -> None:
    text = r"^meshdist\.distributed has no simulate\n  fix:      from meshdist import simulate$"
    with pytest.raises(AttributeError, match=text):
        _ = distributed.simulate
    with pytest.raises(ImportError, match=text):
        exec("from meshdist.distributed import simulate")


def test_texts_name_what_is_there() -> None:
    """Each text in the code that names md.x, a fix above all, names what resolves."""
    named = set()
    for path in sorted((ROOT / "meshdist").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else ""
            if isinstance(text, str) and " " in text:  # else it is a thread's name
                named |= {*re.findall(r"\b(?:md|meshdist)\.(\w+)", text)}
    rooms = {path.stem for path in (ROOT / "meshdist").iterdir()}
    assert [name for name in sorted(named - rooms) if not hasattr(meshdist, name)] == []
    assert len(named) > 40


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
