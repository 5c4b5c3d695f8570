"""Messages of the core: matching, order, any source, and what two waiting threads must not do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from meshdist.backends import native
from tests.native import ranks
from tests.native.ranks import OK
from tests.native.reading import reads_others, secret_memory

F32, F64 = native.DTYPES["float32"], native.DTYPES["float64"]
TIMEOUT = 20.0
SMALL, LARGE = 100, 300_000  # one packet; an offer, and pieces that fill the ring many times
THROUGH_THE_RING, WHERE_IT_LIES = 0, 1 << 40  # up to how many bytes a message is read in place

_most_bytes_read = THROUGH_THE_RING


@pytest.fixture(
    autouse=True,
    params=[
        pytest.param(THROUGH_THE_RING, id="ring"),
        pytest.param(WHERE_IT_LIES, id="reading", marks=reads_others),
    ],
)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways that a large message may take, in turn."""
    global _most_bytes_read
    _most_bytes_read = request.param
    yield
    _most_bytes_read = THROUGH_THE_RING


def run_ranks(size: int, body: Callable[[Any], Any], **more: Any) -> list[Any]:
    """Call ``body`` on all ranks, which send large messages the way that is tested."""

    def tuned(c: Any) -> Any:
        c.set_tuning("fetch_most_bytes", _most_bytes_read)
        return body(c)

    return ranks.run_ranks(size, tuned, is_crowded=False, **more)


def data(seed: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) * (seed + 1)


def pingpong_cases(c: Any) -> None:
    peer = 1 - c.rank
    for count in (0, 1, SMALL, 4096, 5000, LARGE):
        x, y = data(c.rank, count), torch.zeros(count)
        if c.rank == 0:
            assert c.send(x.data_ptr(), count, F32, peer, 5, TIMEOUT) == OK
            assert c.recv(y.data_ptr(), count, F32, peer, 5, TIMEOUT) == OK
        else:
            assert c.recv(y.data_ptr(), count, F32, peer, 5, TIMEOUT) == OK
            assert c.last_source == 0
            assert c.send(x.data_ptr(), count, F32, peer, 5, TIMEOUT) == OK
        assert torch.equal(y, data(peer, count))


def test_messages_of_all_sizes_arrive() -> None:
    run_ranks(2, pingpong_cases)


def crossed_cases(c: Any) -> None:
    """Both receive first, then send; each waits for its receive first."""
    peer = 1 - c.rank
    for count in (SMALL, LARGE):
        x, y = data(c.rank, count), torch.zeros(count)
        receive = c.recv_async(y.data_ptr(), count, F32, peer, 0)
        send = c.send_async(x.data_ptr(), count, F32, peer, 0)
        assert receive.wait(TIMEOUT) == OK
        assert send.wait(TIMEOUT) == OK
        assert torch.equal(y, data(peer, count))
        assert receive.source() == peer


def test_both_sides_may_receive_first() -> None:
    run_ranks(2, crossed_cases)


def tags_out_of_order(c: Any) -> None:
    tags = [3, 1, 2, 0]
    if c.rank == 0:
        sent = [data(tag, LARGE if tag % 2 else SMALL) for tag in tags]
        sends = [
            c.send_async(x.data_ptr(), x.numel(), F32, 1, tag)
            for tag, x in zip(tags, sent, strict=True)
        ]
        assert [send.wait(TIMEOUT) for send in sends] == [OK] * 4
    else:
        for tag in range(4):
            count = LARGE if tag % 2 else SMALL
            y = torch.zeros(count)
            assert c.recv(y.data_ptr(), count, F32, 0, tag, TIMEOUT) == OK
            assert torch.equal(y, data(tag, count))


def test_no_message_waits_behind_one_of_another_tag() -> None:
    run_ranks(2, tags_out_of_order)


def same_tag_in_order(c: Any) -> None:
    counts = [SMALL, LARGE, SMALL, LARGE, 1]
    if c.rank == 0:
        sent = [data(i, count) for i, count in enumerate(counts)]
        sends = [c.send_async(x.data_ptr(), x.numel(), F32, 1, 7) for x in sent]
        assert all(send.wait(TIMEOUT) == OK for send in sends)
    else:
        got = [torch.zeros(count) for count in counts]
        receives = [c.recv_async(y.data_ptr(), y.numel(), F32, 0, 7) for y in got]
        for i, receive in reversed(list(enumerate(receives))):  # waited for last to first
            assert receive.wait(TIMEOUT) == OK
            assert torch.equal(got[i], data(i, counts[i]))


def test_messages_of_one_tag_keep_their_order() -> None:
    run_ranks(2, same_tag_in_order)


def any_source_of_equal_sizes(c: Any) -> None:
    for count in (SMALL, LARGE):
        if c.rank:
            x = data(c.rank, count)
            assert c.send(x.data_ptr(), count, F32, 0, 1, TIMEOUT) == OK
        else:
            seen = set()
            for _ in range(1, c.size):
                y = torch.zeros(count)
                assert c.recv(y.data_ptr(), count, F32, -1, 1, TIMEOUT) == OK
                assert torch.equal(y, data(c.last_source, count))
                seen.add(c.last_source)
            assert seen == set(range(1, c.size))
        assert c.barrier(TIMEOUT) == OK


