"""Moves every room to its place, and gives every name one meaning; run once, in the repository's root.

Imports, texts that name rooms, and tests go along; floors of the layering test are set by hand.
"""
# ruff: noqa

import ast, io, re, subprocess, sys, tokenize
from pathlib import Path

MOVES = {
    "launching.reports": "launching.failed_ranks",
    "debug.pausing": "worlds.breakpoints",
    "mesh.inputs": "mesh.layout_arguments",
    "mesh.splits": "mesh.placement",
    "mesh.named_dims": "mesh.pattern_sizes",
    "wires.shm.failures": "wires.shm.core_failures",
    "wires.mpi.link": "wires.mpi.connection",
    "groups.failures": "groups.explainer",
    "groups.registry": "groups.communicators",
    "groups.header_tables": "groups.host_tables",
    "collectives.checks": "collectives.roots",
    "collectives.instruments": "collectives.marks",
    "collectives.monitored": "collectives.monitored_barrier",
    "groups.announcement_table": "checking.announcement_table",
    "groups.announcements": "joining.announcements",
    "groups.whereabouts": "joining.whereabouts",
    "groups.waits": "joining.waits",
    "groups.shadowing": "joining.shadow",
    "collectives.neutral_answers": "joining.answers",
    "ddp.joining": "joining.join",
    "collectives.axis_types": "functional.axis_types",
    "collectives.linear_function": "functional.linear_function",
    "collectives.value_checks": "functional.value_checks",
    "collectives.functional": "functional.reducing",
    "collectives.rearranging": "functional.moving",
    "collectives.operation_rules": "typed_contexts.torch_functions",
    "collectives.type_errors": "typed_contexts.refusals",
    "collectives.provenance": "typed_contexts.provenance",
    "collectives.casting": "typed_contexts.casting",
    "collectives.contexts": "typed_contexts.context",
    "collectives.annotations": "typed_contexts.annotations",
    "collectives.typed_verbs": "typed_contexts.verb_calls",
    "collectives.detail_checks": "typed_contexts.detail_checks",
    "collectives.typed_gradients": "typed_contexts.gradients",
    "collectives.seeding": "typed_contexts.random_draws",
    "collectives.special_calls": "typed_contexts.special_calls",
    "collectives.typed_context": "typed_contexts.mode",
    "lax": "lax",
    "collectives.named_axes.axes": "lax.axes",
    "collectives.named_axes.reducing": "lax.reducing",
    "collectives.named_axes.moving": "lax.moving",
    "collectives.named_axes.asserting": "lax.asserting",
    "sharding.joining": "sharding.broadcasting",
    "ddp.arrivals": "ddp.history",
    "ddp.streams": "ddp.device_streams",
    "ddp.comm_hooks.reducing": "ddp.comm_hooks.uncompressed",
    "cli.arguments": "cli.flags",
    "torch_process_groups.process_group": "torch_process_groups.wire_group",
    "torch_process_groups.opening": "torch_process_groups.creating",
}
TESTS = {  # files below tests/
    **{
        f"collectives/test_{a}.py": f"typed_contexts/test_{b}.py"
        for a, b in {
            "annotations": "annotations",
            "carried_specs": "carried_specs",
            "casting": "casting",
            "custom_functions": "custom_functions",
            "forgotten_sums": "forgotten_sums",
            "list_operations": "list_operations",
            "operation_rules": "torch_functions",
            "seeding": "random_draws",
            "typed_context": "mode",
            "typed_gradients": "gradients",
            "typed_holes": "holes",
            "typed_in_place": "in_place",
            "typed_places": "places",
            "typed_programs": "programs",
            "typed_verbs": "verb_calls",
            "leaf_names": "leaf_names",
        }.items()
    },
    "collectives/typed_cases.py": "typed_contexts/typed_cases.py",
    "collectives/typed_programs.py": "typed_contexts/typed_programs.py",
    **{
        f"collectives/test_{a}.py": f"functional/test_{b}.py"
        for a, b in {
            "axis_types": "axis_types",
            "blocks": "blocks",
            "equal_values": "equal_values",
            "functional": "reducing",
            "leaf_gradients": "leaf_gradients",
            "linear_function": "linear_function",
            "ragged": "ragged",
            "rearranging": "moving",
            "verb_kinds": "verb_kinds",
            "reported_bugs": "reported_bugs",
        }.items()
    },
    "collectives/verb_cases.py": "functional/verb_cases.py",
    "collectives/test_asserting.py": "lax/test_asserting.py",
    "test_lax.py": "lax/test_lax.py",
    "test_lax_as_jax.py": "lax/test_lax_as_jax.py",
    "jax_answers.json": "lax/jax_answers.json",
    "make_jax_answers.py": "lax/make_jax_answers.py",
    "collectives/test_neutral_answers.py": "joining/test_answers.py",
    "collectives/test_instruments.py": "collectives/test_marks.py",
    "collectives/test_monitored.py": "collectives/test_monitored_barrier.py",
    "debug/test_pausing.py": "worlds/test_breakpoints.py",
    **{
        f"groups/test_{a}.py": f"joining/test_{b}.py"
        for a, b in {
            "announcements": "announcements",
            "join_places": "join_places",
            "join_refusals": "join_refusals",
            "shadowing": "shadow",
            "waits": "waits",
            "whereabouts": "whereabouts",
        }.items()
    },
    "groups/uneven_programs.py": "joining/uneven_programs.py",
    "groups/test_announcement_table.py": "checking/test_announcement_table.py",
    "groups/test_header_tables.py": "groups/test_host_tables.py",
    "ddp/test_joining.py": "joining/test_join.py",
    "ddp/test_uneven_loops.py": "joining/test_uneven_loops.py",
    "ddp/test_joined_optimizer.py": "joining/test_joined_optimizer.py",
    "ddp/test_arrivals.py": "ddp/test_history.py",
    "ddp/test_streams.py": "ddp/test_device_streams.py",
    "ddp/comm_hooks/test_reducing.py": "ddp/comm_hooks/test_uncompressed.py",
    "mesh/test_inputs.py": "mesh/test_layout_arguments.py",
    "mesh/test_splits.py": "mesh/test_placement.py",
    "sharding/test_joining.py": "sharding/test_broadcasting.py",
    "cli/test_arguments.py": "cli/test_flags.py",
    "torch_process_groups/test_process_group.py": "torch_process_groups/test_wire_group.py",
    "launching/test_root_cause.py": "launching/test_failed_ranks.py",
}
RENAMES = {
    "bench.sides": {"Side": "Library"},
    "mesh.pattern": {"Side": "PatternSide", "_Parser": "_PatternReader"},
    "bootstrap.generations": {"Joined": "Rendezvous"},
    "collectives.provenance": {"_Joined": "_MakingOperation", "_Leaf": "_Operand"},
    "wires.work": {"_Joined": "_SeveralWorks"},
    "collectives.value_checks": {
        "_Note": "_LeafNote",
        "_Leaf": "_ObservedLeaf",
        "_Backward": "_ObservedBackward",
    },
    "cli.arguments": {"_Answer": "_HabitHint"},
    "collectives.neutral_answers": {"_Answer": "_NeutralArguments"},
    "groups.signals": {"Answer": "SignalReply"},
    "worlds.spawning": {"_Answer": "_RankResult"},
    "collectives.axis_types": {"Join": "JoinedType", "join": "join_types"},
    "collectives.linear_function": {"joined": "stack_blocks"},
    "collectives.casting": {
        "Place": "LeafSlot",
        "Bucket": "LeafGroup",
        "LeafBuckets": "LeafGroups",
    },
    "groups.announcements": {"Place": "JoinedCommunicator", "Round": "AnnouncementRound"},
    "wires.simulated.meeting": {
        "Collective": "PendingCollective",
        "Receive": "PendingReceive",
        "Message": "SentMessage",
        "Step": "PendingCall",
        "Round": "MemberData",
    },
    "groups.matching": {"Receive": "UnnamedReceive"},
    "collectives.rearranging": {"_Exchange": "_RaggedExchange"},
    "collectives.monitored": {"Outcome": "BarrierResult"},
    "wires.c10d.enqueued": {"Outcome": "DeviceResult"},
    "collectives.objects": {"_Line": "_Conversation"},
    "launching.streams": {"_Line": "_OutputLine"},
    "collectives.operation_rules": {"Operation": "TorchFunction"},
    "collectives.prepare": {"_Form": "_Recipe"},
    "ddp.arrivals": {"Arrivals": "History"},
    "ddp.replicas": {"Buffers": "ModelBuffers"},
    "wires.mpi.datatypes": {"Buffers": "MpiBuffers", "Plan": "MpiReduction"},
    "torch_process_groups.process_group": {"_Form": "_TorchForm"},
    "sharding.carrying": {
        "_Exchange": "_ExchangeAction",
        "_Pad": "_PadAction",
        "_Verb": "_VerbAction",
    },
    "wires.mpi.link": {"Link": "MpiConnection"},
    "launching.child_processes": {"Ending": "ProcessExit"},
    "debug.pausing": {"_Console": "_PausedConsole"},
    "groups.agreement": {"_Meeting": "_PendingAgreement"},
    "launching.launcher": {"_Job": "_LocalRanks"},
    "wires.operations": {"Job": "QueuedOperation"},
    "mesh.drawing": {"_Drawing": "_GridDrawing"},
    "wires.built_verbs": {"Carrier": "BuildingCommunicator"},
    "groups.shadowing": {"Shadowing": "Shadow", "find_shadowing": "find_shadow"},
    "ddp.settling": {"Settling": "Verdict"},
    "ddp.streams": {"FlagReader": "TailReader"},
    "sharding.requests": {"Request": "ReshardRequest"},
    "collectives.contexts": {
        "find_mode": "find_context",
        "innermost_mode": "open_context",
        "asleep": "paused",
    },
    "collectives.torch_private": {"NotSeen": "HiddenFromModes", "unseen": "hidden_from_modes"},
    "runtime.untraced": {"leave_untraced": "untraced"},
}

