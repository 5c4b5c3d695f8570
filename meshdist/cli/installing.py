"""How the Python that runs this should install meshdist, and what is missing from it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

from ..runtime.hosts import find_version

__all__ = ["find_install", "has_core", "python", "torch_wheel"]

_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_EXTRAS = {
    "mpi": ("mpi4py", "the wire mpi, and mpiexec"),
    "examples": ("scikit-learn", "what the examples use"),
    "cupy": ("cupy-cuda13x", "arrays of CuPy"),
}


def python() -> str:
    """How a shell calls this interpreter: by a name on the PATH that means it, else by its path."""
    for name in ("python", "python3"):
        found = shutil.which(name)
        if found is not None and os.path.samefile(found, sys.executable):
            return name
    return sys.executable


def torch_wheel() -> str:
    """The requirement of torch for pip: on a machine without an NVIDIA GPU the build for CPUs."""
    return "torch" if _has_nvidia_gpu() else f"torch --index-url {_CPU_INDEX}"


def has_core() -> bool:
    """Whether the native core is installed; loads neither it nor torch."""
    return importlib.util.find_spec("meshdist.wires.native") is not None


def find_install() -> list[dict[str, str]]:
    """The parts of an install: ``name``, ``state``, and ``fix``, a command or ""."""
    pip = f"{python()} -m pip install"
    rows = [_torch_row(pip), _core_row(pip)]
    for extra, (package, what) in _EXTRAS.items():
        if extra == "cupy" and not _has_nvidia_gpu():
            continue
        is_here = find_version(package) is not None
        state = f"here: {what}" if is_here else f"not here: {what}"
        fix = "" if is_here else f"{pip} 'meshdist[{extra}]'"
        rows.append({"name": f"[{extra}]", "state": state, "fix": fix})
    return rows


def _has_nvidia_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None


def _torch_row(pip: str) -> dict[str, str]:
    import torch

    version, has_gpu = torch.__version__, _has_nvidia_gpu()
    built_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    state, fix = f"{version}, for {'GPUs and ' if built_for_gpus else ''}CPUs", ""
    if has_gpu and not built_for_gpus:
        state, fix = f"{state}; this machine has an NVIDIA GPU", f"{pip} --force-reinstall torch"
    elif built_for_gpus and not has_gpu:
        state += f"; a smaller build, without CUDA, is at {_CPU_INDEX}"
    return {"name": "torch", "state": state, "fix": fix}


def _core_row(pip: str) -> dict[str, str]:
    if has_core():
        state, fix = "here: shared memory between the processes of a host", ""
    elif not sys.platform.startswith("linux"):
        state, fix = f"none on {sys.platform}: Gloo takes its place", ""
    else:
        state = "not here: Gloo takes its place, and is slower"
        fix = f"install a C++ compiler, then {pip} --force-reinstall --no-deps meshdist"
    return {"name": "native core", "state": state, "fix": fix}
