"""Python objects as bytes, and back."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..error_text import grouped_text, ranks_text
from ..errors import BackendError, KindError
from ..mesh.groups import ProcessGroup

__all__ = ["Parcel", "raise_unpicklable", "unpack"]


class Parcel:
    """Objects as bytes; or, where one cannot be pickled, why.

    Args:
        objects: what to pickle, one after the other.
        names: what messages call each of them.
    """

    def __init__(self, objects: Sequence[Any], names: Sequence[str]) -> None:
        self.error: Exception | None = None
        buffer = io.BytesIO()
        head = struct.Struct(f"<{1 + len(objects)}q")
        buffer.write(bytes(head.size))
        sizes = []
        for x, name in zip(objects, names, strict=True):
            start = buffer.tell()
            try:
                pickle.dump(x, buffer)
            except Exception as error:  # whatever the object's own code raises
                self.error = error
                told = f"{name} of type {type(x).__qualname__}: {_error_text(error)}"
                buffer = io.BytesIO(json.dumps(told).encode())
                break
            sizes.append(buffer.tell() - start)
        view = buffer.getbuffer()
        if self.error is None:
            head.pack_into(view, 0, len(sizes), *sizes)
        self.data = torch.frombuffer(view, dtype=torch.uint8)

    @property
    def is_failure(self) -> bool:
        """Whether the bytes are the reason of a failure."""
        return self.error is not None

    @property
    def stated(self) -> int:
        """The number of bytes, negative for a failure's."""
        return -self.data.numel() if self.is_failure else self.data.numel()


def unpack(data: torch.Tensor, sender: int, verb: str, target: ProcessGroup) -> list[Any]:
    """Return the objects of a parcel.

    Raises:
        BackendError: one of them cannot be unpickled here.
    """
    view = data.numpy().data
    (count,) = struct.unpack_from("<q", view)
    sizes = struct.unpack_from(f"<{count}q", view, 8)
    start = 8 * (1 + count)
    objects = []
    for place, size in enumerate(sizes):
        try:
            objects.append(pickle.loads(view[start : start + size]))
        except Exception as error:  # whatever the object's own code raises
            which = "the object" if count == 1 else f"object {place}"
            raise BackendError(
                f"{verb}: {which} that rank {sender} sent cannot be unpickled",
                where=f"rank {target.world.rank}, {target.name}",
                found=_error_text(error),
                fix="see that both ranks run the same program, and can import the same modules",
            ) from error
        start += size
    return objects


def raise_unpicklable(
    failed: Sequence[tuple[int, torch.Tensor]], verb: str, cause: Exception | None = None
) -> NoReturn:
    """Raise one and the same error on every member."""
    told = [(rank, json.loads(bytes(text.cpu().numpy()))) for rank, text in failed]
    ranks = [rank for rank, _ in told]
    raise KindError(
        f"{verb}: an object of {ranks_text(ranks)} cannot be pickled",
        expected="objects that pickle takes; nothing was sent",
        found=grouped_text(told),
        fix="send plain data, and classes and functions that stand at the top of a module",
    ) from cause


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
