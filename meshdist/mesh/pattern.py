"""Parse and print patterns, which describe shardings as text.

    pattern := side ["->" side]                   several operands: side "," side "->" side
    side    := (dim | group | "..." | "1")* ["{" kind ":" axis ("," axis)* (";" kind ":" ...)* "}"]
    dim     := name ["@" (axis | "(" axis ("," axis)* ")")]      group := "(" dim+ ")" ["@" ...]
    kind    := "U" | "R"

No space surrounds ``@``. Only a group's first dim can be cut, so that parts are contiguous: ``(h
k)@tp`` equals ``(h@tp k)``. A side names each dim and each axis once. ``pattern_sizes`` adds meshes
and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn

from ..error_text import with_article
from ..errors import KindError, PatternError
from .partition_spec import PartitionSpec

_TOKEN = re.compile(r"\s*(?:(?P<name>[^\W\d]\w*)|(?P<number>\d+)|(?P<sign>\.\.\.|->|[@(){}:;,]))")

_KINDS = ("U", "R")
_AXIS = "the name of a mesh axis"


@dataclass(frozen=True)
class Dim:
    """A dim of an array in a pattern.

    Args:
        names: its name, or a group's names, major to minor; ("...",) means any number of dims, and
            ("1",) a dim of size 1.
        axes: the mesh axes that cut it, or a group's first name, major to minor.
        column: its start in the text, from 0.
    """

    names: tuple[str, ...]
    axes: tuple[str, ...] = ()
    column: int = field(default=0, compare=False)

    @property
    def is_rest(self) -> bool:
        """Return whether it is "..."."""
        return self.names == ("...",)

    @property
    def is_one(self) -> bool:
        """Return whether it is "1"."""
        return self.names == ("1",)

    def __str__(self) -> str:
        names = " ".join(self.names)
        if len(self.names) > 1:
            names = f"({names})"
        return cut_text(names, self.axes)


@dataclass(frozen=True)
class PatternSide:
    """An array in a pattern."""

    dims: tuple[Dim, ...]
    unreduced: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut dims, then the unreduced axes, then the reduced axes."""
        cut = tuple(axis for dim in self.dims for axis in dim.axes)
        return (*cut, *self.unreduced, *self.reduced)

    @property
    def names(self) -> tuple[str, ...]:
        """All dims' names in order, with "..." and without "1"."""
        return tuple(name for dim in self.dims if not dim.is_one for name in dim.names)

    def __str__(self) -> str:
        parts = [*map(str, self.dims), _kinds_text(self.unreduced, self.reduced)]
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern; its ``str`` parses to an equal ``Pattern``.

    Args:
        operands: the arrays before "->", or all arrays.
        result: the array after "->", or None.
        commas: the columns of commas between operands.

    Example:
        >>> parse("b@(dp) (h@tp k)->(h k) b@dp{R:tp}")
        Pattern('b@dp (h k)@tp -> (h k) b@dp {R:tp}')
    """

    operands: tuple[PatternSide, ...]
    result: PatternSide | None = None
    text: str = field(default="", compare=False)
    commas: tuple[int, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        left = ", ".join(map(str, self.operands))
        return left if self.result is None else f"{left} -> {self.result}"

    def __repr__(self) -> str:
        return f"Pattern({str(self)!r})"

    def get_operand(self) -> PatternSide:
        """Return the only operand; raise if there are several."""
        if len(self.operands) == 1:
            return self.operands[0]
        raise column_error(
            self.text,
            self.commas[0],
            expected="one array (a comma outside of brackets separates operands)",
            found=f"{len(self.operands)} operands",
            fix=self.find_missing_brackets(),
        )

    def find_missing_brackets(self) -> str | None:
        """Return the fix if the first comma likely lacks brackets, as in "b@dp,tp d"."""
        return _missing_brackets(self.operands[0].dims[-1:], self.operands[1].dims[:1])


def _missing_brackets(before: Sequence[Dim], following: Sequence[Dim]) -> str | None:
    if not (before and following and before[-1].axes and not following[0].axes):
        return None
    if len(following[0].names) > 1:
        return None
    meant = Dim(before[-1].names, (*before[-1].axes, *following[0].names))
    return f"write {meant} to cut one dim over several axes"


def cut_text(dim: str, axes: Sequence[str]) -> str:
    """Return a dim's name or size with its axes.

    Example:
        >>> cut_text("s", ()), cut_text("s", ("dp",)), cut_text("8", ("dp", "tp"))
        ('s', 's@dp', '8@(dp,tp)')
    """
    listed = ",".join(axes)
    return f"{dim}@({listed})" if len(axes) > 1 else f"{dim}@{listed}" if axes else dim


def _kinds_text(unreduced: Sequence[str], reduced: Sequence[str]) -> str:
    """Return unreduced and reduced axes as ``{U:tp; R:cp}``; "" for none."""
    kinds = [
        f"{kind}:{','.join(axes)}"
        for kind, axes in zip(_KINDS, (unreduced, reduced), strict=True)
        if axes
    ]
    return f"{{{'; '.join(kinds)}}}" if kinds else ""


def parse(text: str) -> Pattern:
    """Parse a pattern; raise PatternError with the column if invalid.

    Example:
        >>> parse("... d@tp {U:dp; R:cp}").operands[0].unreduced
        ('dp',)
    """
    if not isinstance(text, str):
        raise KindError(
            "a pattern must be a string",
            expected='such as "b@dp s d@tp"',
            found=f"{text!r}, {with_article(type(text).__name__)}",
            fix="pass a sharding that has the spec: sharding = "
            f"md.NamedSharding(mesh, {text!r}); then call md.shard(x, sharding), "
            "md.unshard(x, sharding) or md.reshard(x, sharding, other_sharding)"
            if isinstance(text, PartitionSpec)
            else None,
        )
    return _parse(text)


@lru_cache(maxsize=4096)
def _parse(text: str) -> Pattern:
    return _PatternReader(text).pattern()


def column_error(
    text: str,
    column: int,
    *,
    expected: str,
    found: str,
    fix: str | None = None,
    summary: str = "invalid pattern",
) -> PatternError:
    """Return an error with a caret under ``column`` of ``text``."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    error = PatternError(
        f"{summary}: column {column + 1} of {text!r}",
        where=f"{shown}\n{' ' * column}^",
        expected=expected,
        found=found,
        fix=fix,
    )
    error.text, error.column = text, column
    return error


