"""The documentation: every page is reachable, every link leads somewhere, and every code block runs."""

import contextlib
import importlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PAGES = sorted(str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md") if file.parent.parent.name != "packages")
TRAINER = ROOT / "packages/trainer"
WITH_CODE = [
    str(file.relative_to(ROOT))
    for file in [*(DOCS / page for page in PAGES), TRAINER / "README.md"]
    if re.search(r"^```(python|bash)", file.read_text(), re.MULTILINE)
]
BY_DEFAULT = [
    "docs/index.md",
    "docs/guides/rewards.md",
    "docs/guides/data.md",
    "packages/trainer/README.md",
]
CODE = [page if page in BY_DEFAULT else pytest.param(page, marks=pytest.mark.slow) for page in WITH_CODE]
RUN_HERE = [
    "csrc/README.md",
    "docs/packages/csrc/buffers.md",
    "packages/rollout/README.md",
    "docs/packages/rollout/third_party.md",
    "docs/packages/tq/guide.md",
]
"""Pages of packages whose Python is run by a test below."""
RUN_BY_PACKAGES = {
    "packages/agent": "tests/test_agent_readme.py",
    "packages/ckpt": "tests/test_ckpt_readme.py",
    "packages/engine": "tests/test_engine_readme.py",
    "packages/omni": "tests/test_omni_readme.py",
    "packages/tinker": "tests/test_tinker_readme.py",
    "packages/tq": "tests/test_readme.py",
    "packages/tq-compat": "tests/test_readme.py",
    "packages/trainer": "tests/test_trainer_pages.py",
}
"""Tests of packages that run their other pages."""
ENDS_AT_ONCE = ("--dry-run", "--print-config", "--explain", "--list", "--from-verl", "--completion")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where pages run: a tiny model under the name of a real one, and rows in the format of GSM8K."""
    from rl_rollout.testing import write_tiny_model

    folder = tmp_path_factory.mktemp("docs")
    write_tiny_model(folder / "Qwen3-0.6B", max_position_embeddings=4096)
    (folder / "gsm8k").mkdir()
    for name, count in (("train", 100), ("test", 8)):
        line = json.dumps({"question": "How much is 1 + 1?", "answer": "#### 2"}) + "\n"
        (folder / "gsm8k" / f"{name}.jsonl").write_text(line * count)
    return folder


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    from rl_trainer.config import load_config
    from rl_trainer.config.schema import WarmupConfig
    from rl_trainer.data import load_datasets
    from rl_trainer.data.warmup import make_small_model

    config = load_config("quickstart", ["data.options.num_rows=2000", "data.eval_size=16"])
    warmup = WarmupConfig(hidden_size=32, num_layers=1, steps=2, batch_size=16)
    rows = load_datasets(config.data, seed=0).train
    return make_small_model(
        tmp_path_factory.mktemp("small"), warmup, rows, seed=0, timeout_s=120, on_line=lambda line: None
    )


@pytest.fixture
def small(small_model, monkeypatch):
    """`rl_trainer.train` of the pages, as they stand, but of a tiny model, two steps, and one process."""
    import rl_trainer

    train, runs = rl_trainer.train, []
    sizes = {"runtime": "inline", "steps": 2, "eval_every": 0, "timeout_s": 120, "tracking.trackers": {}}
    sizes["batch"] = {"batch_size": 2, "mini_batch_size": 2, "group_size": 2}

    def shortened(recipe, **given):
        runs.append(train(recipe, **{"model": small_model} | given | sizes | {"output_dir": f"out-{len(runs)}"}))
        return runs[-1]

    monkeypatch.setattr(rl_trainer, "train", shortened)
    return runs


@pytest.mark.promise("The code of every page of the documentation runs as it stands")
@pytest.mark.process
@pytest.mark.parametrize("page", CODE)
def test_the_code_of_a_page_runs_as_it_stands(page, folder, small, tmp_path, monkeypatch):
    for name in ("Qwen3-0.6B", "gsm8k"):
        (tmp_path / name).symlink_to(folder / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict = {"__name__": "page"}
    modules = set(sys.modules)
    num_run = 0
    for language, title, text in _BLOCK.findall((ROOT / page).read_text()):
        if language == "python" and title:
            Path(title).write_text(text)
            importlib.invalidate_caches()
            compile(text, title, "exec")
        elif language == "python":
            exec(compile(text, page, "exec"), names)
        elif language == "bash":
            for line in text.strip().splitlines():
                run(line)
        num_run += language in ("python", "bash")
    assert num_run
    for name in set(sys.modules) - modules:  # a page's own files, which another may have too
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def run(line):
    """A command of a page; a training run is checked to the last moment before it would start."""
    from rl_trainer import cli
    from rl_trainer.commands import doctor

    program, *words = shlex.split(line, comments=True)
    if program == "rl-doctor":
        with contextlib.suppress(SystemExit):
            assert doctor.main([]) in (0, 1)
        return
    assert program == "rl-train", f"{line} is run by no test"
    if not any(word in ENDS_AT_ONCE for word in words):
        words.append("--dry-run")
    if words[0] in ("quickstart", "tool_calculator") and not any("data." in word for word in words):
        words += ["data.options.num_rows=2000", "data.eval_size=16"]
    if words[0] == "smollm" and not any("model.path=" in word for word in words):  # there is no network
        words.append(f"model.path={next(Path.cwd().rglob('Qwen3-0.6B'))}")
    assert cli.main(words) == 0, line


@pytest.mark.promise("The README is one screen, and its commands run")
@pytest.mark.process
def test_the_readme_is_one_screen_and_its_commands_run(folder, tmp_path, monkeypatch):
    (tmp_path / "Qwen").mkdir()
    for name, there in (("gsm8k", "gsm8k"), ("Qwen/Qwen3-0.6B", "Qwen3-0.6B")):
        (tmp_path / name).symlink_to(folder / there)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    lines = [line for language, _, block in _BLOCK.findall(text) if language == "bash" for line in block.splitlines()]
    commands = [part.partition("#")[0].strip() for line in lines for part in line.split("&&")]
    assert [each for each in commands if not each.startswith("uv run ")] == ["pip install uv"]
    for command in commands[1:]:
        run(command.removeprefix("uv run "))
    assert len(text.splitlines()) <= 90


@pytest.mark.process
@pytest.mark.parametrize("page", RUN_HERE)
def test_the_python_of_a_package_page_runs_as_it_stands(page, folder, tmp_path, monkeypatch):
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/model").symlink_to(folder / "Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "page"}
    blocks = [text for language, _, text in _BLOCK.findall((ROOT / page).read_text()) if language == "python"]
    for text in blocks:
        exec(compile(text, page, "exec"), names)
    for left in names.values():  # a page shows the exchange, and not its end
        if isinstance(left, socket.socket):
            left.close()
    assert blocks


def test_the_python_of_every_page_is_run_by_a_test():
    """Those of `docs/` above; of the repository's README the line is an excerpt of an example that a test runs."""
    files = [*ROOT.glob("csrc/*.md"), *DOCS.glob("packages/*/*.md"), *ROOT.glob("packages/*/*.md")]
    pages = [str(file.relative_to(ROOT)) for file in files if re.search(r"^```python", file.read_text(), re.MULTILINE)]
    own = {page: page.removeprefix("docs/") for page in pages if page not in RUN_HERE}
    tests = {page: "/".join(name.split("/")[:2]) for page, name in own.items()}
    missing = [page for page, package in tests.items() if not (ROOT / package / RUN_BY_PACKAGES[package]).is_file()]
    assert missing == []
    for page, package in tests.items():
        text = (ROOT / package / RUN_BY_PACKAGES[package]).read_text()
        assert Path(page).name in text or 'glob("*.md")' in text, page
    example = "examples/train_sums.py"
    assert example in (ROOT / "README.md").read_text()
    assert "train_sums" in (ROOT / "packages/trainer/tests/test_trainer_pages.py").read_text()


@pytest.mark.promise("Every error leads to a page of the documentation")
def test_every_error_leads_to_a_page():
    from rl_trainer import errors

    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.TrainerError)]
    assert [each for each in kinds if not (ROOT / errors.page_of(each("x"))).is_file()] == []
    assert errors.page_of(errors.DataError("x")) == "docs/guides/data.md"
    assert errors.page_of(OSError("x")) == "docs/guides/debugging.md"
    assert (ROOT / "docs/guides/fine-tuning.md").is_file()


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in PAGES if page not in text] == []


