"""Define the rules of typed contexts for torch's functions: closed tables, by name.

By default, all results of a function have the joined type of its operands. The tables list the
exceptions and the linear functions. ``torch.add``, ``Tensor.add`` and ``torch.ops.aten.add`` share
a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

import torch

from ..collectives.torch_private import OverloadPacket


class Kind(Enum):
    """The ways in which a typed context treats a function."""

    ORDINARY = auto()
    """Results take the joined type of the operands."""
    FREE = auto()
    """It reads no values, or changes none: shapes, flags."""
    NUMBER = auto()
    """It turns tensors into numbers of Python or arrays of NumPy, or gives away their memory."""
    ROWS = auto()
    """The shape of its result may depend on its operands' values."""
    SIZE = auto()
    """It reads a shape."""
    HOOK = auto()
    """It sets a hook on a tensor's gradient."""
    DRAW = auto()
    """It may draw from a random generator."""
    ITEMS = auto()
    """It treats each item of its lists separately."""
    NORM = auto()
    """A norm, by which torch clips gradients: it differs between ranks if the tensors vary."""
    BACKWARD = auto()
    """``Tensor.backward`` and ``torch.autograd.backward``."""
    GRADIENT = auto()
    """``torch.autograd.grad``."""
    GET_GRAD = auto()
    """It reads ``.grad``."""
    SET_GRAD = auto()
    """It sets ``.grad``."""
    SET_DATA = auto()
    """It sets ``.data``."""


Parameter = tuple[int, str]
"""The position and the name of an argument."""


@dataclass(frozen=True)
class TorchFunction:
    """The rule of a torch function in typed contexts.

    Args:
        linearity: in which unreduced operands it is linear; see ``axis_types.join_types``.
        adds_numbers: whether every rank would add a number to its unreduced operand.
        writes: the arguments that it writes.
        ignores: the arguments of which it reads only shape, dtype and device.
    """

    name: str
    kind: Kind = Kind.ORDINARY
    linearity: str = ""
    adds_numbers: bool = False
    writes: tuple[Parameter, ...] = ()
    ignores: tuple[Parameter, ...] = ()


