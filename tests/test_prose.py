"""The lint of prose: what it finds, and that no file rises above its exact baseline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packaging"))

import lint_prose

HITS = {
    "Pass the wire to the group.": "write backend",
    "Each verb waits.": "write collective, operation",
    "Sum the summands.": "write partial sum",
    "They join at the first touch.": "write first use",
    "The room is small.": "write public API, module",
    "nobody listens": "write plain English",
    "This mends it.": "write fix",
    "on fitting tensors": "write missing, mismatched",
    "The rank is told which.": "told",
    "an error that says so": "says (of code)",
    "It is refused.": "refused",
    "Where ranks share a host, pass it.": "where = if",
    "It fails. So does the call.": "inverted so",
    "Send what is left.": "what as a pronoun",
    "the ranks and those of the mesh": "those of, that of",
    "a class of its own": "of its own",
    "The shard lies on rank 0.": "lies, stands, comes",
    "a dim beside it": "beside, behind",
    "the part that needs one": "one as a pronoun",
    "small parts and large ones": "one as a pronoun",
}


@pytest.mark.parametrize("text", HITS)
def test_each_rule_finds_its_text(text: str) -> None:
    assert HITS[text] in [rule for rule, _ in lint_prose.hits_in(text)]


def test_every_rule_has_a_text() -> None:
    assert set(HITS.values()) == set(lint_prose.RULES)


@pytest.mark.parametrize(
    "text",
    [
        "Reduce `tensor` across the group in place.",
        "Return one value for each rank, and at least one of them.",
        "If all ranks run on one host, pass the backend.",
        "So that the ranks agree, compare the calls.",
    ],
)
def test_plain_sentences_have_no_hit(text: str) -> None:
    assert lint_prose.hits_in(text) == []


def prose(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return lint_prose.prose_of(folder / name)


def test_it_reads_prose_alone(tmp_path: Path) -> None:
    page = "Call `wire` here.\n\n```python\nverb = 1\n```\n<!-- wire -->\n[wires](wires.md)\n"
    read = prose(tmp_path, "page.md", page)
    assert "verb" not in read and "wires.md" not in read and read.count("wire") == 1
    source = (
        '"""A module.\n\n    >>> verb()\n    1\n"""\n'
        "# a comment of two\n# lines\nwire = 'key'  # beside it\nx = f'a text {wire} of it'\n"
    )
    read = prose(tmp_path, "source.py", source)
    assert "verb" not in read and "wire" not in read and "key" not in read
    assert all(text in read for text in ("A module.", "a comment of two lines", "beside it"))
    assert "a text " in read and " of it" in read


def test_of_the_changelog_it_reads_what_is_unreleased(tmp_path: Path) -> None:
    text = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.1.0]\n\n- old\n"
    read = prose(tmp_path, "CHANGELOG.md", text)
    assert "new" in read and "old" not in read


def test_no_file_is_above_its_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint_prose.main([]) == 0, capsys.readouterr().out


def test_the_baseline_has_no_room_left() -> None:
    baseline = json.loads(lint_prose.BASELINE.read_text(encoding="utf-8"))
    files = {lint_prose.name_of(path): path for path in lint_prose.all_files()}
    counts = {
        name: len(lint_prose.hits_in(lint_prose.prose_of(files[name])))
        for name in baseline
        if name in files
    }
    assert counts == baseline, "run `python packaging/lint_prose.py --lower`"


def test_a_new_file_starts_at_zero_and_counts_only_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint_prose, "ROOT", tmp_path)
    monkeypatch.setattr(lint_prose, "BASELINE", tmp_path / "baseline.json")
    lint_prose.BASELINE.write_text('{"old.md": 2, "gone.md": 1}')
    old, new = tmp_path / "old.md", tmp_path / "new.md"
    monkeypatch.setattr(lint_prose, "all_files", lambda: [old, new])
    old.write_text("One wire.\n")
    new.write_text("Two wires.\n")
    assert lint_prose.main([]) == 1
    assert capsys.readouterr().out.startswith("new.md: 1 hits, at most 0\n  write backend: ")
    assert lint_prose.main(["--lower"]) == 1
    assert json.loads(lint_prose.BASELINE.read_text()) == {"old.md": 1}
    old.write_text("Two wires and a wire.\n")
    new.write_text("Two backends.\n")
    assert lint_prose.main([]) == 1
    assert "old.md: 2 hits, at most 1" in capsys.readouterr().out
