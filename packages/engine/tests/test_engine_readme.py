import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_readmes_examples_run(tmp_path, code):
    exec(compile(code.replace("/tmp/", f"{tmp_path}/"), str(README), "exec"), {})


def test_there_are_examples():
    assert len(EXAMPLES) == 3
