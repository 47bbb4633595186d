import pytest
import torch

from fedmtl.data import rows


def test_ranges_are_the_concatenated_ranges():
    start, counts = torch.tensor([5, 0, 9, 2]), torch.tensor([2, 3, 0, 1])
    positions, parts = rows.ranges(start, counts)
    assert positions.tolist() == [5, 6, 0, 1, 2, 2]
    assert parts.tolist() == [0, 0, 1, 1, 1, 3]


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr])
def test_take_select_and_join_equal_dense_indexing(layout):
    dense = torch.randint(0, 3, (9, 4), generator=torch.Generator().manual_seed(0)).float()
    index = torch.tensor([8, 0, 0, 3])
    x = dense if layout == torch.strided else dense.to_sparse_csr()
    assert torch.equal(rows.take(x, index), dense[index])
    chosen, joined = rows.select(x, index), rows.join([x, x])
    assert chosen.layout == joined.layout == layout
    assert torch.equal(chosen.to_dense(), dense[index])
    assert torch.equal(joined.to_dense(), torch.cat([dense, dense]))
    assert rows.take(x, index[:0]).shape == (0, 4)


def test_offsets_begin_with_zero():
    assert rows.offsets_of(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]
