"""What a mesh may choose per axis: wire, timeout, wire options, a communicator of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from ..bootstrap.world import find_world
from ..errors import ArgumentError, KindError
from ..runtime.timeouts import check_timeout
from ..wires.names import backends_in
from .layout import Layout

__all__ = ["AxisOptions", "options_of_axes"]


@dataclass(frozen=True)
class AxisOptions:
    """How the groups along one mesh axis communicate.

    Args:
        backend: the wire, for example "gloo"; None takes the world's for the mesh's device type.
        timeout: how long a verb may wait; None takes the mesh's, else the world's.
        options: the wire's own options (torch's options classes), or None.
        private: whether the axis opens communicators of its own even where equal ones are open,
            for verbs that a second thread calls.

    Example:
        >>> from datetime import timedelta
        >>> AxisOptions(backend="gloo", timeout=timedelta(seconds=30)).private
        False
    """

    backend: str | None = None
    timeout: timedelta | None = None
    options: Any = None
    private: bool = False

    def __post_init__(self) -> None:
        check_timeout(self.timeout)


def options_of_axes(
    layout: Layout,
    axis_options: Mapping[str | int, AxisOptions] | None,
    backend_override: Mapping[str | int, Any] | None = None,
    timeout: timedelta | None = None,
) -> tuple[AxisOptions, ...]:
    """Return one AxisOptions per axis of ``layout``.

    Args:
        layout: the mesh.
        axis_options: by axis name or index.
        backend_override: torch's form: a wire name, wire options, or a pair of both.
        timeout: for the axes that name none.

    Raises:
        AxisError: an unknown axis.
        ArgumentError: an axis given twice.
        KindError: not an AxisOptions.
        BackendError: no such wire.
    """
    chosen: dict[int, AxisOptions] = {}
    from_torch = [(axis, _from_torch_form(one)) for axis, one in (backend_override or {}).items()]
    for axis, options in [*(axis_options or {}).items(), *from_torch]:
        if not isinstance(options, AxisOptions):
            raise KindError(
                f"axis_options[{axis!r}] is {options!r}",
                expected="an AxisOptions",
                fix=f"axis_options={{{axis!r}: AxisOptions(backend='gloo')}}",
            )
        index = layout.axis_index(axis)
        if index in chosen:
            raise ArgumentError(
                f"axis {axis!r} has options twice",
                where=f"DeviceMesh({layout.axis_text()})",
                fix="give each axis once, by name or by index, in one of the two arguments",
            )
        if options.backend is not None:
            backends_in(find_world(), {"": options.backend})  # raises where there is none
        chosen[index] = options
    all_chosen = (chosen.get(index, AxisOptions()) for index in range(layout.ndim))
    return tuple(replace(one, timeout=one.timeout or timeout) for one in all_chosen)


def _from_torch_form(value: Any) -> AxisOptions:
    if isinstance(value, str):
        return AxisOptions(backend=value.lower())
    if isinstance(value, tuple):
        name, options = value
        return AxisOptions(backend=None if name is None else name.lower(), options=options)
    name = getattr(value, "backend", None)
    return AxisOptions(backend=name if isinstance(name, str) else None, options=value)