@dataclass(frozen=True)
class _Token:
    kind: str  # "name", "number", the sign itself, or "end"
    text: str
    start: int
    stop: int

    @property
    def shown(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text)


class _PatternReader:
    """A left-to-right parser of a pattern."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[_Token] = []
        self.position = 0
        at = 0
        while match := _TOKEN.match(text, at):
            kind = match.lastgroup or ""
            token = match[kind]
            at = match.end()
            start = match.start(kind)
            self.tokens.append(_Token(token if kind == "sign" else kind, token, start, at))
        at += len(text[at:]) - len(text[at:].lstrip())
        if at < len(text):
            self.fail(at, 'a dim, "@", "{", "," or "->"', repr(text[at]))

    def pattern(self) -> Pattern:
        operands = [self.side()]
        commas = []
        while self.next.kind == ",":
            commas.append(self.take(",", "").start)
            operands.append(self.side())
        result = None
        if self.next.kind == "->":
            self.take("->", "")
            result = self.side()
        if self.next.kind != "end":
            after_kinds = self.tokens[self.position - 1].kind == "}"
            parts = [] if after_kinds else ["a dim", '"{"']
            parts += ['","', '"->"'] if result is None else []
            expected = ", ".join(parts) + " or the end" if parts else "the end"
            at, following = self.next, self.tokens[self.position + 1 : self.position + 2]
            fix = None
            if at.kind == "," and result is not None and following and following[0].kind == "name":
                fix = _missing_brackets(result.dims, [Dim((following[0].text,))])
            self.fail(at.start, expected, at.shown, fix)
        return Pattern(tuple(operands), result, self.text, tuple(commas))

    def side(self) -> PatternSide:
        """Read and return an array: dims, then kinds in braces."""
        dims: list[Dim] = []
        names: set[str] = set()
        axes: set[str] = set()
        while True:
            token = self.next
            if token.kind in ("name", "number", "..."):
                self.position += 1
                if token.kind == "number" and token.text != "1":
                    self.fail(token.start, "the name of a dim, or 1", token.shown)
                if token.kind != "number":
                    self.note(token, names, "dim")
                cut = self.axes_after_at(axes)
                if cut and token.kind != "name":
                    self.fail(token.stop, 'the name of a dim before "@"', token.shown)
                dims.append(Dim((token.text,), cut, token.start))
            elif token.kind == "(":
                dims.append(self.group(names, axes))
            elif token.kind == "@":
                self.fail_at_sign(dims)
            else:
                break
        unreduced, reduced = self.kinds(axes) if self.next.kind == "{" else ((), ())
        return PatternSide(tuple(dims), unreduced, reduced)

    def group(self, names: set[str], axes: set[str]) -> Dim:
        opening = self.take("(", "")
        inside: list[str] = []
        cut: tuple[str, ...] = ()
        while self.next.kind == "name":
            token = self.take("name", "")
            self.note(token, names, "dim")
            if inside and self.next.kind == "@":
                self.fail(
                    self.next.start,
                    "axes after the first dim of a group",
                    f"axes after {token.text!r}, whose parts would not be contiguous",
                )
            found = self.axes_after_at(axes)
            cut = cut or found
            inside.append(token.text)
        if not inside:
            self.fail(self.next.start, "the name of a dim in a group", self.next.shown)
        self.take(")", 'the name of a dim, or ")"')
        outside = self.next
        found = self.axes_after_at(axes)
        if cut and found:
            self.fail(outside.start, "axes inside of a group or after it", "both")
        return Dim(tuple(inside), cut or found, opening.start)

    def kinds(self, axes: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        self.take("{", "")
        found: dict[str, tuple[str, ...]] = dict.fromkeys(_KINDS, ())
        while True:
            kind = self.take("name", "U (unreduced) or R (reduced)")
            if kind.text not in found:
                self.fail(kind.start, "U (unreduced) or R (reduced)", kind.shown)
            self.take(":", '":" and mesh axes')
            found[kind.text] += self.axis_list(axes)
            if self.next.kind != ";":
                break
            self.position += 1
        self.take("}", '",", ";" or "}"')
        return found["U"], found["R"]

    def axes_after_at(self, axes: set[str]) -> tuple[str, ...]:
        """Read "@" and axes, and return the axes; () without "@"."""
        at = self.next
        if at.kind != "@":
            return ()
        if self.tokens[self.position - 1].stop != at.start:
            self.fail(at.start - 1, '"@" right after its dim', "a space")
        self.position += 1
        after = self.next
        if after.kind != "end" and after.start != at.stop:
            self.fail(at.stop, f'{_AXIS} right after "@"', "a space")
        if after.kind != "(":
            token = self.take("name", f'{_AXIS}, or several in brackets: "(dp,tp)"')
            self.note(token, axes, "mesh axis")
            return (token.text,)
        self.position += 1
        listed = self.axis_list(axes)
        self.take(")", '"," or ")" after a mesh axis')
        return listed

    def axis_list(self, axes: set[str]) -> tuple[str, ...]:
        listed: list[str] = []
        while not listed or self.next.kind == ",":
            self.position += bool(listed)
            token = self.take("name", _AXIS)
            self.note(token, axes, "mesh axis")
            listed.append(token.text)
        return tuple(listed)

    # -- reading one token

    @property
    def next(self) -> _Token:
        if self.position < len(self.tokens):
            return self.tokens[self.position]
        return _Token("end", "", len(self.text), len(self.text))

    def take(self, kind: str, expected: str) -> _Token:
        token = self.next
        if token.kind != kind:
            self.fail(token.start, expected, token.shown)
        self.position += 1
        return token

    def note(self, token: _Token, seen: set[str], what: str) -> None:
        if token.text in seen:
            self.fail(token.start, f"each {what} once in an array", f"{token.text!r} again")
        seen.add(token.text)

    def fail_at_sign(self, dims: list[Dim]) -> NoReturn:
        sign, before = self.next, self.tokens[self.position - 1] if self.position else None
        if dims and dims[-1].axes and before is not None and before.stop == sign.start:
            both = Dim(dims[-1].names, (*dims[-1].axes, "..."))
            self.fail(sign.start, f"several axes in brackets: {both}", "a second '@'")
        self.fail(sign.start, 'the name of a dim right before "@"', sign.shown)

    def fail(self, column: int, expected: str, found: str, fix: str | None = None) -> NoReturn:
        raise column_error(self.text, column, expected=expected, found=found, fix=fix)
