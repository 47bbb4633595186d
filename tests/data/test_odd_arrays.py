"""Arrays as other libraries make them: converted to the same numbers, or refused by client and type."""

import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from torch.utils.data import TensorDataset

from fedmtl.data import Dirichlet, Examples, FederatedDataset, from_partition
from fedmtl.data.arrays import as_tensor
from fedmtl.errors import DataError

X = np.array([[0.5, 2.0], [1.0, 0.0], [0.0, 3.0], [4.0, 6.5]])  # exact in 16 bits
WHOLE = np.array([[1, 2], [3, 0], [0, 5], [7, 100]])
T = torch.tensor(X)


def mapped(tmp_path):
    np.save(tmp_path / "x.npy", X)
    return np.load(tmp_path / "x.npy", mmap_mode="r")


def csr_with_gradient(_):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return T.to_sparse_csr().requires_grad_()


CONVERTED = {
    "big-endian": (X.astype(">f4"), torch.float32),
    "big-endian doubles": (X.astype(">f8"), torch.float64),
    "big-endian whole": (WHOLE.astype(">i2"), torch.int16),
    "big-endian unsigned": (WHOLE.astype(">u4"), torch.int64),
    "half": (X.astype("f2"), torch.float16),
    "longdouble": (X.astype(np.longdouble), torch.float64),
    "uint8": (WHOLE.astype("u1"), torch.uint8),
    "uint16": (WHOLE.astype("u2") + np.uint16(60000), torch.int32),
    "uint32": (WHOLE.astype("u4") + np.uint32(4_000_000_000), torch.int64),
    "uint64": (WHOLE.astype("u8") + np.uint64(2**62), torch.int64),
    "bool": (X > 1, torch.bool),
    "objects": (X.astype(object), torch.float64),
    "whole objects": (WHOLE.astype(object), torch.int64),
    "objects of true and false": ((X > 1).astype(object), torch.bool),
    "decimals": ([[Decimal("0.5"), Fraction(1, 4)], [1, 2.0]], torch.float64),
    "rows as objects": (pd.Series([row.tolist() for row in X]).to_numpy(), torch.float64),
    "nothing masked": (np.ma.masked_equal(X, -9999), torch.float64),
    "columns first": (np.asfortranarray(X), torch.float64),
    "backwards": (X[::-1, ::-1], torch.float64),
    "every second": (np.repeat(X, 2, axis=1)[:, ::2], torch.float64),
    "broadcast": (np.broadcast_to(X[:1], (4, 2)), torch.float64),
    "memory-mapped": (mapped, torch.float64),
    "lists": (X.tolist(), torch.float64),
    "list of tensors": (list(T.requires_grad_(False).bfloat16()), torch.bfloat16),
    "frame": (pd.DataFrame(X), torch.float64),
    "frame of mixed kinds": (pd.DataFrame({"a": [1, 0], "b": [True, False]}), torch.int64),
    "nullable": (pd.DataFrame(WHOLE).astype("Int16"), torch.int64),
    "arrow": (pd.DataFrame(X).astype("float64[pyarrow]"), torch.float64),
    "requires grad": (T.clone().requires_grad_(), torch.float64),
    "parameter": (torch.nn.Parameter(T.clone()), torch.float64),
    "bfloat16": (T.bfloat16(), torch.bfloat16),
    "float8": (T.to(torch.float8_e4m3fn), torch.float32),
    "torch uint16": (torch.tensor(WHOLE).to(torch.uint16), torch.int32),
    "torch uint64": (torch.tensor(WHOLE).to(torch.uint64), torch.int64),
    "transposed": (T.T.contiguous().T, torch.float64),
    "conjugate": (torch.imag(torch.complex(T, -T).conj()), torch.float64),
    "sparse": (sp.coo_array(X), torch.float64),
    "sparse unsigned": (sp.csc_array(WHOLE.astype("u2")), torch.int32),
    "sparse with a gradient": (csr_with_gradient, torch.float64),
}


