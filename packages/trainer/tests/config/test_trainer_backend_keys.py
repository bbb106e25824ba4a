"""Every key of the backends' sections reaches what its backend is built from, or is refused; and what backends can do.

What a backend then makes of it is held to account where the backend is: rl-engine's `test_engine_config_keys` has such
a table for every field of `EngineConfig`; a server refuses options that it has not.
"""

import json
import tempfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from packages.trainer.tests.support.stand_ins import FakeAgents
from safetensors.torch import load_file, save_file

from rl_rollout.testing import write_tiny_model, write_tiny_vl_model
from rl_rollout.types import Capabilities
from rl_trainer.checkpoints import RunState
from rl_trainer.config import load_config
from rl_trainer.config.schema import EngineSection, RolloutSection
from rl_trainer.data import PromptOrder
from rl_trainer.errors import ConfigError, InputError, PlanError
from rl_trainer.pipeline.roles import actor_config, critic_config, frozen_config, is_offloaded, server_config
from rl_trainer.pipeline.rollout_source import RolloutSource
from rl_trainer.planning import gpus
from rl_trainer.planning.gpus import resource_pools
from rl_trainer.planning.preflight import check_backends, check_images, check_started, folder_facts
from rl_trainer.runtime.network import address_of
from rl_trainer.setup import Job, create_engine

# key: (another value, the part of `built` that it changes)
EFFECTS = {
    "engine.backend": ("megatron", "engine"),
    "engine.world_size": ("2", "pools"),
    "engine.environment": ("/an/environment", "pools"),
    "engine.optimizer.kind": ("muon", "engine"),
    "engine.optimizer.momentum": ("0.5", "engine"),
    "engine.optimizer.lr": ("0.5", "engine"),
    "engine.optimizer.betas": ("[0.5, 0.6]", "engine"),
    "engine.optimizer.weight_decay": ("0.5", "engine"),
    "engine.optimizer.max_grad_norm": ("7", "engine"),
    "engine.optimizer.warmup_steps": ("3", "engine"),
    "engine.optimizer.eps": ("1e-5", "engine"),
    "engine.optimizer.total_steps": ("9", "engine"),
    "engine.optimizer.min_lr_ratio": ("0.5", "engine"),
    "engine.lr_schedule": ("constant", "engine"),
    "engine.min_lr_ratio": ("0.5", "engine"),
    "engine.precision": ("bfloat16", "engine"),
    "engine.matmul_precision": ("high", "engine"),
    "engine.max_tokens_per_gpu": ("77", "engine"),
    "engine.prefix_sharing": ("false", "engine"),
    "engine.torch_compile": ("true", "engine"),
    "engine.freeze_vision": ("true", "engine"),
    "engine.cpu_offload": ("true", "engine"),
    "engine.optimizer_offload": ("true", "engine"),
    "engine.transformer_engine": ("false", "engine"),
    "engine.bridge": ("own", "engine"),
    "engine.dist_checkpoint": ("/weights/megatron", "engine"),
    "engine.activation_offload": ("[attention]", "engine"),
    "engine.recompute": ("[mlp, norm]", "engine"),
    "engine.mtp": ("freeze", "engine"),
    "engine.fp8": ("tensorwise", "engine"),
    "engine.activation_checkpointing": ("true", "engine"),
    "engine.router_aux_loss_coef": ("0.5", "engine"),
    "engine.router_replay": ("true", "engine"),
    "engine.async_checkpoints": ("true", "engine"),
    "engine.lora.rank": ("3", "engine"),
    "engine.lora.alpha": ("3", "engine"),
    "engine.lora.export": ("adapter", "engine"),
    "engine.lora.target_modules": ("[q_proj]", "engine"),
    "engine.parallel.tp": ("2", "engine"),
    "engine.parallel.pp": ("2", "engine"),
    "engine.parallel.ep": ("2", "engine"),
    "engine.parallel.vpp": ("2", "engine"),
    "engine.parallel.cp": ("2", "engine"),
    "engine.parallel.sequence_parallel": ("true", "engine"),
    "engine.parallel.sp": ("2", "engine"),
    "engine.parallel.dp_replicate": ("2", "engine"),
    "rollout.num_replicas": ("2", "pools"),
    "rollout.colocated": ("true", "pools"),
    "rollout.sleep": ("false", "offload"),
    "rollout.parallel.tp": ("2", "server"),
    "rollout.parallel.pp": ("2", "server"),
    "rollout.parallel.dp": ("2", "server"),
    "rollout.parallel.ep": ("2", "server"),
    "rollout.elastic.max_replicas": ("4", "pools"),  # what the others do: test_trainer_elastic_policy.py
    "rollout.elastic.min_replicas": ("2", "elastic"),
    "rollout.elastic.policy": ("mine", "elastic"),
    "rollout.elastic.lend": ("true", "elastic"),
    "rollout.elastic.patience": ("2", "elastic"),
    "rollout.temperature": ("0.5", "sampling"),
    "rollout.eval_temperature": ("0.5", "evaluation"),
    "rollout.eval_samples": ("2", "evaluation"),
    "rollout.top_p": ("0.5", "sampling"),
    "rollout.max_new_tokens": ("3", "sampling"),
    "rollout.max_num_seqs": ("3", "server"),
    "rollout.max_model_len": ("99", "server"),
    "rollout.queue_timeout_s": ("7", "server"),
    "rollout.max_body_bytes": ("70000", "server"),
    "rollout.max_completions": ("7", "server"),
    "rollout.max_stops": ("7", "server"),
    "rollout.max_top_logprobs": ("7", "server"),
    "rollout.num_threads": ("7", "server"),
    "rollout.device": ("cpu", "server"),
    "rollout.dtype": ("bfloat16", "server"),
    "rollout.quantization": ("int8", "server"),
    "rollout.kv_cache_bytes": ("7000000", "server"),
    "rollout.options": ("{block_size: 8}", "server"),
    "rollout.backend": ("vllm", "server's kind"),
    "weights_transport": ("uds", "addresses"),
    "queue_storage": ("tcp", "addresses"),
}
# what a key's configuration has beside it, and the one that it is compared with
BESIDE = {key: ["engine.lora={}"] for key in EFFECTS if key.startswith("engine.lora.")}
BESIDE |= {f"engine.parallel.{axis}": ["engine.world_size=2"] for axis in ("tp", "pp", "cp")}
BESIDE |= {
    f"rollout.elastic.{key}": ["rollout.elastic.max_replicas=4"]
    for key in ("min_replicas", "policy", "patience", "lend")
}
BESIDE["rollout.eval_samples"] = ["rollout.eval_temperature=0.7"]
BESIDE["rollout.sleep"] = ["rollout.colocated=true"]
BESIDE["engine.fp8"] = ["engine.precision=bfloat16"]
BESIDE["engine.optimizer.momentum"] = ["engine.optimizer.kind=muon"]
BESIDE["engine.optimizer.total_steps"] = ["engine.lr_schedule=constant"]
BESIDE["engine.optimizer.min_lr_ratio"] = ["engine.lr_schedule=constant", "engine.optimizer.total_steps=9"]


