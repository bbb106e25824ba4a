"""What an index gets: the same bytes each time, a bill of materials, and a compiled module that fits any torch."""

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def publish(what, folder):
    line = [str(ROOT / "tools/publish.sh"), what]
    done = subprocess.run(line, env=os.environ | {"DIST": str(folder)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.promise("Wheels and sdists are the same bytes each time they are built")
def test_wheels_and_sdists_are_the_same_bytes_each_time(tmp_path):
    built = [line.split()[-1].rpartition("/")[2] for line in publish("same", tmp_path).splitlines()]
    assert len([name for name in built if name.endswith(".whl")]) == 7
    assert len([name for name in built if name.endswith(".tar.gz")]) == 8


def test_the_bill_of_materials_names_every_package_of_the_lock(tmp_path):
    publish("sbom", tmp_path)
    found = json.loads((tmp_path / "sbom.json").read_text())
    assert found["bomFormat"] == "CycloneDX"
    names = {component["name"].lower().replace("_", "-") for component in found["components"]}
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line and line[0].isalnum()}
    assert locked - names == set()


@pytest.mark.promise("One wheel of rl-csrc per Python fits any torch")
def test_the_compiled_module_links_no_torch(tmp_path):
    """One wheel per Python serves every torch: pybind11's ABI is Python's, and torch is nowhere in it."""
    line = ["uv", "build", "--quiet", "--wheel", "--no-sources", "--out-dir", str(tmp_path), str(ROOT / "csrc")]
    subprocess.run(line, check=True, timeout=800)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        modules = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".so")}
    assert [name.partition(".")[0] for name in modules] == ["rl_csrc/_cpu"]
    assert [name for name, code in modules.items() if b"libtorch" in code or b"libc10" in code] == []
