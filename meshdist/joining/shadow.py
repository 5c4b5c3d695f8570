"""Ranks without data answer the others' calls, whatever they are, until all ranks have none.

While a rank is in a join context each of its collectives comes behind a round in which all members
of the group say what they are about to call (``announcements``). A rank whose data have ended, one
that has *joined*, waits until a member of any of its groups begins such a round; it takes part in
it, and then answers the call with the neutral element. So every collective is answered. Programs
outside of join contexts pay nothing: channels have a guard in the context alone.

* *The end.* A rank that joins begins a round on the main group at once. Where all members of a
  round there have joined, all of them leave. What they say shows which ranks joined last.
* *Tables.* Where all members of a group are on one host they announce their calls in shared words
  (``announcement_table``), from the second call of a context on. A rank that has data then waits
  for the others' announcements only where it must know which ranks have joined: in what a
  joinable begins, in calls that come from a source, in strict contexts. What it sends it sends at
  once.
* *Waiting.* A joined rank must not wait for one group while another needs it, so it starts rounds
  and polls them. It begins one where it sees that a member has come to the next call: in the
  announcement table, which shows calls in contexts alone (a member without one is in none), else
  in the header table, in shared memory, in a simulated meeting. What members have started on groups
  within the main one before they joined is answered before it leaves. Answers are in flight, and
  not waited for before that: of two ranks that have joined each may come first to what the other
  answers later. Where it cannot see all members, since they are on several hosts, it begins one at
  once, if all of them are in the main group.
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
from datetime import timedelta
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
from ..groups.communicators import get_registry
from ..groups.process_group import ProcessGroup, world_group
from ..runtime.untraced import untraced
from ..wires.operations import WireTimeout
from ..wires.prepared import PreparedCall
from ..wires.work import Work
from .announcements import NOTICE, AnnouncementRound, JoinedCommunicator, Places, Statement
from .waits import Waits
from .whereabouts import Whereabouts, find_call, has_source, message_refusal

__all__ = ["Shadow", "find_shadow"]

_NEVER = timedelta(days=3650)


@dataclass(eq=False)
class Shadow(CallGuard):
    """One join context of this rank.

    Args:
        group: whose members leave together.
        device_type: of the group's rounds.
        answer: calls the verb that is announced with neutral arguments, given the group, the
            type of its device, what all members say, and what those that go on; returns what is in
            flight.
        handle: takes part in what a joinable begins or calls: given the call, and which members
            have not joined.
        is_strict: whether all ranks raise as soon as one has joined.
        calls_more: whether ranks that have joined call what is not announced, too.
        optimizers: those of torch's joinables whose steps are announced.
    """

    group: ProcessGroup
    device_type: str
    answer: Callable[[ProcessGroup, str, Sequence[Statement], Statement], Work | None]
    handle: Callable[[Call, Sequence[bool]], None] = lambda *_: None
    is_strict: bool = False
    calls_more: bool = False
    optimizers: Collection[Any] = ()
    owner: str = field(default="", init=False)
    """Of the calls that are started now."""
    _has_joined: bool = field(default=False, init=False)
    _is_late: bool = field(default=True, init=False)
    _refusal: JoinError | None = field(default=None, init=False)
    """The error that was raised here of a call that cannot be answered."""
    _admitted: Call | None = field(default=None, init=False)
    """The call of which the round has been, which this rank is to start next."""

    def begin(self) -> None:
        """Let all calls of this rank's groups be announced; opens the main group."""
        self._registry = get_registry(self.group.world)
        if self._registry.guard is not None:
            raise ArgumentError(
                "join contexts cannot be nested",
                where=f"rank {self.group.world.rank}, {self.group.name}",
                expected="one join context at a time",
                fix="give all joinables to one: Join([first, second])",
            )
        main = self.group.open_channel(self.device_type).opened
        self._places = Places(main, self.group.ranks)
        world = self.group.world
        # A rank that joins at once has made no call that opens it.
        if len(self.group.ranks) == world.size:
            world_group(world).open_channel(self.device_type)
        self._whereabouts = Whereabouts(world, main.label, self.group.ranks)
        self._waits = Waits(world, self._whereabouts)
        self._registry.guard = self
        self._watch = register_optimizer_step_pre_hook(self._refuse_unknown_step)
        for opened in self._registry.all_opened():
            for group in opened.groups():
                self.cover(group)

    def cover(self, group: ProcessGroup) -> None:
        """Let all calls of ``group`` be announced, as far as it is open."""
        group.fast_path = None
        for channel in group.channels:
            if channel.communicator.size > 1:
                self._places.cover(group, channel)
                channel.guard = self

    def end(self, error: BaseException | None = None) -> None:
        """Leave the context, which ``error`` ends; calls are not announced any more."""
        self._registry.guard = None
        self._watch.remove()
        for opened in self._registry.all_opened():
            for group in opened.groups():
                group.release()
        if error is not None:
            # Members of a broken group are told by what broke it.
            whole = [one.channel for one in self._places if not one.channel.is_broken()]
            labels = [one.opened.label for one in whole]
            self._whereabouts.leave(labels, self._refusal or error)
        self._waits.leave(tuple(self._places))

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
        if isinstance(optimizer, TorchJoinable) and optimizer not in self.optimizers:
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
        place = self._places.main
        if place is None:  # a group of one
            return [True]
        said = self._agree(
            place, place.channel, Statement(get_call(NOTICE, None, owner=notice)), waits=True
        )
        place.settle()
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
        place = self._places.find(channel.opened)
        assert place is not None  # it is covered
        mine = Statement.of(prepared, self.owner)
        self._agree(place, channel, mine, waits=has_source(mine.call))
        try:
            channel.enter(prepared, is_guarded=False)
        except AgreementError as error:
            raise self.cause_of(channel, error) from None
        place.settle()

    def find_joined(self, ranks: Collection[int]) -> list[int]:
        """Those of ``ranks`` that will call nothing of their own before the context ends."""
        if self.calls_more:
            return []
        has_joined, members = self._whereabouts.has_joined, self.group.ranks
        return [rank for rank in ranks if rank in members and has_joined(rank)]

    def announce_call(self, group: ProcessGroup, verb: str) -> list[int]:
        """Announce a call that goes by no channel; return the ranks with data, which make it."""
        channel = group.open_channel(group.first_device_type())
        place = self._places.find(channel.opened)
        if place is None:
            return list(group.ranks)
        said = self._agree(place, channel, Statement(get_call(verb, None)), waits=True)
        place.settle()
        return [rank for rank, one in zip(group.ranks, said, strict=True) if not one.has_joined]

    def _agree(
        self, place: JoinedCommunicator, channel: Channel, mine: Statement, *, waits: bool
    ) -> list[Statement]:
        """Return when the members that go on are at the same call as this one.

        Or, where no rank need wait for that, as soon as they can know of it. ``waits`` says that it
        must be known which members have joined.
        """
        admitted, self._admitted = self._admitted, None
        if admitted is not None and admitted.header == mine.call.header:
            return []
        waits = waits or (self.is_strict and place is self._places.main)
        while True:
            self._make_room(place, channel)
            if not (waits or self._has_joined) and place.say(mine):
                left = place.find_left()
                if left is not None:
                    self._waits.raise_gone(place, left)
                return []
            mine = mine._replace(has_joined=self._has_joined)
            begun = place.begin_round(mine, channel.timeout)
            if self._has_joined:
                self._serve_until(place, begun)
            said = self._finish(place, begun)
            going = self._check(place, said)
            if not self._has_joined or going is None or going.call.header == mine.call.header:
                return said
            self._respond(place, said, going)

    def _serve_until(self, place: JoinedCommunicator, begun: AnnouncementRound) -> None:
        """Answer calls on other groups until a round is done that a call here has begun."""
        place.round, place.is_held = begun, True
        try:
            while not begun.is_ready():
                self._serve_next(begun)
        finally:
            place.round, place.is_held = None, False

    def _check(self, place: JoinedCommunicator, said: Sequence[Statement]) -> Statement | None:
        """Return what those say that go on; None if all joined; JoinError on all alike."""
        is_strict = self.is_strict and place is self._places.main
        try:
            return find_call(place.channel, said, is_strict=is_strict)
        except JoinError as refusal:
            self._refusal = refusal
            place.settle()  # no rank makes it
            raise

    def check_message(self, channel: Channel, verb: str, tensor: Any, peer: int | None) -> None:
        """Raise where a message is for, or from, a rank that has joined."""
        rank = None if peer is None else channel.group.ranks[peer]
        if rank in (None, self.group.world.rank) or not self._whereabouts.has_joined(rank):
            return
        self._refusal = message_refusal(channel, verb, tensor, rank)
        raise self._refusal

    # -- a rank that has none left ----------------------------------------------------------------

    def join(self) -> bool:
        """Answer calls until no rank has data left; return whether this was among the last."""
        self._has_joined = True
        main = self._places.main
        if main is None:
            return True
        self._whereabouts.join()
        for place in tuple(self._places):
            if place is main or self._places.begins_at_once(place):
                self._begin_round(place)
        while not main.is_over or self._places.is_at_work():
            self._serve_next()
        self._waits.end_answers()
        return self._is_late

    def _serve_next(self, begun: AnnouncementRound | None = None) -> None:
        """Answer one call; where none is there wait for one, or until ``begun`` is done."""
        self._waits.end_answers(ready_alone=True)
        due = self._places.find_due()
        try:
            if due is None:
                self._wait_for_any(begun)
            else:
                self._serve(due)
        except AbortedError:
            if not self._places.leave_broken(due):
                raise

    def _serve(self, place: JoinedCommunicator) -> None:
        """Begin the round that others wait for, or answer what one that is done announces."""
        if place.round is None:
            self._begin_round(place)
            return
        begun, place.round = place.round, None
        said = self._finish(place, begun)
        going = self._check(place, said)
        if going is None:
            place.settle()
            place.is_over = True
            return
        if place is self._places.main:
            self._is_late = False
        self._respond(place, said, going)
        if self._places.begins_at_once(place):
            self._begin_round(place)

    def _begin_round(self, place: JoinedCommunicator) -> None:
        mine = Statement(has_joined=True, is_late=self._is_late)
        place.round = place.begin_round(mine, _NEVER)

    def _respond(
        self, place: JoinedCommunicator, said: Sequence[Statement], going: Statement
    ) -> None:
        """Take part in what the members that go on begin."""
        with set_aside(), self.owned_by(""):  # this rank may be inside a call of its own
            at_work, call = [not one.has_joined for one in said], going.call
            if call.verb == NOTICE:
                self.handle(call, at_work)
            else:
                self._admitted = call
                if call.owner:
                    self.handle(call, at_work)
                else:
                    device_type = place.channel.device_type
                    self._waits.keep(self.answer(place.group, device_type, said, going))
                self._admitted = None  # not every call is begun here, or goes by a channel
        place.settle()

    # -- waiting ----------------------------------------------------------------------------------

    def _make_room(self, place: JoinedCommunicator, channel: Channel) -> None:
        """Return when the next announcement there is written over none that is needed."""
        if place.has_room():
            return
        self._waits.until(place.has_room, [channel], channel.timeout, [place])
        if not place.has_room():
            raise channel.explain(WireTimeout("a rank is too many calls behind"))

    def _finish(self, place: JoinedCommunicator, begun: AnnouncementRound) -> list[Statement]:
        """Return what is said in a round, once all members have come to it."""
        channel = place.channel
        timeout = _NEVER if self._has_joined else channel.timeout
        unwatched = [] if begun.is_watched else [place]
        self._waits.until(begun.is_ready, [channel], timeout, unwatched)
        left = begun.find_left()
        if left is not None:
            self._waits.raise_gone(place, left)
        said = begun.finish()
        place.note(said)
        return said

    def cause_of(self, channel: Channel, error: MeshdistError) -> MeshdistError:
        """Why a call has failed: a member has left, and has ended or closed the group, or not."""
        if isinstance(error, (AgreementError, BackendError)):
            try:
                self._waits.raise_left([channel])
            except JoinError as cause:
                return cause
        return error

    def _wait_for_any(self, begun: AnnouncementRound | None = None) -> None:
        """Return when ``begun`` is done, or there is something else to do."""
        places = self._places.under_way()
        unwatched = [one for one in places if one.round is None or not one.round.is_watched]

        def is_ready() -> bool:
            is_done = begun is not None and begun.is_ready()
            return bool(self._waits.has_ready_answer() or is_done or self._places.find_due())

        self._waits.until(is_ready, [one.channel for one in places], _NEVER, unwatched)


def find_shadow(world: World) -> Shadow | None:
    """The join context that this rank is in, if it is in one."""
    found = get_registry(world).guard
    return found if isinstance(found, Shadow) else None
