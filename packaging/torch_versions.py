"""Runs what meshdist builds on torch under each version of torch that it is to work with.

    make torch-versions                            (each environment takes up to 6 GB)
    make torch-versions TORCH_VERSIONS="2.14.1 2.15.0"
    make torch-versions TORCH_INDEX=https://download.pytorch.org/whl/cpu       (builds without CUDA)

For each version it makes a virtual environment (all other versions are those of constraints.txt,
but for setuptools, which torch holds itself), installs this checkout with its tests' extra, and
runs there: tests of torch's groups, of interop, of DDP and of types; the demo; the torch programs.
Where an environment is there it is used again. The report stands beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TESTS = (
    "tests/native/test_torch_layout.py",
    "tests/torch_process_groups",
    "tests/examples/test_torch_programs.py",
    "tests/mesh/test_torch_interop.py",
    "tests/sharding/test_torch_*.py",
    "tests/ddp/test_as_torch.py",
    "tests/ddp/test_compiled.py",
    "tests/ddp/test_data_parallel.py",
    "tests/ddp/test_everyday.py",
    "tests/ddp/test_grad_norm.py",
    "tests/ddp/test_pipelines.py",
    "tests/ddp/test_torch_*.py",
    "tests/tensor_parallel/test_layers.py",
    "tests/typed_mode/test_custom_functions.py",
    "tests/functional/test_reached_gradients.py",
    "tests/collectives/test_torch_private.py",
    "tests/typed_mode/test_[gimp]*.py",
)
DEMO = (
    "-m",
    "meshdist",
    "run",
    "-n",
    "4",
    "examples/train_lm.py",
    "--mesh",
    "dp=2,tp=2",
    "--check",
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
HEAD = (
    "| torch | Python | passed | failed | skipped | demo | torch programs | on |\n"
    + 8 * "|---"
    + "|"
)


def make_environment(folder: Path, version: str, index: str) -> str:
    """Make the environment of a version unless it is there; return why that fails, or ""."""
    python, made = folder / "bin" / "python", folder / ".made"
    if made.exists():
        return ""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    held = [line for line in lines if not line.startswith(("torch==", "setuptools=="))]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(held))
        constraints.flush()
        pip = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints.name]
        found = ["--extra-index-url", index] if index else []
        wanted = [
            "--build-constraint",
            constraints.name,
            "--editable",
            ".[test]",
            f"torch=={version}",
        ]
        for command in (
            [sys.executable, "-m", "venv", "--clear", folder],
            [*pip, "--upgrade", "pip"],
            [*pip, *found, *wanted],
        ):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode != 0:
                return next((x for x in done.stderr.splitlines() if "ERROR" in x), "no reason")
    made.touch()
    return ""


def run_there(python: Path, *command: str) -> tuple[bool, str]:
    """Whether a command of that interpreter succeeds, and what it wrote."""
    started = subprocess.Popen(
        [str(python), *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"},
    )
    written, _ = started.communicate()
    return started.returncode == 0, written


def examine(folder: Path, workers: str) -> dict[str, Any]:
    """Run everything in an environment; return a row of the report."""
    python, begin = folder / "bin" / "python", time.time()
    tests = [str(path.relative_to(ROOT)) for glob in TESTS for path in sorted(ROOT.glob(glob))]
    several = ["--numprocesses", workers, "--dist", "worksteal"]
    _, written = run_there(python, "-m", "pytest", "-q", *several, *tests)
    (folder / "tests.log").write_text(written)
    counts = {
        word: int(found[1]) if (found := re.search(rf"(\d+) {word}", written[-300:])) else 0
        for word in ("passed", "failed", "skipped")
    }
    failing = re.findall(r"^(?:FAILED|ERROR) (\S+)", written, re.MULTILINE)
    demo, _ = run_there(python, *DEMO)
    programs = sorted((ROOT / "examples" / "torch_programs").glob("*.py"))
    done = [run_there(python, *TORCHRUN, str(program))[0] for program in programs]
    _, shown = run_there(python, "-c", "import torch; print(torch.__version__)")
    return {
        "torch": shown.strip(),
        **counts,
        "failing": failing,
        "demo": "ok" if demo else "FAILED",
        "programs": f"{sum(done)} of {len(done)}",
        "is_well": demo and all(done) and not failing and counts["passed"] > 0,
        "seconds": round(time.time() - begin),
        "date": date.today().isoformat(),
    }


def report(rows: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The page of all versions."""
    machine = f"{platform.system()} on {platform.machine()}, {os.cpu_count()} cores, no GPU used"
    lines = ["# Versions of torch", "", f"By `make torch-versions`; {machine}.", "", HEAD]
    python = platform.python_version()
    for version, row in rows:
        if "missing" in row:
            lines.append(
                f"| {version} | {python} | missing: {row['missing']} | | | | | {row['date']} |"
            )
            continue
        counts = f"{row['passed']} | {row['failed']} | {row['skipped']} | {row['demo']}"
        ends = f"{row['programs']} | {row['date']}"
        lines.append(f"| {row['torch']} | {python} | {counts} | {ends} |")
    for version, row in rows:
        for name in row.get("failing", []):
            lines.append(f"\ntorch {version} fails: `{name}`")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Examine each version; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument(
        "--index", default="", help="an index beside pip's own, such as of CPU builds"
    )
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "torch-versions")
    parser.add_argument("--workers", default="2", help="how many tests run at a time")
    parser.add_argument("--report", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args(argv)
    arguments.environments.mkdir(parents=True, exist_ok=True)
    for version in arguments.versions:
        folder = arguments.environments.resolve() / version
        print(f"== torch {version}", flush=True)
        problem = make_environment(folder, version, arguments.index)
        today = date.today().isoformat()
        row = {"missing": problem, "date": today} if problem else examine(folder, arguments.workers)
        print(json.dumps(row, indent=1), flush=True)
        (arguments.environments / f"{version}.json").write_text(json.dumps(row))
    # Versions that an earlier run examined stay in the report, each with its day.
    files = sorted(arguments.environments.glob("*.json"), key=lambda path: path.name.split("."))
    rows = [(path.stem, json.loads(path.read_text())) for path in files]
    arguments.report.write_text(report(rows), encoding="utf-8")
    return 0 if all(row.get("is_well") for _, row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
