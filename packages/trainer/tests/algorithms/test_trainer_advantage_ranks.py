"""Advantages over ranks that each hold some groups are those of the whole batch, and no rank needs all of it."""

import resource
import threading
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import rl_tq
from rl_engine.testing import write_tiny_model
from rl_engine.types import EngineConfig
from rl_trainer.algorithms import ADVANTAGES, AdvantageInput, compute_advantages
from rl_trainer.algorithms.advantages import BatchRanks
from rl_trainer.algorithms.selection import beyond_moment, high_entropy, select_tokens
from rl_trainer.config.schema import AlgorithmConfig
from rl_trainer.runtime import create_runtime
from rl_trainer.runtime.base import Dispatch, ResourcePool, register
from rl_trainer.workers.engine_worker import EngineWorker

PER_TOKEN = ("rewards", "loss_mask", "logprobs", "sum_pi_squared", "values", "ratio", "process_rewards")
PER_ROW = ("group_ids", "rollout_ids", "greedy_rewards", "components")
LIMIT = 250 * 2**20
"""Bytes; the batch takes 270 M on one rank, half of it 140 M."""


def batch(seed):
    """A random ragged batch: 1 to 5 completions of each of 7 prompts, some of several trajectories."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (7,), generator=random)
    groups = torch.arange(7).repeat_interleave(sizes)
    lengths = torch.randint(1, 9, groups.shape, generator=random)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num = int(lengths.sum())
    fields = {name: torch.rand(num, generator=random) for name in PER_TOKEN}
    fields["loss_mask"] = (fields["loss_mask"] > 0.2).long()
    fields |= {"group_ids": groups, "rollout_ids": torch.randint(0, 3, groups.shape, generator=random)}
    fields |= {"greedy_rewards": torch.rand(7, generator=random)[groups]}
    fields |= {"components": torch.rand(len(groups), 2, generator=random)}
    fields |= {"completion_token_ids": torch.randint(0, 3, (num,), generator=random), "prompt_token_ids": groups}
    return fields, cu_seqlens


def part(fields, cu_seqlens, rows, **rest):
    """An estimator's input of these rows alone."""
    lengths = cu_seqlens.diff()
    tokens = torch.isin(torch.arange(len(lengths)).repeat_interleave(lengths), rows)
    own = {name: fields[name][tokens] for name in PER_TOKEN} | {name: fields[name][rows] for name in PER_ROW}
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[rows].cumsum(0)])
    prompts = torch.nested.nested_tensor_from_jagged(fields["prompt_token_ids"][rows], torch.arange(len(rows) + 1))
    columns = {"prompt_token_ids": prompts, "completion_token_ids": fields["completion_token_ids"][tokens]}
    return AdvantageInput(**own, cu_seqlens=offsets, gamma=0.9, lam=0.8, columns=columns, **rest)


def on_ranks(fields, cu_seqlens, compute):
    """`compute(input)` by three ranks with groups 0 to 2, 3 to 6 and none, joined: threads that add at a barrier."""
    groups = fields["group_ids"]
    rows = [torch.nonzero(groups < 3)[:, 0], torch.nonzero(groups >= 3)[:, 0], torch.zeros(0, dtype=torch.int64)]
    barrier, given, answers = threading.Barrier(3), {}, {}

    def run(rank):
        def all_reduce(values):
            assert values.dtype == torch.float64
            given[rank] = values
            barrier.wait(10)
            total = sum(given.values())
            barrier.wait(10)
            return total

        ranks = BatchRanks(rank=rank, size=3, all_reduce=all_reduce)
        answers[rank] = compute(part(fields, cu_seqlens, rows[rank], ranks=ranks))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return torch.cat([answers[rank] for rank in range(3)])


@pytest.mark.filterwarnings("ignore:.*have one completion")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(name for name, each in ADVANTAGES.items() if each.scope != "whole"))
@pytest.mark.process
def test_ranks_with_some_groups_get_the_batch_advantages(name, seed):
    fields, cu_seqlens = batch(seed)
    whole = compute_advantages(name, part(fields, cu_seqlens, torch.arange(len(cu_seqlens) - 1)))
    parts = on_ranks(fields, cu_seqlens, lambda own: compute_advantages(name, own))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


def test_every_estimator_that_ships_runs_on_every_rank():
    assert {name for name, each in ADVANTAGES.items() if each.scope == "whole"} == set()


