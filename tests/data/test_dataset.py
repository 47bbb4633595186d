"""The dataset type against slow loops, and its errors."""

import dataclasses
import hashlib
import math
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.sparse
import torch

from fedmtl import MPMTL, FedAvg, models
from fedmtl.data import Affine, Cast, DataSpec, Domain, Examples, FederatedDataset, from_partition
from fedmtl.errors import ConfigError, DataError
from fedmtl.privacy import RecordPrivacy
from fedmtl.random import id_key
from fedmtl.trainer.scored_models import place_of
from tests import small

from .rows import client_rows, rows_of


def ragged(sizes=(5, 9, 2, 17), shape=(3,), classes=4, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    clients = {}
    for i, size in enumerate(sizes):
        x = torch.randint(0, 256, (size, *shape), generator=generator).to(dtype)
        clients[f"c{i}"] = (x, torch.randint(0, classes, (size,), generator=generator))
    return clients


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.99])
def test_the_split_has_the_asked_share_and_at_least_one_example_on_either_side(fraction):
    sizes = (2, 3, 10, 101)
    data = FederatedDataset.from_tensors(ragged(sizes), test_fraction=fraction)
    expected = [min(max(round(fraction * size), 1), size - 1) for size in sizes]
    assert data.test.counts.tolist() == expected
    assert (data.train.counts + data.test.counts).tolist() == list(sizes)


def test_the_split_does_not_depend_on_the_order_or_the_presence_of_other_clients():
    clients = ragged()
    data = FederatedDataset.from_tensors(clients, seed=3)
    shuffled = FederatedDataset.from_tensors(dict(reversed(clients.items())), seed=3)
    alone = FederatedDataset.from_tensors({"c3": clients["c3"]}, seed=3, classes=data.classes)
    assert shuffled.ids != data.ids
    assert shuffled.subset(data.ids).fingerprint() == data.fingerprint()
    assert alone.fingerprint() == data.subset(["c3"]).fingerprint()


def test_another_seed_is_another_split_and_the_draw_is_uniform():
    x, y = torch.arange(10.0)[:, None], torch.zeros(10, dtype=torch.int64)
    held = torch.zeros(10)
    for seed in range(500):
        test = FederatedDataset.from_tensors({"a": (x, y)}, seed=seed, test_fraction=0.3).test
        held[test.x[:, 0].long()] += 1
    assert held.sum() == 1500
    # each example is held out with probability .3: 150 expected, deviation sqrt(500 * .3 * .7) = 10.2
    assert (held - 150).abs().max() < 4 * 10.2


@pytest.mark.parametrize("shape", [(3,), (1, 4, 4), ()])
@pytest.mark.parametrize("index_shape", [(7,), (2, 5), (2, 3, 4), (0,)])
def test_gather_equals_a_loop(shape, index_shape):
    data = FederatedDataset.from_tensors(
        ragged(shape=shape), classes=4, transform=Affine(0.5, -1.0)
    )
    index = torch.randint(
        0, len(data.train), index_shape, generator=torch.Generator().manual_seed(1)
    )
    x, y = data.gather("train", index)
    assert x.shape == (*index_shape, *shape)
    assert y.shape == index_shape
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    for place in np.ndindex(*index_shape):
        torch.testing.assert_close(x[place], data.train.x[index[place]] * 0.5 - 1.0)
        assert y[place] == data.train.y[index[place]]


def test_gather_casts_floating_targets_with_the_features():
    clients = {"a": (torch.rand(4, 2), torch.rand(4, 3)), "b": (torch.rand(5, 2), torch.rand(5, 3))}
    data = FederatedDataset.from_tensors(clients)
    x, y = data.gather("test", torch.tensor([[0, 1]]), dtype=torch.float64)
    assert (x.dtype, y.dtype, y.shape) == (torch.float64, torch.float64, (1, 2, 3))
    assert data.classes is None


