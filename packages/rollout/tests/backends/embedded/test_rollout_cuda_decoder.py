"""The GPU's pass over plain torch in place of its kernels: the logits of the module, launches, memory that leaves."""

import pytest
import torch
from host_memory import HostMemory
from torch.utils._python_dispatch import TorchDispatchMode

from rl_csrc.inference import layers
from rl_rollout import ServerConfig
from rl_rollout.backends.embedded.kv_cache import KVCache, LayerShape
from rl_rollout.backends.embedded.model import cuda_decoder, model_runner
from rl_rollout.backends.embedded.model import paged_attention as attention
from rl_rollout.backends.embedded.model.paged_attention import PagedBatch
from rl_rollout.backends.embedded.model.weights import WeightStore
from rl_rollout.errors import WeightUpdateError
from rl_rollout.testing import load_weights, write_tiny_model

KNOWN = {
    "qwen3": {},
    "qwen2": {},
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 4},
    "tied": {"family": "qwen3", "tie_word_embeddings": True},
}


def on_cuda(folder, dtype="float32", **config):
    """The model as on a GPU: weights in memory of their own, the decoder in the module's place."""
    config = ServerConfig(model_path=str(folder), dtype=dtype, device="cpu", **config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "device_memory", lambda device: HostMemory)
        patch.setattr(model_runner, "fuse", lambda *_: None)
        return model_runner.load_model(config)


def batch_of(model, lengths, counts, num_single=0):
    """New tokens behind what is cached of each row: the first `num_single` rows have one each, the others a chunk."""
    cache = KVCache(model.layer_shapes, block_size=4, dtype=model.dtype, device=model.device)
    width = -(-max(lengths) // 4)
    cache.resize(len(lengths) * width)
    for part in (*cache.keys.values(), *cache.values.values()):
        part.normal_(generator=torch.Generator().manual_seed(1))
    tables = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(2)).view(-1, width)
    rows = torch.tensor([row for row, count in enumerate(counts) for _ in range(count)])
    positions = torch.cat([torch.arange(n - count, n) for n, count in zip(lengths, counts, strict=True)])
    chunks = [(row, lengths[row] - counts[row], counts[row]) for row in range(num_single, len(lengths))]
    ids = (positions * 31 + rows * 7 + 3) % model.vocab_size
    batch = PagedBatch(cache, tables, rows, positions, num_single=num_single, num_blocks=width, chunks=chunks)
    return ids, positions, batch


