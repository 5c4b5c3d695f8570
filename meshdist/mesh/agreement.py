"""Members compare what they are about to make before anything is opened.

Every member publishes its definition in the store and waits for the others'. Where two differ,
every member raises the same error, which shows both. A member that waits in another definition
which needs this one's ranks can never come: that is found too, and raised on every rank that
waits.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from ..error_text import grouped_text, ranks_text
from ..errors import AgreementError, CollectiveTimeoutError, StoreError
from ..runtime.clock import clock
from ..runtime.handles import check_store_served, store_of_thread
from ..runtime.recorder import call_text
from ..runtime.world import World
from .signals import ask

__all__ = ["Agreement", "agree", "digest_of_ranks"]

_SLICE_S = 1.0
_SURE_AFTER_SLICES = 3
_SURE_AMONG_THREADS = 20
_ALL_HAVE_COME = "all have come"
_counting = threading.Lock()


def digest_of_ranks(ranks: Sequence[int]) -> str:
    """A short name for a list of ranks, equal on all of them."""
    return hashlib.sha1(repr(tuple(ranks)).encode(), usedforsecurity=False).hexdigest()[:16]


@dataclass(frozen=True)
class Agreement:
    """What the members of one agreement know of each other.

    Args:
        name: its name in the store, equal on all members, and no other agreement's.
        offers: for each member the communicators that it has open and could share, by slot.
    """

    name: str
    offers: Mapping[int, Mapping[str, str]]

    def label_for(self, ranks: Sequence[int], slot: str) -> str:
        """The label under which ``ranks`` shall have a communicator, equal on all of them.

        That of the one they have open already, if all of them have it open still; else a new one.
        """
        offered = {self.offers[rank].get(slot, "") for rank in ranks}
        if len(offered) == 1 and "" not in offered:
            return offered.pop()
        return f"group/{digest_of_ranks(ranks)}/{slot}/{self.name}"


def agree(
    world: World,
    ranks: tuple[int, ...],
    kind: str,
    definition: dict[str, Any],
    timeout: timedelta,
    offer: Mapping[str, str] | None = None,
) -> Agreement:
    """Return when all of ``ranks`` have come with an equal ``definition``.

    Args:
        world: the world of the caller, who is one of ``ranks``.
        ranks: who takes part, in any order.
        kind: what is being made, for messages and keys ("mesh", "group").
        definition: plain values; its "text" entry is shown where members differ.
        timeout: how long to wait for the last member.
        offer: what this rank could share with the others, by slot; may differ between members.

    Raises:
        AgreementError: the definitions differ, or members wait for each other in different ones.
        CollectiveTimeoutError: a member did not come; the text names it.
    """
    members = tuple(sorted(ranks))
    counts: dict[tuple[str, tuple[int, ...]], int] = world.rooms.setdefault("agreements", {})
    with _counting:
        count = counts[kind, members] = counts.get((kind, members), 0) + 1
    base = f"agree/{kind}/{digest_of_ranks(members)}/{count}"
    offer = dict(offer or {})
    if len(members) == 1:
        return Agreement(base, {world.rank: offer})
    store = store_of_thread(world)
    mine = json.dumps(definition, sort_keys=True)
    try:
        check_store_served(world)
        store.set(f"{base}/{world.rank}", f"{mine}\n{json.dumps(offer)}")
        _wait_for_all(world, store, base, members, kind, definition["text"], timeout)
        outcome = store.compare_set(f"{base}/outcome", "", _ALL_HAVE_COME).decode()
        if outcome != _ALL_HAVE_COME:
            raise CollectiveTimeoutError(
                f"others gave up to wait before rank {world.rank} came to make a {kind}",
                where=f"rank {world.rank}, {definition['text']}, for {ranks_text(members)}",
                expected=f"the same call on {ranks_text(members)}, at about the same time",
                found=outcome,
                fix=f"look at what kept rank {world.rank}, or raise the timeout",
            )
        blobs = store.multi_get([f"{base}/{r}" for r in members])
    except RuntimeError as error:
        if isinstance(error, (AgreementError, CollectiveTimeoutError)) or world.is_simulated:
            raise
        raise StoreError(
            f"the store was lost while ranks agreed on a {kind}",
            where=f"rank {world.rank}, {definition['text']}",
            found=str(error).splitlines()[0],
            fix="look at the rank that ended first: its error is the cause",
        ) from error
    texts, offers = zip(*(blob.decode().split("\n") for blob in blobs), strict=True)
    if any(text != mine for text in texts):
        raise AgreementError(
            f"the ranks do not define the same {kind}",
            where=f"rank {world.rank}, among {ranks_text(members)}",
            expected=f"one and the same {kind} on every rank",
            found=_grouped(members, [json.loads(text) for text in texts]),
            fix=f"make the {kind} from equal arguments on all of its ranks, in the same order",
        )
    return Agreement(base, dict(zip(members, map(json.loads, offers), strict=True)))


def _grouped(members: tuple[int, ...], definitions: list[dict[str, Any]]) -> str:
    """One line per distinct definition: who holds it, and every entry in which they differ."""
    keys = sorted({key for definition in definitions for key in definition} - {"text"})
    differing = [k for k in keys if len({json.dumps(d.get(k)) for d in definitions}) > 1]
    told = []
    for rank, definition in zip(members, definitions, strict=True):
        details = ", ".join(f"{key} {definition.get(key)}" for key in differing)
        told.append((rank, f"{definition['text']} ({details})" if details else definition["text"]))
    return grouped_text(told)


def _wait_for_all(
    world: World,
    store: Store,
    base: str,
    members: tuple[int, ...],
    kind: str,
    text: str,
    timeout: timedelta,
) -> None:
    keys = [f"{base}/{rank}" for rank in members]
    if world.is_simulated:
        store.wait(keys)
        return
    deadline = clock.now() + timeout.total_seconds()
    waiting_key = f"agree/waiting/{world.rank}"
    if world.rooms.pop(waiting_key, False):
        store.set(waiting_key, "null")
    suspicion: tuple[str, int] = ("", 0)
    while not _all_come(world, store, keys, _slice(deadline)):
        missing = [rank for rank in members if not store.check([f"{base}/{rank}"])]
        if not missing:
            break
        if clock.now() >= deadline:
            told = f"rank {world.rank} waited {timeout.total_seconds():g} s for {text}"
            outcome = store.compare_set(f"{base}/outcome", "", told).decode()
            if outcome == _ALL_HAVE_COME:
                break
            raise _late(world, members, missing, kind, text, timeout)
        if not world.rooms.get(waiting_key):
            world.rooms[waiting_key] = True
            waiting = {
                "base": base,
                "ranks": members,
                "text": text,
                "has_threads": _has_other_threads(),
            }
            store.set(waiting_key, json.dumps(waiting))
        found, patience = _find_crossing(store, base, members, missing)
        same = suspicion[1] + 1 if found and found == suspicion[0] else int(bool(found))
        suspicion = (found, same)
        if same >= patience:
            # What this rank waits for stays in the store, so that the others see it too.
            raise AgreementError(
                f"the ranks do not define the same {kind}: they wait for each other",
                where=f"rank {world.rank}, among {ranks_text(members)}",
                expected="one and the same definition on every rank, in the same order",
                found=f"rank {world.rank}: {text}, for {ranks_text(members)}\n{found}",
                fix="make meshes and groups from equal arguments on all of their ranks",
            )
    if world.rooms.pop(waiting_key, False):
        store.set(waiting_key, "null")


def _slice(deadline: float) -> float:
    """How long to wait before looking at more than the keys."""
    return _SLICE_S if clock.stands() else min(_SLICE_S, max(deadline - clock.now(), 0.0))


def _all_come(world: World, store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all keys are there within ``seconds``.

    Asks again and again instead of ``store.wait``, whose expiry torch reports on stderr.
    """
    deadline = time.monotonic() + seconds
    pause = 0.0001
    while not store.check(keys):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
        check_store_served(world)
    return True


