"""What the documentation is made of beside the files in this folder: pages from the packages, tables from the code."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

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
    "csrc": "csrc",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def pages() -> dict[str, Path]:
    """By page, the file of the repository that it is made of."""
    found = {"design/architecture.md": ROOT / "ARCHITECTURE.md", "how-to/contributing.md": ROOT / "CONTRIBUTING.md"}
    for name, folder in PACKAGES.items():
        found[f"packages/{name}/index.md"] = ROOT / folder / "README.md"
        for file in sorted((ROOT / folder).glob("docs/*.md")):
            found[f"packages/{name}/{file.stem}.md"] = file
        for upper in sorted((ROOT / folder).glob("[A-Z]*.md")):
            if upper.stem not in ("README", "CHANGELOG"):
                found[f"packages/{name}/{upper.stem.lower()}.md"] = upper
    return found


def tables() -> dict[str, str]:
    """By page, what is rendered from the code."""
    from rl_trainer import equivalents
    from rl_trainer.config.explain import reference

    return {"reference/config.md": reference(), "how-to/names.md": f"# Names elsewhere\n\n{equivalents.table()}"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give every package its section."""
    made = pages()
    section = next(entry for entry in config.nav if "Packages" in entry)
    section["Packages"] = [
        {f"rl-{name}": [page for page in made if page.startswith(f"packages/{name}/")]} for name in PACKAGES
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file in docs/ holds."""
    made = pages()
    where = {file.resolve(): page for page, file in made.items()}
    where |= {file.resolve(): str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}
    for page, file in made.items():
        text = rewritten(file.read_text(), file, page, where)
        files.append(File.generated(config, page, content=text))
    for page, text in tables().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ into the repository: to the page that it became, or plain text."""
    source = Path(config.docs_dir) / page.file.src_uri
    if not source.is_file():
        return markdown
    where = {file.resolve(): name for name, file in pages().items()}
    where |= {file.resolve(): str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*")}
    where |= {ROOT / "docs" / name: name for name in tables()}
    return rewritten(markdown, source, page.file.src_uri, where)


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
