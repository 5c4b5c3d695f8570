"""Marks that a module notes: new tensors have them; rejected where they cannot be written."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import meshdist as md
from meshdist.annotations.axis_types import find_type
from meshdist.errors import ArgumentError, AxisError, AxisTypeError, KindError, MeshdistError
from meshdist.mesh.partition_spec import P
from meshdist.typed_mode.module_annotations import NOTED_MARKS, restore_annotations
from tests.typed_mode.typed_cases import in_mesh


class Block(nn.Module):
    """Two layers, a norm and a buffer, of which some are shards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4, bias=False)})
        self.register_buffer("scale", torch.ones(6))


SPECS = {
    "mlp.up.*": "f@tp ...",
    "mlp.down.weight": P(None, "tp"),
    "norm.*": "... {R:tp}",
    "scale": "f@tp",
}
TYPES = {
    "norm.weight": "float32[4]{R:tp}",
    "norm.bias": "float32[4]{R:tp}",
    "mlp.up.weight": "float32[6@tp, 4]",
    "mlp.up.bias": "float32[6@tp]",
    "mlp.down.weight": "float32[4, 6@tp]",
    "scale": "float32[6@tp]",
}


def block() -> Block:
    return md.annotate(Block(), SPECS)


def types(module: nn.Module) -> dict[str, str]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: str(md.typeof(tensor)) for name, tensor in tensors}


def saved(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def assigned(module: nn.Module) -> nn.Module:
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    return module


def on_meta_and_back(module: nn.Module) -> nn.Module:
    return module.to("meta").to_empty(device="cpu")


def with_new_data(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    return module


def with_copies_put_in(module: nn.Module) -> nn.Module:
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, copy.deepcopy(parameter))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, buffer.clone())
    return module


REPLACING: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy twice": lambda module: copy.deepcopy(copy.deepcopy(module)),
    "assign": assigned,
    "to_empty": on_meta_and_back,
    "a pickled deepcopy": lambda module: pickle.loads(pickle.dumps(copy.deepcopy(module))),
    "a deepcopy of a pickle": lambda module: copy.deepcopy(pickle.loads(pickle.dumps(module))),
    "AveragedModel": lambda module: AveragedModel(module).module,
    "copies put in": with_copies_put_in,
}
KEEPING: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save and load": saved,
    "to": lambda module: module.to(torch.float32),
    "load_state_dict": lambda module: (module.load_state_dict(module.state_dict()), module)[1],
    "new data": with_new_data,
}


def test_each_tensor_that_a_pattern_names_is_annotated() -> None:
    module = Block()
    assert md.annotate(module, SPECS) is module
    assert types(module) == TYPES
    assert module.mlp["up"].__dict__[NOTED_MARKS] == {
        "weight": ("V:tp", "6@tp, 4"),
        "bias": ("V:tp", "6@tp"),
    }
    assert NOTED_MARKS not in module.mlp.__dict__
    assert module.state_dict().keys() == Block().state_dict().keys()


@pytest.mark.parametrize("way", REPLACING)
def test_new_tensors_of_a_module_have_its_marks_at_once(way: str) -> None:
    before = block()
    tensors = [*before.parameters(), *before.buffers()]
    module = REPLACING[way](before)
    for own, other in zip([*module.parameters(), *module.buffers()], tensors, strict=True):
        assert own is not other
    assert types(module) == TYPES
    assert types(restore_annotations(module)) == TYPES


@pytest.mark.parametrize("way", KEEPING)
def test_marks_that_stay_stay(way: str) -> None:
    module = KEEPING[way](block())
    assert types(module) == TYPES
    assert types(restore_annotations(module)) == TYPES


def test_half_changes_the_dtype_alone() -> None:
    halved = {name: text.replace("float32", "float16") for name, text in TYPES.items()}
    assert types(block().half()) == halved  # buffers are new tensors
    assert types(copy.deepcopy(block().half())) == halved
    assert types(copy.deepcopy(block()).half()) == halved


