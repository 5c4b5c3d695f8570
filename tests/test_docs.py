"""The documentation, checked: its Python runs, its commands exist, every public name is described.

The ``python`` blocks of a page run from top to bottom in one namespace, in a process of their own.
A block that cannot run here says why right above itself, ``<!-- not executed: reason -->``, and is
counted in ``NOT_EXECUTED``.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

import meshdist
from tests.pool import Pool

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
TIMEOUT_S = 120

# How many blocks of a page carry the comment. A page that is not listed has none.
NOT_EXECUTED: dict[str, int] = {
    "docs/how-to/communication_hooks.md": 1,
    "docs/how-to/cuda.md": 1,
    "docs/how-to/local_sgd_and_pipelines.md": 1,
    "docs/how-to/schedulers.md": 10,
    "docs/how-to/trainers.md": 6,
}

PYTHON = ("python",)
SHELL = ("console", "sh", "bash")
SHOWN = ("text", "toml", "json", "diff")

FENCE = re.compile(r"(`{3,})(.*)")
MARK = re.compile(r"<!-- not executed: \S.* -->")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the line where its text begins, and that text."""

    language: str
    line: int
    text: str
    is_executed: bool


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    found: list[Block] = []
    lines = page.splitlines()
    fence, start = None, 0
    for number, line in enumerate(lines, start=1):
        match = FENCE.fullmatch(line.strip())
        if match is None:
            continue
        if fence is None:
            fence, start = match, number
        elif match[1] == fence[1] and not match[2]:
            above = lines[start - 2].strip() if start > 1 else ""
            text = "\n".join(lines[start : number - 1])
            is_executed = MARK.fullmatch(above) is None
            found.append(Block(fence[2].strip(), start + 1, text, is_executed))
            fence = None
    assert fence is None, f"the block that opens in line {start} never ends"
    return found


def script_of(blocks: list[Block]) -> str:
    """Return the Python of a page as one script, every line where it stands on the page."""
    lines: list[str] = []
    for block in blocks:
        if block.language in PYTHON and block.is_executed:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines) + "\n" if lines else ""


def commands_of(block: Block) -> list[list[str]]:
    """Return the words of each command of a shell block, without prompts, comments and settings."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if words:
            found.append(words)
    return found


def missing_parts(words: list[str]) -> list[str]:
    """Return what a command names and this checkout lacks: scripts, modules, make targets."""
    program, *arguments = words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        goals = [word for word in arguments if "=" not in word and not word.startswith("-")]
        return [goal for goal in goals if not re.search(rf"^{goal}:", makefile, re.MULTILINE)]
    runs_python = program in ("python", "python3", "torchrun", "mpiexec", "mpirun", "srun")
    if not runs_python and [program, *arguments[:1]] != ["meshdist", "run"]:
        return []
    if "-m" in arguments[:-1]:
        module = arguments[arguments.index("-m") + 1]
        return [] if importlib.util.find_spec(module) else [module]
    scripts = [word for word in arguments if word.endswith(".py")][:1]
    return [script for script in scripts if not (ROOT / script).is_file()]


def read(page: str) -> list[Block]:
    """Return the blocks of a page of this checkout."""
    return blocks_of((ROOT / page).read_text(encoding="utf-8"))


# -- the pages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if script_of(read(page))])
def test_every_python_block_runs(page: str, pool: Pool, tmp_path: Path) -> None:
    script = script_of(read(page))
    path = tmp_path / f"{Path(page).stem}.py"
    path.write_text(script, encoding="utf-8")
    (done,) = pool.start(path, is_strict=True, has_teardown=False, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, f"{page} (the line numbers are the page's)\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_names_what_exists(page: str) -> None:
    missing = {
        f"{page}:{block.line}: {shlex.join(words)}": parts
        for block in read(page)
        if block.language in SHELL and block.is_executed
        for words in commands_of(block)
        if (parts := missing_parts(words))
    }
    assert missing == {}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_names_a_language_that_these_tests_know(page: str) -> None:
    unknown = [b for b in read(page) if b.language not in (*PYTHON, *SHELL, *SHOWN)]
    assert unknown == []


def test_blocks_that_are_not_executed_are_counted() -> None:
    marked = {page: sum(not block.is_executed for block in read(page)) for page in PAGES}
    assert {page: count for page, count in marked.items() if count} == NOT_EXECUTED


@pytest.mark.parametrize("page", PAGES)
def test_every_link_within_the_checkout_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    here = (ROOT / page).parent
    assert [t for t in targets if "://" not in t and not (here / t).exists()] == []


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site and GitHub make them."""
    text = re.sub(
        r"^(`{3,})[^\n]*\n.*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        slug = (
            re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        )
        found.add(re.sub(r"[-\s]+", "-", slug))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_anchor_of_a_link_exists(page: str) -> None:
    here = ROOT / page
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", here.read_text(encoding="utf-8"))
    missing = []
    for target, anchor in links:
        path = (here.parent / target) if target else here
        if path.suffix == ".md" and path.exists() and anchor not in anchors_of(path):
            missing.append(f"{target}#{anchor}")
    assert missing == []


def test_every_public_name_is_described() -> None:
    names = {*meshdist.__all__, *meshdist.distributed.__all__, *meshdist.errors.__all__}
    public = {name: getattr(meshdist, name) for name in names}
    kinds = (inspect.isroutine, inspect.isclass, inspect.ismodule)
    described = {name: thing for name, thing in public.items() if any(is_(thing) for is_ in kinds)}
    assert len(described) > 20
    assert [name for name, thing in described.items() if not (thing.__doc__ or "").strip()] == []


# -- the reader of pages itself -----------------------------------------------------------------

SAMPLE = """\
# A page

```python
a = 1
```
<!-- not executed: needs eight GPUs -->
```python
raise SystemExit("never")
```
```console
$ OMP_NUM_THREADS=1 meshdist run -n 4 nowhere.py --steps 3   # four ranks
meshdist run -n 2 \\
    -m meshdist.nowhere
make demo nothing
python setup.py | cat
pip install nowhere.py
```
```python
assert a == 1 and __import__("sys")._getframe().f_lineno == 19
```
"""


def test_a_page_becomes_one_script_with_the_lines_of_the_page() -> None:
    blocks = blocks_of(SAMPLE)
    assert [block.line for block in blocks] == [4, 8, 11, 19]
    assert [block.is_executed for block in blocks] == [True, False, True, True]
    script = script_of(blocks)
    assert "never" not in script
    exec(compile(script, "page", "exec"), {})


def test_commands_that_name_nothing_are_found() -> None:
    commands = commands_of(blocks_of(SAMPLE)[2])
    assert [missing_parts(words) for words in commands] == [
        ["nowhere.py"],
        ["meshdist.nowhere"],
        ["nothing"],
        ["setup.py"],
        [],
    ]


def test_a_block_without_an_end_is_found() -> None:
    with pytest.raises(AssertionError, match="opens in line 2 never ends"):
        blocks_of("text\n```python\na = 1\n")


@pytest.mark.parametrize("word", ["moe", "ulysses", "clip", "experts", "checkpoint", "fsdp"])
def test_the_search_finds_a_page(word: str) -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (separator,) = re.findall(r"separator: '(.*)'", config)
    pages = [page for page in PAGES if page.startswith("docs/")]
    found = [
        page for page in pages if word in re.split(separator, (ROOT / page).read_text().lower())
    ]
    assert found != []