BATCHES = {
    "steps": ([9, 1, 14], [1, 1, 1], 3),
    "chunks": ([20, 7, 5], [20, 3, 1], 0),
    "both": ([9, 6, 12], [1, 1, 8], 2),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("shape", BATCHES)
@torch.inference_mode()
def test_it_gives_the_logits_of_the_module_and_its_cache(shape, name, dtype, tmp_path):
    sizes = dict(KNOWN[name])
    model = on_cuda(write_tiny_model(tmp_path / "model", family=sizes.pop("family", name), **sizes), dtype)
    assert model.on_cuda is not None
    ids, positions, batch = batch_of(model, *BATCHES[shape])
    *_, other = batch_of(model, *BATCHES[shape])
    want = model.module(input_ids=ids[None], position_ids=positions[None], use_cache=False, rl_batch=other).logits[0]
    got = model.raw_logits(ids, positions, batch)
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    kept = model.raw_logits(ids, positions, batch_of(model, *BATCHES[shape])[2], [1, 2])
    torch.testing.assert_close(kept, want[[1, 2]], atol=tolerance, rtol=tolerance)
    for layer in model.layer_shapes:
        torch.testing.assert_close(batch.cache.keys[layer], other.cache.keys[layer], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(batch.cache.values[layer], other.cache.values[layer], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gemma2", {}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("qwen3", {"hidden_act": "gelu"}),
    ],
)
def test_what_is_not_known_is_left_to_the_module(family, sizes, tmp_path):
    model = on_cuda(write_tiny_model(tmp_path / "model", family=family, **sizes))
    assert model.on_cuda is None
    assert model.memory is not None  # its weights come and go all the same


def test_a_pass_that_differs_from_the_module_is_not_used(qwen3_folder, monkeypatch, caplog):
    monkeypatch.setattr(cuda_decoder, "gated", lambda gate_up: layers.gated(gate_up) * 1.1)
    assert on_cuda(qwen3_folder).on_cuda is None
    assert "without the CudaDecoder, more slowly" in caplog.text


class Counted(TorchDispatchMode):
    """Counts operations that compute something, each of which is a launch at least."""

    VIEWS = (
        *("view", "slice", "select", "unsqueeze", "transpose", "expand", "alias", "detach", "split", "chunk"),
        *("reshape", "_reshape", "_unsafe", "flatten", "unflatten", "t."),
    )

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("aten.")
        if not name.startswith(self.VIEWS) and "empty" not in name:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_layer_takes_ten_launches_where_the_module_takes_sixty(tmp_path, monkeypatch):
    """Kernels in the place of their plain forms are one launch, attention two."""
    per_layer = {}
    for num_layers in (1, 3):
        model = on_cuda(write_tiny_model(tmp_path / str(num_layers), family="qwen3", num_hidden_layers=num_layers))
        ids, positions, batch = batch_of(model, *BATCHES["steps"])
        with pytest.MonkeyPatch.context() as patch:
            one = lambda *given, **_: next(x for x in given if x is not None) + 0  # noqa: E731
            patch.setattr(PagedBatch, "attend", lambda self, layer, query, *_: (query + 0).transpose(1, 2) + 0)
            with Counted() as counted:
                model.module(input_ids=ids[None], position_ids=positions[None], use_cache=False, rl_batch=batch)
            patch.setattr(PagedBatch, "attend_to_cache", lambda self, layer, query, settings: (query + 0) + 0)
            patch.setattr(cuda_decoder, "add_norm", one)
            patch.setattr(cuda_decoder, "gated", lambda x: x.chunk(2, dim=-1)[0] + 0)
            num_heads = model.module.config.num_attention_heads
            patch.setattr(cuda_decoder, "rotate_to_pages", lambda qkv, *_, count=num_heads: qkv[:, :count] + 0)
            with Counted() as ours:
                model.raw_logits(ids, positions, batch)
        per_layer[num_layers] = len(counted.names), len(ours.names)
    module, decoder = ((per_layer[3][i] - per_layer[1][i]) / 2 for i in (0, 1))
    assert decoder <= 10, ours.names
    assert module >= 5 * decoder


@torch.inference_mode()
def test_the_chunks_of_a_step_are_one_call_of_flash_attention(qwen3_folder, monkeypatch):
    calls = []

    def flash(query, keys, values, query_starts, key_starts, most_queries, most_keys, *, scale, window_size, **options):
        """What torch documents of `varlen_attn`, with the last query at the last key."""
        calls.append((query_starts.tolist(), key_starts.tolist(), most_queries, most_keys, window_size, options))
        assert query_starts.dtype == key_starts.dtype == torch.int32
        keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        out = torch.empty_like(query)
        for i in range(len(query_starts) - 1):
            its, seen = (slice(*starts[i : i + 2].tolist()) for starts in (query_starts, key_starts))
            scores = torch.einsum("qhd,khd->hqk", query[its], keys[seen]) * scale
            behind = torch.arange(scores.shape[2]) - (scores.shape[2] - scores.shape[1])
            distance = torch.arange(scores.shape[1])[:, None] - behind
            hidden = (distance < 0) | ((distance > window_size[0]) & (window_size[0] >= 0))
            out[its] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values[seen])
        return out

    monkeypatch.setattr(attention, "varlen_attn", flash)
    model = on_cuda(qwen3_folder)
    lengths, counts = [9, 20, 7, 5], [1, 20, 3, 1]
    ids, positions, batch = batch_of(model, lengths, counts, 1)
    want = model.raw_logits(ids, positions, batch)
    assert not calls
    for takes_groups in (True, False):  # torch from 2.12 on, and before
        monkeypatch.setattr(attention, "_fits_varlen", lambda *_: True)
        monkeypatch.setattr(attention, "_takes_groups", lambda takes=takes_groups: takes)
        got = model.raw_logits(ids, positions, batch_of(model, lengths, counts, 1)[2])
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        starts = [0, 20, 23, 24], [0, 20, 27, 32], 20, 20, (-1, 0)
        assert calls == [(*starts, {"enable_gqa": True} if takes_groups else {})] * len(model.layer_shapes)
        calls.clear()
    settings = attention.AttentionSettings(scaling=0.3, window=4)
    num_heads, size = model.module.config.num_attention_heads, model.layer_shapes[0].key_dim
    query = torch.randn(25, num_heads, size, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(attention, "_fits_varlen", lambda *_: False)
    want = batch.attend_to_cache(0, query, settings)
    monkeypatch.setattr(attention, "_fits_varlen", lambda *_: True)
    torch.testing.assert_close(batch.attend_to_cache(0, query, settings), want, atol=1e-5, rtol=1e-5)
    assert calls[0][4] == (3, 0)


def test_weights_come_back_to_their_address_and_hold_the_update(qwen3_folder):
    weights = load_weights(qwen3_folder)
    model = on_cuda(qwen3_folder)
    memory = model.memory.memory
    store = WeightStore(model.module, keeps_places=True, memory=memory)
    places = {name: tensor.data_ptr() for name, tensor in model.module.state_dict().items()}
    layer = model.module.model.layers[0]
    assert model.on_cuda._layers[0].qkv.data_ptr() == layer.self_attn.q_proj.weight.data_ptr()
    store.release()
    assert memory.calls == ["give back"]
    store.begin()
    for name, weight in weights.items():
        if name != "model.norm.weight":
            store.stage(name, weight + 1)
    with pytest.raises(WeightUpdateError, match="1 weights did not arrive"):
        store.check_complete()
    store.begin()
    for name, weight in weights.items():
        store.stage(name, weight + 1)
    store.check_complete()
    assert store.swap() is False
    assert memory.calls == ["give back", "take"]
    assert {name: tensor.data_ptr() for name, tensor in model.module.state_dict().items()} == places
    for name, weight in weights.items():
        assert model.module.state_dict()[name].equal(weight + 1)
    # The next update arrives beside what is served.
    store.begin()
    for name, weight in weights.items():
        store.stage(name, weight)
    assert all(model.module.state_dict()[name].equal(weight + 1) for name, weight in weights.items())
    assert store.swap() is False
    assert all(model.module.state_dict()[name].equal(weight) for name, weight in weights.items())


def test_a_cache_comes_back_to_its_address_with_zeros():
    made = []

    def new_memory(num_bytes):
        made.append(HostMemory(num_bytes))
        return made[-1]

    shapes = {i: LayerShape(num_heads=2, key_dim=8, value_dim=4) for i in range(3)}
    cache = KVCache(shapes, block_size=4, dtype=torch.float32, device=torch.device("cpu"), new_memory=new_memory)
    cache.resize(5)
    keys = cache.keys[2]
    assert (cache.keys[2].shape, cache.values[2].shape) == ((5, 4, 2, 8), (5, 4, 2, 4))
    assert len(made[0].whole) == 5 * cache.bytes_per_block
    assert not any(part.any() for part in (*cache.keys.values(), *cache.values.values()))
    cache.keys[1].fill_(3)
    assert not cache.values[1].any()
    cache.release()
    assert (cache.num_blocks, made[0].calls) == (0, ["give back"])
    cache.resize(5)
    assert made[0].calls == ["give back", "take"]
    assert cache.keys[2] is keys
    assert not any(part.any() for part in (*cache.keys.values(), *cache.values.values()))
    cache.resize(6)
    assert made[0].calls[-1] == "close"
    assert len(made) == 2
    cache.close()
    assert made[1].calls == ["give back", "close"]


@pytest.mark.promise("After sleep level 2 an update by slices needs no second copy of the weights")
def test_slices_land_in_memory_of_weights_that_are_gone(qwen3_folder):
    """The next slices land in new memory."""
    weights, tied = load_weights(qwen3_folder), {"lm_head.weight": "model.embed_tokens.weight"}
    model = on_cuda(qwen3_folder)
    memory = model.memory.memory
    store = WeightStore(model.module, keeps_places=True, memory=memory)

    def is_inside(tensor):
        start = memory.whole.data_ptr()
        return start <= tensor.data_ptr() < start + len(memory.whole)

    store.release()
    store.begin()
    assert all(map(is_inside, store.targets().values()))  # no second copy while the trainer holds its own
    store.begin()  # a sync that failed; the same memory is filled by the next
    first = store.targets()
    for name, target in first.items():
        target.copy_(weights[tied.get(name, name)] + 1)
    store.note_arrived(first)
    store.check_complete()
    assert store.swap(keeps_staged=True) is False
    assert memory.is_there
    assert all(model.module.state_dict()[name].equal(weight + 1) for name, weight in weights.items())
    store.begin()
    assert store.targets() is not first  # what is served must not be written to, nor be the base of a difference
    assert not any(map(is_inside, store.targets().values()))
    for name, target in store.targets().items():
        target.copy_(weights[tied.get(name, name)])
    store.note_arrived(store.targets())
    assert all(model.module.state_dict()[name].equal(weight + 1) for name, weight in weights.items())
    assert store.swap(keeps_staged=True) is False
    assert all(model.module.state_dict()[name].equal(weight) for name, weight in weights.items())
