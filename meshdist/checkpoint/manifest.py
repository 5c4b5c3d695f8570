"""Parse, check and write manifests, which list a checkpoint's arrays, leaves and files.

A save writes ``manifest.json`` last. The file may be untrusted, so it is fully checked before use:
an array's pieces must cover it exactly.

    {"format": "meshdist", "version": 1,
     "leaves": {"step": 5}, "tree": {"step": 0, "model": {"up.weight": 1}},
     "arrays": {"model.up.weight": {"dtype": "float32", "shape": [4, 6]}},
     "files": {"rank-0.safetensors": {"bytes": 288, "pieces": {"model.up.weight":
         {"offsets": [0, 0], "shape": [4, 6], "crc32": 1234}}}},
     "crc32": 5678}

The last number is the CRC-32 of the text before it, which alone has the leaves.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dtypes import DTYPES
from ..errors import CheckpointError
from ..mesh.placement import Box, volume
from .pieces import find_fault

NAME = "manifest.json"
SUFFIX = ".safetensors"
_FORMAT = "meshdist"
_VERSION = 1
_FILE_NAME = re.compile(r"[\w.-]+\.safetensors")
_MOST = 1 << 62
_SUM = ', "crc32": '
MOST_LEVELS = 100
"""The maximum nesting of dicts and lists in a state; some JSON readers support few more."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""The exceptions that parsing a malformed text may raise."""
_LONGEST = 300

DTYPES_IN_FILES = {facts.name: facts for facts in DTYPES.values() if facts.in_files}
"""The dtypes that files support, by name."""
_BY_FILE_NAME = {facts.in_files: name for name, facts in DTYPES_IN_FILES.items()}


FingerprintFacts = tuple[str, tuple[int, ...], tuple[int, ...]]
"""An array in a file: the dtype's name in the file, the shape, the offsets."""


@dataclass(frozen=True)
class Piece:
    """A part (``box``) of an array in a file, and its checksum."""

    file: str
    box: Box
    crc32: int | None = None


@dataclass
class SavedArray:
    """An array of a checkpoint: its dtype's name, shape, and pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES_IN_FILES[self.dtype].dtype


@dataclass
class Manifest:
    """The contents of a checkpoint.

    Args:
        leaves: all values that are not arrays, as JSON.
        file_bytes: the size of each file.
        ending: the end of the text, with the checksum; "" if built from file headers.
    """

    arrays: dict[str, SavedArray]
    leaves: dict[str, Any]
    file_bytes: dict[str, int]
    ending: str = ""

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Return the manifest in a JSON text of path ``where``; raise if damaged."""
        try:
            found = json.loads(text, object_pairs_hook=_without_twins)
            if found["format"] != _FORMAT or found["version"] != _VERSION:
                raise CheckpointError(
                    "this version of meshdist cannot read the checkpoint's format",
                    where=where,
                    expected=f"format {_FORMAT!r}, version {_VERSION}",
                    found=_shortened(f"format {found['format']!r}, version {found['version']!r}"),
                    fix="load it with the version of meshdist that saved it",
                )
            summed, _, stored_sum = text.rpartition(_SUM)
            if stored_sum != f"{_sum_of(summed)}}}":
                raise ValueError("the text does not match its checksum")
            arrays = {
                name: SavedArray(str(facts["dtype"]), sizes_in(facts["shape"]))
                for name, facts in found["arrays"].items()
            }
            file_bytes = {}
            for file, facts in found["files"].items():
                if not _FILE_NAME.fullmatch(file):
                    raise ValueError(f"{file!r} is not the name of a file in the folder")
                (file_bytes[file],) = sizes_in([facts["bytes"]])
                for name, piece in facts["pieces"].items():
                    starts, shape = sizes_in(piece["offsets"]), sizes_in(piece["shape"])
                    if len(starts) != len(shape):
                        raise ValueError(f"{file}: {name} has shape {shape} at {starts}")
                    box = tuple((at, at + size) for at, size in zip(starts, shape, strict=True))
                    (crc32,) = sizes_in([piece["crc32"]])
                    arrays[name].pieces.append(Piece(file, box, crc32))
            leaves = dict(found["leaves"])
            if not is_plain(leaves, MOST_LEVELS + 1):
                raise ValueError("leaves are nested too deeply")
            manifest = cls(arrays, leaves, file_bytes, _SUM + stored_sum)
            manifest.check()
        except CheckpointError:
            raise
        except MALFORMED as error:
            raise damaged(where, f"{NAME}: {error!r}") from error
        return manifest

    def check(self) -> None:
        """Raise ValueError unless pieces cover each array exactly and fit their files."""
        bytes_in = dict.fromkeys(self.file_bytes, 0)
        for name, array in self.arrays.items():
            if array.dtype not in DTYPES_IN_FILES:
                raise ValueError(f"{name}: unsupported dtype {array.dtype!r}")
            boxes = [piece.box for piece in array.pieces]
            if any(len(box) != len(array.shape) for box in boxes):
                raise ValueError(
                    f"{name}: a piece has a different number of dims than {array.shape}"
                )
            if fault := find_fault(array.shape, boxes):
                raise ValueError(f"{name}: {fault}")
            for piece in array.pieces:
                bytes_in[piece.file] += volume(piece.box) * array.torch_dtype.itemsize
        for file, size in self.file_bytes.items():
            if bytes_in[file] > size:
                raise ValueError(f"{file} has {size} bytes, but its pieces have {bytes_in[file]}")

    @property
    def names(self) -> list[str]:
        return [*self.arrays, *self.leaves]


