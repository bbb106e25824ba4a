"""A layer for multi-token prediction learns beside the policy: float64, against plain torch on a transformers model."""

from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import (
    ConfigError,
    EngineConfig,
    Head,
    LoraConfig,
    ModelFolderError,
    OptimizerConfig,
    ParallelConfig,
    create_engine,
)
from rl_engine.backends.megatron.layout import megatron_calls  # first: without megatron-core's warnings
from rl_engine.optimizer import learning_rate
from rl_engine.testing import write_tiny_model

# isort: split
from megatron.core.dist_checkpointing import load_tensors_metadata

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).parents[1] / "support" / "mtp_ranks.py"
_spec = spec_from_file_location("mtp_ranks", SCRIPT)
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
TWO = ["v3:sp2:megatron", "v3:dp2:fsdp"]
MORE = [*(f"v3:{axis}:megatron" for axis in ("pp2", "dp2", "ep2")), "v3:ep2:fsdp"]
MORE += ["glm:sp2:megatron", "glm:vpp2:megatron", "glm:dp2:fsdp", "next:dp2:fsdp", "next:ep2:fsdp"]
CASES = [*TWO, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]


def run_ranks(start_ranks, folder, size, cases=TWO):
    for kind in ranks.KINDS:
        ranks.write_model(folder, kind)
    return start_ranks(SCRIPT, folder, size, *cases)


@pytest.fixture(scope="module")
def more(tmp_path_factory, start_ranks):
    return run_ranks(start_ranks, tmp_path_factory.mktemp("more"), 2, MORE)


@pytest.fixture
def seen(request, case):
    """What the ranks found that ran this case."""
    return request.getfixturevalue("two" if case in TWO else "more")


class Oracle:
    """Two steps of a plain model and of the layer behind its last, the layer's loss written out."""

    def __init__(self, folder, kind):
        config = AutoConfig.from_pretrained(folder / f"{kind} big")
        self.big = AutoModelForCausalLM.from_pretrained(
            folder / f"{kind} big", config=config, dtype=torch.float64, attn_implementation="eager"
        )
        self.big.set_experts_implementation("eager")
        self.big.config.num_hidden_layers -= 1  # transformers' decoder runs so many of its layers
        self.kind, self.behind = kind, ranks.prefix_of(kind)
        saved = load_file(folder / kind / "model.safetensors")
        self.own = [
            saved[f"{self.behind}.{name}.weight"].double().requires_grad_()
            for name in ranks.OWN.get(kind, ranks.OWN["v3"])
        ]
        layer, last = self.big.model.layers[-1], f"model.layers.{ranks.COUNT}."
        policy = [part for name, part in self.big.named_parameters() if not name.startswith(last)]
        trained = [*policy, *layer.parameters(), *self.own]
        adam = ranks.OPTIMIZER
        groups = [
            {"params": [part for part in trained if (part.ndim > 1) == decays], "weight_decay": decays * 0.01}
            for decays in (True, False)
        ]
        optimizer = torch.optim.AdamW(groups, eps=adam.eps, betas=adam.betas)
        self.losses, self.norms, self.layers = [], [], []
        for count in range(2):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(adam, count)
            optimizer.zero_grad()
            loss, ahead = self.loss()
            (loss + ahead).backward()
            norm = torch.nn.utils.get_total_norm([part.grad for part in policy])
            torch.nn.utils.clip_grads_with_norm_(trained, adam.max_grad_norm, norm)
            optimizer.step()
            self.losses.append((float(loss.detach()), float(ahead.detach())))
            self.norms.append(float(norm))
            self.layers.append(self.layer())

    def loss(self):
        """Of the policy, and of the tokens after next."""
        found, ahead, tokens = 0.0, 0.0, 0
        for prompt, completion, mask in ranks.megatron.ranks.draw_rows(ranks.megatron.SEED):
            ids = torch.tensor(prompt + completion)
            states = self.big.model(ids[None]).last_hidden_state
            logprobs = self.big.lm_head(states)[0].log_softmax(-1)
            further = self.states_ahead(states, ids) @ self.big.lm_head.weight.detach().T
            further = further[0].log_softmax(-1)
            for at, counts in enumerate(mask, len(prompt)):
                found = found - counts * logprobs[at - 1, ids[at]]
                if at >= 2:
                    ahead = ahead - counts * further[at - 2, ids[at]]
            tokens += sum(mask)
        return found / tokens, ahead / tokens

    def states_ahead(self, states, ids):
        """(1, T - 1, H): at i from the state at i and the embedding of token i + 1, for token i + 2."""
        embedded, states = self.big.model.embed_tokens(ids[None, 1:]).detach(), states[:, :-1].detach()
        wide, *norms = self.own
        both = torch.cat([self.norm(embedded, norms[0]), self.norm(states, norms[1])], -1)
        mixed, length = both @ wide.T, len(ids) - 1
        places = torch.arange(length)[None]
        hidden = self.big.model.layers[-1](
            mixed,
            attention_mask=torch.full((1, 1, length, length), float("-inf"), dtype=torch.float64).triu(1),
            position_ids=places,
            position_embeddings=self.big.model.rotary_emb(mixed, position_ids=places),
        )
        return self.norm(hidden, norms[2])

    def norm(self, states, weight):
        scale = (states.square().mean(-1, keepdim=True) + self.big.config.rms_norm_eps).rsqrt()
        return states * scale * (weight + (self.kind == "next"))

    def layer(self):
        weights = {
            ranks.in_folder(self.kind, name): tensor.clone()
            for name, tensor in ranks.megatron.weights_of(self.big).items()
            if name.startswith(f"model.layers.{ranks.COUNT}.")
        }
        names = ranks.OWN.get(self.kind, ranks.OWN["v3"])
        mine = {f"{self.behind}.{name}.weight": part for name, part in zip(names, self.own, strict=True)}
        return weights | {name: part.detach().clone() for name, part in mine.items()}


