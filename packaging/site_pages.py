"""Pages of the site that are made from the code, and links that lead out of it; a hook of mkdocs.

The reference has each public name once: what stands on top by the folder that it lives in, and what
stands in ``meshdist.distributed`` alone on a page of its own; a name without a page, or a page
without names, ends the build. The page of errors has all errors of the package, by
``reference_tables.with_all_errors``. ``search_words.json`` lists more words by which the search
finds a page (tags), and pages that rank lower (boost).
"""

from __future__ import annotations

import inspect
import json
import logging
import posixpath
import re
import sys
from collections import defaultdict
from functools import partial
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "packaging")]

from public_names import homes  # noqa: E402
from reference_tables import with_all_errors  # noqa: E402

import meshdist  # noqa: E402 - from this checkout

_TITLES = {
    "mesh": "Mesh",
    "worlds": "Worlds",
    "collectives": "Collectives",
    "lax": "lax: JAX's names",
    "attention": "attention",
    "experts": "experts",
    "typed_mode": "Types",
    "sharding": "Sharded arrays",
    "tensor_parallel": "Tensor parallelism",
    "optim": "Optimizers",
    "checkpoint": "Checkpoints",
    "ddp": "Data parallelism",
    "errors": "Exceptions",
    "distributed": "distributed: torch's names",
}
_ELSEWHERE = {
    "groups": "worlds",
    "join": "ddp",
    "lax": "typed_mode",
    "reduce_ops": "collectives",
}
_BREAK = re.compile(r"(?<=[\w\])])[._(,/\[]+(?=\w)")  # a name in a table may break after this
_MODULES = (
    "attention",
    "checkpoint",
    "distributed",
    "errors",
    "experts",
    "lax",
    "optim",
    "tensor_parallel",
)
_OF_OPERATIONS = ("attention", "experts", "lax", "optim")
"""The modules whose names are written with the module's."""


def _is_of_ours(record: logging.LogRecord) -> bool:
    return "site-packages" not in record.getMessage()


