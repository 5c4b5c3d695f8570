"""Define all operations in two tables; other lists of collectives derive from them.

``OPERATIONS`` are public; ``BACKEND_OPERATIONS`` of a communicator execute them. Import only the
standard library: the command line must not load torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class TensorLayout(Enum):
    """The number of input or output tensors of a collective on a rank."""

    NONE = "none"
    ONE = "one tensor"
    ANY = "some that travel together"
    EACH = "one for each member"
    AT_ROOT = "one for each member, on the root alone"
    PARTS = "one tensor, in a part for each member"
    IN_PLACE = "what it gets, which is written over"


FOR_EACH = (TensorLayout.EACH, TensorLayout.AT_ROOT, TensorLayout.PARTS)
"""The layouts with a separate part for each rank."""


@dataclass(frozen=True)
class BackendOperation:
    """An operation of a communicator.

    Args:
        takes, gives: the layouts of its input and output.
        root: "to" if data are sent to the root, "from" if the root sends them, else "".
    """

    name: str
    takes: TensorLayout
    gives: TensorLayout
    reduces: bool = False
    root: str = ""


BACKEND_OPERATIONS = {
    operation.name: operation
    for operation in (
        BackendOperation("all_reduce", TensorLayout.IN_PLACE, TensorLayout.ONE, reduces=True),
        BackendOperation("all_reduce_list", TensorLayout.IN_PLACE, TensorLayout.ANY, reduces=True),
        BackendOperation(
            "reduce", TensorLayout.IN_PLACE, TensorLayout.ONE, reduces=True, root="to"
        ),
        BackendOperation("reduce_scatter", TensorLayout.ONE, TensorLayout.ONE, reduces=True),
        BackendOperation("reduce_scatter_list", TensorLayout.EACH, TensorLayout.ONE, reduces=True),
        BackendOperation("broadcast", TensorLayout.IN_PLACE, TensorLayout.ONE, root="from"),
        BackendOperation("all_gather", TensorLayout.ONE, TensorLayout.ONE),
        BackendOperation("all_gather_list", TensorLayout.ONE, TensorLayout.EACH),
        BackendOperation("gather", TensorLayout.ONE, TensorLayout.AT_ROOT, root="to"),
        BackendOperation("scatter", TensorLayout.AT_ROOT, TensorLayout.ONE, root="from"),
        BackendOperation("all_to_all", TensorLayout.EACH, TensorLayout.EACH),
        BackendOperation("all_to_all_single", TensorLayout.PARTS, TensorLayout.PARTS),
        BackendOperation("barrier", TensorLayout.NONE, TensorLayout.NONE),
        BackendOperation("send", TensorLayout.ONE, TensorLayout.NONE),
        BackendOperation("recv", TensorLayout.NONE, TensorLayout.ONE),
    )
}
"""The operations of a communicator, by name."""

REDUCING_OPERATIONS = frozenset(
    operation.name for operation in BACKEND_OPERATIONS.values() if operation.reduces
)
"""The operations of a communicator that reduce."""
ROOTED_OPERATIONS = frozenset(
    operation.name for operation in BACKEND_OPERATIONS.values() if operation.root
)
"""The operations of a communicator with a root."""


class Role(Enum):
    """The purpose of a parameter of a public collective."""

    INPUT = "read"
    OUTPUT = "written"
    IN_PLACE = "read, and written over"
    OP = "the reduction"
    ROOT = "the source or destination"
    PEER = "the other side of a message"
    SIZES = "how many rows go to, or come from, each member"
    TAG = "which messages belong together"


class Parameter(NamedTuple):
    """Parameter of a public collective, with its name and role."""

    name: str
    role: Role


class TorchMethod(NamedTuple):
    """The signature of an operation in torch's process groups.

    Args:
        tensors: parameter names of tensors and sizes, outputs first.
        options: the fields of torch's options that may follow.
        is_listed: whether each tensor, or list of tensors, is wrapped in a list.
    """

    tensors: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    is_listed: bool = False


@dataclass(frozen=True)
class OperationSpec:
    """A public operation.

    Args:
        backend_operations: the communicator's operations that run it, by name; () if only the store
            is used.
        parameters: its parameters except the group; a root comes last.
        kind: the axis type of its output over the group's axes: "I" if equal on all ranks, else
            "V".
        torch_method: the signature in torch's process groups, or None.
        alias_of: torch's older name, or "".
        is_plain: whether each call, or each message of a batch, is a single backend operation on
            the tensors that are passed.
    """

    name: str
    backend_operations: tuple[str, ...]
    parameters: tuple[Parameter, ...] = ()
    kind: str = ""
    torch_method: TorchMethod | None = None
    alias_of: str = ""
    is_plain: bool = True
    sends: bool = False
    is_of_objects: bool = False

    @property
    def reduces(self) -> bool:
        return not REDUCING_OPERATIONS.isdisjoint(self.backend_operations)

    @property
    def executor(self) -> BackendOperation:
        """The first of ``backend_operations``; if ``is_plain``, it alone runs a call or message."""
        return BACKEND_OPERATIONS[self.backend_operations[0]]

    @property
    def writes(self) -> str:
        """The name of the written parameter, or ""."""
        return next(iter(self.named(Role.OUTPUT, Role.IN_PLACE)), "")

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the input parameters."""
        return self.named(Role.INPUT)

    def named(self, *roles: Role) -> tuple[str, ...]:
        """Return the names of the parameters with any of ``roles``, role by role."""
        return tuple(
            parameter.name
            for role in roles
            for parameter in self.parameters
            if parameter.role is role
        )


