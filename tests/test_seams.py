"""The rules of the seams that import-linter cannot express, and the proof that every contract can break.

`lint-imports` checks `.importlinter` itself; here each of its contracts is broken on purpose, in a copy.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {source.name: source for source in [*ROOT.glob("packages/*/src/rl_*"), ROOT / "csrc/src/rl_csrc"]}
PROJECTS = {name: tomllib.loads((source.parents[1] / "pyproject.toml").read_text()) for name, source in SOURCES.items()}
INTERFACE = {"base", "types", "errors"}
TRAINER_SEES = INTERFACE | {"registry"}
"""Modules of a sibling that the trainer may import, and a plug-in of somebody else."""
BASES = {"rl_trainer": "runtime/base.py"}
PLUG_INS = {
    "rl_agent": "loops",
    "rl_tq": "storage",
    **dict.fromkeys(("rl_ckpt", "rl_engine", "rl_rollout"), "backends"),
}

ADD_ONS = {"rl_tq_transfer_queue": "rl_tq"}
"""Distributions that are built with one sibling, whose modules they may use, and have no interface of their own."""

# What is imported, as (module, name): `import a.b` is ("a.b", None), `from a import b` is ("a", "b").
Import = tuple[str, str | None]


def imports_of(tree: ast.AST) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.module or "", alias.name) for alias in node.names)


def sibling_of(module: str, importer: str) -> str | None:
    top = module.partition(".")[0]
    return top if top in SOURCES and top != importer else None


def public_names(package: str) -> set[str]:
    """`__all__` of a package, read and not imported."""
    for node in ast.parse((SOURCES[package] / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def foreign_names(tree: ast.Module, importer: str) -> list[str]:
    """What a module uses of its siblings beyond what it may: interface and public names; the trainer, four modules."""
    used = [
        (module, name)
        for module, name in imports_of(tree)
        if sibling_of(module, importer) not in (None, ADD_ONS.get(importer))
    ]
    sees_interfaces = importer in ("rl_trainer", "rl_tinker", "rl_omni", "strangers")
    modules = {module.partition(".")[0] if sees_interfaces else module for module, name in used if name is None}
    nodes = list(ast.walk(tree))
    used += [
        (node.value.id, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
    ]
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    # A group's name alone is how entry points are looked up; a module below it is a backend by name.
    plug_in = re.compile(r"rl_\w+\.(backends|storage|loops)\.\w")
    opens = is_open_to_trainer if sees_interfaces else is_open
    return [f"{module}.{name}" if name else module for module, name in used if not opens(module, name)] + [
        f"the string {string!r}" for string in strings if plug_in.match(string) and sibling_of(string, importer)
    ]


def is_open(module: str, name: str | None) -> bool:
    """Whether siblings may use `name` of `module`, or the module itself."""
    package, _, inner = module.partition(".")
    if not inner:
        return name is None or name in public_names(package) | INTERFACE
    return inner in INTERFACE or (package == "rl_csrc" and not inner.startswith("_"))


def is_open_to_trainer(module: str, name: str | None) -> bool:
    """Whether the trainer may use `name` of `module`: of a sibling four modules, of rl-csrc its public names."""
    package, _, inner = module.partition(".")
    if package == "rl_csrc":
        return not inner and (name is None or name in public_names(package))
    return inner.partition(".")[0] in TRAINER_SEES or (not inner and name in TRAINER_SEES)


def heavy_imports_of_base(tree: ast.Module, package: str) -> list[str]:
    """What a `base.py` imports beyond the standard library, torch, tensordict and its own types and errors."""
    light = {*sys.stdlib_module_names, "torch", "tensordict"} - {"logging"}
    allowed = {f"{package}.types", f"{package}.errors"} | ({"rl_rollout.types"} if package == "rl_agent" else set())
    return [module for module, _ in imports_of(tree) if module.partition(".")[0] not in light and module not in allowed]


def undeclared_siblings(package: str) -> set[str]:
    """Siblings that a package imports and does not list among its dependencies."""
    declared = {
        re.split(r"[\[<>=~! ]", line)[0].replace("-", "_") for line in PROJECTS[package]["project"]["dependencies"]
    }
    used = {sibling_of(module, package) for file in files_of(package) for module, _ in imports_of(parse(file))}
    return {sibling for sibling in used - {None} if sibling.replace("rl_trainer", "rl_post_trainer") not in declared}


def files_of(package: str) -> list[Path]:
    return sorted(SOURCES[package].rglob("*.py"))


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


@pytest.mark.promise("`base.py` of every package imports nothing heavy")
@pytest.mark.parametrize("package", sorted(set(SOURCES) - {"rl_csrc", *ADD_ONS}))
def test_base_is_import_light(package):
    assert heavy_imports_of_base(parse(SOURCES[package] / BASES.get(package, "base.py")), package) == []


@pytest.mark.promise(
    "The trainer knows the interfaces of the others alone; every backend is a file found by an entry point"
)
@pytest.mark.process
@pytest.mark.parametrize("package", sorted(PLUG_INS))
def test_an_interface_loads_base_types_and_errors_alone(package):
    code = f"import sys, {package}.base; print(*(name for name in sys.modules if name.startswith('rl_')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.removeprefix(f"{package}.").partition(".")[0] for name in done.stdout.split()}
    assert loaded == {package, *INTERFACE}


@pytest.mark.parametrize("file", sorted((ROOT / "examples/strangers").glob("*.py")), ids=lambda file: file.name)
def test_a_stranger_sees_interfaces_alone(file):
    """Of five parts that are not ours, each is short, and imports four modules of each package."""
    tree, tops = parse(file), {*sys.stdlib_module_names, "torch", "tensordict", "strangers", *PLUG_INS}
    assert foreign_names(tree, "strangers") == []
    assert [module for module, _ in imports_of(tree) if module.partition(".")[0] not in tops] == []
    assert len(file.read_text().splitlines()) < 150


@pytest.mark.process
@pytest.mark.parametrize("package", sorted(SOURCES))
def test_siblings_meet_at_interfaces_and_public_names(package):
    assert {str(file): names for file in files_of(package) if (names := foreign_names(parse(file), package))} == {}


def test_an_agent_knows_only_the_interface_of_a_rollout_server():
    interface = {"rl_rollout.base", "rl_rollout.types", "rl_rollout.errors"}
    for file in files_of("rl_agent"):
        inner = {module for module, _ in imports_of(parse(file)) if "rl_rollout" in module}
        allowed = (
            {"rl_rollout"} if file.name == "cli.py" else set()
        )  # the command line makes the connection that a loop is given
        assert inner <= interface | allowed, file


@pytest.mark.process
@pytest.mark.parametrize("package", sorted(SOURCES))
def test_every_sibling_that_is_imported_is_a_declared_dependency(package):
    assert undeclared_siblings(package) == set()


@pytest.mark.parametrize("package", sorted(PLUG_INS))
def test_every_backend_is_a_module_found_by_entry_point(package):
    group = f"{package}.{PLUG_INS[package]}"
    entries = PROJECTS[package]["project"]["entry-points"][group]
    for name, target in entries.items():
        module = name.replace("-", "_")  # a scheme of a URL has no underscore
        assert target.partition(":")[0] == f"{group}.{module}"
        backend = SOURCES[package] / PLUG_INS[package] / module
        assert backend.with_suffix(".py").is_file() or (backend / "__init__.py").is_file()


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_every_folder_of_a_package_is_a_package(package):
    """import-linter does not look into a folder without `__init__.py`: a rule would hold there unchecked."""
    folders = {file.parent for file in files_of(package)}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_there_is_no_common_package():
    ours = {"rl_agent", "rl_ckpt", "rl_csrc", "rl_engine", "rl_omni", "rl_rollout", "rl_tinker", "rl_tq", "rl_trainer"}
    assert set(SOURCES) == ours | set(ADD_ONS)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "from rl_ckpt.base import CheckpointEngine\nfrom rl_tq import base\nimport rl_agent\nrl_agent.create_loop",
            [],
        ),
        ("import rl_csrc.buffers.frames", []),
        ("import rl_csrc._cpu", ["rl_csrc._cpu"]),
        ("from rl_ckpt.backends.shm import Engine", ["rl_ckpt.backends.shm.Engine"]),
        ("def f():\n    import rl_agent.loops", ["rl_agent.loops"]),
        ("from rl_agent import loops", ["rl_agent.loops"]),
        ("from rl_agent.testing import FakeGenerator", ["rl_agent.testing.FakeGenerator"]),
        ("import rl_agent\nrl_agent.runner.seeded", ["rl_agent.runner"]),
        ("entry_points(group='rl_rollout.backends')", []),
        ("import_module('rl_rollout.backends.vllm')", ["the string 'rl_rollout.backends.vllm'"]),
    ],
)
def test_a_breach_of_a_seam_is_found(code, expected):
    assert foreign_names(ast.parse(code), "rl_engine") == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import rl_tq.registry\nfrom rl_tq.types import BatchMeta\nrl_tq.registry.connect", []),
        ("import rl_csrc\nfrom rl_csrc import hold_lock\nrl_csrc.policy_loss", []),
        ("from rl_tq import types", []),
        ("from rl_tq import BatchMeta", ["rl_tq.BatchMeta"]),
        ("import rl_tq\nrl_tq.connect", ["rl_tq", "rl_tq.connect"]),
        ("import rl_tq.registry\nrl_tq.connect", ["rl_tq.connect"]),
        ("def f():\n    from rl_ckpt.sharded import ShardedSender", ["rl_ckpt.sharded.ShardedSender"]),
        ("from rl_csrc.inference import images", ["rl_csrc.inference.images"]),
        ("import rl_csrc\nrl_csrc.ops", ["rl_csrc.ops"]),
    ],
)
def test_a_breach_by_the_trainer_is_found(code, expected):
    assert foreign_names(ast.parse(code), "rl_trainer") == expected


@pytest.mark.parametrize(
    ("contract", "siblings"),
    [
        ("trainer-sees-interfaces", set(PLUG_INS)),
        ("tinker-sees-interfaces", {"rl_ckpt", "rl_engine", "rl_rollout"}),
        ("omni-sees-interfaces", {"rl_agent", "rl_engine", "rl_rollout"}),
    ],
)
def test_the_contract_of_a_composer_names_every_other_module(contract, siblings):
    lines = (ROOT / ".importlinter").read_text().partition(f"contract:{contract}]")[2]
    named = set(lines.partition("forbidden_modules =")[2].partition("[")[0].split())
    wanted = set(siblings)
    for package, source in SOURCES.items():
        for child in source.iterdir() if package in {*siblings, "rl_csrc"} else ():
            module = f"{package}.{child.stem}"
            if child.stem.startswith("_") or (package != "rl_csrc" and child.stem in TRAINER_SEES):
                continue
            wanted |= {module} if child.suffix == ".py" else set()
            wanted |= {module, f"{module}.**"} if (child / "__init__.py").is_file() else set()
    assert named == wanted


@pytest.mark.parametrize("module", ["ray", "logging", "rl_ckpt.types", "pydantic.fields", "rl_rollout.router"])
def test_a_heavy_base_is_found(module):
    code = (
        f"from __future__ import annotations\nimport asyncio, torch\nfrom tensordict import TensorDict\nimport {module}"
    )
    assert heavy_imports_of_base(ast.parse(code), "rl_rollout") == [module]


# One import per contract of .importlinter that must break it.
BREACHES = {
    "base-is-light": ("rl_tq/base.py", "import logging"),
    "trainer-knows-interfaces": ("rl_trainer/__init__.py", "import rl_engine.backends"),
    "trainer-sees-interfaces": ("rl_trainer/loop.py", "def f():\n    from rl_rollout.router import Router"),
    "tinker-sees-interfaces": ("rl_tinker/server.py", "from rl_rollout.router import Router"),
    "tinker-knows-no-trainer": ("rl_tinker/cli.py", "import rl_trainer.errors"),
    "nothing-needs-tinker": ("rl_engine/errors.py", "import rl_tinker"),
    "omni-sees-interfaces": ("rl_omni/server.py", "from rl_rollout.router import Router"),
    "omni-knows-no-trainer": ("rl_omni/loop.py", "import rl_trainer.errors"),
    "nothing-needs-omni": ("rl_engine/errors.py", "import rl_omni"),
    "tinker-layers": ("rl_tinker/journal.py", "import rl_tinker.service.store"),
    "backends-are-plug-ins": ("rl_rollout/__init__.py", "import rl_rollout.backends.embedded"),
    "csrc-stands-alone": ("rl_csrc/__init__.py", "import rl_tq.types"),
    "ckpt-stands-alone": ("rl_ckpt/base.py", "import rl_rollout"),
    "tq-stands-alone": ("rl_tq/types/__init__.py", "from rl_ckpt import types"),
    "tq-compat-is-an-add-on": ("rl_tq_transfer_queue/sampler.py", "import rl_rollout"),
    "nothing-needs-tq-compat": ("rl_tq/cli.py", "import rl_tq_transfer_queue"),
    "tq-compat-layers": ("rl_tq_transfer_queue/values/codec.py", "import rl_tq_transfer_queue.metadata"),
    "engine-stands-alone": ("rl_engine/base.py", "def f():\n    import rl_tq"),
    "rollout-receives-weights": ("rl_rollout/base.py", "from rl_agent import base"),
    "agent-talks-to-servers": ("rl_agent/base.py", "from rl_ckpt import base"),
    "servers-are-processes": ("rl_engine/errors.py", "import vllm"),
    "csrc-layers": ("rl_csrc/reference/logprobs.py", "from rl_csrc.ops import operator"),
    "tq-layers": ("rl_tq/metadata/rows.py", "import rl_tq.protocol.service"),
    "ckpt-layers": ("rl_ckpt/tensors/spec.py", "import rl_ckpt.protocol"),
    "rollout-layers": ("rl_rollout/http/text.py", "import rl_rollout.registry"),
    "engine-layers": ("rl_engine/batch/micro_batches.py", "import rl_engine.layers.peft_lora"),
    "engine-step-stands-apart": ("rl_engine/training_worker.py", "import rl_engine.losses"),
    "agent-layers": ("rl_agent/media.py", "import rl_agent.session"),
    "trainer-layers": ("rl_trainer/pipeline/staleness.py", "import rl_trainer.loop"),
    "nothing-needs-the-bench": ("rl_csrc/__init__.py", "import rl_bench"),
}
# Runs in a process of its own, whose working directory holds a copy of every package ahead of the installed ones.
BREAK_EACH = """
import contextlib, io, json, pathlib, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, ".")
from importlinter.cli import lint_imports
def is_kept(contract):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = lint_imports(config_filename=".importlinter", limit_to_contracts=(contract,), no_cache=True)
    assert "Contracts:" in printed.getvalue(), printed.getvalue()
    return code == 0
