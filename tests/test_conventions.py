"""Conventions of names and prose: short names of tests, and plain English in pages and docstrings."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = [*sorted((ROOT / "packages").iterdir()), ROOT / "csrc"]
LONGEST_NAME = 60
MOST_PRIVATE_NAMES, MOST_SLEEPS = 190, 193
"""Of all tests, and only to fall: use a public name or a fake of `testing`; wait by `rl_bench.waiting.until`."""
_UNCLEAR = re.compile(
    r"\b(told|tells|beside|stands(?! alone)|lies|comes to|of before|where there is|given back|of one's own"
    r"|mended|whoever|nobody|somebody|refused with a sentence)\b",
    re.IGNORECASE,
)
"""Words of translated prose; the plain ones: reports, next to, is, equals, previous, if available, returned, custom."""
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_FIRST_LINE = re.compile(r'^\s*r?"""(.+)$', re.MULTILINE)


def test_names_of_tests_have_at_most_sixty_characters():
    folders = [package / part for package in PACKAGES for part in ("src", "tests")] + [
        ROOT / "tests",
        ROOT / "benchmarks",
    ]
    names = [
        f"{file.relative_to(ROOT)}: {name}"
        for folder in folders
        for file in folder.rglob("*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
        if len(name) > LONGEST_NAME
    ]
    assert not names, "\n".join(names)


def texts_of_tests():
    """Every Python file of tests, by its text."""
    folders = [package / "tests" for package in PACKAGES] + [ROOT / "tests"]
    return [file.read_text() for folder in folders for file in folder.rglob("*.py")]


def test_tests_use_few_private_names_of_other_objects():
    found = [
        node.attr
        for text in texts_of_tests()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and re.match(r"_(?!_)", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert len(found) <= MOST_PRIVATE_NAMES, f"{len(found)}: lower them, and this number with them"


def test_tests_wait_on_conditions_and_seldom_sleep():
    found = sum(len(re.findall(r"\bsleep\(", text)) for text in texts_of_tests())
    assert found <= MOST_SLEEPS, f"{found}: wait on a condition (rl_bench.waiting)"


def test_pages_are_in_plain_english():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages += [page for package in PACKAGES for folder in (".", "docs") for page in (package / folder).glob("*.md")]
    assert not _unclear(
        (page, _CODE.sub("", page.read_text()).splitlines())
        for page in pages
        if page.name not in ("CHANGELOG.md", "chaos.md")
    )


def test_first_lines_of_docstrings_are_in_plain_english():
    assert not _unclear(
        (file, (_CODE.sub("", line) for line in _FIRST_LINE.findall(file.read_text())))
        for package in PACKAGES
        for file in (package / "src").rglob("*.py")
    )


def test_names_in_sources_are_those_of_the_field():
    assert not _unclear(
        ((file, file.read_text().splitlines()) for package in PACKAGES for file in (package / "src").rglob("*.py")),
        re.compile(r"(?<![a-z])(told|beside|bury|whereabouts)(?![a-z])", re.IGNORECASE),
    )


def _unclear(texts, words=_UNCLEAR):
    """List the lines with an unclear word, as one text for an assertion's message."""
    return "\n".join(
        f"{file.relative_to(ROOT)}: {word.group()!r} in {line.strip()!r}"
        for file, lines in texts
        for line in lines
        if (word := words.search(line))
    )
