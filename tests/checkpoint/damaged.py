"""A small checkpoint to be damaged, what loading it then gives, and parts of unusual states."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch

import meshdist as md

WHOLES = {
    "a": torch.arange(15.0).view(5, 3) - 7,
    "b": torch.arange(-3, 3, dtype=torch.int8),
    "c": torch.tensor(True),
}
LEAVES = {"step": 5, "name": "run"}


def save_whole(path: str | os.PathLike[str]) -> None:
    """Save the small checkpoint on two ranks, which both have a part of ``a`` and ``b``."""

    def program() -> None:
        with md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)):
            cut = {name: md.shard(WHOLES[name], "n@dp ...") for name in ("a", "b")}
            md.checkpoint.save({**cut, "c": WHOLES["c"], **LEAVES}, path)

    md.simulate(program, 2)


def empty_state() -> dict[str, Any]:
    arrays = {name: torch.zeros_like(whole) for name, whole in WHOLES.items()}
    return {**arrays, "step": 0, "name": ""}


def find_error(path: str | os.PathLike[str], *, verify: bool = False, size: int = 1) -> str | None:
    """Return the text of the error of a load, equal on all ranks; None if all values are right.

    A load that is rejected must leave the state as it was.
    """

    def program() -> str | None:
        state = empty_state()
        try:
            md.checkpoint.load(state, path, verify=verify)
        except (md.CheckpointError, md.ShapeError, md.DtypeError) as error:
            assert has_values(state, empty_state())
            return str(error)
        assert has_values(state, {**WHOLES, **LEAVES}), state
        return None

    (found,) = {program()} if size == 1 else set(md.simulate(program, size))
    return found


def has_values(state: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(
        torch.equal(state[name], value) if name in WHOLES else state[name] == value
        for name, value in wanted.items()
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    del found["crc32"]
    return found


def write_manifest(folder: Path, manifest: dict[str, Any] | str) -> None:
    """Write a manifest with the checksum that it should have, whatever else it says."""
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)[:-1]
    sealed = f'{text}, "crc32": {zlib.crc32(text.encode())}}}'
    (folder / "manifest.json").write_text(sealed)


def deep(levels: int) -> Any:
    """Return dicts inside each other."""
    found: Any = 1
    for _ in range(levels):
        found = {"a": found}
    return found


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x