def manifest_text(
    leaves: Mapping[str, Any],
    tree: Mapping[str, Any],
    arrays: Mapping[str, tuple[str, tuple[int, ...]]],
    files: Mapping[str, Any],
) -> str:
    """Return a manifest's text, which ``Manifest.from_json`` reads.

    Args:
        tree: nested dicts by the keys that form names; a leaf is 0, an array 1.
    """
    found = {
        "format": _FORMAT,
        "version": _VERSION,
        "leaves": leaves,
        "tree": tree,
        "arrays": {
            name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in arrays.items()
        },
        "files": files,
    }
    text = json.dumps(found)[:-1]
    return f"{text}{_SUM}{_sum_of(text)}}}"


def sizes_in(given: Any) -> tuple[int, ...]:
    """Return a JSON list as a tuple of sizes; raise ValueError for other values."""
    if not isinstance(given, list) or {*map(type, given)} - {int}:
        raise ValueError(f"{given!r} is not a list of integers")
    if given and not 0 <= min(given) <= max(max(given), math.prod(given)) < _MOST:
        raise ValueError(f"{given!r} is too large or negative")
    return tuple(given)


def headers_as_manifest(
    headers: Mapping[str, Mapping[str, FingerprintFacts]],
    file_bytes: Mapping[str, int],
    where: str,
) -> Manifest:
    """Return the manifest of ``headers`` by file and array; raise if these conflict."""
    arrays: dict[str, SavedArray] = {}
    for file, header in headers.items():
        for name, (dtype, shape, offsets) in header.items():
            box = tuple((at, at + size) for at, size in zip(offsets, shape, strict=True))
            known = SavedArray(_BY_FILE_NAME.get(dtype, dtype), shape)
            array = arrays.setdefault(name, known)
            if array.dtype != known.dtype or len(array.shape) != len(box):
                raise damaged(where, f"{name} has different dtypes or dims in two files")
            array.pieces.append(Piece(file, box))
            array.shape = tuple(map(max, array.shape, [stop for _, stop in box]))
    manifest = Manifest(arrays, {}, dict(file_bytes))
    try:
        manifest.check()
    except ValueError as error:
        raise damaged(where, str(error)) from None
    return manifest


def is_plain(value: Any, levels: int = MOST_LEVELS) -> bool:
    """Return whether JSON restores ``value``: string keys, at most ``levels`` levels."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and is_plain([*value.values()], levels)
    if isinstance(value, (list, tuple)):
        return levels > 0 and all(is_plain(each, levels - 1) for each in value)
    return True


def damaged(where: str, found: str) -> CheckpointError:
    """Return the error of files that contradict each other or themselves."""
    return CheckpointError(
        "the checkpoint is damaged, or was not written by md.checkpoint.save",
        where=where,
        expected="unmodified files of one save",
        found=_shortened(found),
        fix="load an older checkpoint",
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; raise ValueError for a duplicate name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"duplicate names among {_shortened(str([*found]))}")
    return found


def _sum_of(text: str) -> int:
    return zlib.crc32(text.encode())
