"""Run a collective on Python objects as a round of sizes and a round of bytes.

If an object cannot be pickled, the second round carries the reasons instead.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from ..error_text import grouped_text, ranks_text
from ..errors import BackendError, KindError, MismatchError, PicklingError
from ..groups.process_group import ProcessGroup
from .collective import Collective


class PickledObject:
    """Pickled objects as bytes, or the pickling error as bytes."""

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
        """The number of bytes, negative if they are an error's."""
        return self.data.numel() if self.error is None else -self.data.numel()


def unpack(data: torch.Tensor, sender: int, operation: str, target: ProcessGroup) -> list[Any]:
    """Return the objects in another rank's bytes; raise if they cannot be read."""
    view = data.numpy().data
    try:
        (count,) = struct.unpack_from("<q", view)
        sizes = struct.unpack_from(f"<{count}q", view, 8)
    except struct.error as error:
        raise BackendError(
            f"{operation}: the message of rank {sender} is not a list of objects",
            where=f"rank {target.world.rank}, {target.name}",
            found=f"{data.numel()} bytes: {error}",
            fix="install the same version of meshdist for both ranks",
        ) from None
    start = 8 * (1 + count)
    objects = []
    for index, size in enumerate(sizes):
        try:
            objects.append(pickle.loads(view[start : start + size]))
        except Exception as error:  # whatever the object's own code raises
            which = "the object" if count == 1 else f"object {index}"
            raise BackendError(
                f"{operation}: {which} that rank {sender} sent cannot be unpickled",
                where=f"rank {target.world.rank}, {target.name}",
                found=_error_text(error),
                fix="run the same program on both ranks, with the same modules installed",
            ) from error
        start += size
    return objects


def find_device(target: ProcessGroup, given: Any, operation: str) -> torch.device:
    """Return the device for objects' bytes: ``given``, else the group's first type; or raise."""
    if given is None:
        given = target.first_device_type()
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise KindError(
            f"{operation}: {given!r} is not a device",
            expected="a torch.device, or the name of a device",
            fix="pass for example torch.device('cuda', 0)",
        ) from error
    target.backend_name(device.type)  # raises if no backend supports it
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_is_list(given: Any, argument: str, operation: str, *, is_written: bool) -> None:
    if not isinstance(given, list if is_written else (list, tuple)):
        raise KindError(
            f"{operation}: {argument} must be a list",
            expected="a list, because its entries are replaced"
            if is_written
            else "a list or tuple",
            found=type(given).__name__,
            fix=f"pass {argument} as a list",
        )


def entries(argument: str, objects: Sequence[Any]) -> dict[str, Any]:
    """Return ``{"object_list[0]": object, ...}`` for error messages."""
    return {f"{argument}[{index}]": x for index, x in enumerate(objects)}


def other_length(operation: str, target: ProcessGroup, found: str) -> MismatchError:
    """Return the error for object lists of different lengths; ``found`` lists them by rank."""
    return MismatchError(
        f"{operation}: the ranks' lists of objects have different lengths",
        where=target.name,
        expected="as many entries on every rank as on the source; nothing was sent",
        found=found,
        fix="pass [None] * n on the receivers; if they do not know n, send the list as one "
        "object: [objects]",
    )


def raise_unpicklable(
    failed: Sequence[tuple[int, torch.Tensor]], operation: str, cause: Exception | None = None
) -> NoReturn:
    """Raise the error of ranks that failed to pickle: ``failed`` has (rank, reason as JSON)."""
    reasons = [(rank, json.loads(bytes(text.cpu().numpy()))) for rank, text in failed]
    raise PicklingError(
        f"{operation}: an object of {ranks_text([rank for rank, _ in failed])} cannot be pickled",
        expected="objects that pickle supports; nothing was sent",
        found=grouped_text(reasons),
        fix="send plain data, or classes and functions defined at the top level of a module",
    ) from cause


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class Rounds(Collective):
    """A collective on Python objects, run as collectives on sizes and bytes."""

    device: torch.device

    def __init__(self, name: str, group: Any, device: Any = None) -> None:
        super().__init__(name, group)
        self.device = find_device(self.group, device, name)

    def agree(self, pickled: PickledObject, length: int = 0) -> list[int]:
        """Return each rank's number of bytes; raise if pickling failed or lengths differ."""
        mine = torch.tensor([pickled.signed_size, length], device=self.device)
        gathered = mine.new_empty((self.group.size(), 2))
        flat = gathered.view(-1)
        self.set_data("all_gather", [mine], [flat], mine, [flat, mine])
        self.run()
        signed_sizes, lengths = gathered.t().tolist()
        ranks = self.group.ranks
        if min(signed_sizes) < 0:
            reason = pickled.data if pickled.error is not None else self.empty(0)
            texts = self.all_gather_bytes(reason, [max(0, -size) for size in signed_sizes])
            failed = [(rank, text) for rank, text in zip(ranks, texts, strict=True) if len(text)]
            raise_unpicklable(failed, self.operation, pickled.error)
        if len({*lengths}) > 1:
            entries = [(rank, f"{n} entries") for rank, n in zip(ranks, lengths, strict=True)]
            raise other_length(self.operation, self.group, grouped_text(entries))
        return list(signed_sizes)

    def broadcast_sizes(self, pickled_objects: Sequence[PickledObject]) -> list[int]:
        """Return how many bytes the source sends each rank; raise if it cannot pickle."""
        assert self.root is not None
        failure = next((pickled for pickled in pickled_objects if pickled.error is not None), None)
        signed_sizes = [(failure or pickled).signed_size for pickled in pickled_objects]
        signed_sizes = signed_sizes or [0] * self.group.size()
        sizes: list[int] = self.broadcast(torch.tensor(signed_sizes, device="cpu")).tolist()
        if sizes[0] < 0:
            text = self.broadcast(failure.data if failure else self.empty(-sizes[0]))
            source = self.group.ranks[self.root]
            raise_unpicklable([(source, text)], self.operation, failure.error if failure else None)
        return sizes

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the root's tensor on the CPU; ``tensor`` has its dtype and size; collective."""
        there = tensor.to(self.device)
        self.set_data("broadcast", [there], [there], there, [there])
        self.run()
        return there.cpu()

    def all_gather_bytes(self, data: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return the bytes of every member, ``sizes`` of each, on the CPU; collective."""
        there = data.to(self.device)
        parts = [there.new_empty(size) for size in sizes]
        given = [there.numel()] * len(parts), sizes
        self.set_data("all_gather_list", [there], parts, there, [*parts, there], given)
        self.run()
        return [part.cpu() for part in parts]

    def exchange(
        self, data: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> list[torch.Tensor]:
        """Send ``sent[i]`` bytes of ``data`` to member i; return ``taken[i]`` bytes from each."""
        there = data.to(self.device)
        whole = there.new_empty(sum(received))
        self.set_data(
            "all_to_all_single", [there], [whole], there, [whole, there], (sent, received)
        )
        self.run()
        return list(whole.cpu().split(list(received)))

    def unpack(self, data: torch.Tensor, member: int) -> list[Any]:
        """Return the objects in ``data``, which ``member`` sent."""
        return unpack(data, self.group.ranks[member], self.operation, self.group)