@pytest.mark.parametrize(
    ("loss", "options"),
    [("kl_cov", {"share": 0.2}), ("clip_cov", {"share": 0.1, "low": -1.0, "high": 1.0}), ("kl_cov", {"share": 1e-9})],
)
def test_ranks_choose_the_tokens_that_the_whole_batch_chooses(loss, options):
    fields, cu_seqlens = batch(5)

    def chosen(own):
        return select_tokens(own.logprobs, own.values, own.loss_mask, loss=loss, seed=3, ranks=own.ranks, **options)

    whole = chosen(part(fields, cu_seqlens, torch.arange(len(cu_seqlens) - 1)))
    assert 0 < int(whole.sum()) < int(fields["loss_mask"].sum()) / 2
    assert on_ranks(fields, cu_seqlens, chosen).tolist() == whole.tolist()


@pytest.mark.promise("Tokens chosen over a batch are the same on any number of ranks")
@pytest.mark.parametrize("choose", ["high_entropy", "beyond_moment"])
def test_rank_bounds_on_entropy_and_moments_equal_the_batch_s(choose):
    fields, cu_seqlens = batch(5)

    def chosen(own):
        if choose == "high_entropy":
            return high_entropy(own.sum_pi_squared, own.loss_mask, share=0.2, ranks=own.ranks)
        return beyond_moment(own.values - 0.5, own.rewards - 0.5, own.loss_mask, m2_max=0.02, ranks=own.ranks)

    whole = chosen(part(fields, cu_seqlens, torch.arange(len(cu_seqlens) - 1)))
    assert 0 < int(whole.sum()) < int(fields["loss_mask"].sum()) / 2
    assert on_ranks(fields, cu_seqlens, chosen).tolist() == whole.tolist()


class LimitedWorker(EngineWorker):
    """An engine rank that may take so many bytes of memory more than it has once it is there."""

    @register(Dispatch.ONE_TO_ALL)
    def limit(self, num_bytes: int) -> None:
        (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmData")]
        held = 1024 * int(line.split()[1])
        resource.setrlimit(resource.RLIMIT_DATA, (held + num_bytes, resource.RLIM_INFINITY))


@pytest.mark.promise("No rank needs the whole batch: advantages of one that is beyond the memory of each")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_batch_larger_than_rank_memory_gets_its_advantages(tmp_path):
    """Two real engine ranks; 16 M tokens, of which the columns and sums of a half fit into what a rank may have."""
    lengths, num_rows, size = 65536, 256, 8
    rewards = torch.zeros(num_rows, lengths)
    rewards[:, -1] = torch.arange(num_rows) % 3
    mask = torch.ones(num_rows, lengths, dtype=torch.uint8)
    columns = {
        name: torch.nested.as_nested_tensor([*each], layout=torch.jagged)
        for name, each in (("rewards", rewards), ("loss_mask", mask))
    }
    columns |= {"group_id": torch.arange(num_rows) // size, "rollout_index": torch.arange(num_rows) % size}
    tags = [{"group_id": int(group)} for group in columns["group_id"]]
    with rl_tq.serve("tcp://127.0.0.1:0") as queue, create_runtime("ray", timeout_s=240.0) as runtime:
        batch = queue.put(TensorDict(columns, batch_size=[num_rows]), partition="train", tags=tags)
        runtime.start([ResourcePool(name="engine", num_workers=2, num_cpus=0.5)])
        actor = runtime.create_group(
            LimitedWorker,
            "engine",
            backend="fsdp",
            config=EngineConfig(model_path=str(write_tiny_model(tmp_path / "model"))),
            algorithm=AlgorithmConfig(advantage="reinforce_pp"),
            queue_address=queue.address,
            timeout_s=200.0,
        )
        actor.limit(LIMIT)
        report = actor.compute_advantage(batch, 0.0, 1)
        found = queue.get(batch.union(report.batch), ["advantages"])["advantages"].values().reshape(num_rows, lengths)
        with pytest.raises(Exception, match="can't allocate memory"):
            actor.compute_whole_advantage(batch, 0.0, 1)
    wanted = rewards.sum(1, keepdim=True).double()
    wanted = (wanted - wanted.mean()) / wanted.repeat(1, lengths).std()
    torch.testing.assert_close(found[:, :1].double(), wanted, rtol=1e-4, atol=1e-4)
