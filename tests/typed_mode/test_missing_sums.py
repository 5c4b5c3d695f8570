"""A sum that a program forgets: where the error says that it is missing, there it is missing.

Each program is right as it stands. A case takes marked lines out, and then follows what the errors
say, line by line, until there is none: the gradients are those of one device.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.errors import AxisTypeError

F64 = torch.float64

MLP = """
def loss_of(w, x, start):
    h = x @ w["up"].T
    h = torch.tanh(h)
    y = h @ w["down"].T
    y = lax.psum(y, "tp")  # psum
    x = x + y
    loss = (x * x).mean()
    loss = lax.pmean(loss, "dp")  # pmean
    return loss
"""

# Each layer is the same line twice.
TWO_LAYERS = """
def layer(w, x, up, down):
    h = x @ w[up].T
    h = torch.tanh(h)
    y = h @ w[down].T
    y = lax.psum(y, "tp")  # psum
    return x + y

def loss_of(w, x, start):
    x = layer(w, x @ w["head"].T, "up", "down")
    x = layer(w, x, "up2", "down2")
    loss = (x * x).mean()
    loss = lax.pmean(loss, "dp")  # pmean
    return loss
"""

# Its layers are written out, and the second sum stays.
FIRST_OF_TWO_LAYERS = """
def loss_of(w, x, start):
    h = x @ w["up"].T
    h = torch.tanh(h)
    y = h @ w["down"].T
    y = lax.psum(y, "tp")  # psum
    x = x + y
    z = torch.tanh(x @ w["up2"].T) @ w["down2"].T
    z = lax.psum(z, "tp")
    x = x + z
    loss = (x * x).mean()
    loss = lax.pmean(loss, "dp")  # pmean
    return loss
"""

ATTENTION = """
def loss_of(w, x, start):
    q, k, v = (x @ w[name].T for name in ("q", "k", "v"))
    scores = torch.softmax(q @ k.mT, -1)
    heads = scores @ v
    y = F.linear(heads, w["out"])
    y = lax.psum(y, "tp")  # psum
    x = F.layer_norm(x + y, (4,))
    x = x @ w["head"].T
    loss = (x * x).mean()
    loss = lax.pmean(loss, "dp")  # pmean
    return loss
"""

EMBEDDING = """
def loss_of(w, x, start):
    ids = (x.abs() * 2).long().clamp(max=7)
    ids = ids - start
    inside = (ids >= 0) & (ids < len(w["table"]))
    rows = F.embedding(ids.clamp(0, len(w["table"]) - 1), w["table"])
    y = rows * inside.unsqueeze(-1)
    y = lax.psum(y, "tp")  # psum
    x = torch.tanh(y) @ w["head"].T
    loss = (x * x).mean()
    loss = lax.pmean(loss, "dp")  # pmean
    return loss
"""

# Of the weights alone: a mean of the loss, and a sum behind the addition, would be wrong.
PENALTY = """
def loss_of(w, x, start):
    h = x @ w["up"].T
    y = torch.tanh(h) @ w["down"].T
    y = lax.psum(y, "tp")
    squares = w["up"].square().sum()
    squares = lax.psum(squares, "tp")  # psum
    loss = (y * y).mean()
    loss = lax.pmean(loss, "dp")  # pmean
    loss = loss + squares + w["head"].square().sum()
    return loss
"""

PROGRAMS = {
    "penalty": PENALTY,
    "mlp": MLP,
    "two layers": TWO_LAYERS,
    "the first of two layers": FIRST_OF_TWO_LAYERS,
    "attention": ATTENTION,
    "embedding": EMBEDDING,
}
FILE = "a_program.py"
_DRAW = torch.Generator().manual_seed(0)
# By name: the dim that 'tp' cuts, or None, and the whole.
WEIGHTS = {
    name: (dim, torch.randn(shape, generator=_DRAW, dtype=F64))
    for name, dim, shape in (
        *((name, 0, (8, 4)) for name in ("up", "up2", "table", "q", "k", "v")),
        *((name, 1, (4, 8)) for name in ("down", "down2", "out")),
        ("head", None, (4, 4)),
    )
}
X = torch.randn((4, 3, 4), generator=_DRAW, dtype=F64)


class Alone:
    """``lax`` on one device."""

    @staticmethod
    def psum(x: torch.Tensor, axis: str) -> torch.Tensor:
        return x

    pmean = psum


def compiled(source: str, lax: Any) -> Any:
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "lax": lax}
    exec(compile(source, FILE, "exec"), names)
    return names["loss_of"]


def step(source: str) -> tuple[str, dict[str, torch.Tensor]]:
    """The error of a step on this rank, or "", and its gradients."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate()
    weights = {}
    for name, (dim, whole) in WEIGHTS.items():
        part = whole if dim is None else whole.chunk(2, dim)[tp]
        weight = torch.nn.Parameter(part.clone())
        weights[name] = weight if dim is None else md.annotate(weight, varying="tp")
    batch = md.annotate(X.chunk(2)[dp].clone(), varying="dp")
    start = md.annotate(torch.tensor(4 * tp), varying="tp")
    with md.typed(mesh):
        loss = compiled(source, md.lax)(weights, batch, start)
        try:
            loss.backward()
        except AxisTypeError as error:
            return str(error), {}
    return "", {name: one.grad.clone() for name, one in weights.items() if one.grad is not None}


