"""The real SGLang server takes weights from rl-ckpt. Needs an environment with SGLang and rl-ckpt, at RL_CKPT_SGLANG.

RL_CKPT_SGLANG is the folder of a virtual environment of its own: SGLang pins another torch than this workspace. Written
for SGLang 0.5.23.
"""

import json
import os
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ckpt_servers import PROMPT, ServedModel, ServedSuite, session, tiny_model

import rl_ckpt
from rl_ckpt.adapters.sglang import LOADER, session_request
from rl_ckpt.testing import new_name

ENVIRONMENT = os.environ.get("RL_CKPT_SGLANG")
START_S = 600
TOKEN = "known to both"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.skipif(not ENVIRONMENT, reason="RL_CKPT_SGLANG names no environment with SGLang and rl-ckpt"),
]


class Sglang(ServedModel):
    """`sglang.launch_server` on a folder, with its own Python."""

    def __init__(self, folder, log):
        command = [
            *(f"{ENVIRONMENT}/bin/python", "-m", "sglang.launch_server", "--model-path", str(folder)),
            *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-overlap-schedule"),
            *("--skip-server-warmup", "--skip-tokenizer-init", "--host", "127.0.0.1"),
            *("--mem-fraction-static", "0.1", "--max-total-tokens", "8192", "--custom-weight-loader", LOADER),
        ]
        settings = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RL_CKPT_TOKEN": TOKEN}
        super().__init__(command, settings, log)
        self._url = ""

    def logprobs(self):
        answer = self.post(
            "/generate",
            input_ids=PROMPT,
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        return torch.tensor([row[0] for row in answer["meta_info"]["input_token_logprobs"][1:]])

    def join(self, url, token):
        """The session comes with every update; its token with the server's environment."""
        assert token in {None, TOKEN}
        self._url = url

    def sync(self, sender, weights, version, *, num_peers=1):
        self.post("/pause_generation", mode="retract")
        self.post("/begin_weight_update")
        try:
            with ThreadPoolExecutor(1) as pool:
                taking = pool.submit(self.post, "/update_weights_from_tensor", **session_request(self._url, version))
                try:
                    report = sender.send(weights, version=version, num_peers=num_peers)
                except rl_ckpt.SyncAbortedError:
                    self.refusal = taking.exception(timeout=120)
                    assert isinstance(self.refusal, urllib.error.HTTPError)
                    assert self.refusal.code == 400
                    self.refusal = json.loads(self.refusal.read())["message"]
                    raise
                taking.result(120)
                return report
        finally:
            self.post("/end_weight_update")
            self.post("/continue_generation")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def served(request, tmp_path_factory):
    """A server, and whether its model has tied embeddings."""
    folder = tmp_path_factory.mktemp("sglang")
    tiny_model(0, has_aliases=request.param).save_pretrained(folder / "model")
    server = Sglang(folder / "model", folder / "log")
    try:
        server.wait(START_S)
        yield server, request.param
    finally:
        server.close()


class TestSglang(ServedSuite):
    def test_a_failed_sync_s_request_says_why_and_keeps_the_version(self, served):
        server, has_aliases = served
        with session(server, f"uds://{new_name()}") as sender:
            server.sync(sender, tiny_model(1, has_aliases=has_aliases).named_parameters(), 1)
            part = list(tiny_model(2, has_aliases=has_aliases).named_parameters())[:5]
            with pytest.raises(rl_ckpt.SyncAbortedError):
                server.sync(sender, part, 2)
            assert "tensors that the engine holds did not come" in server.refusal
            told = json.loads(server.get("/model_info"))
            assert told["weight_version"] == "1"
