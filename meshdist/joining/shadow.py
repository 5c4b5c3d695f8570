"""Ranks without data answer the others' calls, whatever they are, until all ranks have none.

While a rank is in a join context it states, before each of its collectives, the call that it is
about to make (``statements``), in a round to which all members of the group come. A rank whose
data have ended has *joined*. It waits until a
member of any of its groups states a call; it states that it has joined, and then answers the call
with the neutral element. So every collective is answered. Programs outside of join contexts pay
nothing: channels have a guard in the context alone.

* *The end.* A rank that joins states so on the main group at once. When all members have joined
  there, all of them leave. Their statements show which ranks joined last.
* *Waiting.* A joined rank must not wait for one group while another needs it, so it polls them. It
  states that it has joined where it sees that a member has come to the next call: in the call
  words, which show calls in contexts alone, else in the header table, in shared memory, in a
  simulated meeting. Calls that members have started before they joined, on groups within the main
  group, are answered before it leaves. Answers are in flight, and not waited for before that: of
  two joined ranks each may come first to a call that the other answers later. Where it cannot see
  all members, since they are on several hosts, it begins a round at once, if all of them are in
  the main group.
* *Joinables.* Notices of a joinable, and calls that it owns, are given to its own handler in place
  of the neutral answer. A verb that a handler calls waits for the members' same call; other calls
  that come before it are answered.
* *Broken groups.* A joined rank does not touch broken groups, except the main group: they may have
  been broken before the context began. Their members learn it in their calls.
* *Exceptions.* A rank that leaves by an exception notes it in the store. A rank that waits for it
  looks there, ends the group's communication for all, and raises. The rank that leaves ends it
  itself where another rank may already wait in a call that it does not make.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..bootstrap.world import World
from ..checking.calls import Call, get_call
from ..checking.program import set_aside
from ..errors import (
    AbortedError,
    AgreementError,
    ArgumentError,
    BackendError,
    JoinError,
    MeshdistError,
)
from ..groups.channel import CallGuard, Channel
from ..groups.communicators import OpenCommunicator, get_registry
from ..groups.process_group import ProcessGroup, world_group
from ..runtime.untraced import untraced
from ..wires.prepared import PreparedCall
from .answers import answer
from .statements import NEVER, NOTICE, JoinedCommunicator, Statement
from .waits import Waits
from .whereabouts import Whereabouts, find_call, message_refusal


@dataclass(frozen=True)
class Joinables:
    """The options of a join context that the objects given to ``Join`` set.

    Args:
        handle: takes part in a notice or call of a joinable: given the call, and which members have
            not joined.
        is_strict: whether all ranks raise as soon as any rank has joined.
        calls_more: whether hooks make calls on joined ranks that no statement asks for.
        optimizers: torch's sharded optimizers in the context, whose steps begin with a notice.
    """

    handle: Callable[[Call, Sequence[bool]], None] = lambda *_: None
    is_strict: bool = False
    calls_more: bool = False
    optimizers: Collection[Any] = ()


class Shadow(CallGuard):
    """A join context of this rank, which guards its channels.

    Args:
        group: the main group, whose members leave together.
        device_type: the type of device on which notices travel there.
    """

    def __init__(
        self, group: ProcessGroup, device_type: str, joinables: Joinables = Joinables()
    ) -> None:
        self.group = group
        self.device_type = device_type
        self.joinables = joinables
        self.owner = ""  # of the calls that are started now
        self._has_joined = False
        self._is_late = True
        # The call to which all members have come, and which an answer of this rank starts next.
        self._admitted: Call | None = None
        # The open communicators with several members.
        self._communicators: dict[OpenCommunicator, JoinedCommunicator] = {}

    def begin(self) -> None:
        """Open the main group, and guard this rank's channels until ``end``; raise if nested."""
        world = self.group.world
        registry = get_registry(world)
        if registry.guard is not None:
            raise ArgumentError(
                "join contexts cannot be nested",
                where=f"rank {world.rank}, {self.group.name}",
                expected="one join context at a time",
                fix="give all joinables to one: Join([first, second])",
            )
        main = self.group.open_channel(self.device_type).opened
        # The world's channel is opened here, since a rank that joins at once makes no call there.
        if len(self.group.ranks) == world.size:
            world_group(world).open_channel(self.device_type)
        self._whereabouts = Whereabouts(world, main.label, self.group.ranks)
        self._waits = Waits(world, self._whereabouts)
        registry.guard = self
        self._watch = register_optimizer_step_pre_hook(self._refuse_unknown_step)
        for opened in registry.all_opened():
            for group in opened.groups():
                self.cover(group)
        self._main = self._communicators.get(main)  # None where this rank is alone there

    def cover(self, group: ProcessGroup) -> None:
        """Guard the open channels of ``group``: each of its calls begins with a statement."""
        group.leave_fast_paths()
        for channel in group.channels:
            if channel.communicator.size > 1:
                if channel.opened not in self._communicators:
                    communicator = JoinedCommunicator(group, channel)
                    communicator.is_wider = not {*self.group.ranks}.issuperset(group.ranks)
                    self._communicators[channel.opened] = communicator
                channel.guard = self

    def end(self, error: BaseException | None = None) -> None:
        """Leave the context, guard no more channels, and store any ``error`` for the members."""
        registry = get_registry(self.group.world)
        registry.guard = None
        self._watch.remove()
        for opened in registry.all_opened():
            for group in opened.groups():
                group.release()
        if error is not None:
            # Members of a broken group learn from their own calls that it is broken.
            communicators = self._communicators.values()
            labels = [each.label for each in communicators if not each.channel.is_broken()]
            self._whereabouts.leave(labels, self._whereabouts.reason_of(error))
        self._waits.leave(tuple(self._communicators.values()))

    @untraced
    def leave(self, error: BaseException | None = None) -> bool:
        """Join unless there is an error, then end; return whether this rank was among the last."""
        try:
            return error is None and self.join()
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.end(error)

    def _refuse_unknown_step(self, optimizer: Any, *_: object) -> None:
        """Raise if a sharded optimizer that is not in the context steps."""
        if isinstance(optimizer, TorchJoinable) and optimizer not in self.joinables.optimizers:
            raise JoinError(
                f"{type(optimizer).__name__} steps in an uneven loop that does not know it",
                where=f"rank {self.group.world.rank}, {self.group.name}",
                expected="a loop inside Join([model, optimizer])",
                found="a step that sends by torch's group, where no rank without data answers",
                fix="write `with md.distributed.Join([model, optimizer]):` around the loop",
            )

    # -- ranks that have data ---------------------------------------------------------------------

    def announce(self, notice: str) -> list[bool]:
        """Announce a joinable's action to the main group; return who has data, by member."""
        if self._main is None:  # this rank is alone in its group
            return [True]
        return self._tell(self._main, get_call(NOTICE, None, owner=notice))

    def announce_call(self, group: ProcessGroup, verb: str) -> list[int]:
        """Announce a call that uses no channel; return the ranks with data, which make the call."""
        communicator = self._communicators.get(group.open_channel(group.first_device_type()).opened)
        if communicator is None:
            return list(group.ranks)
        have_data = self._tell(communicator, get_call(verb, None))
        return list(compress(group.ranks, have_data))

    def _tell(self, communicator: JoinedCommunicator, call: Call) -> list[bool]:
        """Announce a call that no channel carries to its members; return whether each has data."""
        said = self._agree(communicator, Statement(call))
        communicator.is_settled = True
        return [not statement.has_joined for statement in said]

    @contextmanager
    def owned_by(self, owner: str) -> Iterator[None]:
        """Attribute calls inside to joinable ``owner``, whose handler follows on joined ranks."""
        before, self.owner = self.owner, owner
        try:
            yield
        finally:
            self.owner = before

    def enter(self, channel: Channel, prepared: PreparedCall) -> None:
        """State a call to the members, then enter it in its channel; raise for members' errors."""
        communicator = self._communicators[channel.opened]  # `cover` has added it
        mine = Statement.of(prepared, self.owner)
        self._agree(communicator, mine)
        try:
            channel.enter(prepared, is_guarded=False)
        except AgreementError as error:
            raise self.cause_of(channel, error) from None
        communicator.is_settled = True

    def find_joined(self, ranks: Collection[int]) -> list[int]:
        """Return the ranks of ``ranks`` that have joined and make no more calls."""
        if self.joinables.calls_more:
            return []
        has_joined, members = self._whereabouts.has_joined, self.group.ranks
        return [rank for rank in ranks if rank in members and has_joined(rank)]

    def check_message(self, channel: Channel, verb: str, tensor: Any, peer: int | None) -> None:
        """Raise if a message's ``peer`` has joined."""
        rank = None if peer is None else channel.group.ranks[peer]
        if rank in (None, self.group.world.rank) or not self._whereabouts.has_joined(rank):
            return
        refusal = message_refusal(channel, verb, tensor, rank)
        self._whereabouts.refuse(refusal)
        raise refusal

    def _agree(self, communicator: JoinedCommunicator, mine: Statement) -> Sequence[Statement]:
        """State ``mine``; return all members' statements."""
        admitted, self._admitted = self._admitted, None
        if admitted is not None and admitted.header == mine.call.header:
            return ()
        while True:
            communicator.say(mine._replace(has_joined=self._has_joined))
            said = self._read(communicator)
            going = self._check(communicator, said)
            if not self._has_joined or going is None or going.call.header == mine.call.header:
                return said
            self._respond(communicator, said, going)

    def _read(self, communicator: JoinedCommunicator) -> list[Statement]:
        """Wait for all members' statements of a call and return them; answer calls if joined."""
        assert communicator.begun is not None
        try:
            while self._has_joined and not communicator.is_ready():
                self._serve_next(communicator)
            limit = communicator.timeout_of(communicator.begun)
            self._waits.until(communicator.is_ready, [communicator], limit)
            return communicator.read()
        finally:
            communicator.end()

    def _check(
        self, communicator: JoinedCommunicator, said: Sequence[Statement]
    ) -> Statement | None:
        """Return the statement of members with data, None if all joined; or raise JoinError."""
        try:
            return find_call(communicator.channel, said, is_strict=self._is_strict(communicator))
        except JoinError as refusal:
            communicator.is_settled = True  # no rank makes the call
            self._whereabouts.refuse(refusal)
            raise

    def _is_strict(self, communicator: JoinedCommunicator) -> bool:
        return self.joinables.is_strict and communicator is self._main

    # -- a rank that has none left ----------------------------------------------------------------

    def join(self) -> bool:
        """Answer calls until all ranks ran out of data; return whether this was among the last."""
        self._has_joined = True
        main = self._main
        if main is None:
            return True
        self._whereabouts.join()
        for communicator in tuple(self._communicators.values()):
            if communicator is main or self._begins_at_once(communicator):
                self._say_joined(communicator)
        while not main.is_over or self._is_at_work():
            self._serve_next()
        self._waits.end_answers()
        return self._is_late

    def _say_joined(self, communicator: JoinedCommunicator) -> None:
        communicator.say(Statement(has_joined=True, is_late=self._is_late))

    def _serve_next(self, awaited: JoinedCommunicator | None = None) -> None:
        """Answer a call of a member; if there is none, wait for a call or for ``awaited``."""
        self._waits.end_answers(ready_alone=True)
        due = self._find_due()
        try:
            if due is None:
                self._wait_for_any(awaited)
            elif due.begun is None:
                self._say_joined(due)
            else:
                self._serve(due)
        except AbortedError:
            if not self._leave_broken(due):
                raise

    def _serve(self, communicator: JoinedCommunicator) -> None:
        """Answer a call on ``communicator`` that all members have stated."""
        said = self._read(communicator)
        going = self._check(communicator, said)
        if going is None:
            communicator.is_settled = communicator.is_over = True
            return
        if communicator is self._main:
            self._is_late = False
        self._respond(communicator, said, going)
        if self._begins_at_once(communicator):
            self._say_joined(communicator)

    def _respond(
        self, communicator: JoinedCommunicator, said: Sequence[Statement], going: Statement
    ) -> None:
        """Take part in ``going``, the call or notice of the members that in ``said`` have data."""
        with set_aside(), self.owned_by(""):  # this rank may be inside a call of its own
            have_data, call = [not statement.has_joined for statement in said], going.call
            if call.verb == NOTICE:
                self.joinables.handle(call, have_data)
            else:
                self._admitted = call
                if call.owner:
                    self.joinables.handle(call, have_data)
                else:
                    device_type = communicator.channel.device_type
                    self._waits.keep(answer(communicator.group, device_type, said, going))
                self._admitted = None  # the answer may have entered no channel
        communicator.is_settled = True

    # -- where it is needed -----------------------------------------------------------------------

    def _begins_at_once(self, communicator: JoinedCommunicator) -> bool:
        """Return whether to say "joined" at once: the communicator shows no calls of others."""
        is_seen = communicator.channel.shows_calls
        return not is_seen and not communicator.is_wider and communicator.is_open()

    def _find_due(self) -> JoinedCommunicator | None:
        """Return a communicator with a call to answer, or that waits for this rank, else None."""
        for communicator in tuple(self._communicators.values()):
            if communicator.begun is not None:
                if not communicator.is_held() and communicator.is_ready():
                    return communicator
            elif (
                communicator.is_open()
                and communicator.is_awaited()
                and not self._is_ahead(communicator)
            ):
                return communicator
        return None

    def _is_ahead(self, communicator: JoinedCommunicator) -> bool:
        """Return whether a member is in a context that this rank has yet to enter."""
        if not communicator.is_ahead:
            labels = [each.label for each in self._communicators.values()]
            communicator.is_ahead = self._whereabouts.is_ahead(communicator.group.ranks, labels)
        return communicator.is_ahead

    def _is_at_work(self) -> bool:
        """Return whether this rank waits for statements, or a member waits for its answer."""
        return any(each.begun is not None for each in self._communicators.values())

    def _leave_broken(self, due: JoinedCommunicator | None) -> bool:
        """End waits on broken groups; return False, and end none, if the error must be raised."""
        # Members that go on make no calls on a broken group. A call of this rank that waits there
        # must raise, and so must any wait on the main group.
        broken = [
            each
            for each in self._communicators.values()
            if each.channel.is_broken() and (each is due or each.begun is not None)
        ]
        if not broken or any(each.is_held() or each is self._main for each in broken):
            return False
        for communicator in broken:
            communicator.end()
        return True

    # -- waiting ----------------------------------------------------------------------------------

    def _wait_for_any(self, awaited: JoinedCommunicator | None) -> None:
        """Wait for a call to answer, or until ``awaited``, if any, is due; raise if it is late."""
        communicators = [
            each
            for each in self._communicators.values()
            if each.begun is not None or (each is self._main and not each.is_over)
        ]

        def is_ready() -> bool:
            is_done = awaited is not None and awaited.is_ready()
            return bool(self._waits.has_ready_answer() or is_done or self._find_due())

        self._waits.until(is_ready, communicators, awaited.channel.timeout if awaited else NEVER)
        if awaited is not None and not is_ready():
            awaited.read()  # raises, since members with data did not come

    def cause_of(self, channel: Channel, error: MeshdistError) -> MeshdistError:
        """Return the error of a member that left by an exception, if any did, else ``error``."""
        communicator = self._communicators.get(channel.opened)
        if communicator is None or not isinstance(error, (AgreementError, BackendError)):
            return error
        return self._waits.break_if_left(communicator) or error


def find_shadow(world: World) -> Shadow | None:
    """Return the join context of this rank in ``world``, or None."""
    found = get_registry(world).guard
    return found if isinstance(found, Shadow) else None
