"""Small faults of a package's statements: where they can be made, which are drawn, and their text.

A mutant is known by its file, its function, the text of its statement (with a number, where a
function has equal statements), its kind, and which of the places of this kind it changes. So edits
elsewhere leave it what it is. For each folder as many statements are drawn as its share of all
statements; those with the lowest digests of seed and statement are taken, so that an edit changes
few of them. What has no law is left as it is: docstrings, annotations, texts of errors,
``__repr__``, ``__all__``, imports, and blocks for type checkers.

Worked example:

>>> source = '''def first(rows, least):
...     if rows and len(rows) > least:
...         return rows[0:1]
... '''
>>> for site in sites("rows.py", source):
...     print(f"{site.function} {site.kind:9} {site.was!r} -> {site.now!r}")
first boolean   'rows and len(rows) > least' -> '(rows or len(rows) > least)'
first compare   'len(rows) > least' -> '(len(rows) >= least)'
first condition 'rows and len(rows) > least' -> '(not (rows and len(rows) > least))'
first constant  '0' -> '1'
first constant  '1' -> '2'
first return    'return rows[0:1]' -> 'return None'
first slice     '0:1' -> ':1'
first slice     '0:1' -> '0:'
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "meshdist"

COMPARED = ((ast.Eq, ast.NotEq), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Is, ast.IsNot))
MEMBERS = ((ast.In, ast.NotIn),)
COMPUTED = ((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.BitAnd, ast.BitOr))
SHIFTED = ((ast.LShift, ast.RShift),)
EXCHANGED: dict[type[ast.AST], Any] = {ast.Div: ast.Mult, ast.Mod: ast.FloorDiv}
for first, second in (*COMPARED, *MEMBERS, *COMPUTED, *SHIFTED):
    EXCHANGED |= {first: second, second: first}
NO_LAW = {"__repr__", "__str__", "__rich_repr__"}
NO_LAWS = ("__all__", "if TYPE_CHECKING")
TEXTS = {"explain", "warn", "Warning", "Error", "Failure"}
"""Ends of names of calls whose arguments are texts of errors."""

BLOCKS = {"body", "orelse", "finalbody", "handlers", "cases"}
UNREAD = BLOCKS | {"annotation", "type_comment", "decorator_list", "pattern"}
CHANGED = ast.Compare | ast.BinOp | ast.BoolOp | ast.Constant | ast.IfExp | ast.comprehension
CHANGED |= ast.Slice | ast.Call
SKIPPED = ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal | ast.Pass | ast.Assert


@dataclass(frozen=True)
class Site:
    """A place that a mutant changes.

    Attributes:
        statement: text of the statement's first line, as ``ast`` writes it.
        number: which of the function's equal statements.
        place: which of the statement's places of this kind.
        span: where the text lies in the file, in bytes.
    """

    file: str
    function: str
    statement: str
    number: int
    kind: str
    place: int
    was: str
    now: str
    span: tuple[int, int]

    @property
    def home(self) -> str:
        """Name the statement alike, wherever in its function it moves."""
        return f"{self.file}::{self.function}::{self.statement}#{self.number}"

    @property
    def name(self) -> str:
        """Name the mutant alike, whatever changes elsewhere."""
        return f"{self.home}::{self.kind}{self.place}"


def head_of(node: ast.stmt) -> str:
    """Return a statement's text, of a block its first line."""
    head = copy.copy(node)
    for block in BLOCKS & {*node._fields}:
        setattr(head, block, [ast.Pass()] if block == "body" else [])
    return ast.unparse(head).partition("\n")[0]


