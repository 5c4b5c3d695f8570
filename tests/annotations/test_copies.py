"""What becomes of a tensor's annotation when the tensor is copied, viewed, saved or written."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from tests.typed_mode.typed_cases import in_mesh

SHARD = "float32[4@tp, 6]"
VARYING = "float32[4, 6]{V:tp}"
PLAIN = "float32[4, 6]"


def shard() -> torch.Tensor:
    return md.annotate(torch.ones(4, 6), "f@tp d")


def kinds_alone() -> torch.Tensor:
    return md.annotate(torch.ones(4, 6), varying="tp")


def parameter() -> torch.Tensor:
    return md.annotate(nn.Parameter(torch.ones(4, 6)), "f@tp d")


def loaded(x: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)["x"]


def with_other_data(x: torch.Tensor) -> torch.Tensor:
    x.data = x.data.clone()
    return x


def written(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.mul_(2).add_(1)


KEEPING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "a pickle of a pickle": lambda x: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(x)))),
    "weights_only": loaded,
    "nn.Parameter": nn.Parameter,
    "other data": with_other_data,
    "a write in place": written,
    "itself": lambda x: x.float().contiguous(),
}
LOSING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": torch.clone,
    "detach": torch.detach,
    "a view": lambda x: x.view(4, 6),
    "all rows": lambda x: x[:],
    "a cast there and back": lambda x: x.double().float(),
    "a broadcast": lambda x: x.expand(1, 4, 6)[0],  # as torch.nn.DataParallel's replicas are made
}


@pytest.mark.parametrize("way", KEEPING)
def test_what_keeps_an_annotation(way: str) -> None:
    for make, text in ((shard, SHARD), (kinds_alone, VARYING), (parameter, SHARD)):
        assert str(md.typeof(KEEPING[way](make()))) == text


@pytest.mark.parametrize("way", LOSING)
def test_what_loses_an_annotation_outside_of_contexts(way: str) -> None:
    for make, text in ((shard, SHARD), (kinds_alone, VARYING), (parameter, SHARD)):
        x = make()
        assert str(md.typeof(LOSING[way](x))) == PLAIN
        assert str(md.typeof(x)) == text


def test_a_deep_copy_keeps_a_tensors_annotation_and_loses_a_parameters() -> None:
    assert str(md.typeof(copy.deepcopy(shard()))) == SHARD
    assert str(md.typeof(copy.deepcopy(kinds_alone()))) == VARYING
    assert str(md.typeof(copy.deepcopy(parameter()))) == PLAIN


def test_a_later_annotation_of_a_copy_is_the_copys_alone() -> None:
    x = shard()
    for other in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x)), nn.Parameter(x)):
        md.annotate(other, reduced="dp")
        assert str(md.typeof(other)) == "float32[4, 6]{R:dp}"
        assert str(md.typeof(x)) == SHARD


def test_replicas_of_a_module_have_its_annotations_until_their_parameters_are_replaced() -> None:
    layer = md.annotate(nn.Linear(6, 4), {"weight": "f@tp d"})
    replica = layer._replicate_for_data_parallel()
    replica.weight = layer.weight.expand(1, 4, 6)[0]
    assert str(md.typeof(replica.weight)) == PLAIN
    assert str(md.typeof(layer.weight)) == str(md.typeof(copy.deepcopy(layer).weight)) == SHARD


def test_saved_tensors_are_loaded_without_this_package(tmp_path: Path) -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layer = md.annotate(nn.Linear(6, 4), {"weight": "f@tp d", "bias": "f@tp"})
        md.DDP(layer, device_mesh=mesh["dp"])
        grouped = nn.Linear(6, 4)
        ddp = md.DDP(grouped, process_group=md.group.WORLD)  # which knows no axes
        with md.typed(mesh):
            ddp(md.annotate(torch.ones(1, 6), varying=("dp", "tp")))
            made = layer.weight * 2
            if mesh.get_rank() == 0:
                tensors = [shard(), layer.weight, grouped.weight, made.detach()]
                torch.save(tensors, tmp_path / "tensors.pt")

    md.simulate(program, 4)
    lines = (
        "import sys, torch",
        "loaded = torch.load(sys.argv[1], weights_only=True)",
        "assert 'meshdist' not in sys.modules",
        "print(*(tuple(x.shape) for x in loaded))",
    )
    found = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), str(tmp_path / "tensors.pt")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        timeout=120,
    )
    assert (found.stdout.strip(), found.stderr) == (" ".join(["(4, 6)"] * 4), "")


def test_writes_and_results_that_are_the_operand_keep_specs_in_contexts() -> None:
    def body(mesh: md.DeviceMesh) -> list[str]:
        found = []
        for way in (
            lambda w: w.mul_(2),
            lambda w: w.copy_(w * 3),
            lambda w: w.float().contiguous(),
            lambda w: torch.add(w, w, out=w),
            lambda w: torch._foreach_add_([w, w.clone()], 1.0),
            lambda w: w.zero_(),
        ):
            for w in (shard(), parameter()):
                with md.typed(mesh), torch.no_grad():
                    way(w)
                    found.append(str(md.typeof(w)))
        return found

    assert in_mesh(body)[0] == [SHARD] * 12


def test_results_in_contexts_have_the_type_and_no_spec() -> None:
    def body(mesh: md.DeviceMesh) -> list[str]:
        with md.typed(mesh):
            w = shard()
            return [str(md.typeof(x)) for x in (w + 1, w.clone(), w.view(4, 6), w + kinds_alone())]

    assert in_mesh(body)[0] == [VARYING] * 4


WRAPPERS: dict[str, Callable[[md.DeviceMesh], dict[str, Any]]] = {
    "axes": lambda mesh: {"device_mesh": mesh["dp"]},
    "a group": lambda mesh: {"process_group": mesh.get_group("dp")},
}


@pytest.mark.parametrize("way", WRAPPERS)
def test_a_wrappers_parameters_keep_what_it_noted_through_writes(way: str) -> None:
    def body(mesh: md.DeviceMesh) -> list[Any]:
        layer = md.annotate(nn.Linear(6, 4, bias=False), {"weight": "f@tp d"})
        ddp = md.DDP(layer, **WRAPPERS[way](mesh))
        found = []
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = md.annotate(torch.full((1, 6), 1.0 + mesh.get_local_rank("dp")), varying="dp")
        for _ in range(2):
            with md.typed(mesh):
                y = ddp(x)
                md.lax.psum(y.sum(), "tp").backward()
                found.append(str(md.typeof(layer.weight.grad)))
                optimizer.step()
                optimizer.zero_grad()
            found.append(str(md.typeof(layer.weight)))
        copied = str(md.typeof(nn.Parameter(layer.weight)))
        ddp = y = None
        return [*found, copied, str(md.typeof(layer.weight))]

    reduced = "float32[4@tp, 6]{R:dp}"
    assert in_mesh(body)[0] == [VARYING, reduced, VARYING, reduced, PLAIN, SHARD]


@pytest.mark.parametrize("way", WRAPPERS)
@pytest.mark.parametrize("is_annotated", [False, True])
def test_parameters_are_as_before_when_their_wrapper_is_gone(way: str, is_annotated: bool) -> None:
    def body(mesh: md.DeviceMesh) -> bool:
        layer = nn.Linear(6, 4)
        if is_annotated:
            md.annotate(layer.weight, "f@tp d")
            md.annotate(layer.bias)
        before = [str(md.typeof(x)) for x in layer.parameters()]
        shown = []
        for _ in range(2):
            ddp = md.DDP(layer, **WRAPPERS[way](mesh))
            with md.typed(mesh):
                ddp(md.annotate(torch.ones(1, 6), varying="dp"))
            shown.append([str(md.typeof(x)) for x in layer.parameters()])
            del ddp
        after = [str(md.typeof(x)) for x in layer.parameters()]
        # An annotated parameter's copy by ``nn.Parameter`` is annotated, and no wrapper's.
        copies = [str(md.typeof(nn.Parameter(x))) for x in layer.parameters()]
        return shown[0] == shown[1] != before == after == copies

    assert in_mesh(body) == [True] * 4


def test_an_annotation_is_one_attribute() -> None:
    def body(mesh: md.DeviceMesh) -> list[int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4))
        md.annotate(model[1], {"weight": "f@tp d"})
        md.parallelize(model, mesh["tp"], {"0": "reduced"})
        ddp = md.DDP(model, process_group=mesh.get_group("dp"))
        with md.typed(mesh):
            y = ddp(md.annotate(torch.ones(1, 6), varying="dp"))
            return [len(vars(x)) for x in (*model.parameters(), y)]

    assert in_mesh(body)[0] == [1] * 5
