"""LoRA adapters alone into SGLang, over a stand-in of its manager and memory pool, written from 0.5.23's source.

Fused layers have one tensor of stacked rows there, with zeros for projections that the adapter has not, and a rank
takes its rows of each by `torch.concat`.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rl_ckpt
from rl_ckpt.adapters import sglang
from rl_ckpt.adapters.engine_lora import PREFIX
from rl_ckpt.testing import new_name

HIDDEN, RANK, LAYERS, SLOTS = 8, 2, 2, 3
ROWS = {"q_proj": 8, "k_proj": 4, "v_proj": 4}


def adapter_of(seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for block, name, shape in (
            ("self_attn", "q_proj", (8, HIDDEN)),
            ("self_attn", "v_proj", (4, HIDDEN)),
            ("mlp", "down_proj", (HIDDEN, 6)),
        ):
            prefix = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, shape[1], generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(shape[0], RANK, generator=generator)
    return tensors


class Manager:
    """What is used of `LoRAManager`, `LoRAAdapter` and `LoRAMemoryPool`."""

    def __init__(self, model, folders, *, rank=0, num_ranks=1):
        self.base_model, self.dtype = model, torch.float32
        self.rank, self.num_ranks = rank, num_ranks
        self.lora_refs = {
            f"id-{name}": SimpleNamespace(lora_id=f"id-{name}", lora_name=name, lora_path=str(folder))
            for name, folder in folders.items()
        }
        self.loras, self.told = {}, []
        shapes_a = {"qkv_proj": (3 * RANK, HIDDEN), "down_proj": (RANK, 6 // num_ranks)}
        shapes_b = {"qkv_proj": (16 // num_ranks, RANK), "down_proj": (HIDDEN, RANK)}
        self.memory_pool = SimpleNamespace(
            A_buffer={name: [torch.zeros(SLOTS, *shape) for _ in range(LAYERS)] for name, shape in shapes_a.items()},
            B_buffer={name: [torch.zeros(SLOTS, *shape) for _ in range(LAYERS)] for name, shape in shapes_b.items()},
            uid_to_buffer_id={},
            remove_lora=lambda uid: self.memory_pool.uid_to_buffer_id.pop(uid, None),
        )
        self.spoils = lambda: None

    def _notify_lora_slots_updated(self, slots):
        self.told.append(slots)

    def load_lora_weights_from_tensors(self, ref, tensors):
        layers = [SimpleNamespace(weights={}) for _ in range(LAYERS)]
        for name, tensor in tensors.items():
            layers[int(name.split(".layers.")[1].split(".")[0])].weights[name] = tensor.cpu()
        for layer in layers:
            for q_name in [name for name in layer.weights if "q_proj" in name]:
                v_name = q_name.replace("q_proj", "v_proj")
                q, v = layer.weights.pop(q_name), layer.weights.pop(v_name)
                stacked = torch.cat((q, torch.zeros_like(v), v), q.dim() - 2)
                layer.weights[q_name.replace("q_proj", "qkv_proj")] = stacked
        self.loras[ref.lora_id] = SimpleNamespace(layers=layers)

    def fetch_new_loras(self, uids):
        pool = self.memory_pool
        for uid in uids:
            if uid in pool.uid_to_buffer_id:
                continue
            slot = pool.uid_to_buffer_id[uid] = min(set(range(SLOTS)) - set(pool.uid_to_buffer_id.values()))
            for number, layer in enumerate(self.loras[uid].layers):
                for name, weight in layer.weights.items():
                    target = "qkv_proj" if "qkv_proj" in name else "down_proj"
                    buffers = (pool.A_buffer if "lora_A" in name else pool.B_buffer)[target]
                    buffers[number][slot].copy_(self.cut(target, name, weight), non_blocking=True)
        self.spoils()

    def cut(self, target, name, weight):
        if target == "qkv_proj" and "lora_B" in name:
            parts = weight.split(list(ROWS.values()))
            return torch.concat([part.chunk(self.num_ranks)[self.rank] for part in parts], dim=0)
        if target == "down_proj" and "lora_A" in name:
            return weight.chunk(self.num_ranks, dim=1)[self.rank]
        return weight

    def serves(self, name, tensors):
        """Whether the slot of an adapter has its tensors, as a request with it computes."""
        other = Manager(self.base_model, {name: ""}, rank=self.rank, num_ranks=self.num_ranks)
        other.load_lora_weights_from_tensors(other.lora_refs[f"id-{name}"], tensors)
        other.fetch_new_loras({f"id-{name}"})
        mine, theirs = (each.memory_pool for each in (self, other))
        slot = mine.uid_to_buffer_id[f"id-{name}"]
        return all(
            torch.equal(one[slot], two[0])
            for kind in ("A_buffer", "B_buffer")
            for target, buffers in getattr(mine, kind).items()
            for one, two in zip(buffers, getattr(theirs, kind)[target], strict=True)
        )


@pytest.fixture
def folders(tmp_path):
    found = {}
    for seed, name in enumerate(("one", "two")):
        found[name] = tmp_path / name
        found[name].mkdir()
        save_file(adapter_of(seed), found[name] / "adapter_model.safetensors")
        found[name].joinpath("adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK}))
    return found


@pytest.fixture(params=[1, 2], ids=["one rank", "the second of two"])
def manager(request, folders):
    """Of a model that was started with two adapters, one of which has been asked for."""
    model = nn.Linear(2, 2)
    manager = Manager(model, folders, rank=request.param - 1, num_ranks=request.param)
    sglang.remember(None, manager, model, "what else the manager is made of")
    manager.load_lora_weights_from_tensors(manager.lora_refs["id-one"], adapter_of(0))
    manager.fetch_new_loras({"id-one"})
    yield manager
    sglang.managers.pop(id(model))
    if (engine := sglang.engines.pop(id(model), None)) is not None:
        engine.installer.detach()


def named(adapter, tensors):
    return {f"{PREFIX}{adapter}.{key}": tensor for key, tensor in tensors.items()}


def sync(sender, model, tensors, version, fails=None):
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(sglang.load_weights, model, sglang.session_tensors(sender.address, version))
        if fails is None:
            report = sender.send(tensors.items(), version=version)
            taking.result(30)
            return report
        with pytest.raises(rl_ckpt.SyncAbortedError):
            sender.send(tensors.items(), version=version)
        assert fails in str(taking.exception(30))
        return None


@pytest.fixture
def sender():
    with rl_ckpt.connect(f"inproc://{new_name()}", role="send", timeout_s=30) as sender:
        yield sender


@pytest.mark.promise("An adapter alone into SGLang is read back in the slots of its memory pool")
def test_an_adapter_alone_is_served_and_attested(manager, sender):
    fresh = adapter_of(7)
    report = sync(sender, manager.base_model, named("one", fresh), 1)
    assert all(receipt.is_attested for receipt in report.receipts)
    assert report.num_bytes == sum(tensor.nbytes for tensor in fresh.values())
    assert manager.serves("one", fresh)
    assert manager.told == [{0}], "layers that keep something of a slot hear of it"
    sync(sender, manager.base_model, named("one", adapter_of(8)), 2)
    assert manager.serves("one", adapter_of(8))


def test_what_the_pool_does_not_hold_is_found_and_undone(manager, sender):
    sync(sender, manager.base_model, named("one", adapter_of(7)), 1)

    def spoil():
        manager.spoils = lambda: None
        manager.memory_pool.B_buffer["down_proj"][1][0, 3, 0] += 1

    manager.spoils = spoil
    sync(sender, manager.base_model, named("one", adapter_of(8)), 2, fails="do not hold")
    assert manager.serves("one", adapter_of(7))
    sync(sender, manager.base_model, named("two", adapter_of(8)), 2, fails="12 of the 12 tensors that the engine holds")
    assert manager.serves("one", adapter_of(7))


def test_a_failed_first_sync_keeps_the_start_weights(manager, sender):
    def spoil():
        manager.spoils = lambda: None
        manager.memory_pool.A_buffer["qkv_proj"][0][0, 0, 0] += 1

    manager.spoils = spoil
    sync(sender, manager.base_model, named("one", adapter_of(7)), 1, fails="do not hold")
    assert manager.serves("one", adapter_of(0))
    for bad, told in (
        (named("six", adapter_of(8)), "there is no adapter 'six'; loaded are: one, two"),
        (dict([*named("one", adapter_of(8)).items()][1:]), "1 tensors of adapter 'one' did not come"),
        ({name: tensor[:1] for name, tensor in named("one", adapter_of(8)).items()}, "came as [1, 8]"),
        (named("one", adapter_of(8)) | {"model.norm.weight": torch.ones(2)}, "in one sync"),
        ({"model.norm.weight": torch.ones(2)}, "send it adapters alone"),
    ):
        sync(sender, manager.base_model, bad, 1, fails=told)
        assert manager.serves("one", adapter_of(0))


def test_a_server_without_adapters_says_so(sender):
    model = nn.Linear(2, 2)
    sync(sender, model, named("one", adapter_of(7)), 1, fails="start it with --enable-lora")
    sglang.engines.pop(id(model)).installer.detach()
