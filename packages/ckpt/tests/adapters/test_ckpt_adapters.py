"""What the adapters share: host memory that can go back, and reading a model back through its own loader."""

import base64
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch
from torch import nn

import rl_ckpt
from rl_ckpt.adapters import sglang
from rl_ckpt.adapters.installer import Installer
from rl_ckpt.adapters.load_recorder import Copy, Held, LoadRecorder, copies_in, filled_by
from rl_ckpt.testing import assert_same, new_name


class Fused(nn.Module):
    """As an inference engine has it: q and k in one parameter, an embedding that is the head as well."""

    def __init__(self, rank=0, world_size=1):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(8 // world_size, 6), requires_grad=False)
        self.embed = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16), requires_grad=False)
        self._rank, self._rows = rank, 4 // world_size

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            if name in ("q", "k"):
                part = tensor.narrow(0, self._rank * self._rows, self._rows)
                self.qk.data.narrow(0, self._rows * (name == "k"), self._rows).copy_(part)
            elif name == "embed.weight":
                self.embed.weight.data.copy_(tensor)
            elif name == "norm":
                self.norm.data.copy_(tensor)


def weights_of(seed):
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(10, 6, generator=generator)
    return {
        "q": torch.randn(4, 6, generator=generator),
        "k": torch.randn(4, 6, generator=generator),
        "embed.weight": embed,
        "head.weight": embed.clone(),
        "norm": torch.randn(6, generator=generator).bfloat16(),
    }


def loaded(model, weights, **options):
    recorder = LoadRecorder(model, weights)
    with recorder:
        model.load_weights(weights.items())
    return Held(model, weights, recorder.bindings, **options)


def test_fused_and_tied_tensors_are_read_back_by_their_own_names():
    model, weights = Fused(), weights_of(0)
    held = loaded(model, weights)
    assert_same(dict(held), weights)
    assert rl_ckpt.tree_digest(held) == rl_ckpt.tree_digest(weights)
    model.qk.data[5, 2] += 1  # row 1 of k
    assert {name for name in held if not torch.equal(held[name], weights[name])} == {"k"}
    model.embed.weight.data[0, 0] += 1
    assert {name for name in held if not torch.equal(held[name], weights[name])} == {"k", "embed.weight", "head.weight"}


def test_copies_are_followed_and_computed_values_are_not():
    """As a loader does that takes its part to the device first; `clone` stands for the way there."""

    class Moving(Fused):
        @torch.no_grad()
        def load_weights(self, weights):
            moved = {name: tensor[1:].clone() if name == "k" else tensor.clone() for name, tensor in weights}
            self.qk.data[:4].copy_(moved["q"])
            self.qk.data[5:].copy_(moved["k"].to(torch.float64))
            self.embed.weight.data.copy_(moved["embed.weight"][2:].mul(2).repeat(2, 1)[:10])
            self.norm.data.copy_(moved.pop("norm")[:])
            del moved

    model, weights = Moving(), weights_of(0)
    recorder = LoadRecorder(model, weights)
    with recorder:
        model.load_weights(weights.items())
    assert {name: len(found) for name, found in recorder.bindings.items()} == {"q": 1, "k": 1, "norm": 1}
    held = Held(model, weights, recorder.bindings)
    assert_same({name: held[name] for name in ("q", "k", "norm")}, {name: weights[name] for name in ("q", "k", "norm")})
    model.qk.data[5, 2] += 1  # row 1 of k
    assert torch.equal((held["k"] != weights["k"]).nonzero(), torch.tensor([[1, 2]]))
    model.load_weights(weights.items())
    with pytest.raises(rl_ckpt.AttestationError, match="took 'embed.weight' nowhere"):
        held.require_all()


def test_memory_of_a_copy_that_was_given_back_is_no_copy():
    """A buffer of another tensor may come to lie where a copy on the way has lain."""
    model, weights = Fused(), weights_of(0)
    recorder = LoadRecorder(model, weights)
    room = torch.empty(4, 6)
    with recorder:
        moved = weights["q"].clone()
        recorder._origins._moved[room.data_ptr()] = recorder._origins._moved.pop(
            moved.data_ptr()
        )  # as the allocator would have it
        del moved
        model.qk.data[:4].copy_(room)
    assert not recorder.bindings