def keys_of(section, prefix):
    for field in (each for each in fields(section) if each.init):
        hint = get_type_hints(section)[field.name]
        nested = next((t for t in (hint, *get_args(hint)) if is_dataclass(t)), None)
        yield from keys_of(nested, f"{prefix}.{field.name}") if nested else [f"{prefix}.{field.name}"]


class Recorder:
    """A runtime that keeps what a worker is to be built from."""

    def create_group(self, worker, pool, **kwargs):
        return kwargs


def built(*overrides):
    """What the parts of a job are built from."""
    config = load_config("quickstart", overrides)
    told = {}

    class Agents(FakeAgents):
        def evaluate(self, rows, sampling_params):
            told.update(sampling_params, rows=len(rows))
            return super().evaluate(rows, sampling_params)

    agents = Agents(config)
    manager = RolloutSource(agents, [{}], PromptOrder(num_rows=1, seed=0), agents.queue, config, None)
    manager.evaluate([{}])
    state = RunState(seed=0, num_rows=1)
    job = Job(
        config=config,
        runtime=Recorder(),
        model_path=Path("m"),
        state=state,
        output_dir=None,
        name="n",
        store=None,
        queue_address="q",
        weights_address="w",
    )
    return {
        "engine": {
            name: value for name, value in create_engine(job).items() if name in ("backend", "config", "inputs")
        },
        "server": server_config(config, Path("m")),
        "server's kind": config.rollout.backend,
        "pools": resource_pools(config),
        "offload": is_offloaded(config),
        "elastic": config.rollout.elastic,
        "sampling": manager.sampling("1/0"),
        "evaluation": told,
        "addresses": [address_of(name, "n", ("h", 1)) for name in (config.weights_transport, config.queue_storage)],
    }


