"""Count private terms and constructions in prose; hold each file at or below its baseline.

    python packaging/lint_prose.py [--rates] [--lower] [FILE ...]

Without files it reads README, CHANGELOG's Unreleased section, the pages of docs/, and of the
package's sources the docstrings, the comments and the texts (strings with a space: errors, logs,
help). It prints each file above its count in ``packaging/prose_baseline.json``, with the places and
what to write instead; the exit status is 1 if there is any. A file without a count must have no
hit. ``--lower`` writes counts that have fallen into the baseline. ``--rates`` prints the hits per
1,000 words of each rule.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = Path(__file__).with_name("prose_baseline.json")

TERMS = {
    r"wires?": "backend",
    r"verbs?": "collective, operation",
    r"summands?": "partial sum",
    r"first touch": "first use",
    r"front door|rooms?": "public API, module",
    r"kin|anew|dear|seldom|nobody|for ever|as a rule|in silence|without a word|turnout|crowded"
    r"|core demand|deferrals?|hand(?:ed)? back|gave up|strangers?": "plain English",
    r"mends?|mended": "fix",
    r"forgotten|misfits?|unfit|fitting": "missing, mismatched",
}
"""Private terms, and what to write in their place."""

# "one" is a number before a noun, and a pronoun before a word that cannot follow a number.
_FOLLOWS_A_PRONOUN = (
    r"that|which|who|whose|where|whom|is|has|had|was|were|does|did|can|could|may|must|will|would|in"
    r"|with|to|by|at|on|from|as|and|or|but|if|when|it|they|we|the|an?|into|under|than"
    r"|after|before|alone|itself|else|here|there|not|never|made|given|behind|beside|without"
)

SHAPES = {
    "told": r"\b(?:is|are|was|were|be|been|not) (?:told|said|named)\b|\btells?\b",
    "says (of code)": r"\b(?:which|that|it|error|report|call|mesh|launcher|page|text) says?\b",
    "refused": r"\brefus(?:e|es|ed|als?)\b",
    "where = if": r"(?:^|[.;:(] |\n)Where (?!(?:to|it runs|next|each)\b)"
    r"|, where (?:it|they|that|all|some|one|a|no|torch|ranks?)\b",
    "inverted so": r"(?:^|[.;] )So (?:is|are|does|do|it|they|can|may)\b"
    r"|\b(?:so|nor) (?:is|are|does|do) (?:the|its|their|a|those|these)\b",
    "what as a pronoun": r"\bwhat (?:is|was|has|it|they|each|a|the|all|no|comes|goes|lies|follows"
    r"|others?|members?)\b(?![^.?!]*\?)",
    "those of, that of": r"\b(?:those|that) (?:of|which|that|in|with|by)\b",
    "of its own": r"\bof (?:its|their|your|our|one's) own\b"
    r"|\b(?:is|are) no [a-z]+\b(?= (?:of|from|that)\b|[.,;])",
    "lies, stands, comes": r"\b(?:lies?|lying|stands?|stood|brings?|brought|goes|comes?|came) "
    r"(?:in|on|over|beside|behind|along|from|back|up|down|to|with|by|as)\b",
    "beside, behind": r"\b(?:beside|behind)\b",
    "one as a pronoun": r"\bones\b|\b(?:the|this|that|each|every|another)\s+one\s+of\b"
    rf"|\bone(?=\s*(?:[.,;:!?)]|$|--)|\s+(?:{_FOLLOWS_A_PRONOUN})\b)",
}
"""Constructions that the field's docs do not have, as regular expressions."""

RULES = {
    **{f"write {new}": re.compile(rf"(?i)\b(?:{old})\b") for old, new in TERMS.items()},
    **{name: re.compile(f"(?m){text}") for name, text in SHAPES.items()},
}
_EXAMPLE = re.compile(r"^\s*(?:>>>|\.\.\.).*(?:\n(?!\s*\n).*)*", re.MULTILINE)
_CODE = re.compile(r"^`{3}.*?^`{3}|<!--.*?-->", re.DOTALL | re.MULTILINE)
_UNRELEASED = re.compile(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)


def prose_of(path: Path) -> str:
    """Return a page's text without code, or the docstrings, texts and comments of a source."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = "\n\n".join(_EXAMPLE.sub("", part) for part in _texts(text))
    elif path.name == "CHANGELOG.md" and (section := _UNRELEASED.search(text)):
        text = section[1]
    text = _CODE.sub("", text)
    text = re.sub(r"``.*?``|`[^`]*`", "x", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def _texts(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("#: ")
            comments[line] = " ".join(filter(None, (comments.pop(line - 1, ""), text)))
    yield from comments.values()


def hits_in(text: str) -> list[tuple[str, str]]:
    """Return (rule, words around it) of each hit."""
    found = []
    for rule, pattern in RULES.items():
        for hit in pattern.finditer(text):
            around = text[max(0, hit.start() - 30) : hit.end() + 30]
            found.append((rule, " ".join(around.split())))
    return found


def all_files() -> list[Path]:
    """Return the files that are read if none is passed."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [*pages, *sorted((ROOT / "meshdist").rglob("*.py"))]


def name_of(path: Path) -> str:
    """Return a file's name in the baseline."""
    return path.resolve().relative_to(ROOT).as_posix()


def main(words: Sequence[str] | None = None) -> int:
    """Check the files that are passed, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--lower", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(words)
    baseline: dict[str, int] = json.loads(BASELINE.read_text(encoding="utf-8"))
    counts, rules, num_words, is_above = {}, Counter[str](), 0, False
    for path in options.files or all_files():
        text = prose_of(path)
        hits = hits_in(text)
        num_words += len(text.split())
        rules.update(rule for rule, _ in hits)
        name, most = name_of(path), baseline.get(name_of(path), 0)
        counts[name] = len(hits)
        if len(hits) > most and not options.rates:
            is_above = True
            print(f"{name}: {len(hits)} hits, at most {most}")
            for rule, around in hits:
                print(f"  {rule}: ... {around} ...")
    if options.rates:
        print(f"{1000 * sum(counts.values()) / max(num_words, 1):.1f} hits per 1,000 words")
        for rule, number in rules.most_common():
            print(f"{1000 * number / num_words:6.2f}  {rule}")
    if options.lower:
        unread = baseline if options.files else {}
        kept = {name: min(count, baseline.get(name, 0)) for name, count in counts.items()}
        kept = {name: count for name, count in {**unread, **kept}.items() if count}
        BASELINE.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    return 1 if is_above else 0


if __name__ == "__main__":
    sys.exit(main())