_NAMES: dict[Kind, str] = {
    Kind.FREE: """
        __delitem__ __dlpack_device__ __hash__ __reduce_ex__ __repr__ __setstate__ _backward_hooks
        _base _cdata _grad_fn _has_symbolic_sizes_strides _is_view _post_accumulate_grad_hooks
        _set_grad_enabled _version broadcast_shapes can_cast data_ptr dense_dim device dim dim_order
        dtype element_size get_device grad_dtype grad_fn has_names is_coalesced is_complex is_conj
        is_contiguous is_cpu is_cuda is_distributed is_floating_point is_inference is_ipu is_leaf
        is_maia is_meta is_mkldnn is_mps is_mtia is_neg is_nested is_pinned is_quantized
        is_same_size is_set_to is_shared is_signed is_sparse is_sparse_csr is_tensor is_vulkan
        is_xla is_xpu itemsize layout name names nbytes ndim ndimension output_nr promote_types
        record_stream requires_grad requires_grad_ result_type retain_grad retains_grad
        share_memory_ sparse_dim storage_offset storage_type stride typename volatile
    """,
    Kind.NUMBER: """
        __array__ __bool__ __complex__ __contains__ __cuda_array_interface__ __dlpack__ __float__
        __format__ __index__ __int__ __long__ __nonzero__ allclose equal is_nonzero item numpy
        storage tolist untyped_storage
    """,
    Kind.DRAW: """
        _cudnn_attention_backward _cudnn_attention_forward _cudnn_rnn _efficient_attention_forward
        _fill_mem_eff_dropout_mask_ _flash_attention_forward
        _flash_attention_forward_no_dropout_inplace _fused_dropout _lstm_mps _philox_normal_
        _philox_uniform_ _sample_dirichlet _scaled_dot_product_attention_math
        _scaled_dot_product_attention_math_for_mps _scaled_dot_product_cudnn_attention
        _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
        _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable
        _standard_gamma _triton_scaled_dot_attention alpha_dropout alpha_dropout_ bernoulli
        bernoulli_ binomial cauchy cauchy_ dropout dropout1d dropout2d dropout3d dropout_
        exponential exponential_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout
        feature_dropout_ fractional_max_pool2d fractional_max_pool2d_with_indices
        fractional_max_pool3d fractional_max_pool3d_with_indices geometric geometric_ gru
        gumbel_softmax kaiming_normal_ kaiming_uniform_ log_normal log_normal_ lstm miopen_rnn
        multi_head_attention_forward multinomial native_dropout normal normal_ normal_functional
        orthogonal_ pca_lowrank poisson rand rand_like randint randint_like randn randn_like random
        random_ randperm rnn_relu rnn_tanh rrelu rrelu_ rrelu_with_noise rrelu_with_noise_
        rrelu_with_noise_functional scaled_dot_product_attention sparse_ svd_lowrank trunc_normal_
        uniform uniform_ xavier_normal_ xavier_uniform_
    """,
    Kind.NORM: "_foreach_norm linalg_vector_norm",
    Kind.SIZE: "__len__ nelement numel shape size",
    Kind.HOOK: "register_hook register_post_accumulate_grad_hook",
    Kind.ROWS: """
        __getitem__ _unique2 argwhere bincount masked_select nonzero repeat_interleave unique
        unique_consecutive unique_dim where
    """,
}
_KINDS = MappingProxyType({name: kind for kind, names in _NAMES.items() for name in names.split()})
_SUMS = """
    add add_ sub sub_ subtract subtract_ rsub __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__
"""
# All other functions reject unreduced operands.
_LINEAR = {
    "first": """
        H T __deepcopy__ __getitem__ __reversed__ adjoint as_strided as_subclass atleast_1d
        atleast_2d atleast_3d chunk clone conj conj_physical contiguous cpu cuda data detach detach_
        diag diag_embed diagonal dsplit expand expand_as flatten flip fliplr flipud gather hsplit
        imag index_select mH mT masked_select matrix_H mean movedim moveaxis narrow permute ravel
        real repeat repeat_interleave reshape reshape_as resolve_conj resolve_neg roll rot90 select
        split split_with_sizes squeeze squeeze_ sum sum_to_size swapaxes swapdims t t_ take
        take_along_dim tensor_split tile to trace transpose transpose_ tril triu type type_as unbind
        unflatten unfold unsafe_chunk unsafe_split unsqueeze unsqueeze_ view view_as view_as_complex
        view_as_real vsplit bfloat16 cdouble cfloat chalf double float half negative neg neg_
        negative_ __neg__ positive div div_ divide divide_ true_divide true_divide_ __truediv__
        __div__ __itruediv__ __idiv__ zero_
    """,
    "add": f"""
        {_SUMS}
        cat concat concatenate stack hstack vstack dstack row_stack column_stack block_diag copy_
        __setitem__ broadcast_tensors
    """,
    "multiply": """
        mul mul_ multiply multiply_ __mul__ __rmul__ __imul__ matmul __matmul__ __rmatmul__ mm bmm
        mv dot vdot inner outer ger einsum tensordot kron chain_matmul
    """,
    "multiply add": "linear",
    "add multiply": "addmm addbmm addmv addr baddbmm addmm_ addbmm_ addmv_ addr_ baddbmm_",
}
LINEARITY = MappingProxyType(
    {name: linearity for linearity, names in _LINEAR.items() for name in names.split()}
)
_ADDS_NUMBERS = frozenset(_SUMS.split())