def statements(body: Iterable[ast.AST], function: str = "") -> Iterator[tuple[str, str, ast.stmt]]:
    """Yield each statement that does something, with its function's name and its first line."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name not in NO_LAW:
                yield from statements(node.body, f"{function}.{node.name}".lstrip("."))
        elif isinstance(node, ast.stmt):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_text or isinstance(node, SKIPPED):
                continue
            head = head_of(node)
            if head.startswith(NO_LAWS):
                continue
            yield function, head, node
            for block in sorted(BLOCKS):
                yield from statements(getattr(node, block, ()), function)
        else:
            yield from statements(getattr(node, "body", ()), function)


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a statement computes, without its blocks, its annotations and texts of errors."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if name in UNREAD or not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.Call) and ast.unparse(child.func).endswith(tuple(TEXTS)):
                continue
            yield child
            yield from expressions(child)


def negated(node: ast.expr) -> ast.expr:
    """Return the opposite of a condition."""
    return ast.UnaryOp(ast.Not(), node)


def changes_of_expression(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST | None]]:
    """Yield kind, place and replacement of each change within an expression."""
    if not isinstance(node, CHANGED):
        return
    new = copy.copy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1:
        new.ops = [EXCHANGED[type(new.ops[0])]()]
        yield "compare", node, new
    elif isinstance(new, ast.BinOp) and type(new.op) in EXCHANGED:
        new.op = EXCHANGED[type(new.op)]()
        yield "arithmetic", node, new
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield "boolean", node, new
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool | int):
        new.value = not new.value if isinstance(new.value, bool) else new.value + 1
        yield "constant", node, new
    elif isinstance(node, ast.IfExp):
        yield "condition", node.test, negated(node.test)
    elif isinstance(node, ast.comprehension):
        yield from (("condition", test, negated(test)) for test in node.ifs)
    elif isinstance(new, ast.Slice):
        for bound in ("lower", "upper"):
            if getattr(node, bound) is not None:
                other = copy.copy(new)
                setattr(other, bound, None)
                yield "slice", node, other
    elif isinstance(new, ast.Call):
        left_out = [key for key in new.keywords if key.arg not in (None, "stacklevel")]
        for key in left_out:
            rest = [other for other in new.keywords if other is not key]
            yield "argument", node, ast.Call(new.func, new.args, rest)
        if not left_out and len(new.args) > 1 and not isinstance(new.args[-1], ast.Starred):
            yield "argument", node, ast.Call(new.func, new.args[:-1], new.keywords)


def changes(node: ast.stmt) -> Iterator[tuple[str, ast.AST, ast.AST | None]]:
    """Yield kind, place and replacement of each change of a statement; None: `pass`."""
    if isinstance(node, ast.Raise):
        yield "removal", node, None
        return
    if isinstance(node, ast.If | ast.While):
        yield "condition", node.test, negated(node.test)
    # `return False` -> `return None` is seldom another program: that is a constant's change.
    is_plain = not isinstance(getattr(node, "value", None), ast.Constant)
    if isinstance(node, ast.Return) and node.value is not None and is_plain:
        is_truth = isinstance(node.value, ast.Compare) or ast.unparse(node.value).startswith("not ")
        yield "return", node, ast.Return(negated(node.value) if is_truth else ast.Constant(None))
    stores = ast.Attribute | ast.Subscript
    is_stored = isinstance(node, ast.Assign) and all(isinstance(it, stores) for it in node.targets)
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_call and not ast.unparse(node).partition("(")[0].endswith(tuple(TEXTS)):
        yield "removal", node, None
    if is_stored or isinstance(node, ast.AugAssign | ast.Delete | ast.Continue):
        yield "removal", node, None
    for child in expressions(node):
        yield from changes_of_expression(child)


def text_of(node: ast.AST | None) -> str:
    """Return the source of a replacement."""
    if node is None:
        return "pass"
    text = ast.unparse(ast.fix_missing_locations(node))
    is_plain = isinstance(node, ast.stmt | ast.Slice | ast.Constant | ast.Call)
    return text if is_plain else f"({text})"


def sites(file: str, source: str) -> list[Site]:
    """Return all places of a file that a mutant may change, sorted by kind within a statement."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for function, statement, node in statements(ast.parse(source).body):
        number = seen[function, statement]
        seen[function, statement] += 1
        places: Counter[str] = Counter()
        for kind, old, new in sorted(changes(node), key=lambda change: change[0]):
            begin = starts[old.lineno - 1] + old.col_offset  # type: ignore[attr-defined]
            end = starts[old.end_lineno - 1] + old.end_col_offset  # type: ignore[attr-defined]
            was = data[begin:end].decode()
            where = (file, function, statement, number, kind, places[kind])
            found.append(Site(*where, was, text_of(new), (begin, end)))
            places[kind] += 1
    return found


def all_sites(root: Path = ROOT) -> list[Site]:
    """Return all places of the package."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    return [
        site
        for file in files
        for site in sites(str(file.relative_to(root)), file.read_text(encoding="utf-8"))
    ]


def mutated(source: str, site: Site) -> str:
    """Return the file's text with the change made."""
    data, (begin, end) = source.encode(), site.span
    return (data[:begin] + site.now.encode() + data[end:]).decode()


def digest(seed: int, text: str) -> str:
    """Return a number by which a text is drawn."""
    return hashlib.sha256(f"{seed} {text}".encode()).hexdigest()


def draw(places: Iterable[Site], seed: int, count: int) -> list[Site]:
    """Draw statements by each folder's share of them, and of each statement a kind and a place."""
    homes: defaultdict[str, list[Site]] = defaultdict(list)
    for site in places:
        homes[site.home].append(site)
    folders: defaultdict[str, list[str]] = defaultdict(list)
    for home in homes:
        folders[room_of(home)].append(home)
    # Shares of 200 over 3, 2 and 1 statements are 100, 66.7 and 33.3: the remainder goes to the
    # second, whose fraction is largest.
    shares = {name: count * len(of) / len(homes) for name, of in folders.items()}
    by_fraction = sorted(shares, key=lambda name: (int(shares[name]) - shares[name], name))
    more = count - sum(map(int, shares.values()))
    drawn = []
    for name in sorted(folders):
        size = int(shares[name]) + (name in by_fraction[:more])
        for home in sorted(folders[name], key=lambda home: digest(seed, home))[:size]:
            kinds = sorted({site.kind for site in homes[home]})
            kind = min(kinds, key=lambda kind: digest(seed, f"{home} {kind}"))
            of_kind = [site for site in homes[home] if site.kind == kind]
            drawn.append(min(of_kind, key=lambda site: digest(seed, site.name)))
    return drawn


def room_of(name: str) -> str:
    """Return the folder of a mutant's file, and the package's name for files on top."""
    folder = Path(name.partition("::")[0]).parent.as_posix()
    return folder.removeprefix(f"{PACKAGE}/")