def _has_other_threads() -> bool:
    """Whether another thread of this process might open a group of its own."""
    return any(
        thread is not threading.current_thread() and not thread.name.startswith("meshdist-")
        for thread in threading.enumerate()
    )


def _find_crossing(
    store: Store, base: str, members: tuple[int, ...], missing: list[int]
) -> tuple[str, int]:
    """Describe a missing rank that waits, elsewhere, for a rank that waits here; or "".

    Also tells after how many equal findings it is sure: a rank with several threads may yet come
    by another one.
    """
    arrived = set(members) - set(missing)
    for rank in missing:
        key = f"agree/waiting/{rank}"
        other = json.loads(store.get(key)) if store.check([key]) else None
        if not other or other["base"] == base:
            continue
        for awaited in arrived.intersection(other["ranks"]):
            if not store.check([f"{other['base']}/{awaited}"]):
                text = f"rank {rank}: {other['text']}, for {ranks_text(other['ranks'])}"
                is_sure_soon = not other["has_threads"] and not _has_other_threads()
                return text, _SURE_AFTER_SLICES if is_sure_soon else _SURE_AMONG_THREADS
    return "", 1


def _late(
    world: World,
    members: tuple[int, ...],
    missing: list[int],
    kind: str,
    text: str,
    timeout: timedelta,
) -> CollectiveTimeoutError:
    answers = ask(world, tuple(missing))
    lines = []
    for rank in missing:
        answer = answers.get(rank)
        if answer is None:
            lines.append(f"rank {rank}: gives no answer; it has not opened a group, or has ended")
        elif not answer["calls"]:
            lines.append(f"rank {rank}: runs, and has called no verb")
        else:
            lines.append(f"rank {rank}: {call_text(answer['calls'][-1])}")
    return CollectiveTimeoutError(
        f"{ranks_text(missing)} did not come within {timeout.total_seconds():g} s to make a {kind}",
        where=f"rank {world.rank}, {text}, for {ranks_text(members)}",
        expected=f"the same call on {ranks_text(members)}",
        found="\n".join(lines),
        fix=f"look at what {ranks_text(missing)} does instead, or raise the timeout",
    )
