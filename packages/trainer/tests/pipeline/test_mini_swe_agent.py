"""mini-swe-agent, unchanged, as the harness of a run of the page `agent-recipes`: `tools/clients.sh` has it."""

import re
import socket

import pytest
from packages.agent.tests.support.clients import ROOT, check_emitted, clients, model, shell, steer
from rich.console import Console

from rl_agent import load_tokenizer
from rl_rollout.router import Router
from rl_trainer.config import load_config
from rl_trainer.run import run
from rl_trainer.workers import agent as agent_worker

__all__ = ["clients", "model", "steer"]
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PAGE = ROOT / "docs/guides/agent-recipes.md"


@pytest.fixture
def outside():
    """A port of this machine that nothing in the sandbox may reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def reply(prompt, *, mends, port):
    """The next of four commands; the second writes what the docstring says, or leaves the file as it is."""
    right = re.search(r'2 """(.*)"""', prompt)[1]
    commands = [
        f"cat lib.py; bash -c ': < /dev/tcp/127.0.0.1/{port}' && echo reached || echo shut",
        f"sed -i '3s/.*/    return {right}/' lib.py" if mends else "true",
        "python -S test_lib.py && echo passed",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]
    return "I work. " + shell(prompt, commands[prompt.count("\n<tool_response>\n")])


def test_mini_swe_agent_trains_as_the_page_says(clients, model, steer, outside, tmp_path, monkeypatch):
    tokenizer, sessions, emitted, learned = load_tokenizer(model), [], [], []
    generate, to_columns = Router.generate, agent_worker.to_columns

    async def steered(self, request):
        if request.session_id not in sessions:
            sessions.append(request.session_id)
        prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        mends = sessions.index(request.session_id) % 2 == 0
        text = reply(prompt, mends=mends, port=outside.getsockname()[1])
        steer[request.request_id] = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        emitted.append(output := await generate(self, request))
        return output

    def kept(groups, **given):
        learned.extend(output for _, group, _ in groups for output, _ in group)
        return to_columns(groups, **given)

    monkeypatch.setattr(Router, "generate", steered)
    monkeypatch.setattr(agent_worker, "to_columns", kept)
    recipe = tmp_path / "mini_swe_agent.yaml"
    recipe.write_text(re.search(rf'```yaml title="{recipe.name}"\n(.*?)```', PAGE.read_text(), re.DOTALL)[1])
    settings = [
        *("runtime=inline", "steps=2", "eval_every=0", "timeout_s=600", f"output_dir={tmp_path}/out"),
        *("batch.batch_size=1", "batch.group_size=2", "batch.mini_batch_size=1", "data.eval_size=1"),
        *(f"model.path={model}", f"agent.options.venv={clients}"),
    ]
    summary = run(load_config(str(recipe), settings), Console(quiet=True))
    assert (summary["steps"], summary["failed_rollouts"]) == (2, 0)
    assert len(learned) == 4
    for output in learned:
        check_emitted(output, emitted)
        context = tokenizer.decode(output.completion_token_ids)
        assert output.num_turns == 4, context
        assert output.extra_fields["harness"]["exit_status"] == 0
        assert output.reward == float("sed -i" in context) == float('"output": "passed' in context)
        assert '\\nshut\\n"' in context
    assert {output.reward for output in learned} == {0.0, 1.0}
    with pytest.raises(BlockingIOError):
        outside.accept()
