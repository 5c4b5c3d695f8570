"""What pip installs: the wheel holds the whole package and nothing else; versions are held."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import meshdist

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.soak)],
    ids=["Python alone", "with the native core"],
)
def has_core(request: pytest.FixtureRequest) -> bool:
    """Whether the wheel is built with the native core, which takes a minute."""
    return bool(request.param)


@pytest.fixture(scope="module")
def wheel(has_core: bool, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel as pip does, with the backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("wheel")
    settings = {} if has_core else {"wheel.cmake": "False", "wheel.py-api": "py3"}
    call = f"build_wheel({str(folder)!r}, {settings!r})"
    code = f"import scikit_build_core.build as backend; backend.{call}"
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=400
    )
    (path,) = folder.glob("meshdist-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_package_and_nothing_else(
    wheel: zipfile.ZipFile, has_core: bool
) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "meshdist").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    built = {name for name in held if name.endswith(".so")}
    assert held - built == files
    assert len(built) == (has_core and sys.platform == "linux")
    assert all(name.startswith("meshdist/backends/native.") for name in built)
    assert "meshdist/py.typed" in held


def read_info(wheel: zipfile.ZipFile, name: str) -> str:
    """Return the text of one file of the wheel's dist-info."""
    (path,) = [path for path in wheel.namelist() if path.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_the_wheel_carries_version_command_and_licence(wheel: zipfile.ZipFile) -> None:
    assert f"\nVersion: {meshdist.__version__}\n" in read_info(wheel, "METADATA")
    assert "meshdist=meshdist.cli.main:main" in read_info(wheel, "entry_points.txt").replace(
        " ", ""
    )
    assert "meshdist authors" in read_info(wheel, "licenses/LICENSE")


def test_constraints_hold_every_dependency_of_a_development_install(wheel: zipfile.ZipFile) -> None:
    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    requirements = Parser().parsestr(read_info(wheel, "METADATA")).get_all("Requires-Dist", [])
    wanted = {
        normal(re.match(r"[\w.-]+", requirement)[0])  # type: ignore[index]
        for requirement in requirements
        if "cupy" not in requirement
    }
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    held = [line for line in lines if line and not line.startswith("#")]
    assert {"torch", "pytest", "matplotlib", "mpi4py"} <= wanted
    assert wanted - {normal(line.split("==")[0]) for line in held} == set()
    assert [line for line in held if not re.fullmatch(r"[\w.-]+==[\w.]+(; .+)?", line)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="the core is built on Linux alone")
def test_a_clones_sources_without_a_core_say_so_once(tmp_path: Path) -> None:
    unbuilt = shutil.ignore_patterns("*.so")
    shutil.copytree(ROOT / "meshdist", tmp_path / "meshdist", ignore=unbuilt)
    (tmp_path / "CMakeLists.txt").touch()
    (tmp_path / "native").mkdir()
    code = (
        f"import sys; sys.path.append({sysconfig.get_path('platlib')!r})\n"
        "import meshdist as md\n"
        "md.all_reduce, md.DDP\n"
        "print(md.simulate(md.get_rank, 2))\n"
    )
    command = [sys.executable, "-S", "-c", code]  # without the finder of an editable install
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n")
    assert (
        done.stderr.count("meshdist is imported from its source folder, without the native core")
        == 1
    )
    assert f"found:    {tmp_path / 'meshdist'}\n" in done.stderr
    assert "fix:      build it with `pip install -e .`" in done.stderr
    (tmp_path / "CMakeLists.txt").unlink()  # an installed package without a core says nothing
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[0, 1]\n", "")
