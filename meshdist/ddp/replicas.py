"""Compare replicas of a model across a group, and broadcast the first rank's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..collectives.flat_sums import broadcast_from
from ..collectives.objects import gather_from_all
from ..collectives.torch_private import is_wrapped, outside_transforms
from ..collectives.value_comparison import agree
from ..dtypes import dtype_name
from ..error_text import ranks_text
from ..errors import GradientError, KindError, MismatchError
from ..groups.process_group import ProcessGroup
from ..typed_mode.collective_calls import made_equal


class ModelBuffers:
    """The locations of a model's buffers, also after reassignment."""

    def __init__(self, module: nn.Module, ignored: Iterable[str]) -> None:
        excluded = set(ignored)
        self._owners = [
            (owner, name, f"{prefix}.{name}" if prefix else name)
            for prefix, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and (f"{prefix}.{name}" if prefix else name) not in excluded
        ]
        self._hook: tuple[object, Callable[..., Any], bool] | None = None

    def named(self) -> dict[str, torch.Tensor]:
        found = ((name, getattr(owner, key)) for owner, key, name in self._owners)
        return {name: buffer for name, buffer in found if buffer is not None}

    def set_hook(self, state: object, hook: Callable[..., Any], *, is_before: bool) -> None:
        """Run a hook instead of broadcasts, before or after forwards; raise if not callable."""
        if not callable(hook):
            raise KindError(
                f"the buffer communication hook is of type {type(hook).__name__}",
                expected="a function of the state and a dict of buffers by name",
                fix="pass the state first, then the hook",
            )
        self._hook = (state, hook, is_before)

    def is_synchronised_now(self, *, is_before: bool) -> bool:
        """Return whether buffers are broadcast before (``is_before``) or after the forward."""
        runs_before = self._hook is None or self._hook[2]
        return bool(self._owners) and runs_before is is_before

    def synchronise(self, group: ProcessGroup, source: int = 0) -> list[Any]:
        """Broadcast the buffers of group rank ``source``; or return the hook's futures."""
        if self._hook is None:
            # ``.data`` has a separate version counter. An earlier forward may have saved a buffer
            # for its backward, as batch norm does without reading it there.
            buffers = list(self.named().values())
            if any(map(is_wrapped, buffers)):
                raise GradientError(
                    "torch.func cannot transform a DistributedDataParallel that broadcasts buffers",
                    where=f"rank {group.world.rank}, {group.name}",
                    expected="a transform of inputs or parameters only, since each forward "
                    "overwrites "
                    "the buffers",
                    fix="wrap the model with forward_sync_buffers=False, or transform "
                    "model.module instead of model",
                )
            with outside_transforms():  # otherwise the sent memory is wrapped too
                broadcast_from(source, [buffer.data for buffer in buffers], group)
            made_equal(group, *buffers)
            return []
        state, hook, _ = self._hook
        futures = hook(state, self.named())
        return list(futures) if isinstance(futures, (list, tuple)) else []


def tensor_facts(tensor: torch.Tensor) -> str:
    """Describe what replicas of a tensor must have in common.

    Example:
        >>> tensor_facts(torch.zeros(2, 3).requires_grad_())
        '(2, 3) float32'
    """
    text = f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}"
    if not tensor.is_contiguous():
        text += f" strides {tensor.stride()}"
    if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
        text += " frozen"
    return text


def check_equal(
    texts: Mapping[str, str],
    group: ProcessGroup,
    all_ranks: ProcessGroup | None = None,
    *,
    device: torch.device,
    summary: str,
    fix: str,
) -> None:
    """Raise MismatchError on all ranks if ``texts``, by label, or their order differ.

    Args:
        all_ranks: raises on these ranks, which compare in several groups; None for ``group``.
    """
    difference = agree(group, texts, {}, op_name="a comparison of models", device=device)
    found = [(group.ranks, difference.found)] if difference else []
    if all_ranks is not None:  # ranks of other groups may have found none
        with torch.cuda.device_of(torch.empty(0, device=device)):
            found = [entry for entries in gather_from_all(found, all_ranks) for entry in entries]
    if found:
        ranks, text = found[0]
        raise MismatchError(
            summary,
            where=f"group of {ranks_text(ranks)}",
            expected="equal entries, in the same order, on every rank",
            found=text,
            fix=fix,
        )
