"""Any partition of a batch gives the same loss, metrics and gradient: for every loss, in float64."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_engine import create_loss, losses
from rl_engine.finetune import distill, sft
from rl_engine.finetune import preferences as dpo
from rl_engine.finetune import preferences as kto
from rl_engine.finetune import preferences as rm
from rl_engine.finetune.preferences import divergence
from rl_engine.losses import (
    DistillKind,
    DistillLoss,
    DpoKind,
    DpoLoss,
    KtoLoss,
    process_reward_loss,
    reward_loss,
    sft_loss,
)
from rl_engine.testing import ragged
from rl_engine.types import BatchCounts, ModelOutput

LOSSES = {
    "sft": sft_loss,
    "reward": reward_loss,
    "process reward": process_reward_loss,
    "reference-free": DpoLoss(is_reference_free=True, label_smoothing=0.1),
    **{kind.value: DpoLoss(kind=kind) for kind in DpoKind if kind != DpoKind.KTO},
    "kto": KtoLoss(desirable_weight=1.5),
    "divergence": divergence,
    **{f"distill {kind}": DistillLoss(kind=kind, forward_weight=0.3) for kind in DistillKind},
    **{name: create_loss(name) for name in ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")},
}


def is_loss(thing):
    """Whether it takes a micro-batch and gives its share of a loss and of metrics."""
    call = thing.__call__ if inspect.isclass(thing) else thing
    return inspect.isfunction(call) and inspect.signature(call).return_annotation == "tuple[Tensor, dict[str, Tensor]]"


def test_no_loss_of_the_package_is_left_out():
    """Kinds of one are taken from its enumeration above."""
    found = {
        thing for module in (distill, dpo, kto, losses, rm, sft) for thing in vars(module).values() if is_loss(thing)
    }
    tried = {loss if inspect.isfunction(loss) else type(loss) for loss in LOSSES.values()}
    assert found == tried
    assert {type(loss) for loss in LOSSES.values() if hasattr(loss, "kind")} == {DpoLoss, DistillLoss}


def columns_of(lengths, seed):
    """Rows in pairs, and one number per token that a model would have given."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(make):
        return [make(length) for length in lengths]

    scores = tokens(lambda n: -torch.rand(n, generator=draw, dtype=torch.float64) * 3)
    mask = tokens(
        lambda n: torch.cat([torch.randint(0, 2, (n - 1,), generator=draw), torch.ones(1, dtype=torch.int64)])
    )
    return scores, {
        "loss_mask": mask,
        "ref_logprobs": tokens(lambda n: -torch.rand(n, generator=draw, dtype=torch.float64) * 3),
        "step_labels": tokens(lambda n: torch.rand(n, generator=draw, dtype=torch.float64)),
        "teacher_logprobs": tokens(lambda n: -torch.rand(n, generator=draw, dtype=torch.float64) * 3),
        "teacher_candidate_logprobs": tokens(
            lambda n: torch.randn(n, 4, generator=draw, dtype=torch.float64).log_softmax(-1)[:, :3]
        ),
        "weights": tokens(lambda n: torch.rand(n, generator=draw, dtype=torch.float64)),
        "logprobs": tokens(lambda n: -torch.rand(n, generator=draw, dtype=torch.float64) * 3),
        "advantages": tokens(lambda n: torch.randn(n, generator=draw, dtype=torch.float64)),
        "reference_point": torch.full((len(lengths),), 0.2, dtype=torch.float64),
        "is_desirable": torch.arange(len(lengths)) % 3 == 0,
        "pair_id": torch.arange(len(lengths)) // 2,
        "is_chosen": torch.arange(len(lengths)) % 2 == 0,
    }


def select(column, rows):
    if isinstance(column, torch.Tensor):
        return column[rows]
    return ragged([column[row] for row in rows], column[0].dtype)


def added_up(loss_function, scores, columns, parts):
    """Loss, metrics and gradient when each of `parts` is a micro-batch of its own."""
    leaves = [values.clone().requires_grad_() for values in scores]
    counts = BatchCounts(tokens=float(sum(mask.sum() for mask in columns["loss_mask"])), sequences=float(len(leaves)))
    total = {}
    for rows in parts:
        flat = torch.cat([leaves[row] for row in rows])
        lengths = torch.tensor([len(leaves[row]) for row in rows])
        output = ModelOutput(
            token_logprobs=flat,
            token_values=flat,
            token_candidate_logprobs=flat[:, None] - torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
            entropy=None,
            cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            counts=counts,
        )
        loss, metrics = loss_function(output, {name: select(column, rows) for name, column in columns.items()})
        loss.backward()
        for name, share in {"loss": loss, **metrics}.items():
            total[name] = total.get(name, 0.0) + float(share.detach())
    return total, torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])


@pytest.mark.promise("Loss and gradient depend neither on the cut into micro-batches")
@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=12)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_any_partition_gives_the_same_gradient(name, data, seed):
    lengths = data.draw(
        st.lists(st.integers(1, 6), min_size=1, max_size=6).map(lambda half: [n for n in half for _ in "ab"])
    )
    pairs = data.draw(st.permutations(range(len(lengths) // 2)))
    ends = data.draw(st.sets(st.integers(1, len(pairs))).map(lambda found: sorted(found | {len(pairs)})))
    parts = [
        [row for pair in pairs[start:stop] for row in (2 * pair, 2 * pair + 1)]
        for start, stop in zip([0, *ends], ends, strict=False)
    ]
    scores, columns = columns_of(lengths, seed)
    whole = added_up(LOSSES[name], scores, columns, [list(range(len(lengths)))])
    cut = added_up(LOSSES[name], scores, columns, parts)
    assert cut[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-12)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-12, atol=1e-14)
    assert whole[1].abs().max() > 0 or name in ("hinge", "ppo")  # which clip
