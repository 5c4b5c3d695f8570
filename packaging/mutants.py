"""Small faults in copies of the checkout, each of which some test must catch.

    make mutants
    python packaging/mutants.py --seed 1 --count 200 --workers 2
    python packaging/mutants.py --against packaging/mutants.json

``mutations.py`` says what is changed, and how it is drawn. Each mutant lies in a copy of the
checkout, and meets these tests until the first fails; all mutants the room's first:

========  =====================================================================================
step      tests of a mutant of ``meshdist/FOLDER/ROOM.py``
========  =====================================================================================
room      doctests of the file; ``tests/FOLDER/test_ROOM*.py`` (room ``steps``: ``test_steps.py``),
          or else those files of the folder's tests that name the room or the mutant's function
folder    the other files of ``tests/FOLDER``; first those that name the function most often
rest      ``tests/operations``, and test files elsewhere that name the function or the room
========  =====================================================================================

Tests over MPI stand only for rooms of MPI; no test of soaking or of a GPU is run. A test that
fails is run again without the mutant: where it fails there, too, it is left out. A test beyond
``--limit`` *hangs*, which counts as caught; a step that outlasts ``--step-limit`` leaves its mutant
*unfinished*. The verdicts lie in a JSON file, and a run goes on where the last ended:
``--again`` forgets those that no test caught. ``--against`` takes the mutants of another run, says
which no longer exist, and fails if a mutant that was caught is caught no more.

mutmut 3 and cosmic-ray 8 serve less, by their documents: the former first runs the whole suite
under coverage, which does not see ranks in processes of their own; the latter has one command of
tests for all mutants; neither draws by a seed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutations import PACKAGE, ROOT, Site, all_sites, digest, draw, mutated, room_of

STEPS = ("room", "folder", "rest")
OF_THIS = "test_mutants.py"
CAUGHT = ("caught", "hangs")
ELSEWHERE = {
    "bench": ("tests/test_benchmarks.py", "tests/cli/test_bench.py"),
    PACKAGE: (),
}
"""Folders of the package whose tests do not lie in a folder of the same name."""

FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)
NOT_RUN = (98, 99)
"""Exit codes: the tests did not begin; they had the package from elsewhere."""

TITLE = "# Mutants"


def make_copy(folder: Path) -> None:
    """Copy the checkout's files and the native core; in it, the editable install leads nowhere."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    site = Path(sysconfig.get_path("purelib"))
    for core in site.glob(f"{PACKAGE}/backends/native*"):
        shutil.copy2(core, folder / PACKAGE / "backends")
    for finder in site.glob(f"_*{PACKAGE}*.py"):
        (folder / finder.name).touch()
    code = f"import {PACKAGE}.backends.native_core as it; "
    code += "print(it.__file__, it.core and it.core.__file__)"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    if not all(Path(path).is_relative_to(folder) for path in shown if path != "None"):
        raise SystemExit(f"a copy in {folder} imports {shown}")


@cache
def names_of(path: Path) -> Counter[str]:
    """Return how often a file has each name."""
    return Counter(re.findall(r"\w+", path.read_text(encoding="utf-8")))


def tests_of(site: Site, step: str, root: Path) -> list[str]:
    """Return what pytest is to run for a mutant at a step, best first."""
    room = Path(site.file).stem
    function = re.sub(r"\.__\w+__$", "", site.function).rpartition(".")[2] or room
    folder = room_of(site.file)
    files = [root / name for name in ELSEWHERE.get(folder, ())]
    if folder not in ELSEWHERE:
        names = [folder, *(str(parent) for parent in Path(folder).parents)]
        place = next(root / "tests" / name for name in names if (root / "tests" / name).is_dir())
        files = sorted(place.rglob("test_*.py"))
    elsewhere = {*(root / "tests").rglob("test_*.py")} - {*files, root / "tests" / OF_THIS}
    own = {path for path in files or elsewhere if path.stem.startswith(f"test_{room}".rstrip("s"))}
    naming = {path for path in elsewhere | {*files} if {function, room} & {*names_of(path)}}
    if not own:
        own = naming.intersection(files)
    operations = {path for path in elsewhere if path.parent.name == "operations"}
    step_of = {
        "room": own,
        "folder": {*files} - own,
        "rest": (naming & elsewhere | operations) - own,
    }
    ordered = sorted(step_of[step], key=lambda path: (-names_of(path)[function], path))
    doctests = [site.file] if step == "room" else []
    return [*doctests, *(str(path.relative_to(root)) for path in ordered)]


