"""What reads files and sockets runs no code from them: a new use of what could is a failure until a reason stands here.

Looked for in everything that ships: unpickling and its kin, `eval` and `exec`, object collectives of torch (pickles
between ranks), torch's checkpoint metadata (a pickle), unsafe YAML, code of model folders. The threat model says
what each kind of file may do.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [*ROOT.glob("packages/*/src"), ROOT / "csrc/src", ROOT / "benchmarks/src"]
MODULES = {
    "cloudpickle", "copyreg", "dill", "joblib", "marshal", "multiprocessing", "pickle", "pickletools", "runpy",
    "shelve", "torch.distributed.checkpoint",
}  # fmt: skip
CALLS = {
    "all_gather_object", "broadcast_object_list", "exec_module", "gather_object", "load_module", "recv_object_list",
    "recv_pyobj", "scatter_object_list", "send_pyobj", "send_object_list", "unsafe_load",
    "unsafe_load_all", "full_load",
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile", "__import__"}
QUALIFIED = {"torch.load", "yaml.load", "yaml.load_all"}
FLAGS = {"allow_pickle", "trust_remote_code"}

ALLOWED = {
    # what a user gives as code, and asks for by name
    **{
        (f"rl_agent/sandbox/process/{file}.py", what): "runs code: that is what the sandbox's processes are for"
        for file, whats in {
            "execution": ("compile", "eval", "exec"),
            "judge": ("compile", "exec"),
        }.items()
        for what in whats
    },
    ("rl_agent/environments/python.py", "exec_module"): "agent.environment=FILE.py:NAME, a file of the user's",
    **{
        ("rl_agent/recipes/repair.py", what): "runs the functions that the recipe writes, before a model has seen them"
        for what in ("eval", "exec")
    },
    ("rl_trainer/plugins.py", "cloudpickle"): "objects given to train(), on their way to its own workers",
    ("rl_trainer/plugins.py", "exec_module"): "FILE.py:NAME, a plug-in of the user's",
    ("rl_bench/tiers.py", "multiprocessing.util"): "counts the processes that a test starts",
    # a pickle that megatron-core reads, after a reader that makes nothing but torch's records of tensors
    ("rl_engine/backends/megatron/dist_checkpoint.py", "pickle"): "refuses what names anything else",
    ("rl_engine/backends/megatron/dist_checkpoint.py", "torch.distributed.checkpoint.api"): "an exception's class",
    # pickles that are written for a protocol of others, and never read
    ("rl_ckpt/adapters/checkpoint_engine.py", "send_pyobj"): "the protocol wants pickles: written, never read",
    ("rl_ckpt/adapters/sglang.py", "pickle"): "SGLang's server takes tensors as pickles: written, never read",
    ("rl_rollout/backends/sglang.py", "pickle"): "SGLang's server takes tensors as pickles: written, never read",
}


def uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What a module does of all this, and in which line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if is_watched(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            yield from ((name, node.lineno) for name in names[:1] if is_watched(name))
            yield from ((name, node.lineno) for name in names[1:] if name in MODULES | QUALIFIED)
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in CALLS)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            if name in BUILTINS | QUALIFIED or last in CALLS or name.startswith("torch.distributed.checkpoint."):
                yield (name if name in BUILTINS | QUALIFIED else last), node.lineno
            if last == "from_pretrained" and "trust_remote_code" not in {keyword.arg for keyword in node.keywords}:
                yield "from_pretrained without trust_remote_code=False", node.lineno
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in FLAGS and not is_off:
                    yield keyword.arg, node.lineno


def is_watched(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in MODULES)


def found() -> dict[tuple[str, str], list[int]]:
    places: dict[tuple[str, str], list[int]] = {}
    for source in SOURCES:
        for file in sorted(source.rglob("*.py")):
            if "testing" in file.relative_to(source).parts[1:]:  # talks to the processes that it forks
                continue
            for what, line in uses(ast.parse(file.read_text())):
                places.setdefault((file.relative_to(source).as_posix(), what), []).append(line)
    return places


@pytest.mark.promise("No code runs from files, messages or checkpoints; no pickle where data are read")
@pytest.mark.process
def test_code_execution_from_data_needs_a_stated_reason():
    new = {f"{file}:{lines[0]}: {what}" for (file, what), lines in found().items() if (file, what) not in ALLOWED}
    assert not new, "read data with JSON, msgspec or safetensors, or give a reason in ALLOWED"


@pytest.mark.process
def test_every_reason_is_still_needed():
    assert ALLOWED.keys() - found().keys() == set()


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "from multiprocessing.connection import Client",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "from torch.distributed.checkpoint.filesystem import FileSystemReader",
        "import yaml\nyaml.load('x', Loader=yaml.Loader)",
        "eval('1')",
        "exec(text)",
        "np.load(file, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=flag)",
        "AutoModel.from_pretrained(path)",  # transformers asks on the terminal
    ],
)
def test_it_would_be_found(code):
    assert list(uses(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["model.eval()", "yaml.safe_load('x')", "np.load(f, allow_pickle=False)", "json.load(f)"]
)
def test_what_is_fine_is_not(code):
    assert not list(uses(ast.parse(code)))
