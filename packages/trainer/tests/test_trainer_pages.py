"""README and docs/: what the repository's test of pages does not run, and how a page is written."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from rl_trainer.config import load_config

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parents[1]
GUIDES = ("running", "learning", "reward-kinds", "plugins", "data-sources", "weights-in-a-run", "memory", "speed")
PAGES = [
    PACKAGE / "README.md",
    *(ROOT / "docs" / "guides" / f"{name}.md" for name in GUIDES),
    PACKAGE / "bench/README.md",
]
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]
YAML = [(page, text) for page in PAGES for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.promise("The README's example is the one that ships")
def test_the_readme_s_example_is_the_one_that_ships():
    shown = re.search(r"```python\n(.*?)```", PAGES[0].read_text(), re.DOTALL)[1]
    assert len([line for line in shown.splitlines() if line.strip()]) <= 12
    shipped = ast.parse((PACKAGE.parents[1] / "examples" / "train_sums.py").read_text()).body[1:]
    assert [ast.dump(node) for node in ast.parse(shown).body] == [ast.dump(node) for node in shipped]


@pytest.mark.parametrize(("page", "text"), YAML)
def test_a_section_of_yaml_is_one_of_the_configuration(page, text, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"extends": "gsm8k", **yaml.safe_load(text)}))
    assert load_config(str(recipe), []).name


def test_there_is_yaml():
    assert {page.stem for page, _ in YAML} == {"reward-kinds", "data-sources"}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere_and_lines_are_short(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert [p for p in prose.split("\n\n") if len(p.splitlines()) > 6 and not p.startswith(("|", "- "))] == []
    assert not re.search(r"\btest_\w+\.py", prose)
