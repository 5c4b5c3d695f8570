"""Check ``init_process_group`` arguments against a lazily initialized world."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from ..backends.backend_names import backends_text
from ..backends.registry import get_backend
from ..bootstrap.init_methods import InitArguments
from ..bootstrap.world import World
from ..errors import WorldError


def take_over(
    world: World,
    backends: Mapping[str, str] | None,
    init_arguments: InitArguments,
    *,
    timeout: timedelta | None,
    options: Any,
    device: torch.device | None,
) -> None:
    """Accept the lazily initialized ``world``; raise if the arguments differ.

    Args:
        timeout: Replaces the timeout of ``init_arguments``; None if the program passed none.
    """
    defaults = {get_backend(name).default_timeout for name in world.backends.values()}
    is_default = world.timeout is None and defaults == {timeout}
    kept = world.timeout or "the backend's default"
    rank, world_size, store = init_arguments.rank, init_arguments.world_size, init_arguments.store
    init_method, group_name = init_arguments.init_method, init_arguments.group_name
    is_from_env = init_method == "env://" and world.origin.startswith("env://")
    # Name, whether it matches, the argument, and the value of the world.
    table = (
        ("backend", *_compared_backends(world, backends)),
        ("rank", rank in (-1, world.rank), rank, world.rank),
        ("world_size", world_size in (-1, world.size), world_size, world.size),
        ("timeout", timeout in (None, world.timeout) or is_default, timeout, kept),
        ("init_method", init_method is None or is_from_env, repr(init_method), world.origin),
        ("store", store is None, type(store).__name__, world.origin),
        ("group_name", not group_name, repr(group_name), "no name"),
        ("pg_options", options is None or options == world.options, options, world.options),
        ("device_id", device in (None, world.device), device, world.device or "no device"),
    )
    wrong = [(name, given, there) for name, agrees, given, there in table if not agrees]
    if wrong:
        raise WorldError(
            "init_process_group() was called after meshdist initialized itself, "
            "with different arguments",
            where=f"rank {world.rank} of {world.size}, initialized by {world.first_touch}",
            expected=", ".join(f"{name}={there}" for name, _, there in wrong),
            found=", ".join(f"{name}={given}" for name, given, _ in wrong),
            fix="call init_process_group before the first collective and the first mesh, "
            "or leave out " + " and ".join(name for name, _, _ in wrong),
        )
    world.first_touch = ""


def _compared_backends(world: World, backends: Mapping[str, str] | None) -> tuple[bool, str, str]:
    there = backends_text(world.backends)
    if backends is None:
        return True, "", there
    named = {kind: get_backend(name).name for kind, name in backends.items()}
    is_equal = all(world.backends.get(kind) == name for kind, name in named.items())
    return is_equal, backends_text(named), there
