"""Slices into the ranks of an engine: each says what it takes by a dry run of its loader, and gets that and no more."""

import asyncio
import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import rl_ckpt
from rl_bench.waiting import until
from rl_ckpt import ShardSpec
from rl_ckpt.adapters import load_recorder, sglang
from rl_ckpt.adapters.installer import Installer
from rl_ckpt.adapters.layout import DryLoad, read_layouts, write_layout_request
from rl_ckpt.adapters.load_recorder import Held, LoadRecorder
from rl_ckpt.receiver.staging import sparse_like
from rl_ckpt.testing import new_name

HIDDEN, HEADS, EXPERTS, VOCAB = 16, 8, 4, 24


def weights_of(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (HEADS, HIDDEN), "k": (HEADS // 2, HIDDEN), "o": (HIDDEN, HEADS), "embed": (VOCAB, HIDDEN)}
    shapes |= {f"experts.{number}": (6, HIDDEN) for number in range(EXPERTS)} | {"norm": (HIDDEN,), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Rank(nn.Module):
    """One rank of an engine: q and k in one parameter, o cut along its columns, experts stacked and shared out.

    k has fewer heads than there are ranks, `norm` and `scale` are on every rank, and half of the layers on each stage.
    """

    def __init__(self, rank, num_ranks=2, *, is_last_stage=True):
        super().__init__()
        self.rank, self.num_ranks, self.is_last_stage = rank, num_ranks, is_last_stage
        self.rows = HEADS // num_ranks
        for name, shape in {
            "qk": (self.rows + HEADS // 2, HIDDEN),
            "o": (HIDDEN, self.rows),
            "embed": (VOCAB // num_ranks, HIDDEN),
            "experts": (EXPERTS // num_ranks, 6, HIDDEN),
            "norm": (HIDDEN,),
            "scale": (1,),
        }.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "q":
                self.qk.data[: self.rows].copy_(tensor.narrow(0, self.rank * self.rows, self.rows))
            elif name == "k":
                self.qk.data[self.rows :].copy_(tensor)
            elif name == "o":
                self.o.data.copy_(tensor.narrow(1, self.rank * self.rows, self.rows))
            elif name == "embed":
                self.embed.data.copy_(tensor.chunk(self.num_ranks)[self.rank])
            elif name == "norm" and self.is_last_stage:
                self.norm.data.copy_(tensor)
            elif name == "scale":
                self.scale.data.copy_(tensor.reshape(1))
            elif name.startswith("experts."):
                number, each = int(name.removeprefix("experts.")), EXPERTS // self.num_ranks
                if number // each == self.rank:
                    self.experts.data[number % each].copy_(tensor)

    def holds(self, weights):
        other = Rank(self.rank, self.num_ranks, is_last_stage=self.is_last_stage)
        other.load_weights(weights.items())
        return all(
            torch.equal(mine, theirs) for mine, theirs in zip(self.parameters(), other.parameters(), strict=True)
        )

    def num_taken(self):
        return sum(parameter.numel() for parameter in self.parameters()) - (not self.is_last_stage) * HIDDEN


def layout_of(model):
    given = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights_of(0).items()}
    with DryLoad(model, given) as dry:
        model.load_weights(given.items())
    return dry.parts()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dry_load_tells_what_a_rank_takes_and_changes_nothing(rank):
    model = Rank(rank, is_last_stage=rank == 1)
    parts = layout_of(model)
    assert not any(parameter.any() for parameter in model.parameters())
    boxes = {name: (part.offsets, part.sizes) for name, part in parts.items()}
    wanted = {
        "q": ((4 * rank, 0), (4, HIDDEN)),
        "k": ((0, 0), (4, HIDDEN)),
        "o": ((0, 4 * rank), (HIDDEN, 4)),
        "embed": ((12 * rank, 0), (12, HIDDEN)),
        "scale": ((), ()),
        **{f"experts.{number}": ((0, 0), (6, HIDDEN)) for number in (2 * rank, 2 * rank + 1)},
        **({"norm": ((0,), (HIDDEN,))} if rank else {}),
    }
    assert boxes == wanted


def test_values_a_loader_computes_on_or_views_are_wanted_whole():
    """The whole tensor is requested if a loader computes with it or takes a view that is not a box."""

    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.zeros(2, 3), requires_grad=False)

        @torch.no_grad()
        def load_weights(self, weights):
            for name, tensor in weights:
                if name == "doubled":
                    self.a.data.copy_(tensor[:2] * 2)
                elif name == "turned":
                    self.a.data.copy_(tensor.t()[:2])
                elif name == "skewed":
                    self.a.data.copy_(tensor.view(-1)[2:8].view(2, 3))

    model = Turning()
    given = {"doubled": torch.ones(4, 3), "turned": torch.ones(3, 4), "skewed": torch.ones(4, 3), "none": torch.ones(2)}
    with DryLoad(model, given) as dry:
        model.load_weights(given.items())
    assert not model.a.any()
    boxes = {name: (part.offsets, part.sizes) for name, part in dry.parts().items()}
    assert boxes == {"doubled": ((0, 0), (4, 3)), "turned": ((0, 0), (3, 2)), "skewed": ((0, 0), (4, 3))}


def test_a_part_copied_to_the_device_is_wanted_alone_if_uncut():
    """`clone` stands for the way to the device."""

    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.zeros(2, 3), requires_grad=False)

        @torch.no_grad()
        def load_weights(self, weights):
            for name, tensor in weights:
                if name == "moved":
                    self.a.data.copy_(tensor[1:3].clone().to(torch.float64))
                elif name == "cut":
                    self.a.data.copy_(tensor.clone()[1:3])

    model = Moving()
    given = {"moved": torch.ones(4, 3), "cut": torch.ones(4, 3)}
    with DryLoad(model, given) as dry:
        model.load_weights(given.items())
    assert not model.a.any()
    boxes = {name: (part.offsets, part.sizes) for name, part in dry.parts().items()}
    assert boxes == {"moved": ((1, 0), (2, 3)), "cut": ((0, 0), (4, 3))}


class Engine:
    """What an adapter makes of a rank: an installer around its loader."""

    def __init__(self, model):
        self.model, self.num_restored = model, 0
        self.loses = None
        """What the next load leaves out."""
        self.owners = []
        """Of the loads until now."""
        self.installer = Installer(model, load=self.load, restore=self.restore)

    def load(self, weights, owner=None):
        self.owners.append(owner)
        recorder = LoadRecorder(self.model, weights, owner or "")
        with recorder:
            self.model.load_weights((name, tensor) for name, tensor in weights.items() if name != self.loses)
        if self.loses in weights:
            self.loses = None
        return Held(self.model, weights, recorder.bindings)

    def restore(self):
        self.num_restored += 1
        for parameter in self.model.parameters():
            parameter.data.zero_()


class Stack(nn.Module):
    """A rank with two layers."""

    def __init__(self, rank):
        super().__init__()
        self.layers = nn.ModuleList([Rank(rank), Rank(rank)])

    def load_weights(self, weights):
        for name, tensor in weights:
            _, number, own = name.split(".", 2)
            self.layers[int(number)].load_weights([(own, tensor)])

    def holds(self, weights):
        return all(layer.holds(weights_of_layer(weights, number)) for number, layer in enumerate(self.layers))


def weights_of_layer(weights, number):
    prefix = f"layers.{number}."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def stacked(seed):
    return {f"layers.{n}.{name}": tensor for n in (0, 1) for name, tensor in weights_of(10 * seed + n).items()}


def rows_of(rank, like):
    """FSDP: two ranks of a trainer."""
    for name, tensor in like.items():
        axis = 0 if tensor.ndim else None
        yield ShardSpec.on_mesh(name, tuple(tensor.shape), mesh=(2,), placements=(axis,), coordinate=(rank,))


class Trainer:
    def __init__(self, targets, like=None):
        self.like = like or weights_of(0)
        self.plan = rl_ckpt.ShardPlan([list(rows_of(rank, self.like)) for rank in (0, 1)], targets)
        name = new_name()
        self.senders = [
            rl_ckpt.ShardedSender(self.plan, rank, lambda to, rank=rank: f"inproc://{name}-{rank}-{to}", timeout_s=30)
            for rank in (0, 1)
        ]

    def open(self):
        async def prepare():
            return [await sender.prepare() for sender in self.senders]

        return rl_ckpt.join_addresses(asyncio.run(prepare()), self.plan.num_targets).to_json()

    def send(self, weights, version):
        async def run():
            staging = [
                sender.stage(
                    lambda rank=rank: [(spec, spec.of(weights[spec.name])) for spec in rows_of(rank, self.like)],
                    version=version,
                )
                for rank, sender in enumerate(self.senders)
            ]
            shares = await asyncio.gather(*staging, return_exceptions=True)
            if failed := [share for share in shares if isinstance(share, BaseException)]:
                await asyncio.gather(*(sender.abort(str(failed[0])) for sender in self.senders))
                raise failed[0]
            digest = rl_ckpt.join_digest(shares)
            reports = [await sender.commit(digest, version) for sender in self.senders]
            return rl_ckpt.merge_reports(reports, version=version, digest=digest)

        return asyncio.run(run())

    def close(self):
        async def run():
            for sender in self.senders:
                await sender.close()

        asyncio.run(run())


@contextmanager
def running(models, like, folder):
    """Two ranks of a trainer, two engines, and the layouts that they have told."""
    engines = [Engine(model) for model in models]
    url = write_layout_request(folder, {name: ("float32", tuple(tensor.shape)) for name, tensor in like.items()})
    for rank, engine in enumerate(engines):
        engine.installer.report_layout(url, rank, lambda given, engine=engine: engine.model.load_weights(given.items()))
    trainer = Trainer(read_layouts(folder, 2), like)
    address = trainer.open()
    for rank, engine in enumerate(engines):
        engine.installer.join(address, rank, timeout_s=30)
    yield trainer, engines
    for engine in engines:
        engine.installer.detach()
    trainer.close()


@pytest.fixture
def job(tmp_path):
    with running([Rank(rank, is_last_stage=rank == 1) for rank in (0, 1)], weights_of(0), tmp_path) as job:
        yield job


@pytest.fixture
def layered_job(tmp_path):
    with running([Stack(rank) for rank in (0, 1)], stacked(0), tmp_path) as job:
        yield job


def sync(job, weights, version, fails=None):
    """The report, or what each engine failed with."""
    trainer, engines = job
    with ThreadPoolExecutor(2) as pool:
        taking = [pool.submit(engine.installer.take, version) for engine in engines]
        if fails is None:
            report = trainer.send(weights, version)
            for future in taking:
                future.result(60)
            return report
        with pytest.raises(rl_ckpt.SyncAbortedError, match=fails):
            trainer.send(weights, version)
        return [future.exception(60) for future in taking]


@pytest.mark.process
@pytest.mark.promise("A rank of vLLM or SGLang is sent the slices that it computes with, and vouches for them")
def test_each_rank_receives_what_it_computes_with_and_attests_it(job):
    _, engines = job
    for version in (1, 2, 3):
        weights = weights_of(version)
        report = sync(job, weights, version)
        assert report.digest == rl_ckpt.tree_digest(weights)
        assert report.num_bytes == 4 * sum(engine.model.num_taken() for engine in engines)
        assert all(receipt.is_attested for receipt in report.receipts)
        assert all(engine.model.holds(weights) for engine in engines)


@pytest.mark.process
def test_a_rank_that_loses_a_tensor_keeps_the_replica_s_version(job):
    _, engines = job
    first, second = weights_of(1), weights_of(2)
    engines[1].loses = "o"
    errors = sync(job, first, 1, fails="loader took 'o' nowhere")
    assert any(isinstance(error, rl_ckpt.AttestationError) for error in errors)
    assert not any(parameter.any() for engine in engines for parameter in engine.model.parameters())
    sync(job, first, 1)
    engines[1].loses = "experts.3"
    sync(job, second, 2, fails="loader took 'experts.3' nowhere")
    assert all(engine.model.holds(first) for engine in engines)
    sync(job, second, 2)
    assert all(engine.model.holds(second) for engine in engines)


@pytest.mark.process
def test_a_rank_that_stores_other_numbers_is_found(job):
    _, engines = job
    load = engines[0].model.load_weights

    def spoil(weights):
        load(weights)
        engines[0].model.qk.data.view(torch.int32)[0, 0] ^= 1

    engines[0].model.load_weights = spoil
    sync(job, weights_of(1), 1, fails="the engine does not hold 'q' as it was sent")


def staged_bytes(installer):
    """Of all host memory that is kept for weights."""
    staging = installer._staging
    free = [tensor for tensors in installer._free.values() for tensor in tensors]
    kept = [*staging.current.values(), *staging.incoming.values(), *staging._spare.values(), *free]
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in kept}.values())


@pytest.mark.promise(
    "A rank keeps the slices of one version, and goes back to the version before without a second copy"
)
@pytest.mark.process
def test_layers_are_exchanged_one_by_one_and_failures_undone(layered_job, monkeypatch):
    """Only one version is in memory at a time."""
    _, engines = layered_job
    fresh = []
    monkeypatch.setattr(load_recorder, "sparse_like", lambda like: fresh.append(like) or sparse_like(like))
    first, second, third = stacked(1), stacked(2), stacked(3)
    sync(layered_job, first, 1)
    assert [engine.owners for engine in engines] == [[None], [None]]
    one_version = staged_bytes(engines[0].installer)
    for loses, told in (("layers.1.o", "took 'layers.1.o' nowhere"), ("layers.0.q", "took 'layers.0.q' nowhere")):
        engines[1].loses = loses  # the other rank has voted by then, or not: it goes back as well
        sync(layered_job, second, 2, fails=told)
        assert all(engine.model.holds(first) for engine in engines)
    for version, weights in ((2, second), (3, third)):
        for engine in engines:
            engine.owners.clear()
        fresh.clear()
        report = sync(layered_job, weights, version)
        assert report.digest == rl_ckpt.tree_digest(weights)
        assert all(receipt.is_attested for receipt in report.receipts)
        assert all(engine.model.holds(weights) for engine in engines)
        assert [engine.owners for engine in engines] == [["layers.0", "layers.1"]] * 2
        assert all(staged_bytes(engine.installer) <= one_version * 3 / 2 for engine in engines), "and one layer of two"
    assert not fresh, "what is replaced is read into memory that was there"


def resident_bytes(tensor):
    """Of the memory behind a tensor, what the kernel has given to this process."""
    storage, page = tensor.untyped_storage(), mmap.PAGESIZE
    first = storage.data_ptr() // page * page
    length = storage.data_ptr() + storage.nbytes() - first
    pages = (ctypes.c_ubyte * -(-length // page))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(length), pages) == 0
    return page * sum(each & 1 for each in pages)


class Wide(nn.Module):
    """The third of eight ranks: rows of one matrix, columns of another, and one that the loader needs contiguous."""

    def __init__(self):
        super().__init__()
        for name, shape in {"up": (256, 512), "down": (512, 256), "flat": (64, 2048)}.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "up":
                self.up.copy_(tensor[512:768])
            elif name == "down":
                self.down.copy_(tensor[:, 512:768])
            elif name == "flat":
                self.flat.copy_(tensor.view(-1)[: 64 * 2048].view(64, 2048))


@pytest.mark.process
@pytest.mark.promise(
    "Host memory of a rank holds its slices and hardly more, also of matrices that are cut along their columns"
)
def test_host_memory_holds_the_slices_of_a_rank_and_hardly_more(tmp_path):
    """In pages that were written to: a part of every row would otherwise take all pages of a matrix."""
    engine = Engine(Wide())
    like = {"up": torch.ones(2048, 512), "down": torch.ones(512, 2048), "flat": torch.ones(512, 2048)}
    url = write_layout_request(tmp_path, {name: ("float32", tuple(tensor.shape)) for name, tensor in like.items()})
    engine.installer.report_layout(url, 0, lambda given: engine.model.load_weights(given.items()))
    trainer = Trainer(read_layouts(tmp_path, 1), like)
    engine.installer.join(trainer.open(), 0, timeout_s=30)
    seen = {}
    load = engine.installer._load

    def measured(weights, owner=None):
        seen.update({name: resident_bytes(tensor) for name, tensor in weights.items()})
        return load(weights, owner)

    engine.installer._load = measured
    for version in (1, 2):
        sync((trainer, [engine]), {name: tensor * version for name, tensor in like.items()}, version)
        assert all((parameter == version).all() for parameter in engine.model.parameters())
        for name, num_bytes in seen.items():
            own = dict(engine.model.named_parameters())[name].nbytes
            assert own <= num_bytes <= own + 4 * mmap.PAGESIZE, (name, own, num_bytes)
    engine.installer.detach()
    trainer.close()


@pytest.mark.process
@pytest.mark.promise("Slices land while the engine goes on, and are installed when they are taken")
def test_slices_land_while_the_engine_runs_and_install_on_take(layered_job, tmp_path):
    trainer, engines = layered_job
    first, second = stacked(1), stacked(2)
    sync(layered_job, first, 1)
    files = [tmp_path / f"landed-{rank}" for rank in (0, 1)]
    for engine, file in zip(engines, files, strict=True):
        engine.installer.begin(file)
    with ThreadPoolExecutor(3) as pool:
        sending = pool.submit(trainer.send, second, 2)
        until(lambda: all(file.exists() for file in files))
        assert all(engine.model.holds(first) for engine in engines)
        assert not sending.done()
        for taking in [pool.submit(engine.installer.take, 2) for engine in engines]:
            taking.result(30)
        sending.result(30)
    assert all(engine.model.holds(second) for engine in engines)


@pytest.mark.process
def test_slices_landed_and_never_taken_are_voted_against(layered_job, tmp_path):
    trainer, engines = layered_job
    first, second = stacked(1), stacked(2)
    sync(layered_job, first, 1)
    for rank, engine in enumerate(engines):
        engine.installer.begin(tmp_path / f"landed-{rank}")
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(trainer.send, second, 2)
        until(lambda: (tmp_path / "landed-0").exists())
        engines[0].installer.detach()
        assert isinstance(sending.exception(30), rl_ckpt.SyncAbortedError)
    with pytest.raises(rl_ckpt.CkptError):
        engines[1].installer.take(2)
    assert all(engine.model.holds(first) for engine in engines)


@pytest.mark.process
def test_whole_tensors_after_slices_can_be_undone_as_well(layered_job):
    _, engines = layered_job
    first, second = stacked(1), stacked(2)
    sync(layered_job, first, 1)
    engine = engines[0]
    own = {name: tensor for name, tensor in second.items() if not name.endswith(("experts.2", "experts.3"))}
    address = f"inproc://{new_name()}"
    with rl_ckpt.connect(address, role="send", timeout_s=30) as sender, ThreadPoolExecutor(1) as pool:
        engine.installer.join(address, 0, timeout_s=30)
        for loses in ("layers.1.o", None):
            engine.loses = loses
            taking = pool.submit(engine.installer.take, 2)
            if loses is None:
                sender.send(own.items(), version=2)
                taking.result(30)
                assert engine.model.holds(second)
                continue
            with pytest.raises(rl_ckpt.SyncAbortedError):
                sender.send(own.items(), version=2)
            assert isinstance(taking.exception(30), rl_ckpt.CkptError)
            assert engine.model.holds(first)


def test_slices_are_refused_where_no_layout_was_told():
    engine = Engine(Rank(0))
    address = rl_ckpt.join_addresses([{0: "inproc://nobody"}], 1).to_json()
    with pytest.raises(rl_ckpt.UsageError, match="no plan was made for rank 0"):
        engine.installer.join(address, 0, timeout_s=1)


def test_a_server_with_fewer_ranks_than_were_asked_is_refused(tmp_path):
    write_layout_request(tmp_path, {"w": ("float32", (2,))})
    with pytest.raises(rl_ckpt.UsageError, match="2 ranks were asked for their layouts"):
        read_layouts(tmp_path, 2)


def test_sglang_reports_its_layout_and_takes_slices_by_loader(tmp_path):
    model = Rank(0, num_ranks=1)
    told = {name: ("float32", tuple(tensor.shape)) for name, tensor in weights_of(0).items()}
    sglang.load_weights(model, sglang.session_tensors(write_layout_request(tmp_path, told), 0))
    trainer = Trainer(read_layouts(tmp_path, 1))
    address = trainer.open()
    try:
        for version in (1, 2):
            with ThreadPoolExecutor(1) as pool:
                taking = pool.submit(sglang.load_weights, model, sglang.session_tensors(address, version))
                trainer.send(weights_of(version), version)
                taking.result(60)
            assert model.holds(weights_of(version))
    finally:
        sglang.engines.pop(id(model)).installer.detach()
        trainer.close()
