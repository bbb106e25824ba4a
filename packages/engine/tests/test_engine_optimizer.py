import pytest
import torch

from rl_engine import BatchCounts, ConfigError, ModelOutput, NonFiniteError, OptimizerConfig, OptimizerKind
from rl_engine.losses import sft_loss
from rl_engine.optimizer import ClippedAdamW, clip_grad_norm, learning_rate, module_optimizer
from rl_engine.testing import ragged_batch


def test_the_schedule_warms_up_and_decays():
    config = OptimizerConfig(lr=2.0, warmup_steps=2, total_steps=6, min_lr_ratio=0.5)
    rates = [learning_rate(config, step) for step in range(9)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.8535533905932737, 1.5, 1.1464466094067263, 1.0, 1.0, 1.0])
    assert [learning_rate(OptimizerConfig(lr=3.0), step) for step in (0, 99)] == [3.0, 3.0]


def test_only_matrices_decay():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = ClippedAdamW([matrix, vector], OptimizerConfig(lr=0.1, weight_decay=0.5))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    assert vector.tolist() == [1, 1]


def test_the_first_step_moves_by_the_rate_against_the_sign():
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = ClippedAdamW([weight], OptimizerConfig(lr=0.1))
    weight.grad = torch.tensor([[4.0, -3.0], [2.0, 0.0]])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([[-0.1, 0.1], [-0.1, 0.0]]))


def test_muon_steps_matrices_by_svd_and_others_by_adamw():
    """The gradient 3 * I becomes I / |I|, then five times a polynomial; the update is scaled by 0.2 * sqrt(2)."""
    matrix, table = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.zeros(2, 2))
    config = OptimizerConfig(kind=OptimizerKind.MUON, lr=0.1, weight_decay=0.5, max_grad_norm=1e9)
    optimizer = module_optimizer([matrix, table], [matrix], config)
    matrix.grad, table.grad = 3 * torch.eye(2), torch.tensor([[4.0, -3.0], [2.0, -1.0]])
    assert optimizer.clip_and_step() == pytest.approx((2 * 9 + 16 + 9 + 4 + 1) ** 0.5)
    value = 0.5**0.5
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    want = 0.95 * torch.ones(2, 2) - 0.1 * 0.2 * 2**0.5 * value * torch.eye(2)
    torch.testing.assert_close(matrix.detach(), want, rtol=0, atol=1e-3)  # torch orthogonalises in bfloat16
    torch.testing.assert_close(table.detach(), torch.tensor([[-0.1, 0.1], [-0.1, 0.1]]), rtol=1e-5, atol=1e-6)
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}


def test_muons_momentum_is_refused_of_adamw():
    with pytest.raises(ConfigError, match=r"^optimizer.momentum is 0.9; it must be left out without kind=muon"):
        OptimizerConfig(momentum=0.9)
    with pytest.raises(ConfigError, match=r"^optimizer.kind is 'sgd'; allowed are adamw, muon"):
        OptimizerConfig(kind="sgd")


def test_clipping_is_global_and_returns_the_norm_before():
    one, two = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    one.grad, two.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_grad_norm([one, two], 1.0) == pytest.approx(5)
    assert (one.grad.item(), two.grad.item()) == pytest.approx((0.6, 0.8), rel=1e-5)
    assert clip_grad_norm([one, two], 2.0) == pytest.approx(1, rel=1e-5)
    assert one.grad.item() == pytest.approx(0.6, rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_norm_is_an_error_and_gradients_stay(bad):
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([bad, 5.0])
    with pytest.raises(NonFiniteError, match="the step was not taken"):
        clip_grad_norm([weight], 1.0)
    assert weight.grad[1] == 5


def test_sft_loss_is_a_share_of_the_global_mean():
    rows = ragged_batch([[1], [1]], [[2, 3], [4]], [[1, 0], [1]])
    output = ModelOutput(
        token_logprobs=torch.tensor([-0.5, -9.0, -1.5]),
        entropy=None,
        cu_seqlens=torch.tensor([0, 2, 3]),
        counts=BatchCounts(tokens=8.0, sequences=4.0),
    )
    loss, metrics = sft_loss(output, rows)
    assert loss.item() == 0.25
    assert metrics["accuracy"].item() == 0.125
    assert metrics["sequence_accuracy"].item() == 0.25  # the first row of four: its second token is masked


def test_a_sequence_is_right_only_if_all_asked_tokens_are():
    rows = ragged_batch([[1], [1], [1]], [[2, 3], [4, 5], [6]], [[1, 1], [1, 1], [0]])
    output = ModelOutput(
        token_logprobs=torch.tensor([-0.1, -0.1, -0.1, -9.0, -0.1]),
        entropy=None,
        cu_seqlens=torch.tensor([0, 2, 4, 5]),
        counts=BatchCounts(tokens=4.0, sequences=2.0),
    )
    assert sft_loss(output, rows)[1]["sequence_accuracy"].item() == 0.5