@pytest.fixture(scope="module")
def oracles():
    return {}


def oracle_of(oracles, folder, kind):
    if kind not in oracles:
        oracles[kind] = Oracle(folder, kind)
    return oracles[kind]


@pytest.mark.promise("On `megatron` such a layer learns tokens two ahead")
@pytest.mark.parametrize("case", CASES)
def test_the_layer_learns_tokens_two_ahead(seen, oracles, case):
    want, got = oracle_of(oracles, seen["folder"], case.split(":")[0]), seen[case]
    assert [metrics["mtp_loss"] for metrics, _ in got["train"]["steps"]] == pytest.approx(
        [ahead for _, ahead in want.losses], rel=1e-8
    )
    for found, expected in zip(got["layer"], want.layers, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.promise("and the policy's steps are those without it")
@pytest.mark.parametrize("case", CASES)
def test_the_policy_is_what_it_is_without_it(seen, oracles, case):
    want, got = oracle_of(oracles, seen["folder"], case.split(":")[0]), seen[case]
    (train, freeze), behind = (got[treatment] for treatment in ("train", "freeze")), want.behind
    for (found, norm), (expected, other), oracle, clipped in zip(
        train["steps"], freeze["steps"], want.losses, want.norms, strict=True
    ):
        assert found.keys() == expected.keys() | {"mtp_loss"}
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-8)
        assert found["loss"] == pytest.approx(oracle[0], rel=1e-8)
        assert norm == pytest.approx(other, rel=1e-6)  # megatron-core adds up norms in float32
        assert norm == pytest.approx(clipped, rel=1e-6)
        assert norm > ranks.OPTIMIZER.max_grad_norm
    torch.testing.assert_close(train["weights"], freeze["weights"], rtol=1e-7, atol=1e-8)
    assert train["scored"].keys() == freeze["scored"].keys()
    assert train["shards"] == freeze["shards"]
    assert not any(name.startswith(behind) for name in [*train["weights"][0], *train["shards"]])


@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_has_the_mtp_layer_with_embedding_and_head(seen, oracles, case):
    behind, got = oracle_of(oracles, seen["folder"], case.split(":")[0]).behind, seen[case]
    saved = load_file(seen["folder"] / f"{case.replace(':', '-')}-saved" / "model.safetensors")
    assert saved.keys() == load_file(seen["folder"] / case.split(":")[0] / "model.safetensors").keys()
    if behind != "mtp":
        assert torch.equal(saved.pop(f"{behind}.embed_tokens.weight"), saved["model.embed_tokens.weight"])
        assert torch.equal(saved.pop(f"{behind}.shared_head.head.weight"), saved["lm_head.weight"])
    for name, tensor in (got["layer"][1] | got["train"]["weights"][1]).items():
        assert torch.equal(saved[name].double(), tensor.double()), name
    assert got["again"].keys() == saved.keys()
    torch.testing.assert_close(got["again"], {name: tensor.double() for name, tensor in saved.items()})
    if "megatron" not in case:
        return
    torch.testing.assert_close(got["from megatron"], got["layer"][1] | got["train"]["weights"][1], rtol=0, atol=0)
    with megatron_calls():
        written = load_tensors_metadata(str(seen["folder"] / f"{case.replace(':', '-')}-megatron"))
    assert "mtp.layers.0.eh_proj.weight" in written


