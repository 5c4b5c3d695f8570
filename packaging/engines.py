"""Run the programs of docs/how-to/schedulers.md, each in a new environment.

python packaging/engines.py [ENGINE ...]

Each runs three times: as it stands; with a rank that raises an exception; with a rank that is
killed. The report, packaging/engines.md, says what the other ranks were told, and how soon.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "schedulers.md"
REPORT = ROOT / "packaging" / "engines.md"
FOLDER = ROOT / "build" / "engines"
MARK = "MESHDIST_ENGINE_RUN"
SIZE, TIMEOUT_S, ENDING_S = 4, 180, 20.0
OPERATION = "md.all_reduce(x)"
SECTION = re.compile(r"^## (.+?)$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FAILURES = {
    "raises": 'raise ValueError("no data")',
    "is killed": "_os.kill(_os.getpid(), 9)",
}
FAILING = """\
import os as _os, time as _time
from pathlib import Path as _Path
if rank == 1:
    _time.sleep(0.5)
    _Path({folder!r}, "failed").write_text(str(_time.time()))
    {failure}
try:
    md.all_reduce(x)
except md.MeshdistError as _error:
    _Path({folder!r}, f"rank {{rank}}").write_text(f"{{_time.time()}}\\n{{_error}}")
    raise
"""


@dataclass(frozen=True)
class Engine:
    """An engine, and how its program is started.

    Args:
        section: the heading of its program on the page.
        packages: what is installed for it.
        command: the words before the program's path, behind the environment's folder of commands.
        variables: what the environment holds besides.
        by_hand: variables of each process, where there is no command that starts all.
    """

    name: str
    section: str
    packages: tuple[str, ...]
    command: tuple[str, ...] = ("python",)
    variables: tuple[tuple[str, str], ...] = ()
    by_hand: tuple[dict[str, str], ...] = ()


LAUNCHERS = "DeepSpeed, accelerate, Kubeflow"
PODS = tuple(
    {
        "PET_NNODES": str(SIZE),
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "29417",
    }
    for rank in range(SIZE)
)
ENGINES = (
    Engine("Ray", "Ray", ("ray[train]",)),
    Engine("Ray Train", "Ray Train", ("ray[train]",)),
    Engine("Dask", "Dask", ("distributed",)),
    Engine("submitit", "submitit", ("submitit",)),
    Engine("Spark", "Spark", ("pyspark", "pandas")),
    Engine("joblib", "joblib", ("joblib",)),
    Engine("Process pools", "Process pools", ()),
    Engine("ipyparallel", "ipyparallel", ("ipyparallel",)),
    Engine(
        "DeepSpeed",
        LAUNCHERS,
        ("deepspeed",),
        ("deepspeed", "--num_accelerators", str(SIZE)),
        (("DS_ACCELERATOR", "cpu"),),
    ),
    Engine(
        "accelerate",
        LAUNCHERS,
        ("accelerate",),
        ("accelerate", "launch", "--multi_gpu", "--num_processes", str(SIZE)),
    ),
    Engine("Kubeflow's variables", LAUNCHERS, (), by_hand=PODS),
)


@dataclass
class Outcome:
    """The end of one run, and what it left."""

    code: int
    text: str
    seconds: float
    left: list[str]


def programs() -> dict[str, str]:
    """Return each engine's program, by the heading above it."""
    found = {title: PROGRAM.search(text) for title, text in SECTION.findall(PAGE.read_text())}
    return {title: match[1] for title, match in found.items() if match and OPERATION in match[1]}


def with_failure(program: str, failure: str, folder: Path) -> str:
    """Return a program in which rank 1 fails before the first collective; the others note the
    error."""
    line = next(line for line in program.splitlines() if line.strip() == OPERATION)
    lines = FAILING.format(folder=str(folder), failure=FAILURES[failure]).splitlines()
    indent = line.removesuffix(OPERATION)
    return program.replace(line, "\n".join(f"{indent}{each}" for each in lines), 1)


