"""`requirements.lock` is what the packages ask for: pinned, hashed, and of no host. `.ci/requirements` renews it."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
PYPROJECTS = [ROOT / "pyproject.toml", ROOT / "csrc/pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
_ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
ENTRIES = {canonicalize_name(name): (version, rest) for name, version, rest in _ENTRY.findall(LOCK)}


def wanted():
    """The requirements of every package, and of its extras that the workspace asks for."""
    projects = {p["project"]["name"]: p["project"] for p in (tomllib.loads(f.read_text()) for f in PYPROJECTS)}
    todo = [Requirement(text) for text in projects["rl-stack"]["dependencies"]]
    seen = set()
    while todo:
        each = todo.pop()
        if each.name not in projects:
            yield each
            continue
        for extra in (None, *each.extras):
            if (each.name, extra) in seen:
                continue
            seen.add((each.name, extra))
            project = projects[each.name]
            lines = project.get("dependencies", []) if extra is None else project["optional-dependencies"][extra]
            todo += [Requirement(line) for line in lines]


def test_everything_that_is_asked_for_is_pinned_to_a_version_that_fits():
    missing = [
        str(each)
        for each in wanted()
        if (found := ENTRIES.get(canonicalize_name(each.name))) is None
        or not each.specifier.contains(found[0], prereleases=True)
    ]
    assert missing == [], "run .ci/requirements"


def test_it_agrees_with_the_versions_of_the_workspace():
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    for each in map(Requirement, pinned):
        if (found := ENTRIES.get(canonicalize_name(each.name))) is not None:
            assert each.specifier.contains(found[0]), f"{each}, but {found[0]}: run .ci/requirements"


def test_every_entry_has_hashes_and_nothing_names_a_host():
    assert len(ENTRIES) > 100
    assert [name for name, (_, rest) in ENTRIES.items() if "--hash=sha256:" not in rest] == []
    assert not re.search(r"://|--(extra-)?index|--find-links| @ ", LOCK)