def test_every_key_is_in_the_table():
    found = {*keys_of(EngineSection, "engine"), *keys_of(RolloutSection, "rollout")}
    assert found | {"weights_transport", "queue_storage"} == EFFECTS.keys() | {"engine.lora.dropout"}


def test_the_plan_says_which_tokens_end_a_turn(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    assert folder_facts(load_config("gsm8k", [f"model.path={folder}"])) == [("turns end at", "<eos> (1)")]
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<unk>{% endfor %}")
    (_, ends), (name, warning) = folder_facts(load_config("gsm8k", [f"model.path={folder}"]))
    assert (ends, name) == ("<eos> (1), <unk> (2)", "warning")
    assert warning.startswith("the chat template ends turns with <unk> (2), which is not an eos_token_id")
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"generation_config\.json holds a list, not a JSON object"):
        folder_facts(load_config("gsm8k", [f"model.path={folder}"]))


def test_rows_with_images_need_a_model_that_takes_them(tmp_path):
    config = load_config("gsm8k", [f"model.path={write_tiny_model(tmp_path / 'text')}"])
    with pytest.raises(InputError, match=r"rows of the data have images, and the model in .*text takes none"):
        check_images(config)
    folder = write_tiny_vl_model(tmp_path / "sees")
    check_images(load_config("gsm8k", [f"model.path={folder}"]))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "gemma3", "vision_config": {"depth": 2}}))
    with pytest.raises(InputError, match="takes none: of model type 'gemma3', tokens of a Gemma 3 image attend to"):
        check_images(load_config("gsm8k", [f"model.path={folder}"]))


@pytest.mark.process
@pytest.mark.parametrize(
    ("sizes", "targets", "layer"),
    [
        ({"tie_word_embeddings": False}, ["lm_head", "q_proj"], "lm_head, which servers do not adapt"),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            ["experts"],
            "mlp.experts, which servers do not",
        ),
    ],
)
def test_an_adapter_that_servers_cannot_have_is_found_early(tmp_path, sizes, targets, layer):
    folder = write_tiny_model(tmp_path / "model", family="qwen3_moe" if "num_experts" in sizes else "qwen3", **sizes)
    lora = f"engine.lora={{export: adapter, target_modules: [{', '.join(targets)}]}}"
    with pytest.raises(ConfigError, match=layer):
        check_backends(load_config("gsm8k", [f"model.path={folder}", lora]))
    lora = f"engine.lora={{export: {'merged' if 'lm_head' in targets else 'adapter'}, target_modules: [q_proj]}}"
    assert "adapter_layers" not in dict(check_backends(load_config("gsm8k", [f"model.path={folder}", lora])))


@pytest.mark.process
@pytest.mark.parametrize(
    ("beside", "rate", "want"),
    [
        ([], 0.0, None),
        (["engine.lora={dropout: 0.25}"], 0.0, "off: engine.lora.dropout=0.25"),
        (["engine.lora={dropout: 0.25}"], 0.1, "off: attention_dropout=0.1, engine.lora.dropout=0.25"),
        ([], 0.1, "off: attention_dropout=0.1"),
    ],
)
def test_dropout_is_off_and_the_plan_says_so(tmp_path, beside, rate, want):
    folder = write_tiny_model(tmp_path / "model")
    values = json.loads((folder / "config.json").read_text()) | {"attention_dropout": rate}
    (folder / "config.json").write_text(json.dumps(values))
    config = load_config("gsm8k", [f"model.path={folder}", *beside])
    assert dict(check_backends(config)).get("dropout") == want
    lora = actor_config(config, folder).lora
    assert lora is None or lora.dropout == 0.0


@pytest.mark.process
@pytest.mark.parametrize("key", EFFECTS)
def test_a_key_reaches_its_backend(key):
    value, part = EFFECTS[key]
    beside = BESIDE.get(key, [])
    assert built(*beside, f"{key}={value}")[part] != built(*beside)[part]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("keys") / "model")


