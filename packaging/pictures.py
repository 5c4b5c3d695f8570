"""The pictures of the README: a mesh, and the loss of a model on it and on one process, really run.

python packaging/pictures.py         (two minutes on two cores)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from meshdist import Layout
from meshdist.mesh.visualize import draw_svg

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"


def main() -> int:
    """Draw both; return the exit code of the run."""
    IMAGES.mkdir(exist_ok=True)
    mesh = Layout.from_shape((2, 2), ("dp", "tp"))
    (IMAGES / "mesh.svg").write_text(draw_svg(mesh, highlight_rank=0), encoding="utf-8")
    run = [sys.executable, "-m", "meshdist", "run", "-n", "4", "examples/train_lm.py"]
    options = ["--mesh", "dp=2,tp=2", "--check", "--plot", str(IMAGES / "loss.svg")]
    return subprocess.run([*run, *options], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
