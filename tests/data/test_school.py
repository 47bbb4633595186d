"""ILEA School from small .mat files of the same format, against plain NumPy."""

import numpy as np
import pytest
import scipy.io
import torch

from fedmtl.data import FederatedDataset, load_data, read_school
from fedmtl.errors import DataError

from .rows import client_rows

PUPILS = (12, 7, 20, 2)


def schools(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """X as small integers of several dtypes, with a column that is constant everywhere and one constant in school 1."""
    rng = np.random.default_rng(seed)
    x = [np.column_stack([np.ones(n), rng.integers(0, 90, (n, 3))]) for n in PUPILS]
    x[1][:, 2] = 41
    kinds = (np.uint8, np.int16, np.float64, np.uint8)
    return [v.astype(k) for v, k in zip(x, kinds, strict=True)], [
        rng.integers(1, 71, (n, 1)) for n in PUPILS
    ]


def cells(values: list) -> np.ndarray:
    out = np.empty((1, len(values)), dtype=object)
    for i, value in enumerate(values):
        out[0, i] = value
    return out


def write(path, x, y, **more):
    scipy.io.savemat(path, {"X": cells(x), "Y": cells(y), **more})
    return path


def side(data: FederatedDataset, client: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = client_rows(data.side(name), client)
    return x.numpy(), y.numpy()


def test_schools_become_clients_and_no_pupil_is_lost(tmp_path):
    x, y = schools()
    write(tmp_path / "school.mat", x, y)
    data = load_data("school", root=tmp_path)
    assert data.fingerprint() == read_school(str(tmp_path / "school.mat")).fingerprint()
    assert data.ids == ("school-0", "school-1", "school-2", "school-3")
    assert load_data("school", root=tmp_path, min_examples=10).ids == ("school-0", "school-2")
    assert (data.spec.shape, data.classes, data.train.x.dtype, data.train.y.dtype, data.notes) == (
        (4,), None, torch.float32, torch.float32, ()
    )  # fmt: skip
    for i, n in enumerate(PUPILS):
        (a, s), (b, t) = side(data, i, "train"), side(data, i, "test")
        assert len(t) == max(1, round(0.3 * n))
        got = np.column_stack([np.concatenate([a, b]), np.concatenate([s, t])])
        expected = np.column_stack([x[i], y[i]]).astype(np.float64)
        np.testing.assert_array_equal(got[np.lexsort(got.T)], expected[np.lexsort(expected.T)])


def test_unit_targets_and_standardized_features_are_those_of_numpy(tmp_path):
    file = write(tmp_path / "s.mat", *schools())
    raw = read_school(file, seed=3)
    data = read_school(file, standardize="client", targets="unit", seed=3)
    for i in range(len(PUPILS)):
        (a, s), (b, t) = side(raw, i, "train"), side(raw, i, "test")
        mean, std = a.astype(np.float64).mean(0), a.astype(np.float64).std(0)
        std[std == 0] = 1.0
        for name, values, scores in (("train", a, s), ("test", b, t)):
            got_x, got_y = side(data, i, name)
            np.testing.assert_allclose(got_x, (values - mean) / std, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(got_y, (scores - 1) / 69, rtol=1e-6)
    assert data.train.x.isfinite().all()


def test_rows_of_unit_length_and_centred_targets(tmp_path):
    file = write(tmp_path / "s.mat", *schools())
    base = read_school(file, standardize="client", targets="unit", seed=3)
    data = read_school(file, standardize="client", targets="centred", unit_rows=True, seed=3)
    for i in range(len(PUPILS)):
        own = side(base, i, "train")[1].astype(np.float64).mean()
        for name in ("train", "test"):
            (x, y), (got_x, got_y) = side(base, i, name), side(data, i, name)
            np.testing.assert_allclose(got_y, y - own, atol=1e-6)
            norm = np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
            np.testing.assert_allclose(got_x * np.where(norm > 0, norm, 0), x, rtol=3e-6, atol=1e-6)
            lengths = np.linalg.norm(got_x.astype(np.float64), axis=1)
            assert ((lengths == 0) | ((lengths <= 1) & (lengths >= 1 - 2.0**-19))).all()
            assert (lengths == 0).tolist() == (norm[:, 0] == 0).tolist()
    assert len(data.notes) == 2
    assert "training mean and standard deviation" in data.notes[0]
    assert data.subset(["school-2"]).notes == data.to("cpu").notes == data.notes
    assert "own training mean" in data.notes[1]
    assert read_school(file, unit_rows=True).notes == ()


def test_a_test_row_does_not_move_the_standardization(tmp_path):
    x, y = schools()
    first = read_school(write(tmp_path / "a.mat", x, y), standardize="client")
    held = side(read_school(tmp_path / "a.mat"), 2, "test")[0]
    changed = x[2].copy()
    changed[(changed == held[0]).all(1)] += 1000
    second = read_school(
        write(tmp_path / "b.mat", [x[0], x[1], changed, x[3]], y), standardize="client"
    )
    assert torch.equal(first.train.x, second.train.x)
    assert not torch.equal(first.test.x, second.test.x)


BAD = {
    "schools": (lambda x, y: (x, y[:3]), r"X or Y is missing or has no cell for a school"),
    "none": (lambda x, y: ([], []), r"there are no clients"),
    "text": (lambda x, y: ([np.array(["ab"]), *x[1:]], y), r"school-0, field 'X' holds .*ab.*; accepted: numbers"),
    "NaN": (lambda x, y: ([*x[:2], x[2] * np.nan, x[3]], y), r"'school-2', example 0, field 'x' holds nan; every"),
    "score": (lambda x, y: (x, [y[0] * 0 + 71, *y[1:]]), r"school-0, row 0: Y holds 71; a score must be from 1 to 70"),
    "low score": (lambda x, y: (x, [y[0] * 0, *y[1:]]), r"school-0, row 0: Y holds 0; a score must be from 1 to 70"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_cells_have_a_clear_error(tmp_path, case):
    change, message = BAD[case]
    file = write(tmp_path / "ilea.mat", *change(*schools()))
    with pytest.raises(DataError, match=rf"ilea\.mat.*{message}"):
        read_school(file)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"school\.mat cannot be read .*it may be missing"):
        read_school(tmp_path)
    file = write(tmp_path / "cut.mat", *schools())
    whole = file.read_bytes()
    for size in (0, 60, 200, len(whole) // 2):
        file.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"cut\.mat cannot be read as a MATLAB file"):
            read_school(file)
    header = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM"
    (tmp_path / "new.mat").write_bytes(header + bytes(512))
    with pytest.raises(DataError, match=r"new\.mat cannot be read .*-v7"):
        read_school(tmp_path / "new.mat")
    scipy.io.savemat(tmp_path / "lack.mat", {"X": cells([np.ones((3, 2))])})
    with pytest.raises(DataError, match=r"lack\.mat: X or Y is missing"):
        read_school(tmp_path / "lack.mat")