def test_a_rank_vouches_for_its_part_and_no_other():
    model, weights = Fused(rank=1, world_size=2), weights_of(0)
    held = loaded(model, weights)
    assert_same(dict(held), weights)
    assert torch.equal(model.qk.data, torch.cat([weights["q"][2:], weights["k"][2:]]))
    model.qk.data[0, 0] += 1
    wrong = held["q"] != weights["q"]
    assert wrong.nonzero().tolist() == [[2, 0]]


def test_a_model_tensor_is_filled_when_all_of_it_is_written():
    model, weights = Fused(), weights_of(0)

    def filled(**given):
        recorder = LoadRecorder(model, given)
        with recorder:
            model.load_weights(given.items())
        return filled_by(recorder.bindings)

    assert filled(**weights) == {"qk", "embed.weight", "norm"}
    assert filled(q=weights["q"]) == filled(k=weights["k"]) == set()  # one half of qk each
    model.load_weights = lambda items: [model.qk.data.t().copy_(tensor) for _, tensor in items]
    assert filled(turned=torch.ones(6, 8)) == {"qk"}
    model.load_weights = lambda items: [model.qk.data[:, :5].copy_(tensor) for _, tensor in items]
    assert filled(narrow=torch.ones(8, 5)) == set()
    model.load_weights = lambda items: [model.qk.data[row].copy_(tensor) for row, (_, tensor) in enumerate(items)]
    assert filled(**{f"row{row}": torch.ones(6) for row in range(8)}) == {"qk"}
    assert filled(**{f"row{row}": torch.ones(6) for row in range(7)}) == set()


def test_what_the_loader_leaves_out_or_rounds_is_seen():
    model, weights = Fused(), weights_of(0)
    held = loaded(model, {**weights, "unknown": torch.ones(3)})
    assert "unknown" not in held
    rounded = {**weights, "norm": torch.randn(6)}  # float32 into bfloat16
    with pytest.raises(rl_ckpt.AttestationError, match=r"keeps 'norm' as torch.bfloat16 and was sent torch.float32"):
        rl_ckpt.tree_digest(loaded(model, rounded))
    exact = {**weights, "norm": torch.ones(6)}
    assert rl_ckpt.tree_digest(loaded(model, exact)) == rl_ckpt.tree_digest(exact)
    model.load_weights = lambda items: (
        Fused.load_weights(model, items),
        model.register_parameter("norm", nn.Parameter(model.norm.float())),
    )
    assert "norm" not in loaded(model, weights)  # it keeps something else in its place


def test_a_head_that_is_not_the_one_it_is_tied_to_is_seen():
    model, weights = Fused(), weights_of(0)
    weights["head.weight"] += 1
    held = loaded(model, weights)
    assert {name for name in held if not torch.equal(held[name], weights[name])} == {"head.weight"}


def test_a_loader_that_fills_another_module_is_followed_there():
    model = nn.ModuleDict({"one": nn.Linear(3, 2, bias=False), "other": nn.Linear(3, 2, bias=False)})
    given = {"one.weight": torch.randn(2, 3)}
    recorder = LoadRecorder(model, given, "one")
    with recorder, torch.no_grad():
        for layer in model.values():
            layer.weight.copy_(given["one.weight"])
    assert [binding.path for binding in recorder.bindings["one.weight"]] == ["one.weight", "other.weight"]
    held = Held(model, given, recorder.bindings)
    held.require_all()
    model["other"].weight.detach()[0, 0] += 1
    with pytest.raises(rl_ckpt.AttestationError, match=r"does not hold 'one\.weight' as it was sent"):
        held.require_all()