def become_pytest(folder: Path, arguments: Sequence[str], output: Path) -> None:
    """Run pytest in the copy; this process, which has imported torch, ends with its exit code."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD")
    scratch = str(output.parent / "tmp")
    os.environ |= {"PYTHONPATH": str(folder), "TMPDIR": scratch}
    tempfile.tempdir = None
    sys.meta_path[:] = [it for it in sys.meta_path if PACKAGE not in type(it).__module__]
    here = str(Path(__file__).parent)
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in (here, str(ROOT)))]
    # Processes that tests start by multiprocessing import the main module: here it is pytest's.
    sys.argv = ["pytest"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__spec__ = importlib.util.find_spec("pytest.__main__")
    import pytest
    import torch

    torch._import_device_backends()
    code = pytest.main([*arguments])
    package = sys.modules.get(PACKAGE)
    if package is not None and not Path(str(package.__file__)).is_relative_to(folder):
        code = NOT_RUN[1]
    sys.stdout.flush()
    os._exit(code)


def end_processes_of(folder: Path) -> None:
    """End the processes whose command or environment names a folder: those that its tests left."""
    name = os.fsencode(folder)
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            known = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
            if name in known and int(path.name) != os.getpid():
                os.kill(int(path.name), signal.SIGKILL)


def run_tests(
    folder: Path, tests: Sequence[str], options: argparse.Namespace, more: Sequence[str]
) -> tuple[int | None, str]:
    """Run tests in the copy, and end what they leave; return the code, None if late, and output."""
    output = folder.parent / "output"
    (folder.parent / "tmp").mkdir(exist_ok=True)
    limits = [f"--timeout={options.limit}", "-o", f"faulthandler_timeout={options.limit + 30}"]
    looks = ["-x", "-q", "-rfE", "--tb=line", "--no-header", "-p", "no:cacheprovider"]
    arguments = [*looks, *limits, "--hypothesis-seed=0", *more, *tests]
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            become_pytest(folder, arguments, output)
        finally:
            os._exit(NOT_RUN[0])
    code = None
    try:
        while code is None and time.monotonic() - begin < options.step_limit:
            ended, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if code is None:
            os.waitpid(pid, 0)
        end_processes_of(folder.parent)
        shutil.rmtree(folder.parent / "tmp", ignore_errors=True)
        shutil.rmtree(folder / ".hypothesis", ignore_errors=True)
    return code, output.read_text(errors="replace")


class Copy:
    """The copy in which a process runs tests, and which of them pass and fail without a mutant."""

    here: ClassVar[Copy]

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        make_copy(folder)
        self.folder = folder
        self.good: set[str] = set()
        self.bad: set[str] = set()

    @staticmethod
    def begin(base: Path) -> None:
        """Make this process's copy."""
        Copy.here = Copy(base / str(os.getpid()) / "it")