ROOT = Path(".")
PKG = ROOT / "meshdist"
run = lambda *a: subprocess.run(a, check=True)


def modules():
    found = {}
    for p in PKG.rglob("*.py"):
        n = ".".join(p.relative_to(PKG).with_suffix("").parts)
        found[n.removesuffix(".__init__") if n != "__init__" else ""] = p
    return found


MODS = modules()
for old in MOVES:
    assert old in MODS, old
new_of = lambda m: MOVES.get(m, m)


def python_files():
    out = subprocess.run(
        ["git", "ls-files", "*.py", "*.pyi"], capture_output=True, text=True, check=True
    ).stdout.split()
    return [Path(x) for x in out]


def own_module(p):
    if p.parts[0] != "meshdist":
        return None
    n = ".".join(p.relative_to(PKG).with_suffix("").parts)
    return n.removesuffix(".__init__") if n != "__init__" else ""


def package_of(module, is_init):
    parts = module.split(".") if module else []
    return parts if is_init else parts[:-1]


def relative(
    package,
    base,
):
    k = 0
    while k < len(package) and k < len(base) and package[k] == base[k]:
        k += 1
    return "." * (len(package) - k + 1) + ".".join(base[k:])


INITS_NEW = {"lax"}  # becomes a folder's __init__
module_renames = {}  # file -> {old module name: new one}