def test_every_copy_that_a_tied_layer_keeps_is_looked_at():
    """As on CPUs, where a layer computes with a packed copy: the stale one of a tied layer is found."""
    model, weights = Fused(), weights_of(0)
    packed = {"head.weight": torch.zeros(10, 6), "embed.weight": weights["embed.weight"].clone()}

    def copies(model, path, whole):
        return [Copy(whole, lambda: packed[path])] if path in packed else copies_in(model, path, whole)

    held = loaded(model, weights, copies=copies)
    assert not torch.equal(held["embed.weight"], weights["embed.weight"])
    packed["head.weight"].copy_(weights["embed.weight"])
    assert torch.equal(held["embed.weight"], weights["embed.weight"])


class Pair:
    """A sender in this thread, and one or more calls that take from it in others."""

    def __init__(self, sender):
        self._sender = sender

    def veto(self):
        """A receiver that takes everything and says no when another has said yes."""

        def held():
            deadline = time.monotonic() + 30
            while not any(peer.staged for peer in self._sender._peers.members.admitted) and time.monotonic() < deadline:
                time.sleep(0.005)
            raise RuntimeError("vetoed")

        with rl_ckpt.connect(self._sender.address, role="receive", timeout_s=30) as receiver:
            receiver.attest_with(held)
            for _ in receiver.recv():
                pass

    def sync(self, weights, version, *takers, fails=None):
        with ThreadPoolExecutor(len(takers)) as pool:
            taking = [pool.submit(taker) for taker in takers]
            if fails is None:
                report = self._sender.send(weights.items(), version=version, num_peers=len(takers))
                for future in taking:
                    future.result(60)
                return report
            with pytest.raises(rl_ckpt.SyncAbortedError, match=fails):
                self._sender.send(weights.items(), version=version, num_peers=len(takers))
            return [future.exception(60) for future in taking]


@pytest.fixture
def url():
    return f"inproc://{new_name()}"


@pytest.fixture
def pair(url):
    with rl_ckpt.connect(url, role="send", timeout_s=30) as sender:
        yield Pair(sender)


def same(model, weights):
    whole = {"qk": torch.cat([weights["q"], weights["k"]]), "embed.weight": weights["embed.weight"]}
    return all(torch.equal(model.get_parameter(name), tensor) for name, tensor in whole.items())


def installer_of(model, url, restore):
    installer = Installer(model, load=lambda weights, owner=None: loaded(model, weights), restore=restore)
    installer.attach(rl_ckpt.connect(url, role="receive", timeout_s=30))
    return installer


def test_an_installed_version_is_undone_if_the_sync_fails(pair, url):
    model = Fused()
    started = weights_of(9)
    model.load_weights(started.items())
    installer = installer_of(model, url, restore=lambda: model.load_weights(started.items()))
    pair.sync(weights_of(1), 1, installer.take, pair.veto, fails="vetoed")
    assert same(model, started)
    report = pair.sync(weights_of(1), 1, installer.take)
    assert same(model, weights_of(1))
    assert (report.receipts[0].is_attested, report.receipts[0].num_bound) == (True, 5)
    pair.sync(weights_of(2), 2, installer.take, pair.veto, fails="vetoed")
    assert same(model, weights_of(1))
    (error,) = pair.sync(weights_of(2), 2, lambda: installer.take(version=3), fails="stopped before the end")
    assert isinstance(error, rl_ckpt.VersionError)
    some = {"q": weights_of(3)["q"]}
    (error,) = pair.sync(some, 3, installer.take, fails="4 of the 5 tensors that the engine holds did not come")
    assert isinstance(error, rl_ckpt.TensorError)
    assert same(model, weights_of(1))
    shorter = {**weights_of(3), "k": torch.ones(2, 6)}
    (error,) = pair.sync(shorter, 3, installer.take, fails=r"'k' came as \[2, 6\]; the engine's is \[4, 6\]")
    assert same(model, weights_of(1))
    pair.sync(some, 3, lambda: installer.take(is_partial=True))
    merged = {**weights_of(1), "q": weights_of(3)["q"]}
    assert same(model, merged)
    installer.attach(rl_ckpt.connect(url, role="receive", timeout_s=30))  # as after a restart of the trainer
    untied = {name: tensor for name, tensor in weights_of(4).items() if name != "head.weight"}
    pair.sync(untied, 4, installer.take, pair.veto, fails="vetoed")
    assert same(model, merged)
    pair.sync(untied, 4, installer.take)
    assert same(model, untied)
    installer.detach()


