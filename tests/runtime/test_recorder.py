"""What a rank called last."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.distributed import ReduceOp

from meshdist.runtime.recorder import (
    NUM_NOTES,
    Recorder,
    call_text,
    is_list,
)


def verb(recorder: Recorder, *args, **more) -> object:
    """Stands for a verb, whose caller is noted, and the channel that it enters."""
    return enter(recorder, *args, **more)


def enter(recorder: Recorder, *args, **more) -> object:
    return recorder.note("the world", *args, **more)


def message(recorder: Recorder, *args) -> None:
    enter_message(recorder, *args)


def enter_message(recorder: Recorder, *args) -> None:
    recorder.note_message("the world", *args)


def test_the_last_call_with_argument_and_place() -> None:
    recorder = Recorder()
    verb(recorder, "all_reduce", torch.ones(2, 3))
    line = test_the_last_call_with_argument_and_place.__code__.co_firstlineno + 2
    assert recorder.describe() == {
        "sequence": 1,
        "group": "the world",
        "verb": "all_reduce",
        "argument": "(2, 3) float32",
        "where": f"{__file__}:{line} in test_the_last_call_with_argument_and_place",
        "waits_for": "",
    }


def test_the_place_is_that_of_the_program_whatever_lies_between() -> None:
    recorder = Recorder()
    inside = torch.__file__.replace("__init__", "made_up")
    code = compile("def between(f, *args): f(*args)\n", inside, "exec")
    names: dict = {}
    exec(code, names)
    names["between"](verb, recorder, "barrier", None)
    assert recorder.describe()["where"].endswith(
        "in test_the_place_is_that_of_the_program_whatever_lies_between"
    )


def test_arguments_in_words() -> None:
    recorder = Recorder((4, 6))
    x = torch.ones(2)
    verb(recorder, "reduce", x, ReduceOp.MAX, 1)
    assert recorder.describe()["argument"] == "(2,) float32, MAX, root rank 6"
    verb(recorder, "all_to_all", x, None, None, ([1, 2], [3, 0]))
    told = "(2,) float32, sending [1, 2], taking [3, 0] elements"
    assert recorder.describe()["argument"] == told
    verb(recorder, "all_reduce_coalesced", [x, torch.zeros(3, 1, dtype=torch.int8)])
    assert recorder.describe()["argument"] == "[(2,) float32, (3, 1) int8]"
    message(recorder, "irecv", x, None, 7)
    assert recorder.describe()["argument"] == "(2,) float32, from any rank, tag 7"
    message(recorder, "send", x, 0, 0)
    assert recorder.describe()["argument"] == "(2,) float32, to rank 4"
    verb(Recorder(), "barrier", None)


def test_a_list_is_told_from_a_tensor() -> None:
    recorder = Recorder()
    x = torch.ones(2)
    assert verb(recorder, "all_reduce", x) == (x.shape, x.dtype)
    assert not is_list(verb(recorder, "all_reduce", torch.ones(())))
    assert not is_list(verb(recorder, "barrier", None))
    assert is_list(verb(recorder, "all_reduce_coalesced", [x]))
    assert is_list(verb(recorder, "all_reduce_coalesced", []))


def test_only_collectives_count() -> None:
    recorder = Recorder()
    verb(recorder, "barrier", None)
    assert recorder.describe()["waits_for"] == ""
    message(recorder, "send", torch.ones(1), 1, 0)
    described = recorder.describe()
    assert described["waits_for"] == "member 1 to receive (1,) float32 from this rank under tag 0"
    assert (described["sequence"], described["verb"]) == (1, "send")
    verb(recorder, "barrier", None)
    assert recorder.describe()["sequence"] == 2
    assert recorder.describe()["argument"] == ""


def test_earlier_calls_are_found_as_long_as_they_are_remembered() -> None:
    recorder = Recorder()
    for size in range(NUM_NOTES + 2):
        verb(recorder, "all_reduce", torch.ones(size))
    assert recorder.find_call(2) is None
    third = recorder.find_call(3)
    assert third is not None and third["argument"] == "(2,) float32"
    assert recorder.find_call(NUM_NOTES + 3) is None


def test_a_call_that_is_no_longer_remembered_is_not_taken_for_another() -> None:
    recorder = Recorder()
    assert call_text(recorder.describe(3)) == "call 0 on : () at "
    message(recorder, "send", torch.ones(1), 1, 0)
    for _ in range(NUM_NOTES):
        verb(recorder, "all_reduce", torch.ones(2))
    assert recorder.describe(2)["verb"] == "all_reduce"
    told = call_text(recorder.describe(1))
    assert told == f"a call before the last {NUM_NOTES}, which is no longer known"
    assert recorder.find_note(1) is None and recorder.find_message(True, 1, 0, 1) is None
    for about in ({"note": 1}, {"message": [True, 1, 0, 1]}, {"sequence": 1}):
        assert recorder.has_noted(about)
    for about in ({"note": 200}, {"message": [True, 1, 0, 2]}, {"sequence": 200}):
        assert not recorder.has_noted(about)


def test_messages_are_numbered_by_direction_peer_and_tag() -> None:
    recorder = Recorder((0, 1, 2))
    verb(recorder, "barrier", None)
    for size, (name, peer, tag) in enumerate(
        [("send", 1, 0), ("isend", 1, 0), ("recv", 1, 0), ("send", 2, 0), ("send", 1, 5)], 1
    ):
        message(recorder, name, torch.ones(size), peer, tag)
    found = {
        key: recorder.find_message(*key)
        for key in [
            (True, 1, 0, 1),
            (True, 1, 0, 2),
            (False, 1, 0, 1),
            (True, 2, 0, 1),
            (True, 1, 5, 1),
        ]
    }
    shown = [call and call["argument"].split(" ")[0] for call in found.values()]
    assert shown == ["(1,)", "(2,)", "(3,)", "(4,)", "(5,)"]
    assert recorder.find_message(True, 1, 0, 3) is None
    call = recorder.find_call(1)
    assert call is not None and call["verb"] == "barrier"  # messages bear its number too


def test_before_any_call() -> None:
    texts = dict.fromkeys(("group", "verb", "argument", "where", "waits_for"), "")
    assert Recorder().describe() == {"sequence": 0, **texts}
    assert Recorder().moment == 0


def test_moments_tell_who_was_called_last() -> None:
    first, second = Recorder(), Recorder()
    verb(first, "barrier", None)
    verb(second, "barrier", None)
    assert first.moment < second.moment
    message(first, "send", torch.ones(1), 0, 0)
    assert first.moment > second.moment


def test_it_keeps_no_tensor_alive() -> None:
    recorder = Recorder()
    x = torch.ones(2)
    seen = weakref.ref(x)
    verb(recorder, "all_reduce", x)
    del x
    gc.collect()
    assert seen() is None


def test_calls_in_words() -> None:
    call = {"sequence": 3, "group": "axis 'dp'", "verb": "barrier", "argument": "", "where": "a:1"}
    assert call_text({**call, "waits_for": ""}) == "call 3 on axis 'dp': barrier() at a:1"
    message = {**call, "verb": "send", "argument": "(2,) float32, to rank 1", "waits_for": "it"}
    assert call_text(message) == "send((2,) float32, to rank 1) on axis 'dp' at a:1"


def test_what_a_message_waits_for() -> None:
    recorder = Recorder((4, 6))
    x = torch.ones(2)
    for name, peer, tag, expected in [
        ("irecv", None, 7, "any rank to send (2,) float32 to this rank under tag 7"),
        ("recv", 1, 0, "rank 6 to send (2,) float32 to this rank under tag 0"),
        ("isend", 0, 3, "rank 4 to receive (2,) float32 from this rank under tag 3"),
        ("send_object_list", 1, 0, "rank 6 in recv_object_list, with this rank as its peer"),
        ("recv_object_list", 1, 9, "rank 6 in send_object_list, with this rank as its peer"),
    ]:
        message(recorder, name, x, peer, tag)
        assert recorder.describe()["waits_for"] == expected


def test_a_call_is_described_by_its_number_as_long_as_it_is_remembered() -> None:
    recorder = Recorder()
    verb(recorder, "all_reduce", torch.ones(2))
    number = recorder.num_notes
    message(recorder, "send", torch.ones(1), 1, 0)
    assert recorder.describe()["verb"] == "send"
    assert recorder.describe(number)["verb"] == "all_reduce"
    for _ in range(NUM_NOTES - 2):
        verb(recorder, "barrier", None)
    assert recorder.describe(number)["verb"] == "all_reduce"
    verb(recorder, "barrier", None)
    assert recorder.describe(number)["verb"] == f"a call before the last {NUM_NOTES}"


def test_stacks_are_kept_where_the_environment_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def between(recorder: Recorder) -> None:
        verb(recorder, "barrier", None)

    for value, num_lines in (("0", 1), ("1", None)):
        monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", value)
        recorder = Recorder()
        between(recorder)
        lines = recorder.describe()["where"].splitlines()
        assert lines[0].endswith(" in between")
        if num_lines is not None:
            assert len(lines) == num_lines
        else:
            assert lines[1].startswith(f"  called at {__file__}:")
            assert lines[1].endswith(
                f" in {test_stacks_are_kept_where_the_environment_asks_for_them.__name__}"
            )
