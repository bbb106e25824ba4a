import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import rl_agent
from rl_agent import LoopError, TokenizerError, create_loop, load_tokenizer
from rl_agent import registry as registry
from rl_agent.loops.single_turn import SingleTurnLoop
from rl_agent.testing import FakeGenerator, FakeTokenizer


def test_the_shipped_loop_is_found_by_name():
    server, tokenizer = FakeGenerator(), FakeTokenizer()
    loop = create_loop("single_turn", server, tokenizer)
    assert type(loop) is SingleTurnLoop
    assert loop.server is server
    assert loop.tokenizer is tokenizer


def test_an_unknown_name_lists_what_is_installed():
    with pytest.raises(
        LoopError,
        match=r"no agent loop 'singleturn' is installed as an entry point of rl_agent.loops; there are: .*single_turn",
    ):
        create_loop("singleturn", FakeGenerator(), FakeTokenizer())


def test_a_loop_import_error_is_chained_with_the_pip_line(monkeypatch):
    broken = next(entry for entry in registry.entry_points(group=registry.GROUP) if entry.name == "single_turn")
    broken = EntryPoint("hf", "no_such_module:Loop", registry.GROUP)._for(broken.dist)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken])
    with pytest.raises(LoopError, match=r"pip install 'rl-agent\[hf\]'") as caught:
        create_loop("hf", FakeGenerator(), FakeTokenizer())
    assert isinstance(caught.value.__cause__, ImportError)


def test_an_entry_point_that_is_no_loop_is_refused(monkeypatch):
    entry = EntryPoint("odd", "json:loads", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(LoopError, match="json:loads, which is not a subclass"):
        create_loop("odd", FakeGenerator(), FakeTokenizer())


def test_a_folder_without_tokenizer_is_one_sentence(tmp_path):
    with pytest.raises(TokenizerError, match="no tokenizer can be loaded from"):
        load_tokenizer(str(tmp_path))


def test_the_public_names():
    assert set(rl_agent.__all__) == {
        *("AgentError", "FailureError", "LoopError", "OutputError", "RowError", "TemplateError", "TokenizerError"),
        *("OnFailure", "ToolResult"),
        *("PluginError", "ToolDefinitionError", "ToolError", "FunctionTool", "Tool", "ToolCall", "ParsedTurn"),
        *("CodeResult", "Grader", "GroupResult", "SandboxError", "SandboxLimits", "SandboxReport"),
        *("AgentLoop", "AgentLoopOutput", "AgentRunner", "Failure", "FailureKind", "Generator", "Message"),
        *("RolloutResult", "Tokenizer", "create_loop", "load_tokenizer", "tokenize_prompt", "validate_output"),
        *("tokenize_prompts", "ScriptError", "create_script_reader", "Policy"),
    }
    assert all(hasattr(rl_agent, name) for name in rl_agent.__all__)


@pytest.mark.process
def test_importing_the_package_brings_no_transformers():
    code = "import sys, rl_agent, rl_agent.testing; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