def test_a_compiled_functional_call_puts_its_own_tensors_in() -> None:
    module = block()
    given = {name: x.detach() for name, x in module.mlp["up"].named_parameters()}

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module.mlp["up"], given, (x,))

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    x = torch.ones(2, 4)
    assert torch.equal(compiled(x), module.mlp["up"](x))
    assert types(module) == TYPES


class Tied(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    "specs",
    [
        {"embedding.weight": "v@tp d"},
        {"head.*": "f@tp d"},
        {"embedding.weight": "v@tp d", "head.weight": P("tp")},
    ],
)
def test_a_tied_tensor_is_noted_by_each_owner(specs: dict[str, Any]) -> None:
    module = md.annotate(Tied(), specs)
    copied = copy.deepcopy(module)
    assert copied.head.weight is copied.embedding.weight
    untied = assigned(copy.deepcopy(module))
    assert untied.head.weight is not untied.embedding.weight
    for each in (module, copied, untied):
        assert str(md.typeof(each.head.weight)) == "float32[8@tp, 4]"
        assert str(md.typeof(each.embedding.weight)) == "float32[8@tp, 4]"


def test_a_shared_submodule_is_one_owner_with_two_names() -> None:
    layer = nn.Linear(4, 6, bias=False)
    module = md.annotate(nn.ModuleDict({"a": layer, "b": layer}), {"b.weight": "f@tp d"})
    copied = copy.deepcopy(module)
    assert copied["a"] is copied["b"]
    assert str(md.typeof(copied["a"].weight)) == "float32[6@tp, 4]"


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_a_parametrization_that_takes_a_tensor_over() -> None:
    module = md.annotate(nn.Sequential(nn.Linear(4, 6)), {"0.weight": "f@tp d"})
    nn.utils.parametrize.register_parametrization(module[0], "weight", Doubled())
    copied = copy.deepcopy(module)
    assert str(md.typeof(copied[0].parametrizations.weight.original)) == "float32[6, 4]"
    restore_annotations(copied)
    assert str(md.typeof(copied[0].parametrizations.weight.original)) == "float32[6@tp, 4]"
    # By either name, before and behind it.
    for name in ("0.weight", "0.parametrizations.weight.original"):
        later = md.annotate(copy.deepcopy(module), {name: "f d {R:tp}"})
        for each in (later, restore_annotations(copy.deepcopy(later))):
            original = each[0].parametrizations.weight.original
            assert str(md.typeof(original)) == "float32[6, 4]{R:tp}"


class Counted(dict[str, Any]):
    """A library's own dict of parameters, such as of parameters that are gathered at need."""


def test_another_librarys_dict_of_parameters_stays() -> None:
    module = nn.Linear(4, 6)
    module._parameters = Counted(module._parameters)
    md.annotate(module, {"weight": "f@tp d"})
    assert type(module._parameters) is Counted
    copied = copy.deepcopy(module)
    assert str(md.typeof(copied.weight)) == "float32[6, 4]"
    assert str(md.typeof(restore_annotations(copied).weight)) == "float32[6@tp, 4]"


def test_pickles_find_the_class_of_their_dicts() -> None:
    # Under this name pickles of earlier versions name it.
    kind, *_ = block().norm._parameters.__reduce_ex__(2)[1]
    assert (kind.__module__, kind.__qualname__) == (
        "meshdist.typed_mode.module_annotations",
        "AnnotatedTensors",
    )


def test_later_annotations_win() -> None:
    module = md.annotate(block(), {"mlp.up.weight": "f d {R:tp}"})
    md.annotate(module.norm.weight)  # by the tensor itself, which is not noted
    assert str(md.typeof(restore_annotations(module).norm.weight)) == "float32[4]"
    copied = copy.deepcopy(module)
    assert types(copied) == {**TYPES, "mlp.up.weight": "float32[6, 4]{R:tp}"}


def test_a_tensor_that_is_gone_is_left() -> None:
    module = copy.deepcopy(block())
    module.mlp["up"].bias = None
    restore_annotations(module)
    assert "mlp.up.bias" not in types(module)


