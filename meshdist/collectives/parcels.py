"""Python objects as bytes, and back; what verbs on objects check alike."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from ..error_text import grouped_text, ranks_text
from ..errors import AgreementError, BackendError, KindError, PicklingError
from ..groups.process_group import ProcessGroup

__all__ = [
    "Parcel",
    "check_is_list",
    "entries",
    "find_device",
    "other_length",
    "raise_unpicklable",
    "unpack",
]


class Parcel:
    """Objects as bytes; or, where one cannot be pickled, why."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.error: Exception | None = None
        buffer = io.BytesIO()
        head = struct.Struct(f"<{1 + len(objects)}q")
        buffer.write(bytes(head.size))
        sizes = []
        for name, x in objects.items():
            start = buffer.tell()
            try:
                pickle.dump(x, buffer)
            except Exception as error:  # whatever the object's own code raises
                self.error = error
                text = f"{name} of type {type(x).__qualname__}: {_error_text(error)}"
                buffer = io.BytesIO(json.dumps(text).encode())
                break
            sizes.append(buffer.tell() - start)
        view = buffer.getbuffer()
        if self.error is None:
            head.pack_into(view, 0, len(sizes), *sizes)
        self.data = torch.frombuffer(view, dtype=torch.uint8)

    @property
    def signed_size(self) -> int:
        """The number of bytes, negative for a failure's."""
        return self.data.numel() if self.error is None else -self.data.numel()


def unpack(data: torch.Tensor, sender: int, verb: str, target: ProcessGroup) -> list[Any]:
    """Return the objects of a parcel."""
    view = data.numpy().data
    try:
        (count,) = struct.unpack_from("<q", view)
        sizes = struct.unpack_from(f"<{count}q", view, 8)
    except struct.error as error:
        raise BackendError(
            f"{verb}: what rank {sender} sent is no list of objects",
            where=f"rank {target.world.rank}, {target.name}",
            found=f"{data.numel()} bytes: {error}",
            fix="see that both ranks run the same version of meshdist",
        ) from None
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


def find_device(target: ProcessGroup, given: Any, verb: str) -> torch.device:
    """Where the bytes of objects travel."""
    if given is None:
        given = target.first_device_type()
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise KindError(
            f"{verb}: {given!r} is not a device", expected="for example torch.device('cuda', 0)"
        ) from error
    target.wire_name(device.type)  # raises where nothing serves it
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_is_list(given: Any, argument: str, verb: str, *, is_written: bool) -> None:
    """Raise unless ``given`` is a list, of any length; a tuple will do to read from."""
    if not isinstance(given, list if is_written else (list, tuple)):
        raise KindError(
            f"{verb}: {argument} must be a list",
            expected="a list, whose entries are replaced" if is_written else "a list or tuple",
            found=type(given).__name__,
        )


def entries(argument: str, objects: Sequence[Any]) -> dict[str, Any]:
    """The entries of a list, by what messages call them."""
    return {f"{argument}[{place}]": x for place, x in enumerate(objects)}


def other_length(verb: str, target: ProcessGroup, found: str) -> AgreementError:
    """Make the error for lists of objects of different lengths."""
    return AgreementError(
        f"{verb}: the members' lists of objects have different lengths",
        where=target.name,
        expected="as many entries on every rank as its source has; nothing was sent",
        found=found,
        fix="give receivers [None] * n; where n is not known, send the list as one object: "
        "[objects]",
    )


def raise_unpicklable(
    failed: Sequence[tuple[int, torch.Tensor]], verb: str, cause: Exception | None = None
) -> NoReturn:
    """Raise one and the same error on every member."""
    reasons = [(rank, json.loads(bytes(text.cpu().numpy()))) for rank, text in failed]
    raise PicklingError(
        f"{verb}: an object of {ranks_text([rank for rank, _ in failed])} cannot be pickled",
        expected="objects that pickle takes; nothing was sent",
        found=grouped_text(reasons),
        fix="send plain data, and classes and functions that stand at the top of a module",
    ) from cause


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