def test_a_receive_from_anyone_tells_from_whom() -> None:
    run_ranks(4, any_source_of_equal_sizes)


def to_itself(c: Any) -> None:
    for count in (0, SMALL, LARGE):
        x, y = data(3, count), torch.zeros(count)
        send = c.send_async(x.data_ptr(), count, F32, c.rank, 2)
        assert send.is_done() is False
        assert c.recv(y.data_ptr(), count, F32, -1, 2, TIMEOUT) == OK
        assert c.last_source == c.rank
        assert send.wait(TIMEOUT) == OK
        receive = c.recv_async(y.zero_().data_ptr(), count, F32, c.rank, 2)
        assert c.send(x.data_ptr(), count, F32, c.rank, 2, TIMEOUT) == OK
        assert receive.wait(TIMEOUT) == OK
        assert torch.equal(x, y)


def test_a_member_may_send_to_itself() -> None:
    run_ranks(1, to_itself)
    run_ranks(2, to_itself)


def sender_stays_away(c: Any) -> float:
    """Neither waits in the core: the helpers must bring the message over."""
    x = data(c.rank, LARGE)
    if c.rank == 0:
        send = c.send_async(x.data_ptr(), LARGE, F32, 1, 0)
        time.sleep(0.5)
        return float(send.is_done())
    y = torch.zeros(LARGE)
    receive = c.recv_async(y.data_ptr(), LARGE, F32, 0, 0)
    time.sleep(0.5)
    done = receive.is_done()
    assert torch.equal(y, data(0, LARGE))
    return float(done)


def test_a_large_message_moves_while_both_sides_do_something_else() -> None:
    assert run_ranks(2, sender_stays_away) == [1.0, 1.0]


def among_collectives(c: Any) -> None:
    """A send that is in flight while its sender waits in a collective."""
    x, y = data(c.rank, LARGE), torch.zeros(LARGE)
    if c.rank == 0:
        send = c.send_async(x.data_ptr(), LARGE, F32, 1, 0)
        assert c.barrier(TIMEOUT) == OK
        assert send.wait(TIMEOUT) == OK
    else:
        assert c.recv(y.data_ptr(), LARGE, F32, 0, 0, TIMEOUT) == OK
        assert c.barrier(TIMEOUT) == OK
        assert torch.equal(y, data(0, LARGE))


def test_a_message_does_not_wait_for_a_collective() -> None:
    run_ranks(2, among_collectives)


def unlike(c: Any) -> dict[str, Any]:
    found = {}
    for count in (SMALL, LARGE):
        x = torch.zeros(count + 1, dtype=torch.float64)
        if c.rank == 0:
            found[count] = c.send(x.data_ptr(), count, F32, 1, 0, TIMEOUT, note=count)
        else:
            found[count] = c.recv(x.data_ptr(), count, F64, 0, 0, TIMEOUT)
            failure = c.last_transfer_failure()
            assert (failure.source, failure.other_note) == (0, count)
        assert c.barrier(TIMEOUT) == OK
    return found


def test_unlike_messages_are_rejected_and_the_rest_goes_on() -> None:
    mismatch = native.STATUSES["MISMATCH"]
    sender, receiver = run_ranks(2, unlike)
    assert receiver == {SMALL: mismatch, LARGE: mismatch}
    assert sender == {SMALL: OK, LARGE: mismatch}  # a small message has left already


def gives_up(c: Any) -> list[int]:
    """A receive and a large send that nobody answers; later messages of the tag arrive."""
    x, y = data(c.rank, LARGE), torch.zeros(LARGE)
    found = []
    if c.rank == 0:
        found.append(c.recv(y.data_ptr(), LARGE, F32, 1, 9, 0.2))
        found.append(c.send(x.data_ptr(), LARGE, F32, 1, 8, 0.2))
        assert c.barrier(TIMEOUT) == OK
        assert c.send(x.data_ptr(), LARGE, F32, 1, 9, TIMEOUT) == OK
    else:
        assert c.barrier(TIMEOUT) == OK
        assert c.recv(y.data_ptr(), LARGE, F32, 0, 9, TIMEOUT) == OK
        assert torch.equal(y, data(0, LARGE))
        found.append(c.recv(y.data_ptr(), LARGE, F32, 0, 8, TIMEOUT))
    assert c.barrier(TIMEOUT) == OK
    return found


def test_a_transfer_given_up_leaves_the_others_alone() -> None:
    timeout, cancelled = native.STATUSES["TIMEOUT"], native.STATUSES["CANCELLED"]
    assert run_ranks(2, gives_up) == [[timeout, timeout], [cancelled]]


