"""Data on a GPU."""

import pytest
import torch

from fedmtl.data import Affine, FederatedDataset


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_data_on_a_device_equal_data_on_the_host() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = {}
    for name, size in (("ann", 5), ("bob", 9), ("eve", 17)):
        x = torch.randint(0, 256, (size, 3), generator=generator, dtype=torch.uint8)
        rows[name] = (x, torch.randint(0, 4, (size,), generator=generator))
    data = FederatedDataset.from_tensors(rows, transform=Affine(1 / 255))
    index = torch.arange(len(data.train)).view(1, -1)
    moved = data.to("cuda")
    assert moved.keys.device.type == moved.train.counts.device.type == "cpu"
    assert moved.fingerprint() == data.fingerprint()
    expected = data.gather("train", index)
    results = (moved.gather("train", index.cuda()), data.gather("train", index, device="cuda"))
    for result in results:
        for a, b in zip(result, expected, strict=True):
            assert a.device.type == "cuda"
            torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=1e-7)