def _read(name: str) -> Parameter:
    return Parameter(name, Role.INPUT)


def _written(name: str) -> Parameter:
    return Parameter(name, Role.OUTPUT)


def _in_place(name: str) -> Parameter:
    return Parameter(name, Role.IN_PLACE)


def _objects(
    name: str,
    backend_operations: tuple[str, ...],
    writes: str = "",
    kind: str = "",
    sends: bool = False,
) -> OperationSpec:
    written = (_written(writes),) if writes else ()
    return OperationSpec(
        name, backend_operations, written, kind, is_plain=False, sends=sends, is_of_objects=True
    )


def _multigpu(executor: str, kind: str, *parameters: Parameter) -> OperationSpec:
    return OperationSpec(f"{executor}_multigpu", (executor,), parameters, kind, is_plain=False)


_OP, _TAG = Parameter("op", Role.OP), Parameter("tag", Role.TAG)
_SRC, _DST = Parameter("src", Role.ROOT), Parameter("dst", Role.ROOT)
_SENT = (_read("tensor"), Parameter("dst", Role.PEER), _TAG)
_RECEIVED = (_written("tensor"), Parameter("src", Role.PEER), _TAG)
_GATHER, _SCATTER = ("all_gather",), ("reduce_scatter",)
_GATHERED = (_written("output_tensor"), _read("input_tensor"))
_SCATTERED = (_written("output"), _read("input"), _OP)
_INPUTS, _LISTS = _read("input_tensor_list"), _written("output_tensor_lists")
_SIZES = tuple(Parameter(f"{side}_split_sizes", Role.SIZES) for side in ("output", "input"))
_PAIRS = ("output_tensors", "input_tensors")
_REDUCED, _ROOTED, _TIMED = ("op", "timeout"), ("root", "timeout"), ("timeout",)