def test_the_marks_of_a_wrapper_are_neither_noted_nor_lost() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        module = block()
        wrapped = md.DDP(module, device_mesh=mesh["dp"])
        noted = module.mlp["up"].__dict__[NOTED_MARKS]["weight"]
        copied = restore_annotations(copy.deepcopy(module))
        again = md.DDP(copy.deepcopy(module), device_mesh=mesh["dp"])
        before = dict(module.norm.weight.__dict__)
        twin = copy.deepcopy(wrapped)
        restore_annotations(wrapped)
        return [
            noted,
            before == module.norm.weight.__dict__,
            *(
                str(md.typeof(each.mlp["up"].weight))
                for each in (module, copied, again.module, twin.module)
            ),
        ]

    noted, is_kept, *texts = in_mesh(body)[0]
    assert noted == ("V:tp", "6@tp, 4")
    assert is_kept
    wrapped, bare = "float32[6@tp, 4]{R:dp}", "float32[6@tp, 4]"
    assert texts == [wrapped, bare, wrapped, wrapped]


def test_a_copied_shard_is_rejected_by_a_wrapper_over_its_axis() -> None:
    def body(mesh: md.DeviceMesh) -> str:
        with pytest.raises(AxisTypeError) as caught:
            md.DDP(copy.deepcopy(block()), device_mesh=mesh["tp"])
        return str(caught.value)

    assert all(
        text.startswith(
            "DDP cannot replicate mlp.up.weight: it is annotated as varying over 'tp'\n"
        )
        for text in in_mesh(body)
    )


# -- assert_equal ---------------------------------------------------------------------------------


def assertion(change: Callable[[Any, md.DeviceMesh], object], axes: Any) -> list[str]:
    """The text, on each rank of (2, 2), with which ``assert_equal`` rejects a changed copy."""

    def body(mesh: md.DeviceMesh) -> str:
        torch.manual_seed(mesh.get_local_rank("tp"))
        module = Block()
        with torch.no_grad():
            module.norm.weight.fill_(1.0)
        module = copy.deepcopy(md.annotate(module, {**SPECS, "norm.*": "..."}))
        with torch.no_grad():
            change(module, mesh)
        try:
            md.assert_equal(module, axes, mesh=mesh)
        except md.errors.UnequalError as error:
            return str(error.found)
        return ""

    return in_mesh(body)


@pytest.mark.parametrize("axes", ["dp", "tp", ("dp", "tp"), ("tp", "dp")])
def test_shards_are_compared_along_the_other_axes(axes: Any) -> None:
    assert assertion(lambda module, mesh: None, axes) == [""] * 4


def test_shards_that_differ_along_another_axis_are_found_on_all_ranks() -> None:
    def change(module: Any, mesh: md.DeviceMesh) -> None:
        if mesh.world.rank == 3:
            module.mlp["up"].bias += 1

    for axes in (("dp", "tp"), ("tp", "dp")):
        for found in assertion(change, axes):
            assert found.startswith("mlp.up.bias, shape (6,), float32: rank 3 differs from rank 1,")
    quiet, loud = assertion(change, "dp")[::2], assertion(change, "dp")[1::2]
    assert quiet == ["", ""]
    assert all("rank 3 differs from rank 1" in found for found in loud)
    assert assertion(change, "tp") == [""] * 4


def test_shards_of_uneven_sizes_and_what_is_equal_beside_them() -> None:
    def uneven(module: Any, mesh: md.DeviceMesh) -> None:
        module.scale = md.annotate(torch.ones(2 + mesh.get_local_rank("tp")), "f@tp")

    assert assertion(uneven, ("dp", "tp")) == [""] * 4

    def change(module: Any, mesh: md.DeviceMesh) -> None:
        uneven(module, mesh)
        module.norm.weight += mesh.get_local_rank("tp")

    for found in assertion(change, ("dp", "tp")):
        assert "norm.weight, shape (4,), float32: ranks 1, 3 differ from ranks 0, 2" in found


