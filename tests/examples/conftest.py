"""Examples as a user meets them: started by a launcher, or called in this process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")

Start = Callable[..., "subprocess.CompletedProcess[str]"]
Load = Callable[[str], ModuleType]


@pytest.fixture
def start() -> Start:
    """Starts ``python WORDS`` outside any job; on a timeout, what it started is ended with it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def start_and_wait(
        *words: object, program: str | Path = sys.executable, **more_env: str
    ) -> subprocess.CompletedProcess[str]:
        command = [str(program), *map(str, words)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env | more_env,
            cwd=ROOT,
        )
        try:
            out, err = process.communicate(timeout=150)
        except BaseException:
            process.terminate()  # every launcher ends its ranks when it is asked to end
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return start_and_wait


@pytest.fixture
def load() -> Load:
    """Imports an example from its file, afresh."""

    def load_file(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_file