def rewrite_imports(p):
    text = p.read_text()
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    own = own_module(p)
    is_init = p.stem == "__init__"
    lines = text.splitlines(keepends=True)
    edits = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 0:
            if not node.module or node.module.split(".")[0] != "meshdist":
                continue
            base = node.module.split(".")[1:]
        else:
            if own is None:
                continue
            pk = package_of(own, is_init)
            base = pk[: len(pk) - (node.level - 1)] + (
                node.module.split(".") if node.module else []
            )
        groups = {}
        for a in node.names:
            full = ".".join([*base, a.name])
            if full in MODS and full != "lax":
                new = new_of(full).split(".")
                groups.setdefault(tuple(new[:-1]), []).append((new[-1], a.asname))
                if new[-1] != a.name and a.asname is None:
                    module_renames.setdefault(p, {})[a.name] = new[-1]
            else:
                b = new_of(".".join(base)).split(".") if base else []
                groups.setdefault(tuple(b), []).append((a.name, a.asname))
        new_own = new_of(own) if own is not None else None
        new_init = is_init or own in INITS_NEW

        def source(b):
            if node.level == 0:
                return ".".join(["meshdist", *b])
            return relative(package_of(new_own, new_init), list(b))

        old_source = "." * node.level + (node.module or "")
        same = len(groups) == 1 and all(
            (n, x) == (a.name, a.asname)
            for (n, x), a in zip(next(iter(groups.values())), node.names)
        )
        if same:
            s = source(next(iter(groups)))
            if s == old_source:
                continue
            line = lines[node.lineno - 1]
            start = len(line.encode()[: node.col_offset].decode())
            head, tail = line[:start], line[start:]
            new = re.sub(
                r"^from\s+" + re.escape(old_source) + r"\s+import", f"from {s} import", tail
            )
            assert new != tail, (p, line)
            lines[node.lineno - 1] = head + new
        else:
            edits.append(
                (
                    node,
                    [
                        f"from {source(b)} import "
                        + ", ".join(n if x is None else f"{n} as {x}" for n, x in names)
                        for b, names in groups.items()
                    ],
                )
            )
    for node, statements in sorted(edits, key=lambda e: -e[0].lineno):
        indent = " " * node.col_offset
        end = lines[node.end_lineno - 1][node.end_col_offset :]
        lines[node.lineno - 1 : node.end_lineno] = [
            "\n".join((indent + s) if i or True else s for i, s in enumerate(statements))
            + (end or "\n")
        ]
    return "".join(lines)


