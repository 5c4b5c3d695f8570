"""Run the programs of docs/how-to/trainers.md on two processes, and split models.

``python -m tests.trainers`` runs all of them; their trainers must be installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "trainers.md"
SPLIT = ROOT / "examples" / "transformers_tp.py"
SPLIT_HOW = ("", "--tied", "--model qwen3", "--model qwen3 --tied --tp 4", "--simulate 6 --tied")
NUM_RANKS, TIMEOUT_S = 2, 300

_SECTION = re.compile(r"^## (.+?)$.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RESULT = re.compile(r"weights (-?[\d.]+) over shm")


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
    return RESULT.findall(done.stdout)


def check_split(how: str) -> bool:
    """Run the example of split models; print what it says, and return whether one rank agrees."""
    alone = [sys.executable, str(SPLIT)]
    start = (
        alone
        if "--simulate" in how
        else [*alone[:1], "-m", "meshdist", "run", "-n", "4", *alone[1:]]
    )
    command = [*start, "--check", *how.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    said = done.stdout.strip() or done.stderr[-2000:]
    print(f"{SPLIT.name} {how}: {said}", flush=True)
    return done.returncode == 0


def main() -> int:
    """Run all; the number of programs whose ranks end with other weights, or one rank's differ."""
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
    return num_bad + sum(not check_split(how) for how in SPLIT_HOW)


if __name__ == "__main__":
    sys.exit(main())