# Functions that write arguments other than out= and other than the first of a name with final "_".
_DROPOUTS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout"),
)
_WRITES = MappingProxyType(
    {
        **dict.fromkeys((*_DROPOUTS, "rrelu"), ((0, "input"),)),
        "batch_norm": ((1, "running_mean"), (2, "running_var")),
        "instance_norm": ((1, "running_mean"), (2, "running_var")),
        "embedding": ((1, "weight"),),
        "embedding_bag": ((1, "weight"),),
        "__setitem__": ((0, "self"),),
    }
)
# The functions read only shape, dtype and device of these arguments.
_IGNORES = MappingProxyType(
    {
        **dict.fromkeys(
            ("expand_as", "view_as", "reshape_as", "resize_as_", "type_as"), ((1, "other"),)
        ),
        "to": ((1, "other"),),
        **dict.fromkeys(
            (
                *("empty_like", "full_like", "ones_like", "zeros_like"),
                *("rand_like", "randn_like", "randint_like"),
                *("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor"),
                "new_zeros",
            ),
            ((0, "input"), (0, "self")),
        ),
    }
)
_ATTRIBUTES = MappingProxyType(
    {("grad", "__get__"): Kind.GET_GRAD, ("_grad", "__get__"): Kind.GET_GRAD,
     ("grad", "__set__"): Kind.SET_GRAD, ("_grad", "__set__"): Kind.SET_GRAD,
     ("data", "__set__"): Kind.SET_DATA,
     ("grad", "__delete__"): Kind.FREE, ("_grad", "__delete__"): Kind.FREE}
)  # fmt: skip
_CALLS: dict[Any, Kind] = {
    torch.Tensor.backward: Kind.BACKWARD,
    torch.autograd.backward: Kind.BACKWARD,
    torch.autograd.grad: Kind.GRADIENT,
}


class _Operations(dict[Any, TorchFunction]):
    """A dict of rules by function, filled at lookup."""

    def __missing__(self, function: Any) -> TorchFunction:
        found = _find_operation(function)
        # Nested functions are not cached, because a program can create any number of them.
        if "<locals>" not in getattr(function, "__qualname__", ""):
            self[function] = found
        return found


def _find_operation(function: Any) -> TorchFunction:
    name = str(getattr(function, "__name__", type(function).__name__))
    if name in ("__get__", "__set__", "__delete__"):
        return _find_attribute(getattr(function, "__self__", None), name)
    schema = getattr(function, "_schema", None)
    if isinstance(function, OverloadPacket) and (overloads := function.overloads()):
        schema = getattr(function, overloads[0])._schema
    name = name.partition(".")[0]  # Strip the overload, as of add.Tensor.
    if function in _CALLS:
        return TorchFunction(name, _CALLS[function])
    writes = _find_writes(name, schema)
    if not _is_of_torch(function):
        return TorchFunction(name, writes=writes)
    is_on_items = name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
    return TorchFunction(
        name,
        _KINDS.get(name, Kind.ITEMS if is_on_items else Kind.ORDINARY),
        LINEARITY.get(name, ""),
        name in _ADDS_NUMBERS,
        writes,
        _IGNORES.get(name, ()),
    )


def _find_attribute(descriptor: Any, access: str) -> TorchFunction:
    """Return the rule for a descriptor's ``access``, such as "__get__"."""
    name = getattr(descriptor, "__name__", "") or getattr(
        getattr(descriptor, "fget", None), "__name__", "an attribute"
    )
    kind = _ATTRIBUTES.get((name, access))
    if kind is None:
        kind = _KINDS.get(name, Kind.ORDINARY) if access == "__get__" else Kind.FREE
    return TorchFunction(name, kind, LINEARITY.get(name, "") if access == "__get__" else "")


def _is_of_torch(function: Any) -> bool:
    """Return whether ``function`` is torch's own, so that rules by name apply."""
    namespace = getattr(function, "namespace", None) or getattr(function, "_qualified_op_name", "")
    if namespace:
        return str(namespace).partition("::")[0] in ("aten", "prims")
    owner = getattr(function, "__objclass__", None)
    module = getattr(function, "__module__", None) or getattr(owner, "__module__", None)
    return module is None or module.partition(".")[0] == "torch"