def test_spec_is_the_shape_after_the_transform():
    @dataclass(frozen=True)
    class Flat:
        def __call__(self, x, dtype):
            return x.flatten(1).to(dtype)

    data = FederatedDataset.from_tensors(ragged(shape=(2, 4)), classes=7, transform=Flat())
    assert data.spec == DataSpec(shape=(8,), classes=7, clients=4)
    assert data.gather("train", torch.zeros(2, 3, dtype=torch.int64))[0].shape == (2, 3, 8)


def test_keys_are_the_ids_keys_and_counts_the_offsets_differences():
    data = FederatedDataset.from_tensors(ragged())
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in data.ids]
    assert data.keys.tolist() == [int.from_bytes(one, "little", signed=True) for one in digests]
    assert data.keys.tolist() == [id_key(name) for name in data.ids]
    assert data.train.counts.tolist() == [
        len(client_rows(data.train, i)[0]) for i in range(len(data))
    ]
    assert len(data) == 4


def test_whole_numbers_as_ids_are_texts_everywhere():
    rows = {"7": (X, Y), "0": (X + 1, Y)}
    data, expected = (
        FederatedDataset.from_tensors(one, test=dict.fromkeys(one, (X, Y)))
        for one in ({np.int64(7): (X, Y), 0: (X + 1, Y)}, rows)
    )
    assert data.ids == ("7", "0")
    assert data.fingerprint() == expected.fingerprint()
    assert from_partition(X, Y, {3: [0, 1], 1: [2, 3]}).ids == ("3", "1")
    assert data.subset([0]).ids == data.subset(["0"]).ids == ("0",)
    privacy = RecordPrivacy(clip_norm=1.0, epsilon={7: 2.0, 0: 3.0})
    assert privacy.budgets(data.ids) == (2.0, 3.0)
    assert place_of(0, data.ids) == place_of("0", data.ids) == 1
    with pytest.raises(ConfigError, match="There is no client 3"):
        place_of(3, data.ids)


def test_subset_by_id_keeps_the_given_order():
    data = FederatedDataset.from_tensors(ragged())
    part = data.subset(["c3", "c0"])
    assert part.ids == ("c3", "c0")
    for i, original in enumerate((3, 0)):
        for side in ("train", "test"):
            ours, theirs = client_rows(part.side(side), i), client_rows(data.side(side), original)
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
    with pytest.raises(ConfigError, match="side is 'valid'; accepted: 'train', 'test'"):
        data.side("valid")
    with pytest.raises(DataError, match=r"there is no client 'c9'; the ids are 'c0' \.\. 'c3'"):
        data.subset(["c9"])
    with pytest.raises(DataError, match="there is no client '3'"):
        data.subset([3])
    with pytest.raises(DataError, match="client 'c1' occurs twice"):
        data.subset(["c1", "c1"])


def test_sparse_features_equal_dense_ones():
    rng = np.random.default_rng(0)
    clients, dense = {}, {}
    for i, size in enumerate((5, 8, 3)):
        x = scipy.sparse.random(size, 30, 0.2, format="lil", dtype=np.float32, random_state=i)
        x[0] = 0  # a row without any entry
        x = x.tocsr()
        y = rng.integers(0, 3, size)
        clients[f"c{i}"], dense[f"c{i}"] = (x, y), (x.toarray(), y)
    data = FederatedDataset.from_tensors(clients, classes=3)
    twin = FederatedDataset.from_tensors(dense, classes=3)
    assert data.train.x.layout == torch.sparse_csr
    for ours, theirs in (
        (data, twin),
        (data.take_clients(torch.tensor([2, 0])), twin.take_clients(torch.tensor([2, 0]))),
    ):
        for side in ("train", "test"):
            index = torch.arange(len(ours.side(side))).flip(0).repeat(2).view(2, -1)
            for some in (index, index[:, :0]):
                for a, b in zip(ours.gather(side, some), theirs.gather(side, some), strict=True):
                    assert torch.equal(a, b)


