import re
from pathlib import Path

import pytest


@pytest.mark.promise("The README's example runs")
def test_the_example_of_the_readme_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.S)
    exec(example, {})