def examine(site: Site, step: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a step's tests on a mutant; return the verdict, the test that failed, and seconds."""
    begin = time.monotonic()
    here = Copy.here
    file = here.folder / site.file
    source, times = file.read_text(encoding="utf-8"), file.stat()
    tests = tests_of(site, step, here.folder)
    over_mpi = "" if "mpi" in site.file else " and not mpi"
    wanted = ["-m", f"not soak and not gpu{over_mpi}"]
    verdict, failed = "missed", ""
    while tests:
        file.write_text(mutated(source, site), encoding="utf-8")
        # Compiled files are known by time and size: a time that no other mutant has.
        os.utime(file, (0, int(digest(0, site.name)[:7], 16)))
        left_out = [f"--deselect={test}" for test in sorted(here.bad)]
        try:
            code, text = run_tests(here.folder, tests, options, [*wanted, *left_out])
        finally:
            file.write_text(source, encoding="utf-8")
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        if code in (0, 5):
            break
        if code in (None, *NOT_RUN):
            verdict, failed = "unfinished", text[-300:] if code else ""
            break
        found = FAILED.search(text)
        verdict, failed = "caught", found[1] if found else f"ended with exit code {code}"
        if "Timeout (>" in text:
            verdict = "hangs"
        if not found or failed in here.good:
            break
        code, _ = run_tests(here.folder, [failed], options, wanted)
        if code in (0, 5):
            here.good.add(failed)
            break
        if failed in here.bad:
            verdict = "unfinished"
            break
        here.bad.add(failed)
        verdict, failed = "missed", ""
    return {
        "name": site.name,
        "verdict": verdict,
        "step": step,
        "test": failed,
        "seconds": round(time.monotonic() - begin),
    }


def find_again(rows: Sequence[dict[str, Any]]) -> tuple[list[Site], list[str]]:
    """Return the mutants of another run that still exist, and the names of the others."""
    known = {site.name: site for site in all_sites()}
    names = [row["name"] for row in rows]
    return [known[name] for name in names if name in known], [it for it in names if it not in known]


def new_row(site: Site) -> dict[str, Any]:
    """Return what the verdicts have of a mutant that has met no test."""
    return {"name": site.name, "file": site.file, "function": site.function} | {
        "was": site.was,
        "now": site.now,
    }


def steps_left(row: dict[str, Any]) -> Iterator[str]:
    """Yield the steps that a mutant has before it."""
    if row.get("verdict") not in CAUGHT:
        yield from STEPS[STEPS.index(row["step"]) + 1 if "step" in row else 0 :]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the report's table by room."""
    lines = ["| room | made | caught | of these hang | missed | unfinished |", 6 * "|---" + "|"]
    by_room: dict[str, Counter[str]] = {}
    for row in rows:
        for name in (room_of(row["name"]), "all"):
            by_room.setdefault(name, Counter())[row.get("verdict", "unfinished")] += 1
    for name, counts in sorted(by_room.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        caught = counts["caught"] + counts["hangs"]
        cells = (caught, counts["hangs"], counts["missed"], counts["unfinished"])
        lines.append(f"| {name} | {counts.total()} | " + " | ".join(map(str, cells)) + " |")
    return lines


def report(rows: Sequence[dict[str, Any]], seed: int) -> str:
    """Return the page of a run: its table, and each mutant that no test caught, with its note."""
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    head = f"By `make mutants` on {date.today()}, seed {seed}; {PACKAGE} {version(PACKAGE)}, "
    steps = Counter(row["step"] for row in rows if row.get("verdict") in CAUGHT)
    by_step = ", ".join(f"{steps[step]} at the step *{step}*" for step in STEPS)
    lines = [TITLE, "", head + versions + ".", f"Caught: {by_step}.", "", *table(rows)]
    lines += ["", "## Not caught", ""]
    for row in rows:
        if row.get("verdict") not in CAUGHT:
            change = " ".join(f"`{row['was']}` -> `{row['now']}`".split())
            place = f"`{row['file']}`, `{row['function'] or 'module'}`"
            note = row.get("note", row.get("verdict", "not run"))
            lines.append(f"* {place}: {change}: {note}")
    return "\n".join(lines) + "\n"


def run_all(rows: dict[str, dict[str, Any]], sites: list[Site], options: Any) -> None:
    """Take all mutants through the steps, and write each verdict as it comes."""
    base = Path(tempfile.mkdtemp(prefix="mu"))
    fork = multiprocessing.get_context("fork")
    try:
        with fork.Pool(options.workers, Copy.begin, (base,)) as pool:
            for step in STEPS:
                left = [site for site in sites if step in steps_left(rows[site.name])]
                examined = pool.imap_unordered(partial(examine, step=step, options=options), left)
                for number, row in enumerate(examined, 1):
                    rows[row["name"]].update(row)
                    options.outcomes.write_text(json.dumps([*rows.values()], indent=1) + "\n")
                    state = f"{row['verdict']} {row['seconds']} s {row['test']}"
                    print(f"{step} {number}/{len(left)} {row['name']}: {state}", flush=True)
    finally:
        end_processes_of(base)
        shutil.rmtree(base, ignore_errors=True)


def main() -> int:
    """Draw or find the mutants, run them, write the report; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2, help="how many mutants at a time")
    parser.add_argument("--limit", type=int, default=120, help="seconds of a test")
    parser.add_argument("--step-limit", type=int, default=900, help="seconds of a mutant's step")
    parser.add_argument("--again", action="store_true", help="run again what was not caught")
    parser.add_argument(
        "--against", type=Path, help="verdicts of another run, whose mutants to run"
    )
    parser.add_argument("--outcomes", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    old = json.loads(options.against.read_text()) if options.against else []
    sites, gone = find_again(old) if old else (draw(all_sites(), options.seed, options.count), [])
    if old and options.outcomes == parser.get_default("outcomes"):
        options.outcomes = ROOT / "build" / "mutants.json"
    known = json.loads(options.outcomes.read_text()) if options.outcomes.exists() else []
    before = {row["name"]: row for row in known}
    rows = {site.name: before.get(site.name, new_row(site)) for site in sites}
    for row in rows.values():
        if options.again and row.get("verdict") not in CAUGHT:
            row.pop("step", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # A fork of this process has imported torch; the package only in its copy.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    for name in ("torch", "torch.distributed", "torch.testing", "numpy", "optree", "pytest"):
        importlib.import_module(name)
    run_all(rows, sites, options)
    options.outcomes.with_suffix(".md").write_text(report([*rows.values()], options.seed))
    print("\n".join(table([*rows.values()])))
    was = {row["name"] for row in old if row.get("verdict") in CAUGHT}
    lost = [name for name, row in rows.items() if name in was and row["verdict"] not in CAUGHT]
    print("".join(f"no longer exists: {name}\n" for name in gone), end="")
    print("".join(f"caught before, not now: {name}\n" for name in lost), end="")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