def test_the_fingerprint_tells_values_ids_classes_and_transform_apart_and_nothing_else():
    def make(**changes):
        clients = ragged()
        clients.update(changes.pop("clients", {}))
        return FederatedDataset.from_tensors(clients, **{"classes": 4, **changes})

    data = make()
    assert data.fingerprint() == make(name="other name").fingerprint()
    assert len(data.fingerprint()) == 32
    x, y = ragged()["c1"]
    nudged = x.clone()
    nudged[0, 0] += 1
    others = [
        make(clients={"c1": (nudged, y)}),
        make(clients={"c1": (x, (y + 1) % 4)}),
        make(clients={"c9": (x, y)}),
        make(classes=5),
        make(transform=Affine(2.0)),
        make(seed=1),
        FederatedDataset.from_tensors(
            {k: (v[0].double(), v[1]) for k, v in ragged().items()}, classes=4
        ),
    ]
    assert len({data.fingerprint(), *(other.fingerprint() for other in others)}) == 1 + len(others)


def test_the_fingerprint_does_not_depend_on_the_size_of_its_chunks(monkeypatch):
    whole = FederatedDataset.from_tensors(ragged()).fingerprint()
    monkeypatch.setattr("fedmtl.data.checks._CHUNK_BYTES", 16)
    assert FederatedDataset.from_tensors(ragged()).fingerprint() == whole


def test_data_that_torch_saved_are_the_same_from_memory_and_from_disk(tmp_path):
    drawn = [scipy.sparse.random(6, 20, 0.3, "csr", np.float32, random_state=i) for i in range(3)]
    sparse = {f"c{i}": (x, np.arange(6) % 2) for i, x in enumerate(drawn)}
    bfloat16 = {k: (x.to(torch.bfloat16), y.float()) for k, (x, y) in ragged().items()}
    images = FederatedDataset.from_tensors(
        ragged(dtype=torch.uint8, shape=(1, 2, 2)), transform=Affine(1 / 255)
    )
    for data in (images, *map(FederatedDataset.from_tensors, (sparse, bfloat16))):
        torch.save(data, tmp_path / "data.pt")
        index = torch.randint(0, len(data.train), (3, 4))
        for mapped in (False, True):
            again = torch.load(tmp_path / "data.pt", weights_only=False, mmap=mapped)
            assert (again.ids, again.spec, again.fingerprint()) == (
                data.ids,
                data.spec,
                data.fingerprint(),
            )
            for a, b in zip(again.gather("train", index), data.gather("train", index), strict=True):
                assert torch.equal(a, b)


X, Y = torch.rand(4, 3), torch.tensor([0, 1, 2, 1])


def bad(x=X, y=Y, **options):
    return {"clients": {"a": (X, Y), "b": (x, y)}, **options}


def with_value(value):
    x = X.clone()
    x[2, 1] = value
    return x


