"""Pages of the site that are made from the code, and links that lead out of it; a hook of mkdocs.

The reference has each public name of the package once, by the folder that it lives in; a name
without a page, or a page without names, ends the build. "Errors by their first line" is read from
the places where errors are raised.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import meshdist  # noqa: E402 - from this checkout

_TITLES = {
    "mesh": "Mesh",
    "collectives": "Verbs",
    "lax": "lax: JAX's names",
    "sharding": "Sharded arrays",
    "ddp": "Data parallelism",
    "worlds": "Worlds",
    "groups": "Groups",
    "bootstrap": "Stores and rendezvous",
    "wires": "Works and wires",
    "debug": "Debugging",
    "reduce_ops": "Reductions",
    "errors": "Errors",
}
_ELSEWHERE = {
    "checking": "debug",
    "dtypes": "reduce_ops",
    "functional": "collectives",
    "joining": "ddp",
    "torch_process_groups": "wires",
    "typed_contexts": "collectives",
}
_FIELDS = ("where", "expected", "found", "fix")


def _is_of_ours(record: logging.LogRecord) -> bool:
    return "site-packages" not in record.getMessage()


def on_config(config: Any) -> Any:
    """Let griffe be silent of what it finds in other packages, torch's above all."""
    for name in list(logging.root.manager.loggerDict):
        if "griffe" in name or "mkdocstrings" in name:
            logging.getLogger(name).addFilter(_is_of_ours)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the code."""
    for name, text in {**reference(), "errors_by_first_line.md": errors_page()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to files of the checkout, outside the site, be their names."""
    return re.sub(r"\[([^\]]+)\]\((\.\./[^)]+)\)", _named, markdown)


def _named(link: re.Match[str]) -> str:
    text, path = link[1], link[2].removeprefix("../")
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"


# -- the reference ------------------------------------------------------------------------------


def reference() -> dict[str, str]:
    """The pages of the reference, by path."""
    pages: dict[str, list[str]] = defaultdict(list)
    for name in sorted(meshdist.__all__, key=str.lower):
        if name in ("__version__", "errors", "lax", "comm_hooks"):
            continue
        thing = getattr(meshdist, name)
        home, where = _home(name, thing)
        pages[home].append(_entry(name, thing, where))
    for name in meshdist.lax.__all__:
        thing = getattr(meshdist.lax, name)
        pages["lax"].append(f"::: {thing.__module__}.{name}\n")
    for name in meshdist.comm_hooks.__all__:
        thing = getattr(meshdist.comm_hooks, name)
        if inspect.isroutine(thing) or inspect.isclass(thing):
            pages["ddp"].append(f"::: {thing.__module__}.{thing.__name__}\n")
    pages["debug"].append("::: meshdist.worlds.breakpoints.breakpoint\n")
    missing = _TITLES.keys() ^ pages.keys()
    if missing:
        raise PluginError(f"the reference has no page, or no names, for: {sorted(missing)}")
    texts = {
        f"reference/{home}.md": f"# {title}\n\n" + "\n".join(dict.fromkeys(pages[home]))
        for home, title in _TITLES.items()
    }
    return {**texts, "reference/index.md": _index()}


def _home(name: str, thing: Any) -> tuple[str, str]:
    """The page of a public name, and the module that has it."""
    module = _module_of(name, thing)
    first = module.split(".")[1] if "." in module else ""
    home = _ELSEWHERE.get(first, first)
    if home not in _TITLES:
        raise PluginError(f"meshdist.{name}, of {module}, has no page in the reference")
    return home, module


def _module_of(name: str, thing: Any) -> str:
    """The module of ours from which the front door takes a name."""
    stub = ast.parse((ROOT / "meshdist" / "__init__.pyi").read_text())
    for node in stub.body:
        if isinstance(node, ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            return f"meshdist.{node.module}"
    return str(getattr(thing, "__module__", ""))


def _entry(name: str, thing: Any, module: str) -> str:
    real = getattr(thing, "__name__", name)
    if (inspect.isclass(thing) or inspect.isroutine(thing)) and real == name:
        return f"::: {module}.{name}\n"
    what = f"`{real}`" if inspect.isclass(thing) or inspect.isroutine(thing) else f"`{thing!r}`"
    return f"## `{name}`\n\nAnother name of {what}.\n"


def _index() -> str:
    """All public names on one page."""
    lines = ["# Reference", "", "Every public name, by the page that describes it.", ""]
    by_home: dict[str, list[str]] = defaultdict(list)
    for name in sorted(meshdist.__all__, key=str.lower):
        if name not in ("__version__", "errors", "lax", "comm_hooks"):
            by_home[_home(name, getattr(meshdist, name))[0]].append(f"`{name}`")
    by_home["lax"] = [f"`lax.{name}`" for name in meshdist.lax.__all__]
    for home, title in _TITLES.items():
        lines.append(f"* [{title}]({home}.md): {', '.join(by_home[home])}")
    return "\n".join(lines) + "\n"


# -- errors by their first line -----------------------------------------------------------------


def errors_page() -> str:
    """The first lines of all errors that name one where they are raised, with their fix."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted((ROOT / "meshdist").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and (line := _first_line(call)):
                found.setdefault(line, (_name(call), _fix(call)))
    rows = [
        f"| {_cell(line)} | `{kind}` | {_cell(fix)} |"
        for line, (kind, fix) in sorted(found.items(), key=lambda one: one[0].lower())
    ]
    if len(rows) < 300:
        raise PluginError(f"only {len(rows)} first lines of errors were found")
    return "\n".join(
        [
            "# Errors by their first line",
            "",
            "What stands for a name, a number or a value of the program is `…`. Every report has "
            "up to four more fields; [how to read one](debugging.md#how-to-read-a-report).",
            "",
            "| first line | error | fix |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _first_line(call: ast.Call) -> str:
    kind = getattr(meshdist.errors, _name(call), None)
    if not (inspect.isclass(kind) and issubclass(kind, meshdist.errors.MeshdistError)):
        return ""
    line = _text(call.args[0]) if call.args else ""
    return line if len(line.replace("…", "").split()) > 2 else ""


def _fix(call: ast.Call) -> str:
    return next((_text(word.value) for word in call.keywords if word.arg == "fix"), "")


def _text(node: ast.expr) -> str:
    """A text in the code, with … for what is put into it; "" where it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return re.sub(r"(… ?)+", "… ", "".join(_parts(node))).strip()
    return ""


def _parts(node: ast.JoinedStr) -> Iterator[str]:
    for part in node.values:
        yield str(part.value) if isinstance(part, ast.Constant) else "…"


def _cell(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
    return re.sub(r"([*_`\[\]])", r"\\\1", text)
