"""The names of tensors: variables, parameters, parts of trees, attributes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.inner import names_of


def names(*tensors: torch.Tensor, outwards: int = 1) -> list[str | None]:
    found = names_of(tensors, sys._getframe(outwards))
    return [found.get(id(tensor)) for tensor in tensors]


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.state = {"scale": torch.ones(1)}

    def ask(self) -> list[str | None]:
        return names(self.model.bias, self.state["scale"], outwards=2)


def test_what_holds_a_tensor_names_it() -> None:
    weight = torch.ones(1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    params = {"head": [torch.ones(1), torch.ones(1)], "layers": (nn.Linear(1, 1),)}
    trainer = SimpleNamespace(model=nn.Linear(1, 1), scale=torch.ones(2))
    held = names(
        weight,
        model[1][0].bias,
        params["head"][1],
        params["layers"][0].weight,
        trainer.scale,
        trainer.model.bias,
        torch.ones(1),
    )
    assert held == [
        "weight",
        "model.1.0.bias",
        "params['head'][1]",
        "params['layers'][0].weight",
        "trainer.scale",
        "trainer.model.bias",
        None,
    ]


def test_a_method_sees_its_object() -> None:
    def ask(trainer: Any) -> list[str | None]:
        return trainer.ask()

    assert ask(Trainer()) == ["trainer.model.bias", "trainer.state['scale']"]


def test_inner_functions_are_asked_first_and_outer_ones_too() -> None:
    weight, other = torch.ones(1), torch.ones(1)

    def loss_of(w: torch.Tensor) -> list[str | None]:
        return names(w, other)

    def step() -> list[str | None]:
        inner = weight  # noqa: F841 - it is the name that counts
        return [names_of([weight], sys._getframe()).get(id(weight)), *loss_of(weight)]

    assert step()[1:] == ["w", "other"]
    assert step()[0] in ("inner", "weight")


def test_large_lists_and_trees_that_hold_themselves_are_passed_over() -> None:
    weight = torch.ones(1)
    data = [weight, *range(2000)]
    circle: list[Any] = []
    circle.append(circle)
    holder = data[:1]
    (name,) = names_of([weight], sys._getframe()).values()
    del weight
    (behind,) = names_of(holder, sys._getframe()).values()
    assert (name, behind) == ("weight", "holder[0]")
