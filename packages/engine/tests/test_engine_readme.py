import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
GUIDE = PACKAGE.parents[1] / "docs" / "guides" / "fine-tuning.md"
PAGES = [PACKAGE / "README.md", *sorted((PACKAGE.parents[1] / "docs/packages/engine").glob("*.md")), GUIDE]
EXAMPLES = [(page, code) for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.process
@pytest.mark.promise("The README's examples run")
@pytest.mark.parametrize(("page", "code"), EXAMPLES)
def test_the_readmes_examples_run(tmp_path, page, code):
    exec(compile(code.replace("/tmp/", f"{tmp_path}/"), str(page), "exec"), {})


def test_there_are_examples():
    assert [page.name for page, _ in EXAMPLES] == ["README.md", "backends.md", "fine-tuning.md"]


def test_every_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
