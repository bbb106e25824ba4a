"""`requirements.lock` is what the packages ask for: pinned, hashed, of no host. tools/requirements.sh renews it."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
PYPROJECTS = [ROOT / "pyproject.toml", ROOT / "csrc/pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
_ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
ENTRIES = {
    canonicalize_name(name): (version, rest)
    for name, version, rest in _ENTRY.findall(LOCK)
    if "python_" not in (marker := rest.partition("\\")[0].strip(" ;")) or Marker(marker).evaluate()
}
"""By name; of a package with a version for each Python, that of this one."""


def wanted():
    """The requirements of every package and all of its extras."""
    projects = {p["project"]["name"]: p["project"] for p in (tomllib.loads(f.read_text()) for f in PYPROJECTS)}
    for project in projects.values():
        for lines in (project.get("dependencies", []), *project.get("optional-dependencies", {}).values()):
            found = (each for line in lines if (each := Requirement(line)).name not in projects)
            yield from (each for each in found if "python_" not in str(each.marker) or each.marker.evaluate())


def test_the_first_command_installs_what_it_imports():
    tree = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert tree["project"]["dependencies"] == ["rl-post-trainer[quickstart]"]
    assert tree["tool"]["uv"]["default-groups"] == []


@pytest.mark.promise("`requirements.lock` pins what the packages ask for, with hashes and of no host")
def test_requested_packages_are_pinned_to_fitting_versions():
    missing = [
        str(each)
        for each in wanted()
        if (found := ENTRIES.get(canonicalize_name(each.name))) is None
        or not each.specifier.contains(found[0], prereleases=True)
    ]
    assert missing == [], "run tools/requirements.sh"


def test_it_agrees_with_the_versions_of_the_workspace():
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    for each in map(Requirement, pinned):
        if each.marker is not None and not each.marker.evaluate():
            continue
        if (found := ENTRIES.get(canonicalize_name(each.name))) is not None:
            assert each.specifier.contains(found[0]), f"{each}, but {found[0]}: run tools/requirements.sh"


def test_every_entry_has_hashes_and_nothing_names_a_host():
    assert len(ENTRIES) > 100
    assert [name for name, (_, rest) in ENTRIES.items() if "--hash=sha256:" not in rest] == []
    assert not re.search(r"://|--(extra-)?index|--find-links| @ ", LOCK)