def test_marks_that_differ_are_told() -> None:
    def change(module: Any, mesh: md.DeviceMesh) -> None:
        if mesh.world.rank == 1:
            md.annotate(module, {"scale": "f"})

    for found in assertion(change, ("dp", "tp")):
        assert found == "scale: ranks 0, 2-3: varying over 'tp'; rank 1: shape (6,), float32"


# -- rejections ------------------------------------------------------------------------------------


def refusal(specs: Any, kind: type[MeshdistError], **arguments: Any) -> str:
    """The text with which an annotation is rejected; nothing is marked and nothing noted."""
    module = Block()
    with pytest.raises(kind) as caught:
        md.annotate(module, specs, **arguments)
    assert type(caught.value) is kind
    for owner in module.modules():
        assert NOTED_MARKS not in owner.__dict__
    for tensor in [*module.parameters(), *module.buffers()]:
        assert find_type(tensor) is None
    return str(caught.value)


@pytest.mark.parametrize("specs", [None, "f@tp d", ["f@tp d"], {3: "f@tp d"}])
def test_no_mapping(specs: Any) -> None:
    assert refusal(specs, KindError) == (
        "annotate takes a mapping from names to specs for a module\n"
        "  expected: a mapping from names of parameters and buffers to specs\n"
        f"  found:    {specs!r}, a {type(specs).__name__}\n"
        '  fix:      pass for example {"up.weight": "f@tp d", "norm.*": "... {R:tp}"}'
    )


def test_kinds_beside_a_mapping() -> None:
    assert refusal({"scale": "f@tp"}, KindError, varying="tp") == (
        "annotate takes either a spec or varying=, reduced= and unreduced=, not both\n"
        "  found:    {'scale': 'f@tp'} with varying='tp', reduced=(), unreduced=()\n"
        '  fix:      write all axes in the spec, such as "b@dp d {R:tp}"'
    )
    text = refusal(None, KindError, varying="tp")
    assert text.startswith("annotate cannot take varying=, reduced= or unreduced= for a module\n")


def test_a_pattern_that_fits_no_name() -> None:
    text = refusal({"norm.*": "...", "mlp.up.wieght": "f@tp d"}, ArgumentError)
    assert text == (
        "annotate: 'mlp.up.wieght' matches no parameter or buffer of the module\n"
        "  expected: a name, or a pattern of names such as 'norm.*'\n"
        "  found:    6 names: scale, norm.weight, norm.bias, mlp.up.weight, mlp.up.bias, "
        "mlp.down.weight\n"
        "  fix:      did you mean 'mlp.up.weight'?"
    )


def test_two_patterns_that_fit_one_name() -> None:
    assert refusal({"mlp.*": "f@tp ...", "*.weight": "..."}, ArgumentError) == (
        "annotate: two patterns match 'mlp.up.weight'\n"
        "  expected: one pattern for each name\n"
        "  found:    'mlp.*': 'f@tp ...'; '*.weight': '...'\n"
        "  fix:      make the wider pattern narrower, or name each parameter"
    )


def test_two_specs_for_one_tensor() -> None:
    with pytest.raises(ArgumentError) as caught:
        md.annotate(Tied(), {"embedding.weight": "v@tp d", "head.weight": "f d@tp"})
    assert str(caught.value) == (
        "annotate cannot give one tensor two specs: embedding.weight and head.weight are the same "
        "tensor\n"
        "  expected: one spec for a tensor that has several names\n"
        "  found:    embedding.weight: 'v@tp d'; head.weight: 'f d@tp'\n"
        "  fix:      give both names the same spec, or leave one of them out"
    )


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        (P("a", "b", "c"), md.errors.ShapeError, "annotate: P('a', 'b', 'c') has entries for 3"),
        ("a b c", md.errors.ShapeError, "the pattern names 3 dims, the array has 2"),
        ("f@ d", md.PatternError, "column 3 of 'f@ d'"),
        (("tp", None), KindError, "annotate takes a spec or a pattern"),
        (None, KindError, "found:    None, a NoneType"),
    ],
)
def test_specs_that_do_not_fit(spec: Any, kind: type[MeshdistError], words: str) -> None:
    text = refusal({"norm.*": "...", "mlp.up.weight": spec}, kind)
    assert words in text
    assert "\n  where:    mlp.up.weight, shape (6, 4), float32" in text