def rename_tokens(text, names, *, only_bare=True, quoted=(), modules=()):
    """Rename NAME tokens; a name behind a dot only where a module of ``modules`` stands before it."""
    out, edits = text, []
    lines = text.splitlines(keepends=True)
    starts = [0]
    for l in lines:
        starts.append(starts[-1] + len(l))
    previous = before = None
    depth = 0
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for i, t in enumerate(tokens):
        if t.type in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            continue
        at = starts[t.start[0] - 1] + t.start[1]
        if t.type == tokenize.NAME and t.string in names:
            after = next(
                (
                    x.string
                    for x in tokens[i + 1 :]
                    if x.type not in (tokenize.NL, tokenize.COMMENT)
                ),
                "",
            )
            is_attribute = previous == "."
            is_keyword = after == "=" and depth > 0
            if (not is_attribute and not is_keyword) or (is_attribute and before in modules):
                edits.append((at, len(t.string), names[t.string]))
        elif t.type in (tokenize.STRING, tokenize.COMMENT):
            s = t.string
            new = s
            for o, n in names.items():
                new = re.sub(r"(?<=`)" + re.escape(o) + r"(?=[`.(\[])", n, new)
                if o in quoted:
                    new = re.sub(
                        r'^(["\'])' + re.escape(o) + r"\1$", lambda m: m[1] + n + m[1], new
                    )
                    new = (
                        re.sub(r"(?<=\[)" + re.escape(o) + r"(?=\])", n, new)
                        if len(s) < 60
                        else new
                    )
            if new != s:
                edits.append((at, len(s), new))
        if t.string in "([{" and t.type == tokenize.OP:
            depth += 1
        if t.string in ")]}" and t.type == tokenize.OP:
            depth -= 1
        if t.type != tokenize.COMMENT:
            before, previous = previous, t.string
    for at, n, new in sorted(edits, reverse=True):
        out = out[:at] + new + out[at + n :]
    return out


# 1. imports
texts = {p: rewrite_imports(p) for p in python_files()}
for p, names in module_renames.items():
    print("module renamed in", p, names)
    texts[p] = rename_tokens(texts[p], {k: v for k, v in names.items()}, quoted=())
for p, t in texts.items():
    p.write_text(t)

# 2. files
for old, new in MOVES.items():
    source, target = MODS[old], PKG.joinpath(*new.split(".")).with_suffix(".py")
    if new in INITS_NEW:
        target = PKG / new / "__init__.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    if source != target:
        run("git", "mv", str(source), str(target))
HEADS = {
    "joining": "Ranks without data.",
    "functional": "Verbs that return new tensors, beside their transposes.",
    "typed_contexts": "Types that follow values.",
}
for folder, words in HEADS.items():
    (PKG / folder / "__init__.py").write_text(f'"""{words}"""\n')
    run("git", "add", str(PKG / folder / "__init__.py"))
for gone in ("debug", "collectives/named_axes"):
    run("git", "rm", "-q", "-f", str(PKG / gone / "__init__.py"))
for old, new in TESTS.items():
    target = ROOT / "tests" / new
    target.parent.mkdir(parents=True, exist_ok=True)
    run("git", "mv", f"tests/{old}", str(target))