def test_a_model_that_cannot_roll_back_refuses_to_serve(pair, url):
    """Until it has the next version."""

    def restore():
        raise OSError("no disk")

    model = Fused()
    model.forward = lambda: "served"
    installer = installer_of(model, url, restore)
    errors = pair.sync(weights_of(1), 1, installer.take, pair.veto, fails="vetoed")
    assert "no disk" in errors[0].__notes__[0]
    with pytest.raises(rl_ckpt.UsageError, match="mixed since a failed sync"):
        model()
    with pytest.raises(rl_ckpt.UsageError, match="mixed since a failed sync"):
        model.forward()  # as SGLang calls it
    assert model.qk.isnan().all()  # a CUDA graph calls nothing
    pair.sync(weights_of(1), 1, installer.take)
    assert model() == "served"
    installer.detach()


def test_a_refusal_ends_when_leftovers_of_the_failed_sync_came(pair, url):
    """Then what no sync brings is as it was; and until then the parameters are NaN, whatever fails meanwhile."""

    def restore():
        raise OSError("no disk")

    model = Fused()
    model.gain = nn.Parameter(torch.full((3,), 7.0), requires_grad=False)  # no checkpoint has it
    model.forward = lambda: "served"
    installer = installer_of(model, url, restore)
    without = {name: tensor for name, tensor in weights_of(1).items() if name != "norm"}
    pair.sync(without, 1, installer.take)
    pair.sync(weights_of(2), 2, installer.take, pair.veto, fails="vetoed")  # nobody knows the norm before
    assert model.norm.isnan().all()
    assert model.gain.isnan().all()
    part = {"q": weights_of(2)["q"]}
    for taken, is_partial in ((without, False), (part, True)):
        (error,) = pair.sync(
            taken, 2, lambda is_partial=is_partial: installer.take(is_partial=is_partial), fails="'norm' the first"
        )
        assert isinstance(error, rl_ckpt.TensorError)
        assert model.qk.isnan().all()
    pair.sync(weights_of(2), 2, installer.take, pair.veto, fails="vetoed")
    with pytest.raises(rl_ckpt.UsageError, match="mixed since a failed sync"):
        model()
    assert model.gain.isnan().all()
    pair.sync({"norm": weights_of(2)["norm"]}, 2, lambda: installer.take(is_partial=True))
    assert model() == "served"
    assert same(model, weights_of(1))
    assert torch.equal(model.norm, weights_of(2)["norm"])
    assert torch.equal(model.gain, torch.full((3,), 7.0))
    installer.detach()


def test_a_loader_that_loses_a_tensor_commits_nothing(pair, url):
    model = Fused()
    installer = installer_of(model, url, restore=lambda: None)
    (error,) = pair.sync({**weights_of(1), "unknown": torch.ones(2)}, 1, installer.take, fails="lost or changed")
    assert isinstance(error, rl_ckpt.SyncAbortedError)
    installer.detach()


def test_sglang_takes_a_version_by_its_custom_loader(pair, url):
    """As SGLang calls it: with its model, and the named tensors of the request."""
    model = Fused()
    for version in (1, 2):
        request = sglang.session_tensors(url, version)
        pair.sync(weights_of(version), version, lambda request=request: sglang.load_weights(model, request))
        assert same(model, weights_of(version))
    with pytest.raises(rl_ckpt.UsageError, match="it was given 5 tensors"):
        sglang.load_weights(model, list(weights_of(1).items()))
    sglang.engines.pop(id(model)).installer.detach()