BAD = {
    "lengths": (
        bad(X[:3]),
        r"client 'b': field 'x' has 3 examples and field 'y' has 4.*same number",
    ),
    "nan": (
        bad(with_value(float("nan"))),
        r"client 'b', example 2, field 'x' holds nan.*finite number",
    ),
    "too large a label": (
        bad(classes=2),
        r"client 'a', example 2, field 'y' holds 2; with 2 .* be in 0\.\.1",
    ),
    "negative label": (
        bad(y=torch.tensor([0, -1, 0, 0]), classes=3),
        r"example 1, field 'y' holds -1; with 3",
    ),
    "negative label, inferred": (
        bad(y=torch.tensor([0, -1, 0, 0])),
        r"example 1, field 'y' holds -1; labels must be",
    ),
    "fractional label": (
        {"clients": {"b": (X, Y / 2)}, "classes": 3},
        r"example 1, field 'y' holds 0\.5; class",
    ),
    "nan target": (
        {"clients": {"b": (X, torch.where(Y > 1, torch.nan, Y))}},
        r"example 2, field 'y' holds nan",
    ),
    "classes": (bad(classes=0), r"classes is 0; it must be a whole number of at least 1, or None"),
    "empty client": (
        bad(X[:0], Y[:0]),
        r"client 'b' has no examples; every client needs at least 1\.",
    ),
    "one example": (
        {"clients": {"a": (X[:1], Y[:1]), "b": (X[:1], Y[:1])}},
        r"no client has 2 examples, one to train",
    ),
    "no clients": ({"clients": {}}, r"there are no clients; at least one is needed"),
    "id": (
        {"clients": {7.5: (X, Y)}},
        r"client id 7.5 is of type float; ids must be texts or whole numbers",
    ),
    "true": ({"clients": {True: (X, Y)}}, r"client id True is of type bool"),
    "half of a character": (
        {"clients": {"a\ud800": (X, Y)}},
        r"client id 'a\\ud800' holds half of a character, which no file can store",
    ),
    "same text": (
        {"clients": {1: (X, Y), "1": (X, Y)}},
        r"client '1' occurs twice, as a number and as a text",
    ),
    "shape": (
        bad(X[:, :2]),
        r"client 'b': field 'x' is torch.float32 \(2,\), but torch.float32 \(3,\) of client 'a'",
    ),
    "text": (bad(np.array([["u"] * 3] * 4)), r"client 'b', field 'x' holds .*; accepted: numbers"),
    "ragged rows": (
        bad([[1.0], [1.0, 2.0]]),
        r"client 'b', field 'x' holds .*; .* rows of one shape",
    ),
    "not a pair": ({"clients": {"a": X}}, r"client 'a': its value must be a pair \(x, y\)"),
    "scalar": (
        bad(torch.tensor(1.0)),
        r"client 'b': fields 'x' and 'y' must have one row an example",
    ),
    "no test": (bad(test={}), r"test names no clients; at least one client needs test examples"),
    "empty test": (
        bad(test={"b": (X[:0], Y[:0])}, classes=3),
        r"no client has both training and test examples; acc",
    ),
    "empty unseen test": (
        bad(test={"z": (X[:0], Y[:0])}, classes=3),
        r"no client has both training and test exam",
    ),
    "test label": (
        bad(test={"b": (X, Y + 7)}, classes=3),
        r"\(test\): client 'b', example 0, field 'y' holds 7",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_has_a_clear_error(case):
    options, message = BAD[case]
    with pytest.raises(DataError, match=rf"^wards.*{message}"):
        FederatedDataset.from_tensors(name="wards", **options)


def test_a_client_with_test_examples_only_is_left_out_unless_the_examples_are_divided_anew(caplog):
    rows, test = {"a": (X, Y)}, dict.fromkeys("abc", (X + 1, Y))
    data = FederatedDataset.from_tensors(rows, test=test)
    assert (data.ids, data.train.counts.tolist(), data.test.counts.tolist()) == (("a",), [4], [4])
    assert [line[:60] for line in caplog.messages] == [
        "data: clients left out (a private count): 2, with test examp"
    ]
    anew = FederatedDataset.from_tensors(rows, test=test, test_fraction=0.25)
    assert (anew.ids, anew.train.counts.tolist(), anew.test.counts.tolist()) == (
        ("a", "b", "c"),
        [6, 3, 3],
        [2, 1, 1],
    )
    assert rows_of(anew, 0) == sorted(
        (*x, int(y)) for x, y in zip([*X.tolist(), *(X + 1).tolist()], [*Y, *Y], strict=True)
    )


def test_drawn_clients_that_have_no_test_examples_are_refused_and_others_are_scored():
    rows, scored = dict.fromkeys("abcdef", (X, Y)), set()
    for seed in range(8):
        options = {"draw": 3, "seed": seed}
        ids = FederatedDataset.from_tensors(rows, **options).ids
        scored.add("c" in ids)
        if "c" in ids:
            data = FederatedDataset.from_tensors(rows, test={"c": (X, Y)}, **options)
            assert (data.ids, data.test.counts.tolist()) == (
                ids,
                [4 * (client == "c") for client in ids],
            )
        else:
            with pytest.raises(
                DataError, match=r"^data: none of the 3 clients that were drawn has test"
            ):
                FederatedDataset.from_tensors(rows, test={"c": (X, Y)}, **options)
    assert scored == {False, True}


@pytest.mark.parametrize("fraction", [0, 1, 1.5, float("nan"), "half", True])
def test_an_impossible_test_fraction_is_refused(fraction):
    with pytest.raises(
        ConfigError, match=r"test_fraction is .* it must be a number above 0 and below 1"
    ):
        FederatedDataset.from_tensors(bad()["clients"], test_fraction=fraction)


@pytest.mark.parametrize("algorithm", [FedAvg(), MPMTL(feature_norm=None)])
def test_a_run_whose_clients_all_train_refuses_one_without_training_examples(algorithm):
    train, test = (
        Examples(X, Y.float(), torch.tensor(offsets)) for offsets in ([0, 4, 4], [0, 2, 4])
    )
    with pytest.raises(
        ConfigError,
        match=rf"d: client 'b' has no training examples; {algorithm.name} needs them of",
    ):
        small.trainer(
            algorithm=algorithm,
            data=FederatedDataset(train, test, ("a", "b"), name="d"),
            model=models.linear_regression(bias=False),
        ).fit()


def test_the_constructor_checks_what_it_is_given():
    side = Examples(X, Y, torch.tensor([0, 2, 4]))
    assert len(FederatedDataset(side, side, ("a", "b"), classes=3)) == 2
    FederatedDataset(side, Examples(X, Y, torch.tensor([0, 4, 4])), ("a", "b"), classes=3, name="d")
    with pytest.raises(DataError, match=r"d: client 'a' occurs twice; ids must be distinct"):
        FederatedDataset(side, side, ("a", "a"), classes=3, name="d")
    with pytest.raises(DataError, match=r"examples of 2 clients, but 3 ids"):
        FederatedDataset(side, side, ("a", "b", "c"), classes=3)
    with pytest.raises(
        DataError, match=r"field 'y' has dtype torch.int64 and classes is None \(regression\)"
    ):
        FederatedDataset(side, side, ("a", "b"))
    with pytest.raises(
        DataError,
        match=r"\(test\): field 'x' is .*float64.*, but .*float32.* in train; they must agree",
    ):
        FederatedDataset(side, Examples(X.double(), Y, side.offsets), ("a", "b"), classes=3)
    with pytest.raises(DataError, match="it must be a frozen dataclass with __call__"):
        FederatedDataset(side, side, ("a", "b"), transform=lambda x, dtype: x, classes=3)


@pytest.mark.parametrize(
    ("x", "y", "offsets", "message"),
    [
        (X, Y, [0, 3], "'offsets' must ascend from 0 to the number of examples, 4"),
        (X, Y, [0, 3, 2, 4], "'offsets' must ascend"),
        (X, Y, [1, 4], "'offsets' must ascend"),
        (
            X.to(torch.complex64),
            Y,
            [0, 4],
            "field 'x' has dtype torch.complex64; accepted: real numbers",
        ),
        (X.to_sparse(), Y, [0, 4], "layout torch.sparse_coo; accepted: dense or sparse CSR"),
    ],
)
def test_examples_are_consistent(x, y, offsets, message):
    with pytest.raises(DataError, match=message):
        Examples(x, y, torch.tensor(offsets))


def test_nan_in_sparse_features_is_located():
    x = scipy.sparse.csr_array(np.array([[0, 1.0], [0, 0], [0, float("nan")], [1.0, 0]]))
    with pytest.raises(DataError, match="client 'a', example 2, field 'x' holds nan"):
        FederatedDataset.from_tensors({"a": (x, Y)}, classes=3)


def test_inferred_classes_count_labels_of_both_sides():
    assert FederatedDataset.from_tensors({"a": (X, Y)}).classes == 3
    assert FederatedDataset.from_tensors({"a": (X, Y)}, test={"a": (X, Y + 1)}).classes == 4
    floats = FederatedDataset.from_tensors({"a": (X, Y.float())}, classes=3)
    assert floats.train.y.dtype == torch.int64
    whole = FederatedDataset.from_tensors({"a": (X, Y)}, classes=None)
    assert whole.train.y.dtype == torch.float32


def with_public(bound: float = 2.0) -> FederatedDataset:
    generator = torch.Generator().manual_seed(1)

    def examples(*counts: int) -> Examples:
        total = sum(counts)
        offsets = torch.tensor([0, *counts]).cumsum(0)
        return Examples(
            torch.rand(total, 3, generator=generator),
            torch.rand(total, generator=generator),
            offsets,
        )

    return FederatedDataset(
        examples(2, 3),
        examples(1, 2),
        ("a", "b"),
        public=examples(5),
        domain=Domain(bound, 1.5, 1.0),
    )


def test_public_examples_and_the_domain_stay_with_the_data_and_are_in_the_fingerprint(tmp_path):
    data = with_public()
    torch.save(data, tmp_path / "saved")
    again = torch.load(tmp_path / "saved", weights_only=False)
    for other in (again, data.subset(["b"]), data.to("cpu")):
        assert other.domain == Domain(2.0, 1.5, 1.0)
        assert torch.equal(other.public.x, data.public.x)
        assert torch.equal(other.public.y, data.public.y)
    assert again.fingerprint() == data.fingerprint() == with_public().fingerprint()

    moved = Examples(data.public.x + 1, data.public.y, data.public.offsets)
    others = [
        with_public(2.5),
        dataclasses.replace(data, public=moved),
        dataclasses.replace(data, public=None),
        dataclasses.replace(data, domain=None),
    ]
    assert len({one.fingerprint() for one in (data, *others)}) == 5
    wide = Examples(torch.rand(4, 7), torch.rand(4), torch.tensor([0, 4]))
    with pytest.raises(
        DataError, match=r"\(public\): field 'x' is torch.float32 \(7,\), but torch.float32 \(3,\)"
    ):
        dataclasses.replace(data, public=wide)


def test_a_label_that_is_no_class_is_refused_by_row_and_not_by_the_allocator():
    rows = {"a": (np.zeros((4, 2)), [0, 1, 2, 10**12]), "b": (np.zeros((4, 2)), [0, 1, 2, 1])}
    said = r"data: client 'a', example 3, field 'y' holds 10{12}; as many .* classes=K \(for regression"
    with pytest.raises(DataError, match=said):
        FederatedDataset.from_tensors(rows)
    with pytest.raises(DataError, match=said):
        FederatedDataset.from_tensors(rows, test=rows)


@pytest.mark.parametrize("shape", [(3, 4, 4), (4, 4)])
@pytest.mark.parametrize("given", [False, True])
def test_images_of_bytes_are_scaled_wherever_they_come_from(shape, given):
    x = torch.arange(5 * math.prod(shape)).reshape(5, *shape).to(torch.uint8)
    rows = {"a": (x, torch.zeros(5)), "b": (x, torch.zeros(5))}
    data = FederatedDataset.from_tensors(rows, test=rows if given else None, classes=None)
    assert data.transform == Affine(scale=1 / 255)
    assert data.domain.l2 == math.sqrt(math.prod(shape))
    kept = FederatedDataset.from_tensors(
        rows, test=rows if given else None, classes=None, transform=Cast()
    )
    assert (kept.transform, kept.domain) == (Cast(), None)
    plain = FederatedDataset.from_tensors({"a": (x.flatten(1), torch.zeros(5))}, classes=None)
    assert (plain.transform, plain.domain) == (Cast(), None)  # numbers in a row are no image


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        ("anna ", True),
        ("\ufeffanna", True),
        ("an\u200bna", True),
        ("an\nna", True),
        ("\uff41nna", True),  # a wide letter
        ("Anna", False),
        ("an na", False),
        ("\u0430nna", False),  # a letter of another alphabet
    ],
)
def test_ids_that_look_the_same_are_told(other, alike, caplog):
    FederatedDataset.from_tensors({"anna": (X, Y), other: (X, Y)}, classes=3)
    told = [line for line in caplog.messages if "look the same" in line]
    assert len(told) == alike
    if alike:
        assert f"the clients 'anna' and {other!r}" in told[0]
