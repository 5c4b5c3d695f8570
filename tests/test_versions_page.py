"""docs/install.md and CHANGELOG.md, checked against what names the versions."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import meshdist
from tests.inner import diagnostics

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packaging"))

import torch_versions
import wheels

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def rows_of(head: str) -> list[str]:
    """Return the first cells of the table whose first column has this head."""
    table = PAGE.partition(f"| {head} |")[2].partition("\n\n")[0]
    return re.findall(r"^\| ([\d.]+) \|", table, re.MULTILINE)


def minor_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


def test_the_pythons_are_those_of_the_wheels() -> None:
    assert rows_of("Python") == list(wheels.VERSIONS)
    assert f'requires-python = ">={wheels.VERSIONS[0]}"' in PROJECT


def test_the_torches_are_those_that_are_run() -> None:
    minors = [minor_of(version) for version in torch_versions.VERSIONS]
    assert rows_of("torch") == minors
    assert f'"torch>={minors[0]}"' in PROJECT
    assert ".".join(map(str, diagnostics.NEWEST_TORCH)) == minors[-1]
    assert f"({wheels.TORCH.removeprefix('torch==')})" in PAGE
    report = (ROOT / "packaging" / "torch_versions.md").read_text(encoding="utf-8")
    others = set(minors) - {minor_of(wheels.TORCH.removeprefix("torch=="))}
    assert others <= {minor_of(version) for version in re.findall(r"^\| (\d\S+)", report, re.M)}


def test_the_version_stands_in_one_place_and_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, newest = re.findall(r"^## \[(.*)\](?: - \d{4}-\d\d-\d\d)?$", text, re.MULTILINE)[:2]
    assert (unreleased, newest) == ("Unreleased", meshdist.__version__)
    assert 'dynamic = ["version"]' in PROJECT
    assert minor_of(meshdist.__version__) in PAGE
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    released = re.search(rf"^## \[{re.escape(newest)}\] - (\S+)$", text, re.MULTILINE)
    assert released is not None
    assert f'\nversion: {newest}\ndate-released: "{released[1]}"\n' in citation