def sends_unawaited(c: Any) -> list[int]:
    """The largest messages, in KiB, that a sender is rid of before there is a receive."""
    x, peer, found = torch.zeros(1 << 17), 1 - c.rank, []
    first = x.data_ptr(), LARGE // 4, F32, peer, 0, TIMEOUT  # lets the ring grow
    assert (c.send(*first) if c.rank == 0 else c.recv(*first)) == OK
    for kib in (8, 16, 17, 64, 65):
        if c.rank == 0 and c.send(x.data_ptr(), kib * 256, F32, peer, 1, 0.05) == OK:
            found.append(kib)
        assert c.barrier(TIMEOUT) == OK
    return found


def test_messages_of_64_kib_go_at_once_where_ranks_outnumber_cores() -> None:
    told = ranks.run_ranks(2, sends_unawaited, ring_bytes=2 << 20, is_crowded=True)
    assert told == [[8, 16, 17, 64], []]


def gives_up_while_read(c: Any) -> bool:
    """The sender has no patience, and writes over its message as soon as it has given up."""
    count = 1 << 26
    x, peer = torch.full((count,), float(c.rank)), 1 - c.rank
    assert c.barrier(TIMEOUT) == OK
    if c.rank == 0:
        status = c.send(x.data_ptr(), count, F32, peer, 0, 0.02)
        x.fill_(-1.0)
        assert c.barrier(TIMEOUT) == OK
        return bool(status == OK)
    status = c.recv(x.data_ptr(), count, F32, peer, 0, TIMEOUT)
    assert status in (OK, native.STATUSES["CANCELLED"])
    assert status != OK or not x.any()
    assert c.barrier(TIMEOUT) == OK
    return bool(status == OK)


def test_what_a_sender_took_back_while_it_was_read_is_not_received() -> None:
    sent, received = run_ranks(2, gives_up_while_read)
    assert received or not sent


def sends_a_secret(c: Any) -> bool:
    """A message that the receiver cannot read where it lies, then one that it could."""
    secret = secret_memory(100, range(30, 60))
    if secret is None:
        return False
    mine = secret if c.rank == 0 else torch.zeros(secret.numel())
    for x in (mine, torch.zeros(LARGE)):
        place = x.data_ptr(), x.numel(), F32, 1 - c.rank, 0, TIMEOUT
        if c.rank == 0:
            x.copy_(data(3, x.numel()))
            assert c.send(*place) == OK
        else:
            assert c.recv(*place) == OK
            assert torch.equal(x, data(3, x.numel()))
    return True


def test_what_the_receiver_cannot_read_comes_through_the_ring() -> None:
    if run_ranks(2, sends_a_secret) != [True, True]:
        pytest.skip("this kernel has no secret memory")


def from_threads(c: Any) -> None:
    """Several threads of each member wait for transfers of their own tag at once."""
    failures = []

    def talk(tag: int) -> None:
        for i in range(20):
            count = LARGE if (tag + i) % 5 == 0 else SMALL
            x, y = data(tag + i, count), torch.zeros(count)
            if c.rank == 0:
                status = c.send(x.data_ptr(), count, F32, 1, tag, TIMEOUT)
            else:
                status = c.recv(y.data_ptr(), count, F32, 0, tag, TIMEOUT)
                if not torch.equal(x, y):
                    failures.append((tag, i))
            if status != OK:
                failures.append((tag, i, status))

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_may_wait_side_by_side() -> None:
    run_ranks(2, from_threads)


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 2),
            st.integers(0, 2),
            st.sampled_from([0, 1, 2048, 2049, 50_000]),
        ),
        max_size=25,
    ),
    st.randoms(use_true_random=False),
)
def test_any_messages_in_any_order(messages: list[tuple[int, int, int, int]], order: Any) -> None:
    """Messages (from, to, tag, count); each receiver asks for them in an order of its own."""
    # Of one (from, to, tag) the order is kept; between them it is shuffled.
    lanes: dict[tuple[int, int, int], list[int]] = {}
    for i, (source, target, tag, _) in enumerate(messages):
        lanes.setdefault((source, target, tag), []).append(i)
    shuffled = list(range(len(messages)))
    order.shuffle(shuffled)
    queues = {lane: iter(indices) for lane, indices in lanes.items()}
    asked = [next(queues[messages[i][:3]]) for i in shuffled]

    def body(c: Any) -> None:
        pending, kept = [], []
        for i in range(len(messages)):
            source, target, tag, count = messages[i]
            if source == c.rank:
                x = data(i, count)
                kept.append(x)
                pending.append(c.send_async(x.data_ptr(), count, F32, target, tag))
        received = {}
        for i in asked:
            source, target, tag, count = messages[i]
            if target == c.rank:
                y = torch.full((count,), -1.0)
                received[i] = y
                pending.append(c.recv_async(y.data_ptr(), count, F32, source, tag))
        assert all(one.wait(TIMEOUT) == OK for one in pending)
        assert all(torch.equal(y, data(i, y.numel())) for i, y in received.items())

    run_ranks(3, body, ring_bytes=8192)
