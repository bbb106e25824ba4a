import json
import sys
from pathlib import Path

import pytest

from rl_bench.cli import find_benchmarks, find_checkout, main
from rl_bench.machine import describe_commit, describe_machine

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = """
import multiprocessing

def double(x):
    return 2 * x

def main(run):
    run.parameters(size=8 if run.quick else 64)
    run.compare("sum", {"ours": lambda: sum(range(100))}, peers={"theirs": "not installed: theirs"}, goal="<= 9000 ms")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        run.record("spawned", "ours", pool.map(double, [21]), unit="MiB")
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").write_text("[tool.uv.workspace]\nmembers = []\n")
    bench = tmp_path / "packages" / "toy" / "bench"
    bench.mkdir(parents=True)
    (bench / "toy_bench.py").write_text(BENCHMARK)
    (bench / "_helper.py").write_text("")
    monkeypatch.chdir(bench)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield tmp_path
    for name in [name for name in sys.modules if name == "packages" or name.startswith("packages.")]:
        del sys.modules[name]


def test_checkout_and_benchmarks_are_found_from_any_subfolder(checkout: Path):
    assert find_checkout(Path.cwd()) == checkout
    assert find_benchmarks(checkout) == {"toy_bench": checkout / "packages/toy/bench/toy_bench.py"}


@pytest.mark.process
def test_the_rows_that_need_a_gpu_alone(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert main(["toy_bench", "--gpu"]) == 2
    assert "has no rows that need a GPU" in capsys.readouterr().err
    file = checkout / "packages/toy/bench/toy_gpu.py"
    file.write_text('def gpu(run):\n    run.record("on a GPU", "ours", [1.0], unit="s")\n')
    monkeypatch.setattr("rl_bench.cli.has_gpu", lambda: False)
    assert main(["toy_gpu", "--gpu"]) == 2
    assert capsys.readouterr().err.startswith("no GPU: torch sees no CUDA device here")
    monkeypatch.setattr("rl_bench.cli.has_gpu", lambda: True)
    assert main(["toy_gpu", "--gpu"]) == 0
    assert "on a GPU" in capsys.readouterr().out


def test_two_benchmarks_of_one_name_are_refused(checkout: Path):
    other = checkout / "csrc" / "bench"
    other.mkdir(parents=True)
    (other / "toy_bench.py").write_text("")
    with pytest.raises(ValueError, match="two benchmarks are called 'toy_bench'"):
        find_benchmarks(checkout)


@pytest.mark.process
def test_one_table_and_one_json(checkout: Path, capsys: pytest.CaptureFixture[str]):
    file = checkout / "out" / "toy.json"
    assert main(["toy_bench", "--quick", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "toy_bench" in printed
    result = json.loads(file.read_text())
    assert set(result) == {"name", "date", "machine", "commit", "parameters", "rows"}
    assert result["parameters"]["size"] == 8
    assert result["parameters"]["quick"] is True
    assert [(row["metric"], row["system"], row["n"], row["met"]) for row in result["rows"]] == [
        ("sum", "ours", 7, True),
        ("sum", "theirs", 0, None),
        ("spawned", "ours", 1, None),
    ]
    assert result["rows"][2]["median"] == 42


@pytest.mark.process
@pytest.mark.parametrize(("error", "code"), [("KeyboardInterrupt", 130), ("ValueError", 1)])
def test_a_run_that_ends_early_keeps_its_rows(
    checkout: Path, capsys: pytest.CaptureFixture[str], error: str, code: int
):
    (checkout / "packages/toy/bench/toy_long.py").write_text(
        f'def main(run):\n    run.record("first", "ours", [1.0], unit="s")\n    raise {error}\n'
    )
    file = checkout / "long.json"
    assert main(["toy_long", "--json", str(file)]) == code
    result = json.loads(file.read_text())
    assert [row["metric"] for row in result["rows"]] == ["first"]
    assert result["parameters"]["cut_off_by"] == error
    assert error in capsys.readouterr().err


def test_an_unknown_name_lists_what_there_is(checkout: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["kernel"]) == 2
    assert "no benchmark 'kernel' here; there are: toy_bench" in capsys.readouterr().err


def test_the_machine_is_described_without_importing_torch():
    machine = describe_machine()
    assert machine["cpu"]
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 2**20
    assert isinstance(machine["gpu"], list)


@pytest.mark.process
def test_a_folder_outside_git_has_no_commit(tmp_path: Path):
    assert describe_commit(tmp_path) == "unknown"
