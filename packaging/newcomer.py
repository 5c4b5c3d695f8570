"""Type the commands of the pages that a newcomer reads, in an empty folder.

    make newcomer          (ten minutes; or: python packaging/newcomer.py --quick, without training)

In a fresh virtual environment, with a built wheel in place of the clone: ``pip install .`` installs
the wheel of dist that fits this Python (made there where there is none), and examples/ lies beside,
as downloaded. Commands of make need the checkout: they are told of, not typed; those for a GPU
likewise.
The Python of the pages runs as files, the notebook runs, and the doctor must find all well.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "docs/install.md",
    "docs/quickstart.md",
    "docs/tutorials/torch_tutorial.md",
)
TORCH = next(
    line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:7] == "torch=="
)
NOTEBOOK = """
import nbformat, nbclient
notebook = nbformat.read("examples/first_mesh.ipynb", as_version=4)
nbclient.NotebookClient(notebook, timeout=300).execute()
print(sum(cell.cell_type == "code" for cell in notebook.cells), "cells")
"""


def find_wheel(dist: Path) -> Path:
    """The wheel for this Python, built where there is none."""
    major, minor = sys.version_info[:2]
    tags = [f"-cp{major}{minor}-cp{major}{minor}-", *(["-abi3-"] if minor >= 12 else [])]
    for tag in tags:
        for wheel in dist.glob(f"meshdist-*{tag}*.whl"):
            return wheel
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    constraints = ["--build-constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *constraints, "--wheel-dir", str(dist), str(ROOT)], check=True)
    return next(wheel for tag in tags for wheel in dist.glob(f"meshdist-*{tag}*.whl"))


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language, without those marked as not executed."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(
        rf"(<!-- not executed[^\n]*\n)?^```{language}\n(.*?)^```", text, re.M | re.S
    )
    return [match[2] for match in found if match[1] is None]


def commands(page: str) -> list[str]:
    """What a page says to type, without prompts and comments."""
    lines = "".join(blocks(page, "console")).replace("\\\n", " ").splitlines()
    typed = (re.sub(r"\s+#.*", "", line.removeprefix("$ ")).strip() for line in lines)
    return [line for line in typed if line]


def why_not(command: str, is_quick: bool) -> str:
    """Why a command is not typed; "" where it is."""
    if command.startswith("make "):
        return "needs the checkout"
    if "cuda" in command:
        return "needs a GPU"
    if is_quick and "examples/" in command:
        return "takes minutes"
    return ""


class Newcomer:
    """A person in an empty folder, with one shell."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.wheel = wheel
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "PYTHON", "VIRTUAL_ENV", "MESHDIST_"))
        }
        self.environment |= {"PIP_RETRIES": "0", "PIP_TIMEOUT": "20", "PIP_QUIET": "1"}

    def type(self, command: str) -> None:
        """Type one line; end where it fails."""
        meant = re.sub(r"^pip install '?\.(\[\w+\])?'?$", rf"pip install '{self.wheel}\1'", command)
        begin = time.monotonic()
        code = self._run(meant)
        if code != 0 and "--index-url" in command:
            print(f"newcomer: that index is not reached from here: {TORCH} instead", flush=True)
            code = self._run(f"pip install {TORCH}")
        print(f"newcomer: {time.monotonic() - begin:6.1f} s  {command}", flush=True)
        if code != 0:
            raise SystemExit(f"newcomer: exit code {code} of: {meant}")

    def _run(self, command: str) -> int:
        activate = "[ ! -d venv ] || source venv/bin/activate\n"
        shell = ["bash", "-c", activate + command]
        return subprocess.run(shell, cwd=self.folder, env=self.environment).returncode


def main() -> int:
    """Walk the path; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheels are")
    parser.add_argument("--quick", action="store_true", help="leave out the examples that train")
    arguments = parser.parse_args()
    wheel = find_wheel(arguments.dist.resolve())
    with tempfile.TemporaryDirectory(prefix="newcomer-") as name:
        folder = Path(name)
        shutil.copytree(ROOT / "examples", folder / "examples")
        person = Newcomer(folder, wheel)
        person.type("python3 -m venv venv")
        for page in PAGES:
            print(f"newcomer: {page}", flush=True)
            for command in commands(page):
                if reason := why_not(command, arguments.quick):
                    print(f"newcomer: not typed, {reason}: {command}", flush=True)
                else:
                    person.type(command)
            program = f"{Path(page).stem.lower()}_page.py"
            (folder / program).write_text("\n".join(blocks(page, "python")), encoding="utf-8")
            person.type(f"python {program}")
        (folder / "notebook.py").write_text(NOTEBOOK)
        person.type("pip install nbclient ipykernel")
        person.type("python notebook.py")
        person.type("meshdist doctor")
    print("newcomer: all of it worked", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