OPERATIONS = {
    operation.name: operation
    for operation in (
        OperationSpec(
            "all_reduce",
            ("all_reduce",),
            (_in_place("tensor"), _OP),
            "I",
            TorchMethod(("tensors",), _REDUCED, is_listed=True),
        ),
        OperationSpec(
            "all_reduce_coalesced",
            ("all_reduce_list",),
            (_in_place("tensors"), _OP),
            "I",
            TorchMethod(("tensors",)),
        ),
        OperationSpec(
            "reduce",
            ("reduce",),
            (_in_place("tensor"), _OP, _DST),
            "V",
            TorchMethod(("tensors",), ("root", *_REDUCED), is_listed=True),
        ),
        OperationSpec(
            "reduce_scatter_tensor",
            _SCATTER,
            _SCATTERED,
            "V",
            TorchMethod(("outputTensor", "inputTensor")),
        ),
        OperationSpec(
            "reduce_scatter_single", _SCATTER, _SCATTERED, "V", None, "reduce_scatter_tensor"
        ),
        OperationSpec(
            "reduce_scatter",
            ("reduce_scatter_list",),
            (_written("output"), _read("input_list"), _OP),
            "V",
            TorchMethod(_PAIRS, _REDUCED, is_listed=True),
        ),
        OperationSpec(
            "broadcast",
            ("broadcast",),
            (_in_place("tensor"), _SRC),
            "I",
            TorchMethod(("tensors",), _ROOTED, is_listed=True),
        ),
        OperationSpec(
            "all_gather_into_tensor", _GATHER, _GATHERED, "I", TorchMethod(("output", "input"))
        ),
        OperationSpec("all_gather_single", _GATHER, _GATHERED, "I", None, "all_gather_into_tensor"),
        OperationSpec(
            "all_gather",
            ("all_gather_list",),
            (_written("tensor_list"), _read("tensor")),
            "I",
            TorchMethod(_PAIRS, _TIMED, is_listed=True),
        ),
        OperationSpec(
            "all_gather_coalesced",
            _GATHER,
            (_LISTS, _INPUTS),
            "I",
            TorchMethod(("output_lists", "input_list")),
            is_plain=False,
        ),
        OperationSpec(
            "gather",
            ("gather",),
            (_read("tensor"), _written("gather_list"), _DST),
            "V",
            TorchMethod(_PAIRS, _ROOTED, is_listed=True),
        ),
        OperationSpec(
            "scatter",
            ("scatter",),
            (_written("tensor"), _read("scatter_list"), _SRC),
            "V",
            TorchMethod(_PAIRS, _ROOTED, is_listed=True),
        ),
        OperationSpec(
            "all_to_all",
            ("all_to_all",),
            (_written("output_tensor_list"), _INPUTS),
            "V",
            TorchMethod(_PAIRS),
        ),
        OperationSpec(
            "all_to_all_single",
            ("all_to_all_single",),
            (_written("output"), _read("input"), *_SIZES),
            "V",
            TorchMethod(("output", "input", *(size.name for size in _SIZES)), _TIMED),
        ),
        OperationSpec("barrier", ("barrier",), (), "", TorchMethod((), _TIMED)),
        OperationSpec("send", ("send",), _SENT, sends=True),
        OperationSpec("isend", ("send",), _SENT, sends=True),
        OperationSpec("recv", ("recv",), _RECEIVED, "V"),
        OperationSpec("irecv", ("recv",), _RECEIVED, "V"),
        OperationSpec("batch_isend_irecv", ("send", "recv"), (_written("p2p_op_list"),), "V"),
        _multigpu("all_reduce", "I", _in_place("tensor_list"), _OP),
        _multigpu("reduce", "V", _in_place("tensor_list"), _OP, _DST),
        _multigpu("broadcast", "I", _in_place("tensor_list"), _SRC),
        _multigpu("all_gather", "I", _LISTS, _INPUTS),
        OperationSpec("monitored_barrier", (), is_plain=False),  # by way of the store
        _objects("all_gather_object", ("all_gather", "all_gather_list"), "object_list", "I"),
        _objects("gather_object", ("all_gather", "all_to_all_single"), "object_gather_list", "V"),
        _objects("broadcast_object_list", ("all_gather", "broadcast"), "object_list", "I"),
        _objects(
            "scatter_object_list",
            ("broadcast", "all_to_all_single"),
            "scatter_object_output_list",
            "V",
        ),
        _objects("send_object_list", ("send", "recv"), sends=True),
        _objects("recv_object_list", ("send", "recv"), "object_list", "V"),
    )
}
"""The public collectives, by name."""

SENDING_OPERATIONS = frozenset(
    operation.name for operation in OPERATIONS.values() if operation.sends
)
"""The public collectives that send one message."""

OBJECT_OPERATIONS = frozenset(
    operation.name for operation in OPERATIONS.values() if operation.is_of_objects
)
"""The public collectives that move pickled objects."""
