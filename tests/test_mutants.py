"""The mutants of packaging/: what is changed, what is drawn, who meets them, and what is told."""

from __future__ import annotations

import ast
import doctest
import json
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packaging"))

import mutants
import mutations
from mutations import Site, draw, mutated, room_of, sites

ROOT = mutations.ROOT
FILE = "meshdist/mesh/rooms.py"
SOURCE = '''\
"""A room."""

from __future__ import annotations

__all__ = ["area"]

if TYPE_CHECKING:
    LIMIT = 7


def area(width: int, height: int = 2) -> int:
    """Return width times height; 3 at least."""
    if width < 0:
        raise ValueError(f"{width} is below {0}", 1 + 1)
    return width * height


class Room:
    def __repr__(self) -> str:
        return "a room"[0:6]

    def grow(self, more):
        self.width += more
        self.tell(more, loudly=True, at=9)
        return self.width is None
'''


@cache
def all_places() -> list[Site]:
    return mutations.all_sites()


def changed(source: str) -> list[tuple[str, str]]:
    return [(site.kind, site.now) for site in sites(FILE, source)]


def test_the_worked_example() -> None:
    result = doctest.testmod(mutations)
    assert result.attempted >= 2 and result.failed == 0


def test_laws_are_changed_and_texts_are_not() -> None:
    assert changed(SOURCE) == [
        ("compare", "(width <= 0)"),
        ("condition", "(not width < 0)"),
        ("constant", "1"),
        ("removal", "pass"),
        ("arithmetic", "(width // height)"),
        ("return", "return None"),
        ("removal", "pass"),
        ("argument", "self.tell(more, at=9)"),
        ("argument", "self.tell(more, loudly=True)"),
        ("constant", "False"),
        ("constant", "10"),
        ("removal", "pass"),
        ("compare", "(self.width is not None)"),
        ("return", "return not self.width is None"),
    ]


def test_every_mutant_of_a_file_is_another_program() -> None:
    path = ROOT / "meshdist/mesh/strides.py"
    source = path.read_text(encoding="utf-8")
    found = sites(str(path.relative_to(ROOT)), source)
    programs = {ast.dump(ast.parse(mutated(source, site))) for site in found}
    assert ast.dump(ast.parse(source)) not in programs
    assert len(programs) == len(found) == len({site.name for site in found}) > 50


def test_the_name_of_a_mutant_outlives_edits_elsewhere() -> None:
    edited = SOURCE.replace("    if width", "    width = abs(width + 1)\n    if width")
    edited = edited.replace("class Room", "def more():\n    return 1\n\n\nclass Room")
    before, after = sites(FILE, SOURCE), sites(FILE, edited)
    assert {site.name for site in before} < {site.name for site in after}
    assert [site.span for site in before] != [site.span for site in after][: len(before)]


def test_the_draw_gives_each_room_its_share() -> None:
    places = all_places()
    drawn = draw(places, 1, 200)
    assert drawn == draw(places, 1, 200) != draw(places, 2, 200)
    assert len({site.home for site in drawn}) == 200
    homes = {site.home for site in places}
    all_of, some = Counter(map(room_of, homes)), Counter(room_of(site.name) for site in drawn)
    for room, number in all_of.items():
        assert abs(some[room] - 200 * number / len(homes)) < 1, room


def test_a_new_statement_leaves_most_of_the_draw_as_it_was() -> None:
    places = all_places()
    before = {site.name for site in draw(places, 1, 200)}
    after = {site.name for site in draw([*places, *sites(FILE, SOURCE)], 1, 200)}
    assert len(before & after) >= 197


def site_of(path: str, function: str = "f") -> Site:
    return Site(path, function, "", 0, "removal", 0, "", "", (0, 0))


def test_the_room_s_tests_come_first_and_no_step_repeats_them() -> None:
    site = site_of("meshdist/mesh/strides.py", "is_nested")
    steps = {step: mutants.tests_of(site, step, ROOT) for step in mutants.STEPS}
    assert steps["room"] == ["meshdist/mesh/strides.py", "tests/mesh/test_strides.py"]
    assert "tests/mesh/test_layout.py" in steps["folder"]
    assert "tests/operations/test_table.py" in steps["rest"]
    assert max(Counter(name for names in steps.values() for name in names).values()) == 1


def test_rooms_of_every_folder_have_tests() -> None:
    of_each_folder = {path.parent: path for path in (ROOT / "meshdist").rglob("*.py")}
    for file in of_each_folder.values():
        site = site_of(str(file.relative_to(ROOT)), "")
        names = [name for step in mutants.STEPS for name in mutants.tests_of(site, step, ROOT)]
        assert all((ROOT / name).is_file() for name in names), file
        assert len(names) > 10, file


def test_the_report_counts_and_tells_what_was_not_caught() -> None:
    rows = [
        {"name": f"meshdist/mesh/{letter}.py::f", "step": "room", **verdict, "file": f"{letter}.py"}
        | {"function": "f", "was": "a <\n b", "now": "(a <= b)"}
        for letter, verdict in {
            "a": {"verdict": "caught"},
            "b": {"verdict": "hangs"},
            "c": {"verdict": "missed", "note": "equivalent: a is never b"},
            "d": {},
        }.items()
    ]
    page = mutants.report(rows, 1)
    assert "| mesh | 4 | 2 | 1 | 1 | 1 |" in page and "| all | 4 | 2 | 1 | 1 | 1 |" in page
    assert "* `c.py`, `f`: `a < b` -> `(a <= b)`: equivalent: a is never b" in page
    assert "* `d.py`, `f`: `a < b` -> `(a <= b)`: not run" in page


def test_the_report_is_of_the_verdicts_and_has_a_reason_for_each_that_is_left() -> None:
    file = ROOT / "packaging" / "mutants.json"
    rows = json.loads(file.read_text(encoding="utf-8"))
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    assert "\n".join(mutants.table(rows)) in page
    left = [row for row in rows if row["verdict"] not in mutants.CAUGHT]
    assert all(row["note"] and f": {row['note']}\n" in page for row in left)
    assert page.count("\n* ") == len(left)


def test_a_run_against_another(tmp_path: Path) -> None:
    # A fault that a doctest of its room catches, and one that nothing meets: `caught` was a lie.
    path = "meshdist/mesh/strides.py"
    source = (ROOT / path).read_text(encoding="utf-8")
    site = next(
        site
        for site in sites(path, source)
        if site.function == "coalesced" and site.kind == "return"
    )
    rows = [
        {"name": site.name, "verdict": "caught"},
        {"name": f"{path}::gone::return 1#0::return0", "verdict": "caught"},
    ]
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(rows))
    command = ["packaging/mutants.py", "--workers", "1", "--against", str(old)]
    done = subprocess.run(
        [sys.executable, *command, "--verdicts", str(new)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"no longer exists: {rows[1]['name']}\n" in done.stdout
    (row,) = json.loads(new.read_text())
    assert row["verdict"] == "caught" and row["test"] and row["step"] == "room"
    assert (ROOT / path).read_text(encoding="utf-8") == source
