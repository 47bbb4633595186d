import pytest
import torch

from fedmtl.data import Affine, Cast


@pytest.mark.parametrize("stored", [torch.uint8, torch.int16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_affine_is_scale_times_x_plus_shift_and_leaves_x_alone(stored, dtype):
    x = torch.arange(12).view(3, 4).to(stored)
    before = x.clone()
    for transform in (Affine(-1 / 255, 1.0), Affine(2.0), Affine(1.0, 3.0), Affine()):
        out = transform(x, dtype)
        expected = before.double() * transform.scale + transform.shift
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(x, before)
    assert torch.equal(Cast()(x, dtype), before.to(dtype))