class FusedNextN(nn.Module):
    """As SGLang's models that draft: embedding and head are the model's, weights those of the layer alone."""

    def __init__(self, model):
        super().__init__()
        self.fc = nn.Parameter(torch.zeros(6, 12), requires_grad=False)
        self.embed = model.embed

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            assert name in ("mtp.fc.weight", "model.layers.3.eh_proj.weight")
            self.fc.copy_(tensor)


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.layers.3.eh_proj.weight"])
def test_a_model_that_drafts_is_installed_and_undone_too(pair, url, name):
    """SGLang calls a custom loader for the one that drafts, and then for the model, which takes both."""
    model = Fused()
    model.config = SimpleNamespace(num_hidden_layers=3)
    ahead = FusedNextN(model)

    def take(version):
        request = sglang.session_tensors(url, version)
        sglang.load_weights(ahead, request)
        sglang.load_weights(model, request)

    first, second = torch.ones(6, 12), torch.full((6, 12), 2.0)
    pair.sync({**weights_of(1), name: first}, 1, lambda: take(1))
    assert same(model, weights_of(1))
    assert torch.equal(ahead.fc, first)
    pair.sync({**weights_of(2), name: second}, 2, lambda: take(2), pair.veto, fails="vetoed")
    assert same(model, weights_of(1))
    assert torch.equal(ahead.fc, first)
    pair.sync({**weights_of(2), name: second}, 3, lambda: take(3))
    assert torch.equal(ahead.fc, second)
    copy = {"model.layers.3.shared_head.head.weight": torch.ones(2)}
    pair.sync({**weights_of(2), name: first, **copy}, 4, lambda: take(4), fails="lost or changed")
    sglang.drafters.clear()
    sglang.engines.pop(id(model)).installer.detach()


def test_sglang_keeps_its_start_weights_until_the_first_commit(pair, url):
    """A first sync that fails late is undone, and answered; another loader's error is SGLang's as before."""
    model = Fused()
    started = weights_of(9)
    model.load_weights(started.items())

    def update(version, load_format=sglang.LOADER):
        def called(load_format):
            sglang.load_weights(model, sglang.session_tensors(url, version))
            return True, "Success"

        return lambda: answers.append(sglang.answer(called, load_format=load_format))

    answers = []
    pair.sync(weights_of(1), 1, update(1), pair.veto, fails="vetoed")
    assert answers.pop() == (False, ANY)
    assert same(model, started)
    pair.sync(weights_of(1), 1, update(1))
    assert answers.pop() == (True, "Success")
    errors = pair.sync(weights_of(2), 2, update(2, load_format="another"), pair.veto, fails="vetoed")
    assert isinstance(errors[0], rl_ckpt.SyncAbortedError)
    assert same(model, weights_of(1))
    sglang.engines.pop(id(model)).installer.detach()


def test_sglang_reverts_names_new_to_the_version_before(pair, url):
    """One that the loader does not know, and one that it has put somewhere."""

    def take(version):
        return lambda: sglang.load_weights(model, sglang.session_tensors(url, version))

    model = Fused()
    model.load_weights(weights_of(9).items())
    without = {name: tensor for name, tensor in weights_of(1).items() if name not in {"k", "norm"}}
    pair.sync(without, 1, take(1))
    for name, fails in {"unknown": "lost or changed", "norm": "keeps 'norm' as torch.bfloat16"}.items():
        wrong = {**weights_of(2), name: torch.full((6,), 0.1)}  # float32, which norm would round
        errors = pair.sync(wrong, 2, take(2), fails=fails)
        assert not hasattr(errors[0], "__notes__")
        assert same(model, {**without, "k": weights_of(9)["k"]})
        assert torch.equal(model.norm, weights_of(9)["norm"])
    pair.sync(weights_of(2), 2, take(2))
    assert same(model, weights_of(2))
    pair.sync({**weights_of(3), "unknown": torch.ones(6)}, 3, take(3), fails="lost or changed")
    assert same(model, weights_of(2))
    sglang.engines.pop(id(model)).installer.detach()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_the_sglang_request_has_no_memory_handle():
    request = sglang.session_request("shm://policy", 7, tp_size=2)
    one, other = request["serialized_named_tensors"]
    assert one == other
    ((url, version),) = pickle.loads(base64.b64decode(one))
    assert (url, version.tolist(), version.dtype) == ("shm://policy", [7], torch.int64)
    assert request["weight_version"] == "7"
    assert request["load_format"] == f"{sglang.load_weights.__module__}.{sglang.load_weights.__qualname__}"
