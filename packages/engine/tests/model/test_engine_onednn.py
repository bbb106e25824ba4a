import pytest
import torch
from torch import nn

from rl_engine.layers.onednn_linear import use_onednn

TOKENS = 1100


def layers(inputs=256, outputs=300, *, bias=False, dtype=torch.float32):
    """A layer by oneDNN and a copy of it by torch."""
    torch.manual_seed(0)
    ours, plain = nn.Linear(inputs, outputs, bias=bias, dtype=dtype), nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    plain.load_state_dict(ours.state_dict())
    use_onednn(nn.Sequential(ours))
    return ours, plain


def differentiated(layer, x, weight):
    """Result of a layer, and the gradients of x and of its parameters that are trained."""
    x = x.detach().requires_grad_()
    out = layer(x)
    wanted = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), wanted)]


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_products_equal_those_in_float64(bias, is_trained):
    ours, plain = layers(bias=bias)
    ours.requires_grad_(is_trained)
    plain.double().requires_grad_(is_trained)
    x, weight = torch.randn(1, 256, TOKENS).transpose(1, 2), torch.randn(1, TOKENS, 300)  # columns are apart
    found = differentiated(ours, x, weight)
    assert len(found) == 2 + is_trained * (1 + bias)
    for got, want in zip(found, differentiated(plain, x.double(), weight.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-4)


def test_a_broadcast_gradient_is_taken():
    ours, plain = layers()
    x = torch.randn(TOKENS, 256)
    ours(x).sum().backward()
    plain.double()(x.double()).sum().backward()
    torch.testing.assert_close(ours.weight.grad.double(), plain.weight.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("tokens", "dtype"), [(8, torch.float32), (TOKENS, torch.bfloat16), (TOKENS, torch.float64)])
def test_small_and_other_products_are_torchs(tokens, dtype):
    ours, plain = layers(dtype=dtype)
    x, weight = torch.randn(tokens, 256, dtype=dtype), torch.randn(tokens, 300, dtype=dtype)
    for got, want in zip(differentiated(ours, x, weight), differentiated(plain, x, weight), strict=True):
        assert torch.equal(got, want)


def test_bits_do_not_depend_on_the_number_of_threads():
    (ours, _), x, weight = layers(), torch.randn(TOKENS, 256), torch.randn(TOKENS, 300)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(differentiated(ours, x, weight)[:2])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
