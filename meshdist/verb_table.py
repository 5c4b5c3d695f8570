"""The facts of each verb: two tables, from which every other list of verbs is made.

``VERBS`` has the public verbs, ``WIRE_VERBS`` those of a communicator that carry them. This
module imports the standard library alone, so that the command line can use it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
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
        is_plain: whether one call of it is one call of that verb; else it is built above the wire.
        alias_of: torch's older name of the same verb, if it has one.
        sends: whether it sends a message; receives do not.
        is_of_objects: whether it moves pickled objects.
    """

    name: str
    wire_verbs: tuple[str, ...]
    is_plain: bool = True
    alias_of: str = ""
    sends: bool = False
    is_of_objects: bool = False

    @property
    def reduces(self) -> bool:
        """Whether it takes an op."""
        return not REDUCING_VERBS.isdisjoint(self.wire_verbs)


def _objects(name: str, *wire_verbs: str, sends: bool = False) -> Verb:
    return Verb(name, wire_verbs, is_plain=False, sends=sends, is_of_objects=True)


VERBS = {
    verb.name: verb
    for verb in (
        Verb("all_reduce", ("all_reduce",)),
        Verb("all_reduce_coalesced", ("all_reduce_list",)),
        Verb("reduce", ("reduce",)),
        Verb("reduce_scatter_tensor", ("reduce_scatter",)),
        Verb("reduce_scatter_single", ("reduce_scatter",), alias_of="reduce_scatter_tensor"),
        Verb("reduce_scatter", ("reduce_scatter_list",)),
        Verb("broadcast", ("broadcast",)),
        Verb("all_gather_into_tensor", ("all_gather",)),
        Verb("all_gather_single", ("all_gather",), alias_of="all_gather_into_tensor"),
        Verb("all_gather", ("all_gather_list",)),
        Verb("all_gather_coalesced", ("all_gather",), is_plain=False),
        Verb("gather", ("gather",)),
        Verb("scatter", ("scatter",)),
        Verb("all_to_all", ("all_to_all",)),
        Verb("all_to_all_single", ("all_to_all_single",)),
        Verb("barrier", ("barrier",)),
        Verb("send", ("send",), sends=True),
        Verb("isend", ("send",), sends=True),
        Verb("recv", ("recv",)),
        Verb("irecv", ("recv",)),
        Verb("batch_isend_irecv", ("send", "recv")),
        Verb("all_reduce_multigpu", ("all_reduce",), is_plain=False),
        Verb("reduce_multigpu", ("reduce",), is_plain=False),
        Verb("broadcast_multigpu", ("broadcast",), is_plain=False),
        Verb("all_gather_multigpu", ("all_gather",), is_plain=False),
        Verb("monitored_barrier", (), is_plain=False),  # by way of the store
        _objects("all_gather_object", "all_gather", "all_gather_list"),
        _objects("gather_object", "all_gather", "all_to_all_single"),
        _objects("broadcast_object_list", "all_gather", "broadcast"),
        _objects("scatter_object_list", "broadcast", "all_to_all_single"),
        _objects("send_object_list", "send", "recv", sends=True),
        _objects("recv_object_list", "send", "recv"),
    )
}
"""The public verbs, by name."""

SENDING_VERBS = frozenset(verb.name for verb in VERBS.values() if verb.sends)
"""The public verbs that send one message."""

OBJECT_VERBS = frozenset(verb.name for verb in VERBS.values() if verb.is_of_objects)
"""The public verbs that move pickled objects."""
