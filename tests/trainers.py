"""The programs of docs/trainers.md, each run as it stands there, on two processes.

``python -m tests.trainers`` runs all of them; their trainers must be installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "trainers.md"
NUM_RANKS, TIMEOUT_S = 2, 300

_SECTION = re.compile(r"^## (.+?)$.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RESULT = re.compile(r"weights (-?[\d.]+) over shm")


def programs() -> dict[str, str]:
    """Return each trainer's program, by the heading above it."""
    return dict(_SECTION.findall(PAGE.read_text(encoding="utf-8")))


def run(program: str) -> list[str]:
    """Run one; return the weights that each rank ends with.

    Raises:
        RuntimeError: it has failed; with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(program, encoding="utf-8")
        command = [sys.executable, "-m", "meshdist", "run", "-n", str(NUM_RANKS), str(script)]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return _RESULT.findall(done.stdout)


def main() -> int:
    """Run all programs; the number of those whose ranks do not end with equal weights."""
    num_bad = 0
    for name, program in programs().items():
        try:
            weights = run(program)
            is_good = len(weights) == NUM_RANKS and len(set(weights)) == 1
            print(f"{name}: {'equal' if is_good else 'DIFFERENT'} weights {weights}", flush=True)
        except RuntimeError as error:
            is_good = False
            print(f"{name}: {error}", flush=True)
        num_bad += not is_good
    return num_bad


if __name__ == "__main__":
    sys.exit(main())
