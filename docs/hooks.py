"""What the documentation is made of beside the files in this folder: pages from the packages, tables from the code."""

from __future__ import annotations

import json
import posixpath
import re
import runpy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "trainer": "packages/trainer",
    "engine": "packages/engine",
    "rollout": "packages/rollout",
    "agent": "packages/agent",
    "ckpt": "packages/ckpt",
    "tq": "packages/tq",
    "tq-compat": "packages/tq-compat",
    "tinker": "packages/tinker",
    "csrc": "csrc",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def pages() -> dict[str, Path]:
    """By page, the file of the repository that it is made of."""
    found = {"develop/architecture.md": ROOT / "ARCHITECTURE.md", "develop/contributing.md": ROOT / "CONTRIBUTING.md"}
    for name, folder in PACKAGES.items():
        found[f"packages/{name}/index.md"] = ROOT / folder / "README.md"
        for upper in sorted((ROOT / folder).glob("[A-Z]*.md")):
            if upper.stem not in ("README", "CHANGELOG", "ALGORITHMS"):
                found[f"packages/{name}/{upper.stem.lower()}.md"] = upper
    found["reference/algorithms.md"] = ROOT / "packages/trainer/ALGORITHMS.md"
    return found


@cache
def tables() -> dict[str, str]:
    """By page, what is rendered from the code."""
    from rl_trainer.config.explain import names_elsewhere, reference

    names = f"# Names elsewhere\n\n{names_elsewhere()}"
    return {
        "reference/config.md": reference(),
        "reference/names.md": names,
        "performance.md": performance(),
        "develop/promises.md": promises(),
    }


def promises() -> str:
    """The page of tools/promises.py."""
    return runpy.run_path(str(ROOT / "tools" / "promises.py"))["page"]()


def performance() -> str:
    """The newest figures of every benchmark that has a limit or a peer beside ours."""
    newest: dict[str, tuple[str, dict[str, Any]]] = {}
    for file in sorted((ROOT / "benchmarks/results").glob("*.json")):
        found = json.loads(file.read_text())
        is_figures = isinstance(found, dict) and isinstance(found.get("rows"), list) and "machine" in found
        if is_figures and found["date"] > newest.get(found["name"], ("", {"date": ""}))[1]["date"]:
            newest[found["name"]] = (file.name, found)
    out = [PERFORMANCE]
    for name, (file, found) in sorted(newest.items()):
        rows = [row for row in found["rows"] if row.get("role") == "ours" and _ratios(row)]
        if not rows:
            continue
        machine = found["machine"]
        where = ", ".join(machine.get("gpu") or []) or f"{machine['cpu']}, {machine['cores']} cores"
        out += [
            f"## {name}",
            "",
            f"{where}; {found['date'][:10]}; torch {machine.get('torch')}; `benchmarks/results/{file}`.",
        ]
        out += ["", "| system | what | median | of the limit | of the best peer |", "|---|---|---|---|---|"]
        for row in rows:
            limit, peer = _ratios(row)
            cells = (row["system"], row["metric"], f"{row['median']:.4g} {row['unit']}", limit, peer)
            out.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
        out.append("")
    return "\n".join(out)


def _ratios(row: dict[str, Any]) -> tuple[str, str] | None:
    limit, peer = row.get("ratio_to_limit"), row.get("ratio_to_best_peer")
    if limit is None and peer is None:
        return None
    return ("-" if limit is None else f"{limit:.2f}"), ("-" if peer is None else f"{peer:.2f}")


PERFORMANCE = """# Performance

Every figure is a median of alternating repetitions (ours, peer, ours, peer) on one machine, beside the limit of that
machine or the best peer in the same run. `uv run rl-bench NAME` measures again. The table is made from the newest
JSON of each benchmark; those of a package have pages of their own:
[kernels](packages/csrc/kernels.md), [weights](packages/ckpt/performance.md), [queue](packages/tq/figures.md),
[agents](packages/agent/figures.md).
"""


def places() -> dict[Path, str]:
    """By file of the repository, and by place in docs/, the page that it is."""
    docs = ROOT / "docs"
    found = {file.resolve(): str(file.relative_to(docs)) for file in docs.rglob("*") if file.is_file()}
    found |= {docs / name: name for name in (*pages(), *tables())}
    return found | {file.resolve(): page for page, file in pages().items()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give every package its section: the README, the pages of `docs/packages`, and specifications."""
    docs = ROOT / "docs"
    own = [str(file.relative_to(docs)) for file in sorted((docs / "packages").rglob("*.md"))]
    made = sorted([*pages(), *own], key=lambda page: not page.endswith("/index.md"))
    section = next(entry for entry in config.nav if "Packages" in entry)
    section["Packages"] = [
        {f"rl-{name}": [page for page in made if page.startswith(f"packages/{name}/")]} for name in PACKAGES
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file in docs/ holds."""
    made, where = pages(), places()
    for page, file in made.items():
        text = rewritten(file.read_text(), file, page, where)
        files.append(File.generated(config, page, content=text))
    for page, text in tables().items():
        files.append(File.generated(config, page, content=rewritten(text, ROOT / "docs" / page, page, where)))
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ into the repository: to the page that it became, or plain text."""
    source = Path(config.docs_dir) / page.file.src_uri
    if not source.is_file():
        return markdown
    return rewritten(markdown, source, page.file.src_uri, places())


def rewritten(text: str, file: Path, page: str, where: dict[Path, str]) -> str:
    """A file's text as a page: its relative links lead to pages, or are none.

    Raises:
        FileNotFoundError: a link leads to a file that is not there.
    """

    def link(match: re.Match[str]) -> str:
        mark, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target or re.match(r"^[a-z]+:", target):
            return match[0]
        path = (file.parent / target).resolve()
        if path in where:
            return f"{mark}[{words}]({posixpath.relpath(where[path], posixpath.dirname(page))}{anchor})"
        if path.is_dir() and path / "README.md" in where:
            return f"[{words}]({posixpath.relpath(where[path / 'README.md'], posixpath.dirname(page))})"
        if not path.exists():
            raise FileNotFoundError(f"{file.relative_to(ROOT)} links to {target}, which is not there")
        return f"`{path.relative_to(ROOT)}`" if words.strip("`") == Path(target).name else words

    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in _FENCE.split(text))