def _find_writes(name: str, schema: Any) -> tuple[Parameter, ...]:
    if schema is not None:
        return tuple(
            (parameter, argument.name)
            for parameter, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    if name in _WRITES:
        return _WRITES[name]
    if name.endswith("_") and not name.endswith("__"):
        return ((0, "self"), (0, "input"), (0, "tensor"))
    if name.startswith("__i") and name.endswith("__") and name not in _NOT_IN_PLACE:
        return ((0, "self"),)
    return ()


_NOT_IN_PLACE = ("__index__", "__int__", "__invert__")

OPERATIONS: dict[Any, TorchFunction] = _Operations()
"""The rule of each function that torch hands to a mode."""


def argument(parameter: Parameter, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Return a call's argument at ``parameter``, or None.

    Example:
        >>> argument((1, "running_mean"), ("x", "mean"), None)
        'mean'
    """
    position, name = parameter
    if position < len(args):
        return args[position]
    return None if kwargs is None else kwargs.get(name)


def draws(operation: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Return whether this call draws from a random generator."""
    switches = _DRAWS_IF.get(operation.name, ())
    if kwargs and "train" in kwargs:  # torch.dropout's name of the argument.
        kwargs = {**kwargs, "training": kwargs["train"]}
    if switches is _RNN and len(args) > 3 and isinstance(args[3], (list, tuple)):
        args = args[1:]  # The second argument of a packed sequence is its batch sizes.
    return _are_on(switches, args, kwargs)


def shape_depends_on_values(operation: TorchFunction, args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether the result's shape depends on values, as of a bool mask."""
    if operation.name == "where":
        return len(args) + len(kwargs or ()) == 1
    if operation.name != "__getitem__":
        return True
    index = args[1] if type(args[1]) is tuple else args[1:]
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in index)


def written_tensors(
    operation: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> list[torch.Tensor]:
    """Return the tensors that this call writes, including ``out``."""
    written: list[Any] = []
    if operation.writes and _are_on(_WRITES_IF.get(operation.name, ()), args, kwargs):
        written = [argument(parameter, args, kwargs) for parameter in operation.writes]
    out = None if kwargs is None else kwargs.get("out")
    written.extend(out if isinstance(out, (tuple, list)) else [out])
    found = {id(x): x for x in written if isinstance(x, torch.Tensor)}
    return list(found.values())


def _are_on(
    switches: Sequence[tuple[Parameter, Any]], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bool:
    for parameter, default in switches:
        value = argument(parameter, args, kwargs)
        if not (default if value is None else value):
            return False
    return True


# A call draws, or writes, only if all of these arguments (with their defaults) are true.
_DROPOUT = (((1, "p"), 0.5), ((2, "training"), True))
_ALPHA_DROPOUT = (((1, "p"), 0.5), ((2, "training"), False))
_RNN = (((5, "dropout"), 0.0), ((6, "training"), False))
_DRAWS_IF: MappingProxyType[str, tuple[tuple[Parameter, Any], ...]] = MappingProxyType(
    {
        **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _DROPOUT),
        **dict.fromkeys(("dropout_", "feature_dropout", "feature_dropout_"), _DROPOUT),
        "native_dropout": _DROPOUT,
        **dict.fromkeys(("alpha_dropout", "alpha_dropout_"), _ALPHA_DROPOUT),
        **dict.fromkeys(("feature_alpha_dropout", "feature_alpha_dropout_"), _ALPHA_DROPOUT),
        **dict.fromkeys(("rrelu", "rrelu_"), (((3, "training"), False),)),
        "scaled_dot_product_attention": (((4, "dropout_p"), 0.0),),
        "_scaled_dot_product_attention_math": (((4, "dropout_p"), 0.0),),
        "multi_head_attention_forward": (((10, "dropout_p"), 0.0), ((13, "training"), True)),
        **dict.fromkeys(("lstm", "gru", "rnn_relu", "rnn_tanh"), _RNN),
    }
)
_WRITES_IF: MappingProxyType[str, tuple[tuple[Parameter, Any], ...]] = MappingProxyType(
    {
        **dict.fromkeys(_DROPOUTS, (((3, "inplace"), False),)),
        "rrelu": (((4, "inplace"), False),),
        "batch_norm": (((5, "training"), False),),
        "instance_norm": (((5, "use_input_stats"), True),),
        "embedding": (((3, "max_norm"), None),),
        "embedding_bag": (((3, "max_norm"), None),),
    }
)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [
        x
        for entry in tree
        for x in ([entry] if isinstance(entry, torch.Tensor) else tensors_in(entry))
    ]
