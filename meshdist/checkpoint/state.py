"""Collect a training program's state under wrapper-independent names."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ..annotations.tensor_specs import find_spec, mark_spec
from ..checking.call_sites import warn_caller
from ..error_text import with_article
from ..errors import KindError
from ..mesh.device_mesh import DeviceMesh
from ..typed_mode.module_annotations import restore_annotations
from ..typed_mode.random_draws import find_seeded_axes, note_seeding, seed
from .manifest import Manifest
from .participants import Members
from .reader import OpenArrays
from .trees import EachRanks, FirstRanks, axes_to_json, is_array

__all__ = ["State"]

_WRAPPERS = ("module", "_orig_mod")


class State:
    """The state of a training program, for ``save``, ``load`` and ``Checkpointer``.

    Parameters and optimizer states have the unwrapped model's names. Optimizer states with their
    parameter's shape are sharded like it. Buffers are the first rank's, as in ``DDP``. On an equal
    mesh each rank's random generators continue their sequences. On another mesh, their seed is the
    CRC-32 of the first rank's saved state, and they differ along the axes over which ``md.seed``
    made them differ.

    Args:
        model: a module, wrapped in ``DDP`` or ``torch.compile`` or not; or a dict of modules by
            name.
        optimizer: a torch optimizer or a list of them; their parameters are the model's.
        sampler: an object with ``state_dict`` and ``load_state_dict``, such as
            ``DistributedSampler``, which continues with the same samples on any number of ranks.
        rng: whether to include the generators of torch, NumPy and ``random``.
        **leaves: everything else: JSON values, arrays, dicts of these, further modules, and objects
            with ``state_dict`` and ``load_state_dict``, such as schedulers. They are attributes:
            ``state.step = 5``.

    Example:
        >>> import tempfile, torch, meshdist as md
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> state = md.checkpoint.State(model=model, optimizer=optimizer, step=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state.step = 5
        ...     md.checkpoint.save(state, f"{folder}/five")
        ...     state.step = 0
        ...     md.checkpoint.load(state, f"{folder}/five").step
        5
    """

    def __init__(
        self,
        *,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        optimizer: Any = None,
        sampler: Any = None,
        rng: bool = True,
        **leaves: Any,
    ) -> None:
        models = dict(model) if isinstance(model, Mapping) else {"": model}
        for each in models.values():
            if not isinstance(each, nn.Module) and model is not None:
                raise KindError(
                    "State requires a module, or a dict of modules, as model=",
                    found=with_article(type(each).__name__),
                    fix="pass the module, not its state_dict()",
                )
        optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.__dict__.update(
            _models={} if model is None else models,
            _optimizers=[each for each in optimizers if each is not None],
            _rng=rng,
            _leaves={**leaves, **({} if sampler is None else {"sampler": sampler})},
            _written_back=[],
        )
        if any(isinstance(leaf, torch.optim.Optimizer) for leaf in leaves.values()):
            raise KindError(
                "State requires optimizers as optimizer=, with the models of their parameters",
                fix='pass State(model={"a": a, "b": b}, optimizer=[of_a, of_b])',
            )
        if self._optimizers and model is None:
            raise KindError(
                "State requires model= with optimizer=",
                fix="pass State(model=model, optimizer=optimizer)",
            )
        for each in self._optimizers:
            if not isinstance(each, torch.optim.Optimizer):
                raise KindError(
                    "State requires a torch optimizer, or a list of them, as optimizer=",
                    found=with_article(type(each).__name__),
                    fix="pass other objects with a state_dict() as a separate keyword",
                )

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_leaves"][name]
        except KeyError:
            raise AttributeError(f"the state has no leaf {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("model", "optimizer", "rng") or name.startswith("_"):
            raise AttributeError(f"cannot set {name!r}: pass it to State(...)")
        self._leaves[name] = value

    def to_tree(self, mesh: DeviceMesh | None, saved: Manifest | None) -> dict[str, Any]:
        """Return the state as nested dicts, to save it or to load into."""
        tree: dict[str, Any] = {}
        self._written_back.clear()
        if self._models:
            tree["model"] = {
                _joined(own, name): x
                for own, model in self._models.items()
                for name, x in _model_tree(model).items()
            }
        if self._optimizers:
            tree["optimizer"] = self._optimizer_tree(saved)
        if self._rng:
            tree["rng"] = _generators(mesh)
        for name, leaf in self._leaves.items():
            if isinstance(leaf, nn.Module):
                tree[name] = _model_tree(leaf)
            else:
                tree[name] = dict(leaf.state_dict()) if _has_state(leaf) else leaf
        self._written_back.append((self._leaves, tree))
        return tree

    def was_loaded(self, names: Sequence[str], source: OpenArrays, members: Members) -> None:
        """Pass loaded values to objects and generators."""
        _, loaded = self._written_back[-1]
        for name, leaf in self._leaves.items():
            if isinstance(leaf, nn.Module):
                continue
            if _has_state(leaf) and any(each.startswith(f"{name}.") for each in names):
                leaf.load_state_dict(loaded[name])
        for owner, tree in self._written_back:
            for key in tree:
                if key in owner and not (is_array(tree[key]) or _has_state(owner[key])):
                    owner[key] = tree[key]
        if self._rng and "rng.torch" in names:
            _restore_generators(loaded["rng"], members.mesh)
        elif self._rng and "rng.differ_over" in names:
            _seed_again(source.manifest, members)

    def _optimizer_tree(self, saved: Manifest | None) -> dict[str, Any]:
        names: dict[int, str] = {}
        models = nn.ModuleDict({own or "_": _unwrapped(x) for own, x in self._models.items()})
        for own, model in self._models.items():
            for name, parameter in _unwrapped(model).named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), _joined(own, name))
        with_states = set() if saved is None else _prefixes(saved)
        states: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        for optimizer in self._optimizers:
            if saved is not None and not optimizer.state:
                _make_states(models, optimizer)
            for group in optimizer.param_groups:
                options = {key: value for key, value in group.items() if key != "params"}
                self._written_back.append((group, options))
                groups[str(len(groups))] = options
                for parameter in group["params"]:
                    own = names.get(id(parameter))
                    if own is None:
                        raise KindError(
                            "State: a parameter of the optimizer is not in the model",
                            found=f"shape {tuple(parameter.shape)}",
                            fix="pass the model that the optimizer trains; pass several models as "
                            "a dict",
                        )
                    state = optimizer.state.get(parameter, {})
                    if saved is not None and f"optimizer.state.{own}" not in with_states:
                        optimizer.state.pop(parameter, None)  # as it was when it was saved
                        continue
                    states[own] = {k: _as_parameter(x, parameter) for k, x in state.items()}
                    self._written_back.append((state, states[own]))
        return {"state": states, "param_groups": groups}


def _joined(own: str, name: str) -> str:
    return f"{own}.{name}" if own else name


def _has_state(leaf: Any) -> bool:
    return hasattr(leaf, "state_dict") and hasattr(leaf, "load_state_dict")


def _prefixes(saved: Manifest) -> set[str]:
    """Return all saved names, and their prefixes that end before a dot."""
    found = set()
    for name in saved.names:
        while name and name not in found:
            name = name.rpartition(".")[0]
            found.add(name)
    return found


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the innermost module inside wrappers such as DDP."""
    while True:
        inner = next(
            (getattr(model, name, None) for name in _WRAPPERS if hasattr(model, name)), None
        )
        has_more = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
        if has_more or not isinstance(inner, nn.Module) or len(list(model.children())) != 1:
            return model
        model = inner


def _model_tree(model: nn.Module) -> dict[str, Any]:
    """Return a model's annotated state dict, with the first rank's buffers."""
    bare = restore_annotations(_unwrapped(model))  # copies of parametrizations lose them
    buffers = {name for name, _ in bare.named_buffers(remove_duplicate=False)}
    tree = dict(bare.state_dict(keep_vars=True))
    for name in buffers & tree.keys():
        if type(tree[name]) is torch.Tensor and find_spec(tree[name]) is None:
            tree[name] = FirstRanks(tree[name])
    return tree


def _make_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Create the states of an optimizer that has not stepped."""
    # torch makes it step on zero gradients, but only if there are no others.
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    get_optimizer_state_dict(model, optimizer)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _as_parameter(x: Any, parameter: torch.Tensor) -> Any:
    """Return optimizer state ``x`` with the parameter's spec, if shapes are equal."""
    spec = find_spec(parameter)
    if spec is None or type(x) is not torch.Tensor or x.shape != parameter.shape:
        return x
    return mark_spec(x.detach(), spec)


def _generators(mesh: DeviceMesh | None) -> dict[str, Any]:
    """Return this rank's random generator states and seeds as bytes."""
    _, words, pair = random.getstate()
    drawn: Any = np.random.get_state(legacy=False)
    if drawn["bit_generator"] != "MT19937":
        raise KindError(
            "State cannot save NumPy's global generator",
            expected="NumPy's default MT19937",
            found=str(drawn["bit_generator"]),
            fix="pass rng=False to State, and save the generator's state as a leaf",
        )
    mt19937, axes = drawn["state"], find_seeded_axes()
    python = [*words, pair is not None, pair or 0.0]
    numpy = [*mt19937["key"].tolist(), mt19937["pos"], drawn["has_gauss"], drawn["gauss"]]
    tree = {
        "torch": EachRanks(torch.get_rng_state()),
        "python": EachRanks(torch.tensor(python, dtype=torch.float64, device="cpu")),
        "numpy": EachRanks(torch.tensor(numpy, dtype=torch.float64, device="cpu")),
        "differ_over": FirstRanks(None if axes is None else list(axes)),
        "mesh": FirstRanks(None if mesh is None else axes_to_json(mesh)),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tree["cuda"] = EachRanks(torch.cuda.get_rng_state())
    return tree


def _restore_generators(tree: Mapping[str, Any], mesh: DeviceMesh | None) -> None:
    """Restore this rank's random generators from ``tree``."""
    torch.set_rng_state(tree["torch"].array)
    *words, has_pair, pair = tree["python"].array.tolist()
    random.setstate((3, tuple(map(int, words)), pair if has_pair else None))
    *key, pos, has_gauss, gauss = tree["numpy"].array.tolist()
    np.random.set_state(("MT19937", np.array(key, np.uint32), int(pos), int(has_gauss), gauss))
    if "cuda" in tree:
        torch.cuda.set_rng_state(tree["cuda"].array)
    if mesh is not None and isinstance(tree["differ_over"], list):
        note_seeding(tuple(tree["differ_over"]), mesh.layout)


def _seed_again(saved: Manifest, members: Members) -> None:
    """Seed the generators on another mesh with the CRC-32 of the first rank's saved state."""
    pieces = sorted(saved.arrays["rng.torch"].pieces, key=lambda each: each.box)
    sums = [piece.crc32 or 0 for piece in pieces]  # files of other programs lack checksums
    number, num_states = sums[0], len({*sums})
    axes = saved.leaves["rng.differ_over"]
    if axes is None:  # seeded without md.seed, equally on all ranks or not
        number += members.group_rank if num_states > 1 else 0
        torch.manual_seed(number)
        np.random.seed(number % (1 << 32))
        random.seed(number)
        if 1 < num_states < len(pieces):
            warn_caller(
                "some ranks drew the same random numbers, seeded without md.seed; after this load "
                "each rank draws different numbers: call md.seed(..., differ_over=...) after the "
                "load to choose"
            )
        return
    names = () if members.mesh is None else members.mesh.axis_names
    lacking = [axis for axis in axes if axis not in names]
    if lacking:
        warn_caller(
            f"the random generators differed over {', '.join(lacking)}, which this mesh lacks; "
            "ranks now draw the same numbers: call md.seed(..., differ_over=...) if they should "
            "differ"
        )
    differ_over = tuple(axis for axis in names if axis in axes)
    seed(number, differ_over=differ_over, mesh=members.mesh)