def test_no_page_names_a_machine_path_or_fetches_anything():
    for file in [*DOCS.rglob("*.md"), ROOT / "README.md"]:
        text = file.read_text()
        assert not re.search(r"/(work|home|root|Users)/", text), file
    theme = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]
    assert theme["font"] is False


def test_every_key_that_a_page_names_exists():
    from dataclasses import fields

    from rl_trainer.config.explain import keys
    from rl_trainer.config.schema import Config

    sections = {each.name for each in fields(Config)}
    known = [re.compile(re.escape(name).replace("NAME", r"\w+")) for name in keys()]
    for page in [*(DOCS / page for page in PAGES), ROOT / "README.md"]:
        for name in re.findall(r"`([a-z]+(?:\.\w+)+)(?:=[^`]*)?`", page.read_text()):
            is_key = name.partition(".")[0] in sections and not name.endswith(
                (".md", ".py", ".json", ".jsonl", ".yaml")
            )
            is_named = any(each.fullmatch(name) or name.startswith("algorithm.loss_options.") for each in known)
            assert not is_key or is_named or name.startswith(FREE), f"{page.name}: {name}"


FREE = ("model.", "rollout.options.", "agent.options.", "data.options.", "staleness.options.")
"""Files such as model.safetensors, and options of parts that are named elsewhere."""


def test_every_file_of_figures_is_quoted_by_a_page():
    names = {file.name for file in (ROOT / "benchmarks" / "results").iterdir()}
    pages = [page.read_text() for page in ROOT.glob("**/*.md") if not {".venv", "node_modules"} & {*page.parts}]
    assert not {name for name in names if not any(name in page for page in pages)}


def test_pictures_are_readable_in_dark_mode():
    for name in ("step", "trainer", "engine", "rollout", "agent", "ckpt", "tq", "csrc"):
        text = (DOCS / "img" / f"{name}.svg").read_text()
        assert "prefers-color-scheme: dark" in text
        assert "<title>" in text
        assert not re.search(r"(fill|stroke)=\"#", text), "colours are variables"


def test_relative_links_lead_to_files():
    links = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
    made = (
        "reference/config.md",
        "reference/algorithms.md",
        "reference/names.md",
        "develop/contributing.md",
        "develop/promises.md",
        "performance.md",
    )
    for file in DOCS.rglob("*.md"):
        for target in links.findall(re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)):
            path = (file.parent / target).resolve()
            is_there = path.exists() or (path.is_relative_to(DOCS) and str(path.relative_to(DOCS)) in made)
            assert is_there or re.match(r"^[a-z]+:", target), f"{file}: {target}"


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_network(tmp_path):
    pytest.importorskip("mkdocs", reason="uv sync --group docs")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {
        "NO_MKDOCS_2_WARNING": "1",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    subprocess.run(line, cwd=ROOT, check=True, timeout=300, env=environment)
    assert "batch.group_size" in (tmp_path / "reference" / "config.html").read_text()
    assert "fonts.googleapis" not in (tmp_path / "index.html").read_text()