def plain(value) -> np.ndarray:
    """The numbers of a value by another way than the code's: an object each."""
    if sp.issparse(value):
        value = value.toarray()
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.to_dense().tolist() if value.layout != torch.strided else value.tolist()
    if isinstance(value, list) and isinstance(value[0], torch.Tensor):
        value = [part.tolist() for part in value]
    return np.array([[float(v) for v in row] for row in np.asarray(value).tolist()])


@pytest.mark.parametrize("case", CONVERTED)
def test_odd_arrays_keep_their_numbers(case, tmp_path):
    value, kind = CONVERTED[case]
    if callable(value):
        value = value(tmp_path)
    made = as_tensor(value, "client 'a'", "x")
    assert made.dtype == kind
    assert not made.requires_grad
    dense = made.to_dense() if made.layout != torch.strided else made
    np.testing.assert_array_equal(dense.double().numpy(), plain(value))
    data = FederatedDataset.from_tensors({"a": (value, [0, 1] * (len(dense) // 2))}, classes=2)
    x, _ = data.gather("train", torch.arange(len(data.train)))
    assert {tuple(row) for row in x.tolist()} <= {tuple(row) for row in dense.float().tolist()}
    data.fingerprint()


def test_a_copy_is_taken(tmp_path):
    value = X.copy()
    made = as_tensor(value, "client 'a'", "x")
    value[:] = 7
    assert made.tolist() == X.tolist()


REFUSED = {
    "masked": (
        np.ma.masked_equal(X, 3.0),
        r"is masked in example 2; accepted: a number for every value",
    ),
    "masked rows": ([np.ma.masked_equal(row, 3.0) for row in X], r"is masked in example 2"),
    "missing": (pd.DataFrame(WHOLE).astype("Int64").where(WHOLE != 5), r"is empty in example 2"),
    "None": (
        [[1.0, 2.0], [None, 1.0]],
        r"is empty in example 1; accepted: a number for every value",
    ),
    "NA": (np.array([[1, 2], [3, pd.NA]], dtype=object), r"is empty in example 1"),
    "nothing": (None, r"is empty; accepted"),
    "beyond int64": (
        np.array([[1], [2**63]], "u8"),
        r"the whole number 9223372036854775808 \(uint64\); .* below 2\^63",
    ),
    "torch beyond int64": (
        torch.tensor([[-1]]).view(torch.uint64),
        r"2\^63 or more \(torch\.uint64\)",
    ),
    "objects beyond int64": ([[1], [2**64]], r"holds a whole number beyond int64"),
    "beyond float64": (
        np.array([[np.longdouble(10) ** 400]]),
        r"beyond float64 \((longdouble|float128)\)",
    ),
    "complex": (X + 0j, r"holds complex numbers \(complex128\); accepted: real numbers"),
    "torch complex": (T + 0j, r"holds complex numbers \(torch\.complex128\)"),
    "sparse complex": (sp.csr_array(X + 0j), r"holds complex numbers"),
    "dates": (
        np.zeros((4, 1), "M8[D]"),
        r"holds dates \(datetime64\[D\]\); accepted: numbers, such as the days",
    ),
    "dates of pandas": (
        pd.Series([pd.Timestamp("2020-01-01", tz="UTC")] * 4),
        r"holds '2020-01-01.*a Timestamp",
    ),
    "spans": (np.zeros((4, 1), "m8[h]"), r"holds spans of time \(timedelta64\[h\]\)"),
    "texts": (np.array([["1", "2"]]), r"holds '1'; accepted: numbers"),
    "categories": (pd.Series(list("abab")).astype("category"), r"holds 'a' \(a str\) in example 0"),
    "fields": (np.zeros(4, [("a", "i4"), ("b", "f4")]), r"holds records of several fields"),
    "ragged": ([[1.0], [1.0, 2.0]], r"accepted: numbers, and rows of one shape"),
    "ragged objects": (np.array([[1.0], [1.0, 2.0]], dtype=object), r"rows of one shape"),
    "a set": ({1, 2}, r"holds a set; accepted"),
    "meta": (T.to("meta"), r"is on the meta device, which holds no numbers"),
    "coordinates": (T.to_sparse(), r"has the layout torch\.sparse_coo"),
    "compressed columns": (T.to_sparse_csc(), r"has the layout torch\.sparse_csc"),
}
if sp.coo_array(np.arange(4)).ndim == 1:  # SciPy before 1.13 makes it a row
    REFUSED["sparse of one dimension"] = (
        sp.coo_array(np.arange(4)),
        r"is sparse of shape \(4,\); accepted: one sparse row an",
    )


@pytest.mark.parametrize("case", REFUSED)
def test_odd_arrays_are_refused_by_client_and_type(case):
    value, message = REFUSED[case]
    with pytest.raises(DataError, match=rf"client 'ann',.*{message}"):
        FederatedDataset.from_tensors({"ann": (value, [0, 1] * 2)}, classes=2)


@pytest.mark.filterwarnings(
    "ignore:.*quantiz.*", "ignore:The PyTorch API of nested tensors", "ignore:.*deprecated.*"
)
def test_quantized_and_nested_tensors_are_refused():
    quantized = torch.quantize_per_tensor(T.float(), 0.5, 0, torch.quint8)
    nested = torch.nested.nested_tensor([T[0], T[1, :1]])  # jagged ones take long to import
    for value, message in (
        (quantized, r"is quantized \(torch\.quint8\)"),
        (nested, "is a nested tensor"),
    ):
        with pytest.raises(DataError, match=message):
            as_tensor(value, "client 'a'", "x")


def test_numbers_of_ml_dtypes_are_converted():
    other = pytest.importorskip("ml_dtypes")
    made = as_tensor(X.astype(other.bfloat16), "client 'a'", "x")
    assert (made.dtype, made.tolist()) == (torch.float32, X.tolist())
    assert as_tensor(np.array([1, -3]).astype(other.int4), "client 'a'", "y").tolist() == [1, -3]


LABELS = np.array([0, 1, 2, 1])


@pytest.mark.parametrize(
    "y",
    [
        LABELS.astype(">i8"),
        LABELS.astype("u8"),
        LABELS.astype("f2"),
        LABELS.astype(object),
        LABELS.astype(np.longdouble),
        pd.Series(LABELS, dtype="Int8"),
        pd.Series([2.0, 0, 1, 0])[::-1]
        .reset_index(drop=True)
        .replace({0.0: 1.0, 1.0: 0.0})
        .sort_index(),
        torch.tensor(LABELS).to(torch.uint16),
        torch.tensor(LABELS).bfloat16(),
        torch.tensor(LABELS).to(torch.float8_e5m2),
        torch.tensor(LABELS).float().requires_grad_(),
        LABELS.tolist(),
    ],
)
def test_labels_of_any_type_are_classes(y):
    data = FederatedDataset.from_tensors({"a": (X, y)}, classes=3)
    assert data.train.y.dtype == torch.int64
    assert sorted(data.train.y.tolist() + data.test.y.tolist()) == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("y", "classes", "message"),
    [
        (
            np.eye(3, dtype=int)[LABELS],
            3,
            r"holds labels of shape \(3,\); with 3 classes .* one-hot rows y\.argmax\(1\)",
        ),
        (np.eye(3, dtype="f4")[LABELS], 3, r"holds labels of shape \(3,\)"),
        (LABELS[:, None], 3, r"holds labels of shape \(1,\); .* of a column y\[:, 0\]"),
        (LABELS[:, None], "infer", r"holds labels of shape \(1,\)"),
        (pd.DataFrame({"y": LABELS}), 3, r"holds labels of shape \(1,\)"),
        (LABELS - 1, 3, r"example 0, field 'y' holds -1; with 3 classes a label must be in 0\.\.2"),
        (LABELS * 128, 256, r"example 2, field 'y' holds 256; with 256 classes"),
        (LABELS + 0.5, 3, r"example 0, field 'y' holds 0\.5; class labels must be whole"),
        (LABELS * 1e30, 3, r"holds .*; class labels must be whole"),
        (
            LABELS.astype("u8") + np.uint64(2**64 - 3),
            3,
            r"field 'y' holds the whole number .*uint64",
        ),
        (sp.csr_array(LABELS[:, None]), 3, r"field 'y' is sparse; accepted: dense"),
        (LABELS.astype(str), 3, r"field 'y' holds '0'; accepted: numbers"),
        (np.ma.masked_equal(LABELS, 2), 3, r"field 'y' is masked in example 2"),
        (pd.Series([0, 1, None, 1]), 3, r"field 'y' is empty in example 2"),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused(y, classes, message):
    with pytest.raises(DataError, match=rf"client 'ann'.*{message}"):
        FederatedDataset.from_tensors({"ann": (X, y)}, classes=classes)


def test_true_and_false_are_two_classes_and_columns_of_several_labels_stay():
    assert FederatedDataset.from_tensors({"a": (X, LABELS > 5)}).classes == 2
    data = FederatedDataset.from_tensors({"a": (X, np.eye(2, dtype=int)[LABELS % 2])}, classes=2)
    assert data.spec.labels == 2
    assert FederatedDataset.from_tensors(
        {"a": (X, LABELS[:, None] / 2)}, classes=None
    ).spec.targets == (1,)


def test_examples_and_datasets_refuse_the_same():
    offsets = torch.tensor([0, 4])
    made = Examples(T.clone().requires_grad_(), torch.tensor(LABELS), offsets)
    assert not made.x.requires_grad
    for x, y, message in (
        (T.to("meta"), torch.tensor(LABELS), "'x' is on the meta device"),
        (T.to(torch.float8_e4m3fn), torch.tensor(LABELS), "'x' has dtype torch.float8_e4m3fn"),
        (T, torch.tensor(X).to_sparse_csr(), "'y' has layout"),
    ):
        with pytest.raises(DataError, match=message):
            Examples(x, y, offsets)
    with pytest.raises(DataError, match=r"client 'a', example 0, field 'x' holds complex numbers"):
        FederatedDataset.from_tensors({"a": TensorDataset(T + 0j, torch.tensor(LABELS))})
    frame = pd.DataFrame(
        {"who": list("aabb"), "x": pd.array([1, 2, None, 4], "Int64"), "y": LABELS}
    )
    with pytest.raises(DataError, match=r"row 2, field 'x' is empty"):
        FederatedDataset.from_columns(frame, client="who", target="y", features="x")
    kinds = pd.DataFrame(
        {"who": list("aabb"), "x": 1.0, "y": pd.Series([True, 2**24 + 1, 0, 1], dtype=object)}
    )
    data = FederatedDataset.from_columns(
        kinds, client="who", target="y", features="x", classes=2**24 + 2
    )
    assert sorted(data.train.y.tolist() + data.test.y.tolist()) == [0, 1, 1, 2**24 + 1]


@pytest.mark.parametrize(
    ("part", "message"),
    [([0.0, 1.5], "is float64 of shape"), (np.array([True, False, True, False]), "is bool of shape"),
     ([[0, 1]], "is int64 of shape"), (np.array([2**64 - 1], "u8"), "whole number")],
)  # fmt: skip
def test_row_numbers_are_whole(part, message):
    with pytest.raises(DataError, match=rf"the part of client 'a'.*{message}"):
        from_partition(X, LABELS, {"a": part, "b": [3]}, classes=3)


def test_a_partition_deals_converted_labels():
    y = np.arange(40) % 2
    plain = from_partition(np.repeat(X, 10, 0), y, Dirichlet(2, 1.0), classes=2)
    for other in (
        y.astype(">i4"),
        y.astype(object),
        torch.tensor(y).float().requires_grad_(),
        torch.tensor(y).half(),
    ):
        made = from_partition(np.repeat(X, 10, 0), other, Dirichlet(2, 1.0), classes=2)
        assert made.fingerprint() == plain.fingerprint()
    with pytest.raises(DataError, match="is masked in example 1"):
        from_partition(np.repeat(X, 10, 0), np.ma.masked_equal(y, 1), Dirichlet(2, 1.0), classes=2)


def test_whole_features_beyond_int64_are_refused():
    from fedmtl.data import Integers

    with pytest.raises(
        DataError, match=r"client 'a', example 3, field 'x' holds .*whole number below 2\^63"
    ):
        FederatedDataset.from_tensors(
            {"a": ([[1.0], [2.0], [3.0], [1e30]], LABELS)}, classes=3, transform=Integers()
        )
