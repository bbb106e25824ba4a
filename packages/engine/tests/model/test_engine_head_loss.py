"""A token-local loss is made by the head, with its gradient, from one pass over the logits."""

from functools import partial

import pytest
import torch

import rl_csrc
from rl_csrc.cpu import kernels as cpu_head
from rl_engine import EngineConfig, LoraConfig, OptimizerConfig, ParallelConfig, check, create_engine
from rl_engine.backends.fsdp import FsdpBackend
from rl_engine.layers import logprobs
from rl_engine.losses import DistillLoss, DpoLoss, sft_loss, token_local, token_mean, token_values
from rl_engine.model.module_engine import Capabilities
from rl_engine.testing import ragged_batch, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("head_loss") / "model")


def batch():
    g = torch.Generator().manual_seed(0)
    draw = lambda size: torch.randint(4, 70, (size,), generator=g).tolist()  # noqa: E731
    lengths = [3, 20, 1, 33, 12, 40]
    rows = ragged_batch([draw(5) for _ in lengths], [draw(size) for size in lengths])
    rows["loss_mask"].values()[::3] = 0
    return rows


def with_entropy(output, rows):
    """A loss of log-probs and entropies that is linear in neither."""
    mask = token_values(rows, "loss_mask", output.logprobs)
    loss = token_mean(output.logprobs.square() - 0.1 * output.entropy.square(), mask, output)
    return loss, {"entropy": token_mean(output.entropy.detach(), mask, output)}


def step(folder, loss, backend="fsdp", **changes):
    config = EngineConfig(model_path=str(folder), optimizer=OptimizerConfig(lr=1e-2), **changes)
    engine = create_engine(backend, config)
    engine.initialize()
    output = engine.forward_backward_batch(batch(), loss)
    norm = engine.optimizer_step()
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.close()
    return output.metrics, norm, output.columns["logprobs"].values(), weights


@pytest.fixture
def calls(monkeypatch):
    """The calls of the op, whose logits are kept for 32 tokens at a time."""
    seen = []
    monkeypatch.setattr(cpu_head, "KEPT_BYTES", 0)

    def count(*arguments, **options):
        seen.append(options)
        return rl_csrc.linear_loss(*arguments, **options)

    monkeypatch.setattr(logprobs, "linear_loss", count)
    return seen


CASES = {
    "float32": {},
    "float64": {"precision": "float64"},
    "bfloat16": {"precision": "bfloat16"},
    "another temperature": {"temperature": 0.7},
    "recomputed layers": {"activation_checkpointing": True},
    "an adapter": {"lora": LoraConfig(rank=4)},
    "several micro-batches": {"max_tokens_per_gpu": 50},
    "rows that share prompts": {"prefix_sharing": True},
    "torchtitan": {"backend": "torchtitan"},
    "megatron": {"backend": "megatron"},
}


@pytest.mark.promise("The head makes token-local losses with their gradient, in three products for four")
@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_it_steps_as_log_probs_and_then_the_loss(folder, calls, case):
    found = step(folder, sft_loss, **CASES[case])
    assert calls
    num_calls = len(calls)
    wanted = step(folder, lambda output, rows: sft_loss(output, rows), **CASES[case])  # which declares nothing
    assert len(calls) == num_calls
    loose = {"rtol": 2e-2, "atol": 2e-3} if case == "bfloat16" else {"rtol": 1e-4, "atol": 1e-6}
    assert found[0] == pytest.approx(wanted[0], rel=loose["rtol"])
    assert found[1] == pytest.approx(wanted[1], rel=loose["rtol"])
    torch.testing.assert_close(found[2], wanted[2], **loose)
    moved = {"rtol": 1e-4, "atol": 1e-4} if case != "bfloat16" else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found[3], wanted[3], **moved)


@pytest.mark.process
def test_entropies_take_their_gradient_along(folder, calls):
    found = step(folder, token_local(partial(with_entropy)), precision="float64", entropy=True)
    assert calls
    wanted = step(folder, with_entropy, precision="float64", entropy=True)
    assert found[0] == pytest.approx(wanted[0], rel=1e-9)
    assert found[1] == pytest.approx(wanted[1], rel=1e-9)
    torch.testing.assert_close(found[3], wanted[3], rtol=1e-9, atol=1e-9)


@pytest.mark.process
def test_extra_head_outputs_leave_the_loss_to_its_function(folder, calls):
    for changes in ({"num_candidates": 2}, {"sum_pi_squared": True}):
        step(folder, sft_loss, **changes)
    assert not calls


def test_a_forward_pass_alone_takes_the_other_way(folder, calls):
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder)))
    engine.initialize()
    engine.forward_backward_batch(batch(), sft_loss, forward_only=True)
    engine.close()
    assert not calls


def test_losses_say_whether_they_are_token_local():
    assert sft_loss.is_token_local
    assert DistillLoss(kind="reverse").is_token_local
    assert not DistillLoss(kind="forward").is_token_local
    assert not getattr(DpoLoss(), "is_token_local", False)


@pytest.mark.process
def test_check_says_who_makes_the_loss(folder):
    def said(**changes):
        return check("fsdp", EngineConfig(model_path=str(folder), **changes), 2).get("loss_in_head")

    assert said() == "yes, of token-local losses"
    assert said(head="value").startswith("no: head is value")
    assert said(num_candidates=2).startswith("no: num_candidates is 2")
    assert said(parallel=ParallelConfig(sp=2)).startswith("no: parallel.sp is 2")
    assert said(optimizer=None) is None


def test_a_backend_that_makes_whole_logits_says_so(folder, monkeypatch):
    monkeypatch.setattr(FsdpBackend, "capabilities", Capabilities(has_loss_in_head=False))
    found = check("fsdp", EngineConfig(model_path=str(folder)), 2)
    assert found["loss_in_head"] == "no: the backend's models make whole logits"