@pytest.mark.slow
def test_a_checkpoint_of_one_layout_continues_on_another(more):
    for before, case in pairwise(MORE):
        if before.split(":")[::2] == case.split(":")[::2]:
            (metrics, norm), weights = more[case]["resumed"]
            first = more[before]
            assert metrics == pytest.approx(first["train"]["steps"][1][0], rel=1e-7)
            assert norm == pytest.approx(first["train"]["steps"][1][1], rel=1e-6)
            torch.testing.assert_close(weights, first["train"]["weights"][1] | first["layer"][1], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": Head.VALUE}, r"mtp is train and head is value; it trains with head=lm\. Or mtp=freeze\."),
        ({"init": "random"}, r"mtp is train and init is random; it trains with init=pretrained\. Or mtp=freeze\."),
        ({"lora": LoraConfig()}, r"mtp is train and lora is .*; it trains with lora=None\. Or mtp=freeze\."),
        ({"mtp": "learn"}, r"mtp is 'learn'; allowed are refuse, freeze, train\."),
        ({"mtp": "refuse", "exports_mtp": True}, r"exports_mtp is true; it needs mtp=freeze or train"),
    ],
)
def test_settings_that_it_does_not_go_with_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model_path="model", **({"mtp": "train"} | changes))


@pytest.mark.usefixtures("cuda_stand_in")
def test_models_and_layouts_that_it_is_not_for_are_refused(tmp_path):
    plain = EngineConfig(model_path=str(write_tiny_model(tmp_path / "a")), mtp="train")
    with pytest.raises(ConfigError, match=r"mtp is train; of the backends here fsdp and megatron do it\. Use one"):
        create_engine("torchtitan", plain).check(1)
    with pytest.raises(ConfigError, match=r"mtp is train and .*/a has no layer for multi-token prediction\. Leave"):
        create_engine("fsdp", plain).check(1)
    dense = EngineConfig(model_path=str(tmp_path / "a"), mtp="train")
    with pytest.raises(ConfigError, match=r"mtp is train and the model is qwen3; mapped are deepseek_v3, glm4_moe\."):
        create_engine("megatron", dense).check(1)
    ranks.write_model(tmp_path, "glm")
    given = {"model_path": str(tmp_path / "glm"), "mtp": "train"}
    for backend, axis in (("megatron", "cp"), ("fsdp", "sp")):
        with pytest.raises(ConfigError, match=rf"mtp is train and parallel\.{axis} is 2, whose ranks"):
            create_engine(backend, EngineConfig(**given, parallel=ParallelConfig(**{axis: 2}))).check(2)
        create_engine(backend, EngineConfig(**given)).check(1)
    file = tmp_path / "glm" / "model.safetensors"
    tensors = load_file(file)
    ranks.save_file({name: part for name, part in tensors.items() if "hnorm" not in name}, file, {"format": "pt"})
    for backend in ("megatron", "fsdp"):
        with pytest.raises(ModelFolderError, match=r"lacks .*hnorm\.weight"):
            create_engine(backend, EngineConfig(**given)).check(1)
    ranks.save_file(tensors | {"model.layers.5.eh_proj.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    for backend in ("megatron", "fsdp"):
        with pytest.raises(ModelFolderError, match=r"has, beyond what the architecture takes, .*layers\.5\.eh_proj"):
            create_engine(backend, EngineConfig(**given)).check(1)


def test_the_loss_of_a_layer_falls(tmp_path):
    """On bfloat16 activations and float32 weights, as a run trains; dense, behind layers with state."""
    ranks.write_model(tmp_path, "3.5")
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0)
    config = EngineConfig(
        model_path=str(tmp_path / "3.5"), mtp="train", optimizer=optimizer, precision="bfloat16", max_tokens_per_gpu=60
    )
    engine = create_engine("fsdp", config)
    engine.initialize()
    rows = ranks.megatron.ranks.draw_rows(ranks.megatron.SEED)
    losses = [ranks.step(engine, rows)[0]["mtp_loss"] for _ in range(12)]
    engine.close()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.promise("Layers for multi-token prediction go to servers with the weights, and into folders as they were")
@pytest.mark.parametrize(
    ("backend", "kind", "mtp"), [("fsdp", "v3", "freeze"), ("fsdp", "next", "train"), ("megatron", "glm", "train")]
)
def test_a_frozen_engine_leaves_the_layer_as_it_was(tmp_path, backend, kind, mtp):
    ranks.write_model(tmp_path, kind)
    config = EngineConfig(model_path=str(tmp_path / kind), mtp=mtp, exports_mtp=True, optimizer=None)
    engine = create_engine(backend, config)
    engine.check(1)
    engine.initialize()
    engine.save_model(tmp_path / "saved")
    sent = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    with pytest.raises(ConfigError, match="exports_mtp is true: layers for it leave as whole tensors"):
        next(engine.get_local_shards())
    engine.close()
    (before, first), (after, second) = (
        (load_file(file), file.read_bytes())
        for file in (tmp_path / name / "model.safetensors" for name in (kind, "saved"))
    )
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert first == second
    copies = {f"model.layers.4.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    torch.testing.assert_close(sent, {name: part for name, part in before.items() if name not in copies})