def test_an_axis_that_the_mesh_lacks() -> None:
    def body(mesh: md.DeviceMesh) -> list[str]:
        texts = [refusal({"scale": "f@tpp"}, AxisError, mesh=mesh)]
        with mesh:
            texts.append(refusal({"scale": P("tpp")}, AxisError))
        return texts

    for text in in_mesh(body)[0]:
        assert "\n  where:    scale, shape (6,), float32\n" in text
        assert "did you mean 'tp'?" in text


def test_an_axis_of_an_outer_mesh() -> None:
    def body(mesh: md.DeviceMesh) -> str:
        with mesh, mesh["dp"]:
            return refusal({"scale": "f@tp"}, AxisError)

    text = in_mesh(body)[0]
    assert "\n  where:    scale, shape (6,), float32\n" in text
    assert "an outer `with mesh:` of DeviceMesh(dp=2, tp=2), which has axis 'tp'" in text


def test_a_parameter_without_a_shape() -> None:
    with pytest.raises(ArgumentError) as caught:
        md.annotate(nn.LazyLinear(3), {"weight": "f@tp d"})
    assert str(caught.value) == (
        "annotate: weight has no shape yet\n"
        "  expected: an initialized parameter\n"
        "  found:    a UninitializedParameter\n"
        "  fix:      run one forward pass of the module first, then annotate it"
    )


def test_a_subclass_of_tensor() -> None:
    class Own(nn.Parameter):
        pass

    layer = nn.Linear(2, 2)
    layer.weight = Own(torch.ones(2, 2))
    with pytest.raises(KindError, match="cannot take an operand of type Own") as caught:
        md.annotate(layer, {"bias": "f@tp", "weight": "f@tp d"})
    assert caught.value.where == "weight"
    assert find_type(layer.bias) is None


def test_a_wrapped_module() -> None:
    def body(mesh: md.DeviceMesh) -> list[str]:
        texts = []
        for over in ({"device_mesh": mesh["dp"]}, {"process_group": md.group.WORLD}):
            wrapped = md.DDP(Block(), **over)
            for module, prefix in ((wrapped, "module."), (wrapped.module, "")):
                with pytest.raises(AxisTypeError) as caught:
                    md.annotate(module, {prefix + "norm.bias": "... {R:tp}"})
                texts.append(str(caught.value).replace("module.norm", "norm"))
        return texts

    assert set(in_mesh(body)[0]) == {
        "annotate cannot change norm.bias: its module is wrapped already\n"
        "  expected: a module that is not wrapped yet\n"
        "  fix:      annotate the module first, then wrap it: "
        "md.DDP(md.annotate(module, {...}))"
    }


def test_a_tensor_of_another_shape_that_has_lost_its_mark() -> None:
    module = block()
    module.mlp["up"].weight = nn.Parameter(torch.ones(12, 4))
    assert find_type(module.mlp["up"].weight) is None
    module.mlp["up"].bias.__dict__.clear()
    with pytest.raises(md.errors.ShapeError) as caught:
        restore_annotations(module)
    assert str(caught.value) == (
        "cannot restore the annotation of mlp.up.weight: its shape has changed\n"
        "  expected: dims 6@tp, 4, as recorded in the module\n"
        "  found:    shape (12, 4), float32\n"
        "  fix:      annotate it again: md.annotate(module, {'mlp.up.weight': ...}, mesh=mesh)"
    )
    assert find_type(module.mlp["up"].bias) is None
    md.annotate(module, {"mlp.up.*": "f@tp ..."})
    assert types(restore_annotations(copy.deepcopy(module)))["mlp.up.weight"] == "float32[12@tp, 4]"
