"""Messages of a rank to itself."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from meshdist.backends.messages import Mailbox
from meshdist.backends.requests import BackendAborted, BackendTimeout
from meshdist.errors import MismatchError

SECONDS = timedelta(seconds=5)


def test_whichever_comes_first() -> None:
    box = Mailbox(0)
    got = torch.zeros(2)
    sent = box.send(torch.ones(2), 1)
    assert not sent.is_done
    received = box.recv(got, 1)
    assert sent.is_done and received.is_done and got.tolist() == [1.0, 1.0]

    again = torch.zeros(2)
    waiting = box.recv(again, 1)
    assert not waiting.is_done
    box.send(torch.full((2,), 5.0), 1)
    assert waiting.is_done and again.tolist() == [5.0, 5.0]


def test_pairs_by_tag_and_in_order() -> None:
    box = Mailbox(0)
    for number in (1.0, 2.0):
        box.send(torch.tensor([number]), 7)
    box.send(torch.tensor([9.0]), 8)
    got = []
    for tag in (8, 7, 7):
        x = torch.zeros(1)
        box.recv(x, tag)
        got.append(x.item())
    assert got == [9.0, 1.0, 2.0]


def test_shapes_may_differ_where_the_numbers_agree() -> None:
    box = Mailbox(0)
    x = torch.zeros(2, 2)
    box.recv(x, 0)
    box.send(torch.arange(4.0), 0)
    assert x.tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_a_send_that_is_waited_for_is_buffered() -> None:
    box = Mailbox(3)
    x = torch.ones(2)
    sent = box.send(x, 0)
    assert not sent.poll()
    sent.finish(SECONDS)
    assert sent.poll()
    x.zero_()
    got = torch.zeros(2)
    received = box.recv(got, 0)
    received.finish(SECONDS)
    assert received.poll() and received.source() == 3 and got.tolist() == [1.0, 1.0]


def test_a_receive_waits_for_another_thread_a_timeout_or_an_abort() -> None:
    box = Mailbox(0)
    got = torch.zeros(2)
    threading.Timer(0.05, lambda: box.send(torch.ones(2), 0)).start()
    box.recv(got, 0).finish(SECONDS)
    assert got.tolist() == [1.0, 1.0]
    with pytest.raises(
        BackendTimeout, match="no matching send or receive for a message of this rank to itself"
    ):
        box.recv(got, 0).finish(timedelta(seconds=0.05))
    threading.Timer(0.05, box.abort).start()
    with pytest.raises(BackendAborted, match="aborted while waiting for a message of this rank"):
        box.recv(got, 1).finish(SECONDS)


@pytest.mark.parametrize("given", [torch.zeros(3), torch.zeros(2, dtype=torch.int64)])
def test_what_does_not_fit_is_rejected_and_the_first_stays(given: torch.Tensor) -> None:
    box = Mailbox(0)
    sent = box.send(torch.ones(2), 1)
    with pytest.raises(MismatchError, match=r"sent: \(2,\) float32"):
        box.recv(given, 1)
    assert not sent.is_done and not given.any()
    got = torch.zeros(2)
    box.recv(got, 1)
    assert sent.is_done and got.tolist() == [1.0, 1.0]
