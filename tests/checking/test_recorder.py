"""What a rank called last."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp
from typing_extensions import deprecated

import meshdist as md
from meshdist.checking.calls import CallRecord, GroupFacts, get_call, get_message
from meshdist.checking.recorder import FORGOTTEN, NUM_NOTES, Recorder
from tests.pool import Pool

WORLD = GroupFacts("the world", (4, 6, 7), 0)


def operation(recorder: Recorder, *args: Any) -> object:
    """Stands for a collective, whose caller is noted, and the channel that it enters."""
    return enter(recorder, *args)


def enter(recorder: Recorder, *args: Any) -> object:
    return recorder.note(WORLD, get_call(*args))


def message(recorder: Recorder, *args: Any) -> None:
    enter_message(recorder, *args)


def enter_message(recorder: Recorder, *args: Any) -> None:
    recorder.note(WORLD, get_message(*args))


def noted(recorder: Recorder, number: int | None = None) -> CallRecord:
    note = recorder.find_note(number)
    assert note is not None
    return note


def test_the_last_call_with_its_arguments_and_place() -> None:
    recorder = Recorder()
    x = torch.ones(2, 3)
    note = operation(recorder, "reduce", x, ReduceOp.MAX, 1)
    found = noted(recorder)
    assert found == note
    assert found[:5] == (1, WORLD, get_call("reduce", x, ReduceOp.MAX, 1), (), 0)
    line = test_the_last_call_with_its_arguments_and_place.__code__.co_firstlineno + 3
    assert found.where == f"{__file__}:{line} in test_the_last_call_with_its_arguments_and_place"
    operation(recorder, "barrier", None)
    assert noted(recorder).call.data is None
    operation(recorder, "all_reduce_coalesced", [x])
    assert noted(recorder).call.data == ((x.shape, x.dtype),)
    assert noted(recorder).sequence == 3


def test_the_place_is_that_of_the_program_whatever_lies_between() -> None:
    recorder = Recorder()
    inside = torch.__file__.replace("__init__", "made_up")
    code = compile("def between(f, *args): f(*args)\n", inside, "exec")
    names: dict = {}
    exec(code, names)
    names["between"](operation, recorder, "barrier", None)
    assert noted(recorder).where.endswith(
        "in test_the_place_is_that_of_the_program_whatever_lies_between"
    )


def test_the_place_is_that_of_the_program_where_torch_calls_a_collective_deprecated() -> None:
    recorder = Recorder()
    deprecated("use another collective", category=None)(operation)(recorder, "barrier", None)
    assert noted(recorder).where.endswith(
        "in test_the_place_is_that_of_the_program_where_torch_calls_a_collective_deprecated"
    )


def test_only_collectives_count() -> None:
    recorder = Recorder()
    operation(recorder, "barrier", None)
    message(recorder, "send", torch.ones(1), 1, 0)
    assert (noted(recorder).sequence, noted(recorder).call.operation) == (1, "send")
    operation(recorder, "barrier", None)
    assert noted(recorder).sequence == recorder.sequence == 2
    assert recorder.num_notes == 3


def test_earlier_calls_are_found_as_long_as_they_are_kept() -> None:
    recorder = Recorder()
    for size in range(NUM_NOTES + 2):
        operation(recorder, "all_reduce", torch.ones(size))
    assert recorder.find_call(2) is None
    third = recorder.find_call(3)
    assert third is not None and third.arguments == "(2,) float32"
    assert recorder.find_call(NUM_NOTES + 3) is None


def test_a_call_that_is_no_longer_kept_is_not_taken_for_another() -> None:
    recorder = Recorder()
    assert recorder.find_note() is recorder.find_note(3) is None
    message(recorder, "send", torch.ones(1), 1, 0)
    for _ in range(NUM_NOTES):
        operation(recorder, "all_reduce", torch.ones(2))
    assert noted(recorder, 2).call.operation == "all_reduce"
    assert recorder.find_note(1) is None and recorder.find_message(True, 1, 0, 1) is None


@pytest.mark.parametrize("about", [{"note": 1}, {"message": [True, 1, 0, 1]}, {"sequence": 1}])
def test_a_question_about_a_call(about: dict[str, Any]) -> None:
    recorder = Recorder()
    assert recorder.text_about(about) is None
    if "sequence" in about:
        operation(recorder, "all_reduce", torch.ones(2))
    else:
        message(recorder, "send", torch.ones(2), 1, 0)
    text = recorder.text_about(about)
    assert text is not None and text == noted(recorder).text
    later = {key: [*value[:-1], 300] if key == "message" else 300 for key, value in about.items()}
    for _ in range(NUM_NOTES):
        operation(recorder, "barrier", None)
    assert recorder.text_about(about) == FORGOTTEN
    assert recorder.text_about(later) is None


def test_messages_are_numbered_by_direction_peer_and_tag() -> None:
    recorder = Recorder()
    operation(recorder, "barrier", None)
    for size, (name, peer, tag) in enumerate(
        [("send", 1, 0), ("isend", 1, 0), ("recv", 1, 0), ("send", 2, 0), ("send", 1, 5)], 1
    ):
        message(recorder, name, torch.ones(size), peer, tag)
    kinds = [(True, 1, 0, 1), (True, 1, 0, 2), (False, 1, 0, 1), (True, 2, 0, 1), (True, 1, 5, 1)]
    found = [recorder.find_message(*kind) for kind in kinds]
    shown = [call and call.arguments.split(" ")[0] for call in found]
    assert shown == ["(1,)", "(2,)", "(3,)", "(4,)", "(5,)"]
    assert recorder.find_message(True, 1, 0, 3) is None
    call = recorder.find_call(1)
    assert call is not None and call.call.operation == "barrier"  # messages bear its number too


def test_before_any_call() -> None:
    assert Recorder().find_note() is None
    assert Recorder().moment == 0


def test_moments_order_the_calls_of_all_recorders() -> None:
    first, second = Recorder(), Recorder()
    operation(first, "barrier", None)
    operation(second, "barrier", None)
    assert first.moment < second.moment
    message(first, "send", torch.ones(1), 0, 0)
    assert first.moment > second.moment


def test_it_keeps_no_tensor_alive() -> None:
    recorder = Recorder()
    x = torch.ones(2)
    seen = weakref.ref(x)
    operation(recorder, "all_reduce", x)
    del x
    gc.collect()
    assert seen() is None


def test_stacks_are_kept_where_the_environment_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def between(recorder: Recorder) -> None:
        operation(recorder, "barrier", None)

    for value, num_lines in (("0", 1), ("1", None)):
        monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", value)
        recorder = Recorder()
        between(recorder)
        lines = noted(recorder).where.splitlines()
        assert lines[0].endswith(" in between")
        if num_lines is not None:
            assert len(lines) == num_lines
        else:
            assert lines[1].startswith(f"  called at {__file__}:")
            assert lines[1].endswith(
                f" in {test_stacks_are_kept_where_the_environment_asks_for_them.__name__}"
            )


def numbers_of_notes() -> list[list[int]]:
    """Of some moments the number of the last note, and of those that are found."""
    group, x, found = md.group.WORLD, torch.ones(1), []
    md.all_reduce(x)
    path, recorder = group.fast_path, group.open_device_group("cpu").recorder
    for call in range(3 * NUM_NOTES):
        group.fast_path = path if call % 5 < 2 else None
        md.all_reduce(x)
        if call % 50 == 49:
            numbers = range(recorder.num_notes + 2)
            kept = [number for number in numbers if recorder.find_note(number)]
            places = [recorder.find_call(number).sequence for number in kept]  # each has its number
            found.append([recorder.num_notes, *kept] if kept == places else [])
    return found


def test_notes_of_the_core_and_of_python_are_kept_equally_long(pool: Pool) -> None:
    for found in pool.run(numbers_of_notes, 2, backend="shm"):
        for number, *kept in found:
            assert kept == [*range(max(0, number - NUM_NOTES) + 1, number + 1)]
        assert len(found) == 3 * NUM_NOTES // 50


def notes_found_in_a_collection() -> list[tuple[int, int]]:
    """Positions in the code, as noted and as found while a collection notes other calls."""
    names: dict[str, Any] = {"md": md}
    for name, num_lines in (("early", 400), ("late", 700)):
        text = f"def {name}(x):\n" + " y = x\n" * num_lines + " md.all_reduce(x)\n"
        exec(compile(text, "program.py", "exec"), names)
    x, found = torch.ones(1), []
    names["early"](x)
    find = md.group.WORLD.open_device_group("cpu").recorder.for_core(None).find
    collecting = [False]  # a Python from 3.12 on collects elsewhere

    def note(phase: str, _: object) -> None:
        if phase == "start" and collecting[0]:
            collecting[0] = False
            for _ in range(NUM_NOTES + 1):
                names["late"](x)

    gc.callbacks.append(note)
    limits, is_on = gc.get_threshold(), gc.isenabled()
    gc.enable()
    try:
        for _ in range(20):
            for _ in range(NUM_NOTES):
                names["early"](x)
            number = md.group.WORLD.open_device_group("cpu").recorder.num_notes - NUM_NOTES // 2
            noted = int(str(find(number)[6]))  # no reference to what is noted
            kept = [tuple([i] * 8) for i in range(30)]  # those that Python has in store
            collecting[0] = True
            gc.set_threshold(1)
            fields = find(number)
            gc.set_threshold(*limits)
            collecting[0] = not kept
            found.append((noted, fields[6]))
    finally:
        gc.set_threshold(*limits)
        gc.callbacks.remove(note)
        if not is_on:
            gc.disable()
    return found


def test_a_note_is_whole_though_others_come_while_it_is_looked_for(pool: Pool) -> None:
    (found,) = pool.run(notes_found_in_a_collection, 1, backend="shm")
    assert len(found) == 20 and all(noted == position for noted, position in found)
