"""House rules that can be counted: a ratchet on lines, circles, long functions, wide classes."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
structure = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "structure.py")))
PACKAGES = structure.sources()


def test_no_package_grows_without_its_record():
    recorded = json.loads((ROOT / "tools" / "structure.json").read_text())
    grown = {name: structure.num_lines(each) - recorded[name] for name, each in PACKAGES.items()}
    assert {name: lines for name, lines in grown.items() if lines > 0} == {}, "delete, or tools/structure.py --write"
    assert {name: lines for name, lines in grown.items() if lines < -500} == {}, "record it: tools/structure.py --write"


@pytest.mark.parametrize("name", PACKAGES)
def test_classes_and_functions_can_be_read(name):
    classes = {} if name == "rl_tq_transfer_queue" else structure.classes(PACKAGES[name])
    assert {each: count for each, count in classes.items() if count > structure.LARGEST_CLASS} == {}
    assert {each: lines for each, lines in structure.functions(PACKAGES[name]).items() if lines > 80} == {}


@pytest.mark.process
@pytest.mark.parametrize("name", PACKAGES)
def test_modules_import_one_another_in_one_direction(name, monkeypatch):
    monkeypatch.syspath_prepend(str(PACKAGES[name].parent))
    assert structure.measure(PACKAGES[name])["import circles"] == 0


def test_circles_and_lone_modules_are_counted(tmp_path, monkeypatch):
    package = tmp_path / "toy_structure"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("")
    (package / "one.py").write_text("from toy_structure.inner.two import Tidy\n\ndef one(parcels):\n    return Tidy\n")
    (package / "inner" / "two.py").write_text(
        "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from toy_structure import one\n\nclass Tidy:\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert structure.measure(package) == {
        "files": 4,
        "lines": 10,
        "modules in the widest folder": 2,
        "short modules with one importer": 2,
        "import circles": 1,
        "folder circles": 0,
        "lines of the longest function": 2,
        "methods of the largest class": 0,
    }
