"""Ranks without data answer the others' calls, whatever they are, until all ranks have none.

While a rank is in a join context it says before each of its collectives what it is about to call
(``announcements``): in shared words where all members of the group are on one host, else in a round
to which all of them come. A rank whose data have ended, one that has *joined*, waits until a member
of any of its groups says so; it says that it has joined, and then answers the call with the neutral
element. So every collective is answered. Programs outside of join contexts pay nothing: channels
have a guard in the context alone.

* *The end.* A rank that joins announces itself on the main group at once. Where all members have
  joined there, all of them leave. What they say shows which ranks joined last.
* *Words.* A rank that has data waits for the others only in a round, and where it must know which
  ranks have joined: in what a joinable begins, in calls that come from a source, in strict
  contexts. What it sends else it sends at once.
* *Waiting.* A joined rank must not wait for one group while another needs it, so it polls them. It
  announces itself where it sees that a member has come to the next call: in the call words, which
  show calls in contexts alone (a member without some is in none), else in the header table, in
  shared memory, in a simulated meeting. What members have started on groups within the main one
  before they joined is answered before it leaves. Answers are in flight, and not waited for before
  that: of two ranks that have joined each may come first to what the other answers later. Where it
  cannot see all members, since they are on several hosts, it begins a round at once, if all of them
  are in the main group.
* *Joinables.* What a joinable announces, and calls that it owns, are given to its own handler in
  place of the neutral answer. A verb that a handler calls waits for the members' same call; others
  that come before it are answered.
* *Broken groups.* A rank that has joined leaves them alone, but for the main one: they may have
  been broken before the context began, and be told of late. Their members learn it in their calls.
* *Exceptions.* A rank that leaves by an exception says so in the store. A rank that waits for it
  looks there, ends the group's communication for all, and raises. One that leaves does so itself
  where another may have gone on to a call that it does not make.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any

from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..bootstrap.world import World
from ..checking.call_words import StatementTooLong
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
from .announcements import NEVER, NOTICE, JoinedCommunicator, Statement
from .answers import answer
from .waits import Waits
from .whereabouts import TOO_LONG, Whereabouts, find_call, has_source, message_refusal

__all__ = ["Joinables", "Shadow", "find_shadow"]


@dataclass(frozen=True)
class Joinables:
    """The part that the objects given to ``Join`` have in its context; a loop has none.

    Args:
        handle: takes part in what a joinable begins or calls: given the call, and which members
            have not joined.
        is_strict: whether all ranks raise as soon as one has joined.
        calls_more: whether ranks that have joined call what is not announced, too.
        optimizers: those of torch's whose steps are announced.
    """

    handle: Callable[[Call, Sequence[bool]], None] = lambda *_: None
    is_strict: bool = False
    calls_more: bool = False
    optimizers: Collection[Any] = ()


@dataclass(eq=False)
class Shadow(CallGuard):
    """One join context of this rank.

    Args:
        group: the main group, whose members leave together.
        device_type: of what is announced there.
        joinables: that are in the context.
    """

    group: ProcessGroup
    device_type: str
    joinables: Joinables = Joinables()
    owner: str = field(default="", init=False)
    """Of the calls that are started now."""
    _has_joined: bool = field(default=False, init=False)
    _is_late: bool = field(default=True, init=False)
    _admitted: Call | None = field(default=None, init=False)
    """The call that all have come to, which this rank is to start next."""
    _places: dict[OpenCommunicator, JoinedCommunicator] = field(default_factory=dict, init=False)
    """Of all communicators that have several members."""

    def begin(self) -> None:
        """Let all calls of this rank's groups be announced; opens the main group."""
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
        # A rank that joins at once has made no call that opens it.
        if len(self.group.ranks) == world.size:
            world_group(world).open_channel(self.device_type)
        self._whereabouts = Whereabouts(world, main.label, self.group.ranks)
        self._waits = Waits(world, self._whereabouts)
        registry.guard = self
        self._watch = register_optimizer_step_pre_hook(self._refuse_unknown_step)
        for opened in registry.all_opened():
            for group in opened.groups():
                self.cover(group)
        self._main = self._places.get(main)  # None where this rank is alone there

    def cover(self, group: ProcessGroup) -> None:
        """Let all calls of ``group`` be announced, as far as it is open."""
        group.fast_path = None
        for channel in group.channels:
            if channel.communicator.size > 1:
                if channel.opened not in self._places:
                    self._places[channel.opened] = JoinedCommunicator(group, channel)
                channel.guard = self

    def end(self, error: BaseException | None = None) -> None:
        """Leave the context, which ``error`` ends; calls are not announced any more."""
        registry = get_registry(self.group.world)
        registry.guard = None
        self._watch.remove()
        for opened in registry.all_opened():
            for group in opened.groups():
                group.release()
        if error is not None:
            # Members of a broken group are told by what broke it.
            places = self._places.values()
            labels = [place.label for place in places if not place.channel.is_broken()]
            self._whereabouts.leave(labels, self._whereabouts.reason_of(error))
        self._waits.leave(tuple(self._places.values()))

    @untraced
    def leave(self, error: BaseException | None = None) -> bool:
        """Join, unless there is an error, and ``end``; whether this rank was among the last."""
        try:
            return error is None and self.join()
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.end(error)

    def _refuse_unknown_step(self, optimizer: Any, *_: object) -> None:
        """Raise where an optimizer that sends by torch's groups steps unannounced."""
        if isinstance(optimizer, TorchJoinable) and optimizer not in self.joinables.optimizers:
            raise JoinError(
                f"{type(optimizer).__name__} steps in an uneven loop that does not know it",
                where=f"rank {self.group.world.rank}, {self.group.name}",
                expected="a loop inside Join([model, optimizer])",
                found="a step that sends by torch's group, where no rank without data answers",
                fix="write `with md.Join([model, optimizer]):` around the loop",
            )

    # -- ranks that have data ---------------------------------------------------------------------

    def announce(self, notice: str) -> list[bool]:
        """Tell the main group that a joinable begins something; return which have not joined."""
        if self._main is None:  # a group of one
            return [True]
        return self._tell(self._main, get_call(NOTICE, None, owner=notice))

    def announce_call(self, group: ProcessGroup, verb: str) -> list[int]:
        """Announce a call that goes by no channel; return the ranks with data, which make it."""
        place = self._places.get(group.open_channel(group.first_device_type()).opened)
        if place is None:
            return list(group.ranks)
        at_work = self._tell(place, get_call(verb, None))
        return list(compress(group.ranks, at_work))

    def _tell(self, place: JoinedCommunicator, call: Call) -> list[bool]:
        """Announce what no channel carries; return which members have not joined."""
        said = self._agree(place, Statement(call), waits=True)
        place.is_settled = True
        return [not one.has_joined for one in said]

    @contextmanager
    def owned_by(self, owner: str) -> Iterator[None]:
        """Calls inside are a joinable's: on ranks that have joined its handler takes part."""
        before, self.owner = self.owner, owner
        try:
            yield
        finally:
            self.owner = before

    def enter(self, channel: Channel, prepared: PreparedCall) -> None:
        """Enter a call as ``Channel.enter`` does, for ranks that have no data left."""
        place = self._places[channel.opened]  # it is covered
        mine = Statement.of(prepared, self.owner)
        self._agree(place, mine, waits=has_source(mine.call))
        try:
            channel.enter(prepared, is_guarded=False)
        except AgreementError as error:
            raise self.cause_of(channel, error) from None
        place.is_settled = True

    def find_joined(self, ranks: Collection[int]) -> list[int]:
        """Those of ``ranks`` that will call nothing of their own before the context ends."""
        if self.joinables.calls_more:
            return []
        has_joined, members = self._whereabouts.has_joined, self.group.ranks
        return [rank for rank in ranks if rank in members and has_joined(rank)]

    def check_message(self, channel: Channel, verb: str, tensor: Any, peer: int | None) -> None:
        """Raise where a message is for, or from, a rank that has joined."""
        rank = None if peer is None else channel.group.ranks[peer]
        if rank in (None, self.group.world.rank) or not self._whereabouts.has_joined(rank):
            return
        refusal = message_refusal(channel, verb, tensor, rank)
        self._whereabouts.refuse(refusal)
        raise refusal

    def _agree(
        self, place: JoinedCommunicator, mine: Statement, *, waits: bool
    ) -> Sequence[Statement]:
        """Return when the members that go on are at the same call as this one.

        Or, where no rank need wait for that, as soon as they can know of it. ``waits`` says that it
        must be known which members have joined.
        """
        admitted, self._admitted = self._admitted, None
        if admitted is not None and admitted.header == mine.call.header:
            return ()
        waits = waits or self._has_joined or self._is_strict(place)
        while True:
            self._say(place, mine._replace(has_joined=self._has_joined))
            if not waits and not place.is_in_round():
                place.end()
                self._waits.refuse_gone(place)
                return ()
            said = self._read(place)
            going = self._check(place, said)
            if not self._has_joined or going is None or going.call.header == mine.call.header:
                return said
            self._respond(place, said, going)

    def _say(self, place: JoinedCommunicator, mine: Statement) -> None:
        """Say ``mine`` to the members of a communicator, once there is room for it."""
        if not place.has_room(mine):
            self._wait(place, partial(place.has_room, mine), mine)
            if not place.has_room(mine):
                raise place.not_begun(mine)
        try:
            place.say(mine)
        except StatementTooLong:
            self._whereabouts.leave([place.label], TOO_LONG)
            self._waits.refuse_left([place])

    def _read(self, place: JoinedCommunicator) -> list[Statement]:
        """Return what all have said there, once they have; answer other calls meanwhile."""
        assert place.begun is not None
        try:
            while self._has_joined and not place.is_due():
                self._serve_next(place)
            self._wait(place, place.is_ready, place.begun)
            return place.read()
        finally:
            place.end()

    def _check(self, place: JoinedCommunicator, said: Sequence[Statement]) -> Statement | None:
        """Return what those say that go on; None if all joined; JoinError on all alike."""
        try:
            return find_call(place.channel, said, is_strict=self._is_strict(place))
        except JoinError as refusal:
            place.is_settled = True  # no rank makes it
            self._whereabouts.refuse(refusal)
            raise

    def _is_strict(self, place: JoinedCommunicator) -> bool:
        return self.joinables.is_strict and place is self._main

    # -- a rank that has none left ----------------------------------------------------------------

    def join(self) -> bool:
        """Answer calls until no rank has data left; return whether this was among the last."""
        self._has_joined = True
        main = self._main
        if main is None:
            return True
        self._whereabouts.join()
        for place in tuple(self._places.values()):
            if place is main or self._begins_at_once(place):
                self._say_joined(place)
        while not main.is_over or self._is_at_work():
            self._serve_next()
        self._waits.end_answers()
        return self._is_late

    def _say_joined(self, place: JoinedCommunicator) -> None:
        self._say(place, Statement(has_joined=True, is_late=self._is_late))

    def _serve_next(self, awaited: JoinedCommunicator | None = None) -> None:
        """Answer one call; where none is there wait for one, or until ``awaited`` is due."""
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

    def _serve(self, place: JoinedCommunicator) -> None:
        """Answer what all have said on a communicator."""
        said = self._read(place)
        going = self._check(place, said)
        if going is None:
            place.is_settled = place.is_over = True
            return
        if place is self._main:
            self._is_late = False
        self._respond(place, said, going)
        if self._begins_at_once(place):
            self._say_joined(place)

    def _respond(
        self, place: JoinedCommunicator, said: Sequence[Statement], going: Statement
    ) -> None:
        """Take part in what the members that go on begin."""
        with set_aside(), self.owned_by(""):  # this rank may be inside a call of its own
            at_work, call = [not one.has_joined for one in said], going.call
            if call.verb == NOTICE:
                self.joinables.handle(call, at_work)
            else:
                self._admitted = call
                if call.owner:
                    self.joinables.handle(call, at_work)
                else:
                    device_type = place.channel.device_type
                    self._waits.keep(answer(place.group, device_type, said, going))
                self._admitted = None  # not every call is begun here, or goes by a channel
        place.is_settled = True

    # -- where it is needed -----------------------------------------------------------------------

    def _reaches(self, place: JoinedCommunicator) -> bool:
        """Return whether all members of a communicator leave the context with this rank."""
        return {*self.group.ranks}.issuperset(place.group.ranks)

    def _begins_at_once(self, place: JoinedCommunicator) -> bool:
        """Return whether it is announced there always, since calls of others cannot be seen."""
        is_seen = place.uses_words or place.channel.shows_calls
        return not is_seen and self._reaches(place) and place.is_open()

    def _find_due(self) -> JoinedCommunicator | None:
        """Where there is something to do: all have said something, or a member waits for this."""
        for place in tuple(self._places.values()):
            if place.begun is not None:
                if not place.is_held() and place.is_due():
                    return place
            elif place.is_open() and place.is_awaited() and not self._is_ahead(place):
                return place
        return None

    def _is_ahead(self, place: JoinedCommunicator) -> bool:
        """Return whether what is awaited there is none of this context; it is looked up once."""
        if not (place.uses_words or place.is_ahead):
            labels = [one.label for one in self._places.values()]
            place.is_ahead = self._whereabouts.is_ahead(place.group.ranks, labels)
        return place.is_ahead

    def _is_at_work(self) -> bool:
        """Whether something is begun, or a call that a member started before it had joined."""
        return any(
            place.begun is not None
            or (
                place.uses_words and self._reaches(place) and place.is_open() and place.is_awaited()
            )
            for place in self._places.values()
        )

    def _leave_broken(self, due: JoinedCommunicator | None) -> bool:
        """Wait no more for calls where a group is broken: no member that goes on makes any there.

        Returns:
            Whether that was so at ``due``, or where something is begun; never on the main group, or
            where a call of this rank waits.
        """
        broken = [
            place
            for place in self._places.values()
            if place.channel.is_broken() and (place is due or place.begun is not None)
        ]
        if not broken or any(place.is_held() or place is self._main for place in broken):
            return False
        for place in broken:
            place.end()
        return True

    # -- waiting ----------------------------------------------------------------------------------

    def _wait(
        self, place: JoinedCommunicator, is_ready: Callable[[], bool], mine: Statement
    ) -> None:
        """Wait for members of a communicator, to say ``mine`` or for what they say.

        At most for its timeout. Raise where a member that is missed has left.
        """

        def is_over() -> bool:
            return is_ready() or place.find_left() is not None

        self._waits.until(is_over, [place], place.timeout_of(mine))
        if not is_ready():
            self._waits.refuse_gone(place)

    def _wait_for_any(self, awaited: JoinedCommunicator | None) -> None:
        """Return when ``awaited`` is due, or there is something else to do.

        A rank without data waits as long as others have some; for what they have begun, at most the
        timeout of their group.
        """
        places = [
            place
            for place in self._places.values()
            if place.begun is not None or (place is self._main and not place.is_over)
        ]

        def is_ready() -> bool:
            is_done = awaited is not None and awaited.is_due()
            return bool(self._waits.has_ready_answer() or is_done or self._find_due())

        self._waits.until(is_ready, places, awaited.channel.timeout if awaited else NEVER)
        if awaited is not None and not is_ready():
            awaited.read()  # raises: members that have data did not come

    def cause_of(self, channel: Channel, error: MeshdistError) -> MeshdistError:
        """Why a call has failed: a member has left, and has ended or closed the group, or not."""
        place = self._places.get(channel.opened)
        if place is None or not isinstance(error, (AgreementError, BackendError)):
            return error
        return self._waits.end_for_cause(place) or error


def find_shadow(world: World) -> Shadow | None:
    """The join context that this rank is in, if it is in one."""
    found = get_registry(world).guard
    return found if isinstance(found, Shadow) else None
