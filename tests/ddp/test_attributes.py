"""No object of the reducer has more than twelve attributes of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import meshdist as md

LIMIT = 12


class Net(nn.Module):
    """One sparse weight and two that are not; it sees what is there in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(2, 2, sparse=True)
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.rows(x))
        return out


def names_of(thing: object) -> set[str]:
    """The attributes that an object has itself, those of its slots too."""
    slots = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())}
    return {*getattr(thing, "__dict__", {}), *slots} - {"__weakref__", "__dict__"}


def parts_of(thing: object, seen: dict[int, object]) -> Iterator[object]:
    """``thing`` and all objects of ``ddp/`` that it holds."""
    if isinstance(thing, (list, tuple)):
        for entry in thing:
            yield from parts_of(entry, seen)
    elif type(thing).__module__.startswith("meshdist.ddp.") and id(thing) not in seen:
        seen[id(thing)] = thing
        yield thing
        for name in names_of(thing):
            yield from parts_of(getattr(thing, name, None), seen)


def test_no_object_of_the_reducer_has_more_than_twelve_attributes() -> None:
    def program() -> dict[str, int]:
        model = md.DDP(Net(), bucket_cap_mb=1e-6)
        counts: dict[str, int] = {}

        def look(_: torch.Tensor) -> None:
            for part in parts_of(model.reducer, {}):
                counts[type(part).__name__] = len(names_of(part))

        for _ in range(2):
            out = model(torch.tensor([0]))
            model.module.rows.weight.register_post_accumulate_grad_hook(look)
            out.sum().backward()
        return counts

    (counts,) = md.simulate(program, 1)
    expected = {
        "Reducer",
        "Backward",
        "Bucket",
        "BucketLayout",
        "BackwardOutcome",
        "ExpectedGradients",
        "ReducerState",
    }
    assert expected | {"BucketState", "Flat", "Sparse", "GradientHooks", "StatusFlags"} <= {*counts}
    assert {name: num for name, num in counts.items() if num > LIMIT} == {}
