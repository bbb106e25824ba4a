"""Unchanged clients in a sandbox: where they are, a model that their long prompts fit, and what it is made to say."""

import json
import os
import sysconfig
from pathlib import Path

import pytest
from packages.agent.tests.conftest import FAMILIES

ROOT = Path(__file__).resolve().parents[4]
MAX_MODEL_LEN = 1 << 16


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shell(prompt, command):
    """A call of whichever shell tool the client offers."""
    for name, arguments in (
        ("exec_command", {"cmd": command}),
        ("shell_command", {"command": command}),
        ("shell", {"command": ["bash", "-lc", command]}),
        ("Bash", {"command": command, "description": "work"}),
        ("bash", {"command": command}),
    ):
        if f'"name": "{name}"' in prompt:
            return call(name, **arguments)
    return "done"


VARIABLES = (
    "export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors MSWEA_GLOBAL_CONFIG_DIR=/tmp/mini"
    " LITELLM_LOCAL_MODEL_COST_MAP=True CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_ATTRIBUTION_HEADER=0"
)


@pytest.fixture(scope="session")
def clients():
    folder = Path(os.environ.get("RL_CLIENTS") or ROOT / ".clients").resolve()
    if not (folder / "node/node_modules/.bin/claude").exists():
        pytest.fail(f"there are no clients in {folder}: tools/clients.sh FOLDER, and RL_CLIENTS=FOLDER")
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A random model of 64k positions, with a byte-level tokenizer that learned from Python's standard library."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("clients") / "model"
    specials = ["<|im_start|>", "<|im_end|>"]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=6000, special_tokens=specials, initial_alphabet=alphabet)
    core.train([str(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=specials[1])
    tokenizer.chat_template = FAMILIES["qwen"][2]
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def steer(monkeypatch):
    """Logits of the embedded server, plus a bias to the token that each of its requests is to say next."""
    from rl_rollout.backends.embedded.model import model_runner
    from rl_rollout.backends.embedded.step_runner import StepRunner

    wanted, draw = {}, StepRunner._draw

    def steered(self, drawn, rows, logits):
        logits = logits.clone()
        for at, row in enumerate(drawn.tolist()):
            sequence = self._scheduler.running[row]
            place = int(self._table.lengths_host[row]) - len(sequence.prompt)
            logits[at, wanted[sequence.request.request_id][place]] += 30.0
        return draw(self, drawn, rows, logits)

    monkeypatch.setattr(model_runner, "fuse", lambda *_, **__: None)  # the fused decoder draws by itself
    monkeypatch.setattr(StepRunner, "_draw", steered)
    return wanted


def check_emitted(output, emitted):
    """Check that the trained tokens are emitted answers, one after another; a stop string may cut one short."""
    columns = [output.completion_token_ids, output.rollout_logprobs, output.weight_versions]
    trained = [row for row, m in zip(zip(*columns, strict=True), output.loss_mask, strict=True) if m]
    answers = [[*zip(each.token_ids, each.logprobs, each.weight_versions, strict=True)] for each in emitted]
    while trained:
        shared = [
            next((i for i, (a, b) in enumerate(zip(trained, each, strict=False)) if a != b), len(each))
            for each in answers
        ]
        size = min(max(shared), len(trained))
        assert size, f"token {trained[0]} was not emitted here"
        trained = trained[size:]
