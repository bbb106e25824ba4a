import subprocess
import sys

import pytest

import rl_engine
from rl_engine import BackendError, EngineConfig, create_engine

PUBLIC = """
BackendError BatchCounts BatchError CheckpointError ConfigError DataError Engine
EngineConfig EngineError EngineOutput Fp8 Head LoraConfig LoraExport LossFunction MatmulPrecision ModelFolderError
ModelInit ModelOutput Mtp NonFiniteError OptimizerConfig OptimizerKind ParallelConfig PeftConfig Precision ShardSpec
StepOutcome TrainingWorker
auto_precision check create_engine digest_files
find_damage for_this_machine model_folder read_manifest write_manifest describe_model describe_tokens ModelFacts
"""


def test_public_names():
    assert sorted(rl_engine.__all__) == rl_engine.__all__
    assert set(rl_engine.__all__) == set(PUBLIC.split())
    assert all(hasattr(rl_engine, name) for name in rl_engine.__all__)


@pytest.mark.process
def test_importing_brings_nothing_heavy():
    heavy = "{'transformers', 'ray', 'vllm', 'megatron', 'wandb', 'peft', 'tensordict'}"
    code = f"import rl_engine, rl_engine.base, rl_engine.types, sys; print(sorted({heavy} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_an_unknown_backend_lists_what_is_installed():
    with pytest.raises(BackendError, match=r"No engine backend is named 'fsdpp'\. Installed: .*fsdp"):
        create_engine("fsdpp", EngineConfig(model_path="nowhere"))


def test_a_backend_that_cannot_be_imported_prints_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in (
        "backends.fsdp",
        "model.hf",
    ):  # imported by other tests, with transformers
        monkeypatch.delitem(sys.modules, f"rl_engine.{name}", raising=False)
    with pytest.raises(BackendError, match=r"pip install 'rl-engine\[fsdp\]'") as raised:
        create_engine("fsdp", EngineConfig(model_path="nowhere"))
    assert isinstance(raised.value.__cause__, ImportError)