VLLM, SGLANG = "rollout.backend=vllm", "rollout.backend=sglang"
REFUSED = [
    ([], ["rollout.options={blok_size: 3}"], "backend=embedded cannot .* no option 'blok_size'; did you mean 'block_"),
    ([VLLM], ["rollout.options={block_size: 3}"], "rollout.backend=vllm cannot be used .* no option 'block_size'"),
    ([VLLM], ["rollout.options={args: --quantization fp8}"], "takes no new weights .* as by --quantization"),
    ([VLLM], ["rollout.options={args: [--quantization=fp8]}"], "takes no new weights .* as by --quantization"),
    ([SGLANG], ["rollout.options={args: --quantization fp8}"], "takes no new weights .* as by --quantization"),
    ([], ["rollout.device=mps"], "device 'mps' is not computed on; use auto, cpu, cuda"),
    ([VLLM], ["rollout.colocated=true"], "rollout.backend=vllm cannot give the memory of its weights back"),
    (
        ["rollout.backend=tensorrt_llm"],
        ["rollout.options={command: trtllm-serve}"],
        "rollout.backend=tensorrt_llm takes no new weights",
    ),
    (["engine.parallel.sp=3"], [], "engine.backend=fsdp cannot be used for the policy: .*sp = 3 does not divide"),
    (["engine.lora={target_modules: [w9]}"], [], r"for the policy: .*target_modules is \['w9'\]"),
    (["engine.lora={target_modules: [embed_tokens]}"], [], "of type Embedding; adapters are on linear layers"),
    (["engine.router_aux_loss_coef=0.1"], [], "the model has no router"),
    (["critic={path: /nowhere}"], [], "engine.backend=fsdp cannot be used for the critic: .*/nowhere"),
    (
        ["weights_transport=file:///w"],
        ["weights.mode=sharded"],
        "mode=sharded cannot be, because file:// takes no votes",
    ),
    (["engine.lora.rank=4"], ["weights.delta=true"], "weights.delta=true cannot be, because an adapter is merged"),
    (
        ["engine.lora.export=adapter", "rollout.parallel={pp: 2}"],
        [VLLM],
        "rollout.backend=vllm takes no updates of an adapter alone",
    ),
    (
        ["engine.backend=megatron"],
        ["engine.dist_checkpoint=/weights"],
        "for the policy: dist_checkpoint is /weights, and /weights has no metadata.json",
    ),
    (
        ["runtime=ray"],
        ["weights_transport=inproc"],
        "weights_transport=inproc moves data inside one process, and runtime=ray",
    ),
    (["runtime=ray"], ["queue_storage=inproc"], "queue_storage=inproc moves data inside one process"),
    ([], ["weights_transport=tcp://a"], "weights_transport=tcp://a cannot be used: .* write tcp://host:port"),
    ([], ["weights_transport=shm://a?b=1"], r"shm://a\?b=1 cannot be used: .* has an option 'b'; options of this back"),
]


