"""Messages of a rank to itself."""

from __future__ import annotations

import pytest
import torch

from meshdist.errors import AgreementError
from meshdist.wires.mailbox import Mailbox


def test_whichever_comes_first() -> None:
    box = Mailbox()
    got = torch.zeros(2)
    sent = box.send(torch.ones(2), 1)
    assert not sent.done
    received = box.recv(got, 1)
    assert sent.done and received.done and got.tolist() == [1.0, 1.0]

    again = torch.zeros(2)
    waiting = box.recv(again, 1)
    assert not waiting.done
    box.send(torch.full((2,), 5.0), 1)
    assert waiting.done and again.tolist() == [5.0, 5.0]


def test_pairs_by_tag_and_in_order() -> None:
    box = Mailbox()
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
    box = Mailbox()
    x = torch.zeros(2, 2)
    box.recv(x, 0)
    box.send(torch.arange(4.0), 0)
    assert x.tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_a_send_is_buffered_for_whoever_waits_for_it() -> None:
    box = Mailbox()
    x = torch.ones(2)
    sent = box.send(x, 0)
    box.buffer(sent)
    assert sent.done
    x.zero_()
    got = torch.zeros(2)
    received = box.recv(got, 0)
    box.buffer(received)
    assert received.done and got.tolist() == [1.0, 1.0]
    waiting = box.recv(torch.zeros(2), 0)
    box.buffer(waiting)
    assert not waiting.done


@pytest.mark.parametrize("given", [torch.zeros(3), torch.zeros(2, dtype=torch.int64)])
def test_what_does_not_fit_is_refused_and_the_first_stays(given: torch.Tensor) -> None:
    box = Mailbox()
    sent = box.send(torch.ones(2), 1)
    with pytest.raises(AgreementError, match=r"sent: \(2,\) float32"):
        box.recv(given, 1)
    assert not sent.done and not given.any()
    got = torch.zeros(2)
    box.recv(got, 1)
    assert sent.done and got.tolist() == [1.0, 1.0]
