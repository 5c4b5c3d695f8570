"""The plan of an einsum: what one rank does, in words and in bytes; integers alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..mesh.layout import Layout
from .einsum_layouts import EinsumLayout
from .plans import Plan, bytes_text, make_plan, step_text
from .routes import Link


@dataclass(frozen=True, eq=False, repr=False)
class EinsumPlan:
    """The plan of an einsum for one rank: the plans of its operands and of its result.

    Args:
        operands: from how each operand lies to how the product takes it.
        result: from how the product leaves the result to how it shall lie.
    """

    layout: EinsumLayout
    operands: tuple[Plan, ...]
    result: Plan

    def bytes_received(self, itemsize: int = 4, *, backward: bool = False) -> int:
        """Return the bytes that this rank receives, forward, or in the backward alone."""
        plans = (*self.operands, self.result)
        return sum((plan.T if backward else plan).bytes_received(itemsize) for plan in plans)

    def explain(self, itemsize: int = 4) -> str:
        """Return the plan in words: what each axis divides, the steps, and what is summed.

        Example:  # doctest: +ELLIPSIS
            >>> from .requests import plan
            >>> mesh = Layout.from_shape((2,), ("tp",))
            >>> print(plan("b d, d f@tp -> b f@tp", mesh=mesh, b=2, d=4, f=8).explain())
            einsum 'b d, d f@tp -> b f@tp': rank 0 (tp=0) of mesh (tp=2)
              tp divides 'f': the gradient of operand 0 is summed over it
              forward: 0 bytes in
              backward: 32 bytes in
                gradient of operand 0: all-reduce over tp, 2 ranks: 2 x 4; 32 bytes in, ...
        """
        mesh = self.result.layout
        place = self.result.coordinate
        lines = [
            f"einsum {self.layout.text!r}: rank {mesh.rank_at(place)} "
            f"({mesh.coordinate_text(mesh.rank_at(place))}) of mesh ({mesh.axis_text()})"
        ]
        lines += [f"  {self._axis_text(axis)}" for axis in range(mesh.ndim)]
        named = [(f"operand {at}", plan) for at, plan in enumerate(self.operands)]
        named.append(("result", self.result))
        back = [(f"gradient of {name}", plan.T) for name, plan in reversed(named)]
        for which, plans in (("forward", named), ("backward", back)):
            total = sum(plan.bytes_received(itemsize) for _, plan in plans)
            lines.append(f"  {which}: {bytes_text(total)} in")
            for name, plan in plans:
                lines += [
                    f"    {name}: {step_text(step, mesh, plan.links, itemsize)}"
                    for step in plan.steps
                ]
        return "\n".join(lines)

    def _axis_text(self, axis: int) -> str:
        """Return a line on what ``axis`` divides, and on sums over it in forward and backward."""
        work, choice = self.layout.work, self.layout.choices[axis]
        name = (self.result.layout.names or ())[axis] if self.result.layout.names else str(axis)
        if choice is None:
            return f"{name} divides nothing: each rank along it computes the same"
        what = f"{name} divides {choice!r}"
        if isinstance(choice, int):
            what = f"{name} divides the summands of operand {choice}"
        sums = []
        if axis in work.result.unreduced:
            kept = axis in self.layout.result.parts.placement.unreduced
            sums.append("the result stays unreduced" if kept else "the result is summed over it")
        for at, (taken, source) in enumerate(zip(work.operands, self.layout.sources, strict=True)):
            if axis in taken.reduced:
                stays = axis in source.reduced
                sums.append(
                    f"the gradient of operand {at} "
                    + ("stays unreduced" if stays else "is summed over it")
                )
        return f"{what}: {', '.join(sums) or 'nothing is summed over it'}"

    def __repr__(self) -> str:
        return f"<EinsumPlan {self.layout.text!r} at {self.result.coordinate}>"


def plan_einsum(
    laid: EinsumLayout, layout: Layout, coordinate: tuple[int, ...], links: tuple[Link, ...]
) -> EinsumPlan:
    """Return the plan of a laid-out einsum for the rank at ``coordinate``."""
    moves = [*zip(laid.operands, laid.sources, laid.work.operands, strict=True)]
    moves.append((laid.result, laid.work.result, laid.result.parts.placement))
    which = [*(f"operand {number}" for number in range(len(laid.operands))), "the result"]
    *operands, result = [
        make_plan(
            source,
            target,
            coordinate,
            layout=layout,
            links=links,
            title=f"einsum {laid.text!r}: {name} of shape {side.parts.shape}",
        )
        for (side, source, target), name in zip(moves, which, strict=True)
    ]
    return EinsumPlan(laid, tuple(operands), result)
