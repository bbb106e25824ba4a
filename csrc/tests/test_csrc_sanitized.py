"""The kernel tests once more on builds with ASan and UBSan, and with TSan: minutes, so in the slow tier."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[1]
SUITE = sorted(
    str(path)
    for path in Path(__file__).parent.rglob("test_csrc_*.py")
    if "cuda" not in path.name and path.name not in ("test_csrc_frames_fuzz.py", Path(__file__).name)
)
"""Every file that calls the native CPU module; the fuzzers have a build of their own."""


THREADED = [path for path in SUITE if Path(path).parent.name in ("ops", "inference", "buffers")]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("sanitizers", "runtimes", "suite", "options"),
    [
        (
            "address,undefined",
            ("libasan.so", "libubsan.so", "libstdc++.so"),
            SUITE,
            # Python keeps much until its end
            {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
        ),
        (
            "thread",
            ("libtsan.so", "libstdc++.so"),
            THREADED,
            # torch and Python are not instrumented: what they order among themselves is not seen
            {"TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1", "OMP_NUM_THREADS": "4"},
        ),
    ],
    ids=["address", "thread"],
)
def test_kernels_are_clean_under_sanitizers(tmp_path, sanitizers, runtimes, suite, options):
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("cmake") is None:
        pytest.skip("needs g++ and cmake on PATH")
    pybind11 = pytest.importorskip("pybind11", reason="needs pybind11 to build")
    package, build = tmp_path / "package" / "rl_csrc", tmp_path / "build"
    shutil.copytree(ROOT / "src" / "rl_csrc", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    settings = [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}"]
    settings += [f"-DRL_CSRC_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    subprocess.run(["cmake", "-S", ROOT, "-B", build, *settings, f"-DCMAKE_CXX_COMPILER={compiler}"], check=True)
    subprocess.run(["cmake", "--build", build, "-j2"], check=True)
    shutil.copy(build / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}", package)
    preloaded = ":".join(_runtime(compiler, name) for name in runtimes)
    environment = os.environ | {"PYTHONPATH": str(package.parent), "LD_PRELOAD": preloaded} | options
    command = [sys.executable, "-S", "-c", _RUNNER, str(package.parent), *suite]
    if sanitizers == "thread" and (setarch := shutil.which("setarch")):
        command = [setarch, "-R", *command]  # the runtime wants its shadow memory where it expects it
    found = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-8000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(importlib.util.find_spec("rl_csrc._cuda") is not None, reason="the CUDA module itself is installed")
def test_emulated_cuda_kernels_are_clean_under_sanitizers(tmp_path):
    """A memcheck without a GPU: what they read and write lies within the tensors, at addresses aligned to it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ on PATH")
    spec = importlib.util.spec_from_file_location("emulated_build", Path(__file__).parent / "emulated" / "build.py")
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    environment = os.environ | {
        "RL_CSRC_EMULATED": str(builder.build(tmp_path, sanitize=True)),
        "LD_PRELOAD": ":".join(_runtime(compiler, name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    suite = [str(path) for path in sorted(Path(__file__).parent.rglob("test_csrc_cuda_*.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", "-k", "emulated", *suite]
    found = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-8000:]


def _runtime(compiler: str, name: str) -> str:
    return subprocess.run(
        [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()


# Started without `site`, so that an editable install's finder does not bring the unsanitized module in.
_RUNNER = """
import sys
sys.path[1:1] = [p for p in {paths!r}]
import rl_csrc
assert rl_csrc.__file__.startswith(sys.argv[1]), rl_csrc.__file__
import pytest
deselected = "not fork and not compile and not slow and not links_no_torch"
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", deselected, *sys.argv[2:]]))
""".format(paths=[p for p in sys.path if p.endswith("site-packages")])