verdicts = {}
for contract, (name, breach) in json.loads(sys.argv[1]).items():
    file = pathlib.Path(name)
    text = file.read_text()
    before = is_kept(contract)
    file.write_text(f"{text}\\n{breach}\\n")
    verdicts[contract] = (before, is_kept(contract))
    file.write_text(text)
print(json.dumps(verdicts))
"""


@pytest.mark.slow
def test_every_contract_breaks_when_its_rule_is_broken(tmp_path):
    for source in [*SOURCES.values(), ROOT / "benchmarks/src/rl_bench"]:
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    command = [sys.executable, "-c", BREAK_EACH, json.dumps(BREACHES)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {contract: [True, False] for contract in BREACHES}


def test_every_contract_has_its_breach():
    contracts = re.findall(r"^\[importlinter:contract:(.+)\]$", (ROOT / ".importlinter").read_text(), re.MULTILINE)
    assert sorted(contracts) == sorted(BREACHES)


def test_the_glossary_is_short_and_says_what_the_field_says():
    rows = [
        line.split(" | ")
        for line in (ROOT / "docs/reference/glossary.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    terms = [row for row in rows if row[0] != "| term"]
    assert 20 <= len(terms) <= 40
    assert all(len(row) == 3 and row[2].removesuffix("|").strip() for row in terms)


def test_types_are_checked_in_every_package():
    included = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["include"])
    assert included == {str(source.parent.relative_to(ROOT)) for source in SOURCES.values()} | {"benchmarks/src"}
