"""The facts of each verb: two tables, from which every other list of verbs is made.

``VERBS`` has the public verbs, ``WIRE_VERBS`` those of a communicator that carry them. This
module imports the standard library alone, so that the command line can use it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "FOR_EACH",
    "OBJECT_VERBS",
    "REDUCING_VERBS",
    "ROOTED_VERBS",
    "SENDING_VERBS",
    "VERBS",
    "WIRE_VERBS",
    "Form",
    "Verb",
    "WireVerb",
]


class Form(Enum):
    """The tensors that one member brings to a verb of a communicator, or gets of it."""

    NONE = "none"
    ONE = "one tensor"
    ANY = "some that travel together"
    EACH = "one for each member"
    AT_ROOT = "one for each member, on the root alone"
    PARTS = "one tensor, in a part for each member"
    IN_PLACE = "what it gets, which is written over"


FOR_EACH = (Form.EACH, Form.AT_ROOT, Form.PARTS)
"""Of what lies apart for each member."""


@dataclass(frozen=True)
class WireVerb:
    """A verb of a communicator.

    Args:
        name: what communicators call it.
        takes, gives: what a member brings, and what it gets.
        reduces: whether it takes an op.
        root: "to" where the data go to one member, "from" where they come from one, else "".
    """

    name: str
    takes: Form
    gives: Form
    reduces: bool = False
    root: str = ""


WIRE_VERBS = {
    verb.name: verb
    for verb in (
        WireVerb("all_reduce", Form.IN_PLACE, Form.ONE, reduces=True),
        WireVerb("all_reduce_list", Form.IN_PLACE, Form.ANY, reduces=True),
        WireVerb("reduce", Form.IN_PLACE, Form.ONE, reduces=True, root="to"),
        WireVerb("reduce_scatter", Form.ONE, Form.ONE, reduces=True),
        WireVerb("reduce_scatter_list", Form.EACH, Form.ONE, reduces=True),
        WireVerb("broadcast", Form.IN_PLACE, Form.ONE, root="from"),
        WireVerb("all_gather", Form.ONE, Form.ONE),
        WireVerb("all_gather_list", Form.ONE, Form.EACH),
        WireVerb("gather", Form.ONE, Form.AT_ROOT, root="to"),
        WireVerb("scatter", Form.AT_ROOT, Form.ONE, root="from"),
        WireVerb("all_to_all", Form.EACH, Form.EACH),
        WireVerb("all_to_all_single", Form.PARTS, Form.PARTS),
        WireVerb("barrier", Form.NONE, Form.NONE),
        WireVerb("send", Form.ONE, Form.NONE),
        WireVerb("recv", Form.NONE, Form.ONE),
    )
}
"""The verbs of a communicator, by name."""

REDUCING_VERBS = frozenset(verb.name for verb in WIRE_VERBS.values() if verb.reduces)
"""The verbs of a communicator that take an op."""
ROOTED_VERBS = frozenset(verb.name for verb in WIRE_VERBS.values() if verb.root)
"""Those from or to one member."""


@dataclass(frozen=True)
class Verb:
    """A public verb.

    Args:
        name: as in torch.
        wire_verbs: the verbs of a communicator that carry it.
        writes: the parameter that it writes; "" where it writes none.
        kind: of what it writes, over its group's axes: "I" where all members get the same, or "V".
        reads: the parameters of tensors that it reads beside what it writes.
        alias_of: torch's older name of the same verb, if it has one.
        is_plain: whether one call of it is one call of that verb; else it is built above the wire.
        sends: whether it sends a message; receives do not.
        is_of_objects: whether it moves pickled objects.
    """

    name: str
    wire_verbs: tuple[str, ...]
    writes: str = ""
    kind: str = ""
    reads: tuple[str, ...] = ()
    alias_of: str = ""
    is_plain: bool = True
    sends: bool = False
    is_of_objects: bool = False

    @property
    def reduces(self) -> bool:
        """Whether it takes an op."""
        return not REDUCING_VERBS.isdisjoint(self.wire_verbs)


def _objects(
    name: str, wire_verbs: tuple[str, ...], writes: str = "", kind: str = "", sends: bool = False
) -> Verb:
    return Verb(name, wire_verbs, writes, kind, is_plain=False, sends=sends, is_of_objects=True)


_GATHER, _LIST = ("all_gather",), ("input_tensor_list",)

VERBS = {
    verb.name: verb
    for verb in (
        Verb("all_reduce", ("all_reduce",), "tensor", "I"),
        Verb("all_reduce_coalesced", ("all_reduce_list",), "tensors", "I"),
        Verb("reduce", ("reduce",), "tensor", "V"),
        Verb("reduce_scatter_tensor", ("reduce_scatter",), "output", "V", ("input",)),
        Verb(
            "reduce_scatter_single",
            ("reduce_scatter",),
            "output",
            "V",
            ("input",),
            "reduce_scatter_tensor",
        ),
        Verb("reduce_scatter", ("reduce_scatter_list",), "output", "V", ("input_list",)),
        Verb("broadcast", ("broadcast",), "tensor", "I"),
        Verb("all_gather_into_tensor", _GATHER, "output_tensor", "I", ("input_tensor",)),
        Verb(
            "all_gather_single",
            _GATHER,
            "output_tensor",
            "I",
            ("input_tensor",),
            "all_gather_into_tensor",
        ),
        Verb("all_gather", ("all_gather_list",), "tensor_list", "I", ("tensor",)),
        Verb("all_gather_coalesced", _GATHER, "output_tensor_lists", "I", _LIST, is_plain=False),
        Verb("gather", ("gather",), "gather_list", "V", ("tensor",)),
        Verb("scatter", ("scatter",), "tensor", "V", ("tensor", "scatter_list")),
        Verb("all_to_all", ("all_to_all",), "output_tensor_list", "V", _LIST),
        Verb("all_to_all_single", ("all_to_all_single",), "output", "V", ("input",)),
        Verb("barrier", ("barrier",)),
        Verb("send", ("send",), sends=True),
        Verb("isend", ("send",), sends=True),
        Verb("recv", ("recv",), "tensor", "V"),
        Verb("irecv", ("recv",), "tensor", "V"),
        Verb("batch_isend_irecv", ("send", "recv"), "p2p_op_list", "V"),
        Verb("all_reduce_multigpu", ("all_reduce",), "tensor_list", "I", is_plain=False),
        Verb("reduce_multigpu", ("reduce",), "tensor_list", "V", is_plain=False),
        Verb("broadcast_multigpu", ("broadcast",), "tensor_list", "I", is_plain=False),
        Verb("all_gather_multigpu", _GATHER, "output_tensor_lists", "I", _LIST, is_plain=False),
        Verb("monitored_barrier", (), is_plain=False),  # by way of the store
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
"""The public verbs, by name."""

SENDING_VERBS = frozenset(verb.name for verb in VERBS.values() if verb.sends)
"""The public verbs that send one message."""

OBJECT_VERBS = frozenset(verb.name for verb in VERBS.values() if verb.is_of_objects)
"""The public verbs that move pickled objects."""
