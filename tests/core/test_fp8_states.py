"""States in float8: against a float64 reference that rounds by hand."""

import pytest
import torch

from draftsmith.core.fp8_states import FP8, decode, encode

pytestmark = pytest.mark.usefixtures("one_thread")


def states(tokens=50, layers=3, hidden=64, dtype=torch.bfloat16):
    """As a target's are: layers of different sizes, a huge activation in the first token."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(tokens, layers, hidden, generator=generator) * torch.tensor([3.0, 80.0, 80.0])[:layers, None]
    drawn[0, :, 7] = 9000.0
    return drawn.to(dtype)


def reference(rows_XH):
    """Codes' values and scales in float64: to the nearest multiple of 2^(e - 3), of two equally near the even one."""
    x = rows_XH.double()
    scales = x.abs().amax(-1) / 448
    scales[scales == 0] = 1
    y = x / scales[..., None]
    exponents = torch.frexp(y.abs())[1].clamp_min(-5) - 1  # of the leading digit; below 2^-6 numbers are subnormal
    steps = 2.0 ** (exponents.double() - 3)
    return torch.round(y / steps) * steps, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_codes_and_scales_are_the_references(dtype):
    given = states(dtype=dtype)
    codes, scales = encode(given)
    values, exact = reference(given)
    assert codes.dtype == FP8 and codes.shape == given.shape
    assert scales.dtype == torch.float32 and scales.shape == given.shape[:-1]
    torch.testing.assert_close(scales.double(), exact, rtol=2**-23, atol=0)
    # A quotient in float32 may fall on the other side of a tie: then codes differ by one step, and seldom.
    same = codes.double() == values
    assert same.double().mean() > 0.999
    torch.testing.assert_close(codes.double(), values, rtol=2**-3, atol=2**-9)


def test_a_round_trip_is_as_close_as_the_module_says():
    given = states()
    codes, scales = encode(given)
    back = decode(codes, scales)
    assert back.dtype == torch.bfloat16
    exact, scale = given.double(), scales.double()[..., None]
    error = (back.double() - exact).abs()
    # The code's rounding, and bfloat16's of the product.
    assert (error <= torch.maximum(exact.abs() * 2**-4, scale * 2**-10) + exact.abs() * 2**-7).all()
    norms = error.norm(dim=-1) / exact.norm(dim=-1)
    assert norms.max() < 0.05 and norms.mean() < 0.03


def test_decoding_rounds_the_product_once():
    codes, scales = encode(states())
    product = codes.double() * scales.double()[..., None]
    assert torch.equal(decode(codes, scales), product.float().to(torch.bfloat16))


def test_the_largest_number_of_a_row_comes_back_exactly_to_bfloat16():
    given = states()
    back = decode(*encode(given))
    largest = given.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(back.gather(-1, largest), given.gather(-1, largest), rtol=2**-8, atol=0)


def test_zeros_have_scale_one_and_stay_zero():
    given = states()
    given[3, 1] = 0
    codes, scales = encode(given)
    assert scales[3, 1] == 1 and (scales != 1).sum() == scales.numel() - 1
    assert not decode(codes, scales)[3, 1].any()


@pytest.mark.parametrize("size", [1e-41, 1.2e-38, 3e38])
def test_the_ends_of_bfloat16s_range_stay_finite(size):
    given = torch.full((2, 4), size).to(torch.bfloat16)
    back = decode(*encode(given))
    torch.testing.assert_close(back.double(), given.double(), rtol=2**-4, atol=2e-41)


def test_more_rows_than_are_held_at_once_and_none_at_all():
    given, chosen = states(tokens=10_000, layers=1, hidden=8), (0, 4095, 4096, 9999)
    codes, scales = encode(given)
    whole = [encode(given[i : i + 1]) for i in chosen]
    for i, (code, scale) in zip(chosen, whole, strict=True):
        assert torch.equal(codes[i].float(), code[0].float()) and torch.equal(scales[i], scale[0])
    codes, scales = encode(torch.empty(0, 3, 8, dtype=torch.bfloat16))
    assert codes.shape == (0, 3, 8) and scales.shape == (0, 3) and decode(codes, scales).shape == (0, 3, 8)