def make_environment(engine: Engine) -> Path:
    """Return the folder of the engine's virtual environment, which has torch and meshdist, too."""
    folder = FOLDER / (engine.packages[0] if engine.packages else "plain")
    if not (folder / "made").exists():
        venv.create(folder, with_pip=True, clear=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "of_checkout.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
        if engine.packages:
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            constraints = ["--constraint", str(ROOT / "constraints.txt")]
            subprocess.run([*pip, *constraints, *engine.packages], check=True)
        (folder / "made").touch()
    return folder


def version_of(engine: Engine, folder: Path) -> str:
    """Return the name and version of the engine's package."""
    if not engine.packages:
        return f"Python {sys.version.split()[0]}"
    name = engine.packages[0].partition("[")[0]
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    python = str(folder / "bin" / "python")
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return f"{name} {done.stdout.strip()}"


def marked(mark: str) -> Iterator[int]:
    """Yield the processes whose environment has the run's mark."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                yield int(path.name)


def run(engine: Engine, environment: Path, program: str) -> Outcome:
    """Run a program under its engine, and end what it leaves."""
    with tempfile.TemporaryDirectory(prefix="en") as name:
        script = Path(name, "train.py")
        script.write_text(program)
        commands = str(environment / "bin")
        mark = os.path.basename(name)
        variables = {
            **os.environ,
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": name,
            "OMP_NUM_THREADS": "1",
            "RAY_TRAIN_V2_ENABLED": "1",
            MARK: mark,
            **dict(engine.variables),
        }
        begin = time.monotonic()
        with open(Path(name, "output"), "w+") as output:
            started = [
                subprocess.Popen(
                    [f"{commands}/{engine.command[0]}", *engine.command[1:], str(script)],
                    cwd=name,
                    env={**variables, **more},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for more in engine.by_hand or ({},)
            ]
            codes = [124 if (code := wait_for(each)) is None else code for each in started]
        seconds = time.monotonic() - begin
        end = time.monotonic() + ENDING_S
        while (processes := list(marked(mark))) and time.monotonic() < end:
            time.sleep(0.2)
        left = [f"process {pid}" for pid in processes]
        for pid in processes:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        left += [str(path) for path in Path(name).rglob("*meshdist*")]
        left += [str(path) for path in Path(name).rglob("gang*")]
        text = Path(name, "output").read_text(errors="replace")
    return Outcome(max(map(abs, codes)), text, seconds, left)


def wait_for(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code, None where it does not end in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(TIMEOUT_S)
    return None


def told(folder: Path) -> str:
    """Return in words what the others were told of rank 1, and how soon."""
    if not (folder / "failed").exists():
        return "rank 1 did not come so far"
    failed = float((folder / "failed").read_text())
    found, seconds = [], []
    for path in sorted(folder.glob("rank *")):
        moment, _, text = path.read_text().partition("\n")
        about = re.search(r"rank 1 (ended by [^(\n]+ \()?[^\n;]*", text)
        shown = "" if about is None else re.sub(r"\(\S*/", "(", about[0])
        found.append(shown or text.splitlines()[0])
        seconds.append(float(moment) - failed)
    if not found:
        return "nothing: the engine ended them first"
    texts = ", ".join(f"`{text}`" for text in dict.fromkeys(found))
    return f"{len(found)} of {SIZE - 1}: {texts}, after {max(seconds):.1f} s"


def row(engine: Engine, program: str) -> str:
    """Run an engine's program in the three ways; return its row of the report."""
    environment = make_environment(engine)
    plain = run(engine, environment, program)
    sums = plain.text.count("6.0")
    backend = re.search(r"cpu:(\w+)", plain.text)
    is_good = plain.code == 0 and sums >= SIZE and not plain.left
    state = f"{plain.seconds:.0f} s, {backend[1] if backend else '?'}"
    if not is_good:
        state = f"FAILED, exit code {plain.code}, {sums} sums"
        print(plain.text[-4000:], file=sys.stderr)
    cells = [engine.name, version_of(engine, environment), str(date.today()), state]
    left = [*plain.left]
    for failure in FAILURES:
        with tempfile.TemporaryDirectory() as folder:
            end = run(engine, environment, with_failure(program, failure, Path(folder)))
            cells.append(told(Path(folder)) + ("" if end.code else ", exit code 0"))
            left += end.left
    cells.append(", ".join(left) or "nothing")
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Run the engines that are named, or all; write their rows of the report."""
    named = sys.argv[1:]
    known = programs()
    engines = [engine for engine in ENGINES if not named or engine.name in named]
    num_bad = 0
    for engine in engines:
        try:
            found = row(engine, known[engine.section])
        except subprocess.CalledProcessError as error:
            found = f"| {engine.name} | | {date.today()} | not installed: {error} | | | |"
        print(found, flush=True)
        num_bad += "FAILED" in found or "not installed" in found
        rows = {**rows_of_report(), engine.name: found}
        lines = [rows[each.name] for each in ENGINES if each.name in rows]
        REPORT.write_text(HEAD.format(size=SIZE) + "\n".join(lines) + "\n")
    if not named:
        shutil.rmtree(FOLDER, ignore_errors=True)
    return num_bad


def rows_of_report() -> dict[str, str]:
    """Return the rows of the last report, by engine."""
    text = REPORT.read_text() if REPORT.exists() else ""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].strip("| "): line for line in rows[1:]}


HEAD = """\
# Engines

By `make engines`; Linux on x86_64, 2 cores, no GPU; {size} workers each. *Raises* and *is
killed*: what the other ranks were told of rank 1, and how soon. Seconds are those of the whole
program: the engine's start and torch's import in every worker, on a machine that other tests kept
busy. torchrun, which Spark and accelerate use, ends the other ranks as soon as one has failed.

| engine | version | on | as it stands | rank 1 raises | rank 1 is killed | left behind |
|---|---|---|---|---|---|---|
"""

if __name__ == "__main__":
    sys.exit(main())