@pytest.mark.promise("What a backend cannot do is refused by name before anything starts")
@pytest.mark.parametrize(("chosen", "overrides", "words"), REFUSED)
@pytest.mark.process
def test_unsupported_backend_options_are_refused_by_name_first(folder, chosen, overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_backends(load_config("quickstart", [f"model.path={folder}", *chosen, *overrides]))


@pytest.mark.process
@pytest.mark.parametrize(
    ("overrides", "levels"),
    [
        ([], "1 and 2"),
        ([VLLM], "none"),
        (["rollout.backend=tensorrt_llm", "rollout.options={sleeps: true}"], "1"),
        ([VLLM, "rollout.options={args: --enable-sleep-mode}", "rollout.colocated=true"], "1 and 2"),
        ([SGLANG, "rollout.options={args: --enable-deterministic-inference}"], "none"),
        (["weights_transport=inproc", "runtime=inline"], "1 and 2"),
    ],
)
def test_what_a_backend_can_do_is_told_and_leaves_nothing_behind(folder, overrides, levels, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    *_, (what, how) = check_backends(load_config("quickstart", [f"model.path={folder}", *overrides]))
    assert (what, how.rpartition(": ")[2]) == ("server", levels)
    assert not list(tmp_path.iterdir())


@pytest.mark.process
def test_whether_prompts_are_shared_is_told(folder):
    for overrides, words in (
        ([], "yes"),
        (["engine.backend=megatron"], "no: "),
    ):
        told = dict(check_backends(load_config("quickstart", [f"model.path={folder}", *overrides])))
        assert told["prefix_sharing"].startswith(words)


@pytest.mark.process
def test_the_plan_says_what_receipts_of_int8_servers_are_of(folder):
    words = "receipts are of the weights before the server quantises them to int8"
    for value, is_said in (("int8", True), ("none", False)):
        overrides = [f"model.path={folder}", f"rollout.quantization={value}"]
        assert (words in dict(check_backends(load_config("quickstart", overrides)))["server"]) == is_said


@pytest.mark.parametrize(
    ("backend", "quantization", "words"),
    [
        ("sglang", "int8", "quantization='int8' is not one of backend 'sglang', which has none; choose"),
        ("embedded", "fp8_block", "quantization='fp8_block' is not one of backend 'embedded', which has none, int8"),
        ("vllm", "fp8", "rollout.quantization=fp8 takes a GPU, and there is none; choose int8"),
    ],
)
def test_a_quantization_that_cannot_be_is_refused_early(folder, monkeypatch, backend, quantization, words):
    monkeypatch.setattr(gpus, "local_gpus", lambda: 0)
    overrides = [f"model.path={folder}", f"rollout.backend={backend}", f"rollout.quantization={quantization}"]
    with pytest.raises(ConfigError, match=words):
        check_backends(load_config("quickstart", overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([VLLM, "engine.mtp=refuse"], "num_mtp_tokens=1 has servers draft .*: set engine.mtp=train or freeze"),
        ([SGLANG, "engine.mtp=freeze"], "has no layer for multi-token prediction, with which servers draft"),
        ([SGLANG, "engine.mtp=train"], "mtp is train and .* has no layer for multi-token prediction"),
    ],
)
def test_drafts_that_no_layer_makes_are_refused(folder, overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_backends(
            load_config("quickstart", [f"model.path={folder}", "rollout.options.num_mtp_tokens=1", *overrides])
        )


@pytest.mark.process
def test_the_plan_says_whether_syncs_carry_the_layer_that_drafts(tmp_path, monkeypatch):
    file = write_tiny_model(tmp_path / "model") / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    for options, words in (
        ([], "from shard to shard, without the layer (rollout.options.num_mtp_tokens is not set) for multi-token"),
        (["rollout.options.num_mtp_tokens=2"], "takes whole tensors, with the layer for multi-token prediction"),
    ):
        given = [f"model.path={file.parent}", VLLM, "engine.mtp=freeze", "runtime=ray", *options]
        config = load_config("quickstart", given)
        monkeypatch.setattr(gpus, "local_gpus", lambda: 2)
        assert words in dict(check_backends(config))["weights"]
        assert actor_config(config, file.parent).exports_mtp == bool(options)
    monkeypatch.setattr(gpus, "local_gpus", lambda: 0)
    with pytest.raises(ConfigError, match="num_mtp_tokens takes a GPU, and there is none: vLLM 0.32 on a CPU"):
        check_backends(config)
    overrides = [f"model.path={file.parent}", "engine.mtp=freeze", "rollout.options.num_mtp_tokens=2"]
    with pytest.raises(ConfigError, match="rollout.backend=embedded cannot be used as configured: .*num_mtp_tokens"):
        check_backends(load_config("quickstart", overrides))


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block"])
def test_receipts_of_fp8_servers_are_of_what_was_sent(folder, monkeypatch, quantization):
    """Whole tensors are verified as they come; slices would be compared with what vLLM computes with."""
    monkeypatch.setattr(gpus, "local_gpus", lambda: 2)
    overrides = [f"model.path={folder}", "rollout.backend=vllm", f"rollout.quantization={quantization}"]
    told = dict(check_backends(load_config("quickstart", [*overrides, "runtime=ray"])))
    assert f"receipts are of the weights before the server quantises them to {quantization}" in told["server"]
    assert "takes whole tensors" in told["weights"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "from shard to shard"),
        (["engine.backend=megatron", "weights.delta=true"], "from shard to shard, as differences"),
        (["weights_transport=tcp"], "from shard to shard"),
        (["weights.mode=gathered"], "gathered, and sent by rank 0, because weights.mode=gathered asks for it"),
        ([SGLANG], "from shard to shard"),
        (["rollout.backend=tensorrt_llm"], "from shard to shard"),
        ([VLLM, "rollout.parallel={tp: 2}"], "from shard to shard"),
        (["weights_transport=file:///w"], "because file:// takes no votes, so that slices could be of two versions"),
        (["weights_transport=file+memory://w", "weights.delta=true"], "could be of two versions, as differences"),
        (
            ["engine.lora.rank=4"],
            "because an adapter is merged into whole tensors (engine.lora; engine.lora.export=adapter sends it alone)",
        ),
        ([VLLM, "engine.lora.rank=4", "rollout.parallel={pp: 2}"], "is merged into whole tensors (engine.lora)"),
        (
            [VLLM, "engine.lora.export=adapter", "rollout.parallel={tp: 2}"],
            "because the adapter alone is sent",
        ),
        ([SGLANG, "engine.lora.export=adapter"], "because the adapter alone is sent"),
        (["engine.lora.export=adapter"], "because the adapter alone is sent"),
        (["rollout.dtype=bfloat16"], "engine.precision=float32, and rollout.dtype=bfloat16 is another"),
        (["weights_transport=tcp://127.0.0.1:4000"], "is one port and every rank needs its own: write tcp"),
    ],
)
@pytest.mark.process
def test_the_weight_path_is_reported_and_why_it_is_not_shorter(folder, overrides, words):
    told = dict(check_backends(load_config("quickstart", [f"model.path={folder}", *overrides])))
    assert told["weights"].removesuffix(" (engine.lora.export=adapter)").endswith(words)


@pytest.mark.process
def test_who_makes_the_loss_is_told(folder):
    for overrides, words in (
        ([], "yes, of token-local losses"),
        (["algorithm.loss=gspo"], "no: algorithm.loss is gspo"),
        (["engine.backend=megatron"], "yes, of token-local losses"),
    ):
        told = dict(check_backends(load_config("quickstart", [f"model.path={folder}", *overrides])))
        assert told["loss_in_head"] == words


def test_a_server_without_seeds_is_reported_and_gets_none(folder):
    settings = load_config("quickstart", [f"model.path={folder}", SGLANG])
    *_, (_, how) = check_backends(settings)
    assert "requests without seeds" in how
    order = PromptOrder(num_rows=1, seed=0)
    fields = {
        seeded: RolloutSource(None, [{}], order, None, settings, None, is_seeded=seeded).sampling("1/0").keys()
        for seeded in (True, False)
    }
    assert fields[True] - fields[False] == {"seed"}


@pytest.mark.process
def test_a_model_not_built_yet_is_described_to_the_server():
    check_backends(load_config("quickstart"))
    with pytest.raises(ConfigError, match="no option 'blok_size'"):
        check_backends(load_config("quickstart", ["rollout.options={blok_size: 3}"]))


def test_model_dependent_checks_run_once_it_is_loaded():
    config = load_config("quickstart", ["engine.router_replay=true"])
    with pytest.raises(ConfigError, match="rollout.backend=embedded does not return the experts that it chose"):
        check_started(config, Capabilities(), has_images=False)
    check_started(config, Capabilities(gives_routed_experts=True), has_images=False)
    with pytest.raises(ConfigError, match="takes no images for this model, and rows of the data have some"):
        check_started(config, Capabilities(gives_routed_experts=True), has_images=True)
    check_started(load_config("quickstart"), Capabilities(takes_images=True), has_images=True)


def test_megatron_lm_weights_start_the_policy():
    written = ["engine.backend=megatron", "engine.dist_checkpoint=/weights"]
    config = load_config("ppo", [*written, "algorithm.kl_coef=0.1"])
    assert frozen_config(config, "reference", Path("model")).dist_checkpoint == "/weights"
    assert frozen_config(config, "teacher", Path("another")).dist_checkpoint is None
    assert critic_config(config, config.critic, Path("model")).dist_checkpoint == "/weights"
    other = load_config("ppo", [*written, "critic.path=/another"])
    assert critic_config(other, other.critic, Path("model")).dist_checkpoint is None
    with pytest.raises(PlanError, match="engine.lora.export=adapter sends the adapter alone to servers"):
        load_config("grpo", [*written, "engine.lora.export=adapter"])