# 3. names in texts: dotted, and as paths
listed = subprocess.run(
    ["git", "ls-files"], capture_output=True, text=True, check=True
).stdout.split()
pairs = []
for old, new in sorted(MOVES.items(), key=lambda x: -len(x[0])):
    if old == "lax":
        continue
    o, n = old.split("."), new.split(".")
    pairs.append(
        (re.compile(r"(?<![\w.])meshdist\." + r"\.".join(o) + r"(?!\w)"), "meshdist." + new)
    )
    pairs.append(
        (
            re.compile(r"(?<![\w/.])meshdist/" + "/".join(o) + r"(?![\w/])"),
            "meshdist/" + "/".join(n),
        )
    )
    pairs.append((re.compile(r"(?<![\w/.])" + "/".join(o) + r"(?![\w/])"), "/".join(n)))
    pairs.append((re.compile(r"(?<=[\"'])" + r"\.".join(o) + r"(?!\w)"), new))
for old, new in sorted(TESTS.items(), key=lambda x: -len(x[0])):
    pairs.append((re.compile(r"(?<![\w/])tests/" + re.escape(old) + r"(?!\w)"), "tests/" + new))
    if old.endswith(".py"):
        d, e = old[:-3].replace("/", "."), new[:-3].replace("/", ".")
        pairs.append((re.compile(r"(?<!\w)tests\." + re.escape(d) + r"(?!\w)"), "tests." + e))
own_names = {new: (old.rpartition("/")[2], new.rpartition("/")[2]) for old, new in TESTS.items()}
for name in listed:
    p = Path(name)
    if (
        p.suffix not in (".py", ".pyi", ".md", ".toml", ".yml", ".cpp", ".h", ".txt", "")
        or not p.is_file()
    ):
        continue
    if "reports" in p.parts:
        continue
    text = new = p.read_text()
    for pattern, replacement in pairs:
        new = pattern.sub(replacement, new)
    folder = name.removeprefix("tests/").rpartition("/")[0]
    for (
        of,
        (o, n),
    ) in (
        own_names.items()
    ):  # a test names itself, or its neighbour, in what it expects of a traceback
        if name.startswith("tests/") and of.rpartition("/")[0] == folder:
            new = re.sub(r"(?<![\w/])" + re.escape(o) + r"(?!\w)", n, new)
    if new != text:
        p.write_text(new)

# 4. names of classes and functions
files = {p: p.read_text() for p in python_files()}
imports = {}
for p, text in files.items():
    own = own_module(p)
    is_init = p.stem == "__init__"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            if node.level == 0:
                if not node.module or node.module.split(".")[0] != "meshdist":
                    continue
                base = node.module.split(".")[1:]
            else:
                if own is None:
                    continue
                pk = package_of(own, is_init)
                base = pk[: len(pk) - (node.level - 1)] + (
                    node.module.split(".") if node.module else []
                )
            for a in node.names:
                imports.setdefault(p, set()).add((".".join(base), a.name))
per_file = {}
for module, olds in RENAMES.items():
    module = new_of(module)
    path = PKG.joinpath(*module.split(".")).with_suffix(".py")
    assert path.exists(), path
    for old, new in olds.items():
        assert re.search(
            rf"^(?:class|def|async def) {old}\b|^{old}\b.*=", files[path], re.M
        ) or re.search(rf"\b{old}\b", files[path]), (module, old)
        base, last = module.rpartition(".")[0], module.rpartition(".")[2]
        for p in files:
            if p == path or (module, old) in imports.get(p, ()):
                per_file.setdefault(p, {})[old] = new
            elif (base, last) in imports.get(p, ()):
                per_file.setdefault((p, last), {})[old] = new
for key, names in per_file.items():
    if isinstance(key, tuple):
        p, last = key
        files[p] = re.sub(
            rf"\b{last}\.({'|'.join(map(re.escape, names))})\b",
            lambda m: f"{last}.{names[m[1]]}",
            files[p],
        )
        files[p] = re.sub(
            rf"({last}, )\"({'|'.join(map(re.escape, names))})\"",
            lambda m: f'{m[1]}"{names[m[2]]}"',
            files[p],
        )
    else:
        files[key] = rename_tokens(files[key], names, quoted=tuple(names))
for p, t in files.items():
    if p.read_text() != t:
        p.write_text(t)