def on_config(config: Any) -> Any:
    """Drop griffe's log of other packages; link the repository that ``[project.urls]`` names."""
    for name in list(logging.root.manager.loggerDict):
        if "griffe" in name or "mkdocstrings" in name:
            logging.getLogger(name).addFilter(_is_of_ours)
    for url in metadata("meshdist").get_all("Project-URL") or ():
        label, _, address = url.partition(", ")
        if label == "Repository":
            config.repo_url, config.repo_name = address, label
            config.edit_uri = "edit/main/docs/"
            config.theme["features"].append("content.action.edit")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the code."""
    for name, text in reference().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside the site by their names; list all errors on their page."""
    page.meta.update(search_words(page.file.src_uri))
    if page.file.src_uri == "reference/errors.md":
        return with_all_errors(markdown)
    if page.file.src_uri.startswith("api/"):
        return markdown
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    return re.sub(r"\[([^\]]+)\]\((\.\./[^)]+)\)", partial(_named, folder), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Let long names in tables break after a dot, an underscore, a comma or a bracket."""
    return re.sub(r"<td[^>]*>.*?</td>", _with_breaks, html, flags=re.DOTALL)


def _with_breaks(cell: re.Match[str]) -> str:
    return re.sub(
        r"(<code>)([^<]*)(</code>)",
        lambda code: (
            code[1] + re.sub(r"(?<=[\w\])])([._(,/\[]+)(?=\w)", r"\1<wbr>", code[2]) + code[3]
        ),
        cell[0],
    )


def search_words(page: str) -> dict[str, Any]:
    """Return the tags of a page for the search, and its boost, as mkdocs takes them."""
    words = json.loads(Path(__file__).with_name("search_words.json").read_text(encoding="utf-8"))
    boosts = [boost for path, boost in words["boost"].items() if page.startswith(path)]
    tags = words["tags"].get(page)
    return {
        **({"tags": tags} if tags else {}),
        **({"search": {"boost": min(boosts)}} if boosts else {}),
    }


def _named(folder: str, link: re.Match[str]) -> str:
    text, path = link[1], posixpath.normpath(posixpath.join(folder, link[2]))
    if path.startswith("docs/"):
        return link[0]
    return f"`{path}`" if text.strip("`/") in path else f"{text} (`{path}`)"


# -- the reference ------------------------------------------------------------------------------


def reference() -> dict[str, str]:
    """The pages of the reference, by path."""
    pages: dict[str, list[str]] = defaultdict(list)
    listed = names_by_page()
    for page, names in listed.items():
        pages[page] = [_entry(name, *_found(page, name)) for name in names]
    hooks = meshdist.distributed.comm_hooks
    pages["distributed"] += [
        f"::: {thing.__module__}.{thing.__name__}\n"
        for thing in (getattr(hooks, name) for name in hooks.__all__)
        if inspect.isroutine(thing) or inspect.isclass(thing)
    ]
    texts = {
        f"api/{page}.md": f"# {title}\n\n" + "\n".join(dict.fromkeys(pages[page]))
        for page, title in _TITLES.items()
    }
    return {**texts, "api/index.md": _index(listed)}


def names_by_page() -> dict[str, list[str]]:
    """The public names of each page of the reference."""
    found: dict[str, list[str]] = defaultdict(list)
    listed = {*dir(meshdist)} - {*_MODULES, "__version__"}
    modules = homes()
    for name in sorted(listed - {*meshdist.errors.__all__}, key=str.lower):
        first = modules[name].partition(".")[0]
        found[_ELSEWHERE.get(first, first)].append(name)
    for module in _OF_OPERATIONS:
        found[module] += getattr(meshdist, module).__all__
    found["errors"] += meshdist.errors.__all__
    alone = {*dir(meshdist.distributed)} - listed - {"comm_hooks", *meshdist.errors.__all__}
    found["distributed"] += sorted(alone, key=str.lower)
    wrong = _TITLES.keys() ^ found.keys()
    if wrong:
        raise PluginError(f"the reference has no page, or no names, for: {sorted(wrong)}")
    return found


def _found(page: str, name: str) -> tuple[Any, str]:
    """What a name of a page means, and the module that has it."""
    if page in _OF_OPERATIONS:
        thing = getattr(getattr(meshdist, page), name)
        return thing, thing.__module__
    home = "errors" if page == "errors" else homes()[name]
    return getattr(meshdist, name), f"meshdist.{home}"


def _entry(name: str, thing: Any, module: str) -> str:
    """A name's part of its page; a thing with two names is described by that on top."""
    on_top = [other for other in dir(meshdist) if getattr(meshdist, other) is thing]
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return f"## `{name}`\n\nAnother name of `{thing!r}`.\n"
    if thing.__module__.partition(".")[0] == "torch":
        return f"## `{name}`\n\ntorch's own.\n"
    if name not in on_top and (on_top or thing.__name__ != name):
        return f"## `{name}`\n\nAnother name of `{(*on_top, thing.__name__)[0]}`.\n"
    described = f"::: {module}.{thing.__name__}\n"
    return described if thing.__name__ == name else f"## `{name}`\n\n{described}"


def _index(listed: dict[str, list[str]]) -> str:
    """All public names on one page."""
    lines = [
        "# API",
        "",
        "The public names, such as `md.all_reduce`, by the page that describes them. "
        "[Where each name is](../reference/names.md) has all names in one table.",
        "",
    ]
    for page, title in _TITLES.items():
        shown = [
            f"`{page}.{name}`" if page in _OF_OPERATIONS else f"`{name}`" for name in listed[page]
        ]
        if page in ("errors", "distributed"):
            shown = [f"all of `meshdist.{page}`"]
        lines.append(f"* [{title}]({page}.md): {', '.join(shown)}")
    return "\n".join(lines) + "\n"
