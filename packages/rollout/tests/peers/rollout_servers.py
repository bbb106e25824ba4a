"""Servers of others as tests start them: fakes that speak their protocols, and the real ones where there are some.

RL_ROLLOUT_VLLM, RL_ROLLOUT_SGLANG and RL_ROLLOUT_TRTLLM are folders of virtual environments with vLLM, SGLang or
TensorRT-LLM, and rl-ckpt: they pin other torches than ours. For images they need torchvision; where its compiled
operators do not fit the torch of a test environment, declarations of them (`torch.library`) are enough for it to be
imported.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from rl_rollout import GenerateRequest, SamplingParams, ServerConfig, create_server
from rl_rollout.testing import Served, write_tiny_model, write_tiny_vl_model

VLLM = os.environ.get("RL_ROLLOUT_VLLM")
SGLANG = os.environ.get("RL_ROLLOUT_SGLANG")
TRTLLM = os.environ.get("RL_ROLLOUT_TRTLLM")
START_S = 600.0
FAKES = {name: [sys.executable, str(Path(__file__).parent / f"fake_{name}.py")] for name in ("vllm", "sglang")}
SIZES = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 32: vLLM's attention on a CPU has no smaller ones."""


def real(environment, name):
    """Marks of tests that need the real one."""
    why = f"{name} names no environment with the server and rl-ckpt"
    marks = [pytest.mark.integration, pytest.mark.timeout(1500), pytest.mark.skipif(not environment, reason=why)]

    def marked(test):
        for mark in marks:
            test = mark(test)
        return test

    return marked


real_vllm = real(VLLM, "RL_ROLLOUT_VLLM")
real_sglang = real(SGLANG, "RL_ROLLOUT_SGLANG")
real_trtllm = real(TRTLLM, "RL_ROLLOUT_TRTLLM")


def config_of(folder, *args, command, env=None, adapters=None, num_mtp_tokens=None, **fields):
    options = {"command": command, "args": list(args), "env": env or {}}
    options |= {} if adapters is None else {"adapters": dict(adapters)}
    options |= {} if num_mtp_tokens is None else {"num_mtp_tokens": num_mtp_tokens}
    fields = {"num_threads": 1, "timeout_s": START_S, "dtype": "float32", "max_num_seqs": 32} | fields
    return ServerConfig(model_path=str(folder), options=options, **fields)


def fake_vllm_config(folder, *args, **fields):
    return config_of(folder, *args, **{"command": FAKES["vllm"], **fields})


def fake_sglang_config(folder, *args, **fields):
    return config_of(folder, *args, **{"command": FAKES["sglang"], **fields})


def fake_trtllm_config(folder):
    options = {"command": [sys.executable, str(Path(__file__).parent / "fake_trtllm.py")]}
    return ServerConfig(model_path=str(folder), num_threads=1, timeout_s=START_S, max_num_seqs=32, options=options)


def real_vllm_config(folder, *args, **fields):
    return config_of(
        folder,
        "--enforce-eager",
        *args,
        command=f"{VLLM}/bin/python -m vllm.entrypoints.openai.api_server",
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
        **{"kv_cache_bytes": 2**30, **fields},
    )


def real_sglang_config(folder, *args, max_total_tokens=65536, **fields):
    return config_of(
        folder,
        *args,
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--disable-overlap-schedule", "--skip-server-warmup", "--mem-fraction-static", "0.1"),
        *("--max-total-tokens", str(max_total_tokens)),
        command=f"{SGLANG}/bin/python -m sglang.launch_server",
        env={"SGLANG_USE_CPU_ENGINE": "1"},
        device="cpu",
        **fields,
    )


def real_model(folder, **overrides):
    return write_tiny_model(folder / "model", max_position_embeddings=8192, **{**SIZES, **overrides})


def mtp_model(folder, seed=0):
    """A GLM-4.5 of two layers, with the layer for multi-token prediction behind them."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    ids = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    heads = {**SIZES, "use_qk_norm": True, "max_position_embeddings": 512}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
               "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, **ids, **heads, **experts}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **sizes), dtype=torch.float32)
    model.save_pretrained(folder)
    extra = {"model.layers.2.eh_proj.weight": torch.randn(64, 128) / 8}
    extra |= {f"model.layers.2.{name}.weight": torch.rand(64) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    counts = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    config.write_text(json.dumps(json.loads(config.read_text()) | counts))
    return folder


def real_vl_model(folder, family, patch_size=4):
    return write_tiny_vl_model(folder / family, family=family, patch_size=patch_size, hidden_size=64, **SIZES)


def request(request_id="r", prompt=(5, 6), **params):
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=SamplingParams(**params))


def serve(backend, config, trainer, **fields):
    """For a fixture: a server while its tests run."""
    with asyncio.Runner() as runner:
        server = create_server(backend, config)
        runner.run(server.start())
        yield Served(server=server, run=runner.run, model_path=config.model_path, update=trainer.update, **fields)
        runner.run(server.stop())
        runner.run(trainer.close())


def alone(folder, asked):
    """What the embedded server gives, without adapters."""

    async def life():
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        await server.start()
        try:
            return await server.generate(asked)
        finally:
            await server.stop()

    return asyncio.run(life())