def followed(source: str, text: str) -> str:
    """The program with the first of the lines that an error's fix tells to write."""
    lines = source.splitlines()
    (fix,) = re.findall(r"fix: +(.*)", text)
    place = re.match(
        rf"sum the result of (\w+) at {FILE}:(\d+), .* y = (lax.psum\()y(, '\w+'\))", fix
    )
    if place:
        number = int(place[2])
        line = lines[number - 1]
        name = line.split("=")[0].strip()
        indent = line[: len(line) - len(line.lstrip())]
        lines.insert(number, f"{indent}{name} = {place[3]}{name}{place[4]}")
    else:
        (mean,) = re.findall(r"the ranks: (loss = lax.pmean\(loss, .*?\)), or lax.psum;", fix)
        lines.insert(len(lines) - 1, f"    {mean}")
    return "\n".join(lines) + "\n"


def gradients_of_one_device(source: str) -> dict[str, torch.Tensor]:
    if "softmax" in source:  # of two heads, each rank has one
        source = source.replace("scores @ v", "by_head(q, k, v)")
    leaves = {name: whole.clone().requires_grad_() for name, (_, whole) in WEIGHTS.items()}
    loss_of = compiled(source, Alone)
    loss_of.__globals__["by_head"] = by_head
    loss_of(leaves, X, 0).backward()
    return {name: one.grad for name, one in leaves.items() if one.grad is not None}


def statements(source: str) -> list[str]:
    return [line.split("  #")[0] for line in source.replace("'", '"').splitlines()]


def by_head(*whole: torch.Tensor) -> torch.Tensor:
    heads = zip(*(one.chunk(2, -1) for one in whole), strict=True)
    return torch.cat([torch.softmax(q @ k.mT, -1) @ v for q, k, v in heads], -1)


@pytest.mark.parametrize("forgotten", ["psum", "pmean", "psum pmean"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_following_the_fix_gives_the_gradients_of_one_device(name: str, forgotten: str) -> None:
    right = PROGRAMS[name]
    wanted = gradients_of_one_device(right)
    marks = tuple(f"# {operation}" for operation in forgotten.split())
    source = "\n".join(line for line in right.splitlines() if not line.endswith(marks)) + "\n"
    for _ in range(4):
        found = md.simulate(step, 4, args=(source,))
        texts = {text for text, _ in found}
        if texts == {""}:
            break
        assert "" not in texts
        if name != "embedding":  # whose rows are chosen by data that vary over 'tp', as a batch may
            assert "lax.pmean(loss, 'tp')" not in found[0][0]
        source = followed(source, found[0][0])
    if name != "penalty":  # whose mean may stand before the penalty is added, and behind
        assert statements(source) == statements(right)
    for rank, (_, gradients) in enumerate(found):
        assert gradients.keys() == wanted.keys()
        for weight, grad in gradients.items():
            dim = WEIGHTS[weight][0]
            whole = wanted[weight]
            part = whole if dim is None else whole.chunk(2, dim)[rank % 2]
            torch.testing.assert_close(grad, part, msg=f"{weight} on rank {rank}")


def without(source: str, operation: str) -> str:
    return (
        "\n".join(line for line in source.splitlines() if not line.endswith(f"# {operation}"))
        + "\n"
    )


def test_the_error_names_the_leaf_and_the_lines() -> None:
    text = md.simulate(step, 4, args=(without(MLP, "psum"),))[0][0]
    assert text.startswith("backward cannot start from a loss that varies over 'tp'\n")
    assert (
        f"varies over 'tp' since matmul at {FILE}:3, through weights['up']: "
        "float64[4, 4]{V:tp}" in text
    ), text
    assert f"last leaf that varies over 'tp', used in matmul at {FILE}:5: weights['down']" in text
    assert (
        f"fix:      sum the result of matmul at {FILE}:5, of which each rank along 'tp' holds a "
        "part: y = lax.psum(y, 'tp')" in text
    )
    text = md.simulate(step, 4, args=(without(MLP, "pmean"),))[0][0]
    assert (
        f"varies over 'dp' since matmul at {FILE}:3, through batch: float64[2, 3, 4]{{V:dp}}"
        in text
    )
    assert "fix:      reduce the loss over the ranks: loss = lax.pmean(loss, 'dp')" in text


def test_a_cast_a_draw_and_a_resharding_are_seen() -> None:
    def body(make: Any) -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        w = torch.nn.Parameter(torch.ones(2))
        with md.typed(mesh):
            md.seed(0, differ_over="tp")
            loss = make(w * 2).sum()
            with pytest.raises(AxisTypeError) as caught:
                loss.backward()
        return str(caught.value)

    for name, make in (
        ("pvary", lambda x: md.lax.pvary(x, "tp")),
        ("dropout", torch.nn.functional.dropout),
        ("reshard", lambda x: md.reshard(x, "d -> d@tp")),
    ):
        text = md.simulate(body, 2, args=(make,))[0]
        assert f"varies over 'tp' since {name} at {__file__}:" in text, text
        assert f"fix:      sum the result of sum at {__file__}:" in text


def test_a_mesh_that_has_passed_notes_nothing_until_a_step_fails() -> None:
    """What passed runs at full speed: a first failure says so, and the next says where."""

    def program() -> list[str]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        weight = md.annotate(torch.nn.Parameter(torch.ones(2)), varying="tp")
        found = []
        for is_right in (True, True, False, False, True):
            with md.typed(mesh):
                y = weight * torch.ones(2)
                loss = md.lax.psum(y, "tp").sum() if is_right else y.sum()
                try:
                    loss.backward()
                except AxisTypeError as error:
                    found.append(str(error))
        return found

    first, second = md.simulate(program, 2)[0]
    assert "run the step again to make this error show where" in first
    assert "if the batch varies, reduce the loss over the ranks" in first
    assert "since" not in first
    assert "varies over 'tp' since mul at" in second
    assert "through weight: float32[2]{V:tp}" in second
