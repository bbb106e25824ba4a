import re
import subprocess
import sys
from pathlib import Path


def test_the_first_example_of_the_readme_runs():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    example = re.search(r"```python\n(import asyncio.*?)```", readme, re.DOTALL)
    assert example is not None
    done = subprocess.run([sys.executable, "-c", example[1]], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 8
    assert "failed" not in done.stdout
