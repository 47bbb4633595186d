"""MovieLens from small files of the original formats; centring, features and splits computed by hand."""

import gzip
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from fedmtl.data import RatingsGraph, load_data
from fedmtl.data.readers.als import als_features
from fedmtl.data.readers.movielens import (
    LEARNED_FEATURES,
    USER_CENTRE,
    read_movielens,
    read_ratings,
    user_ratings,
)
from fedmtl.errors import ConfigError, DataError

SMALL = {"features": 2, "sweeps": 5}


def rows(users=12, items=15, seed=0):
    """Lines (user, item, rating, timestamp) in random order; item 900 is rated once, by user 3."""
    rng = np.random.default_rng(seed)
    lines = []
    for user in rng.permutation(np.arange(users) * 7 + 3):
        for item in rng.choice(items, 6, replace=False):
            lines.append(
                (int(user), int(item) + 40, int(rng.integers(1, 6)), 880_000_000 + len(lines))
            )
    lines.append((3, 900, 2, 5))
    return [lines[i] for i in rng.permutation(len(lines))]


def write(path, lines, *, csv=False, mark="\t"):
    text = "userId,movieId,rating,timestamp\n" if csv else ""
    text += "".join(("," if csv else mark).join(map(str, line)) + "\n" for line in lines)
    path.write_text(text)
    return path


def test_all_formats_hold_the_same_ratings(tmp_path):
    lines = rows()
    plain = write(tmp_path / "u.data", lines)
    csv = write(tmp_path / "ratings.csv", lines, csv=True)
    dat = write(tmp_path / "ratings.dat", lines, mark="::")
    packed = tmp_path / "ratings.csv.gz"
    packed.write_bytes(gzip.compress(csv.read_bytes()))
    windows = tmp_path / "windows.csv"
    windows.write_bytes(b"\xef\xbb\xbf" + csv.read_bytes().replace(b"\n", b"\r\n"))
    for path in (plain, csv, dat, packed, windows, tmp_path):
        found = read_ratings(path)
        assert list(found.itertuples(index=False, name=None)) == [
            (user, item, float(rating)) for user, item, rating, _ in lines
        ]


GOOD = "1\t2\t3\t4\n1\t3\t4\t4\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no ratings"),
        ("userId,movieId,rating,timestamp\n", "holds no ratings"),
        (
            "user,movie,rating,time\n1,2,3,4\n",
            "the header is 'user,movie,rating,time'; accepted: userId,movieId",
        ),
        ("1,2,3,4\n", "row 0, column 'user' holds '1,2,3,4'; accepted: a whole number"),
        ("1\t2\t3\n", "row 0, column 'timestamp' is empty"),
        (GOOD + "1\t4\t5\t6\t7\n", "Expected 4 fields in line 3, saw 5"),
        (GOOD + "\n1\tx\t5\t6\n", "row 2, column 'item' holds 'x'; accepted: a whole number"),
        (
            GOOD + "-1\t4\t5\t6\n",
            "row 2, column 'user' holds -1; accepted: a whole number of at least 0",
        ),
        (GOOD + "1\t4\t6\t6\n", "row 2, column 'rating' holds 6; accepted: a number from 0.5 to 5"),
        (
            GOOD + "2\t3\t4\t4\n1\t2\t5\t9\n",
            "row 3, column 'item' holds 2; accepted: an item that the user has not",
        ),
    ],
)
def test_malformed_files_are_named_with_row_and_column(tmp_path, content, message):
    path = tmp_path / ("given.csv" if content.startswith("user") else "given")
    path.write_text(content)
    with pytest.raises(DataError, match="given") as error:
        read_ratings(path)
    assert message in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"nothing.data does not exist; give one of u\.data, "):
        read_ratings(tmp_path / "nothing.data")
    with pytest.raises(DataError, match=r"holds none of u.data"):
        read_ratings(tmp_path)
    plain = write(tmp_path / "plain", rows())
    cut = tmp_path / "u.data.gz"
    cut.write_bytes(gzip.compress(plain.read_bytes())[:-20])
    (tmp_path / "latin").write_bytes(b"1\t2\t\xff\t4\n")
    for name in ("u.data.gz", "latin"):
        with pytest.raises(DataError, match="cannot be read as ratings"):
            read_ratings(tmp_path / name)


def read(path, **options):
    """The data, the ratings, the items, the features of those that clients rated, and the training ratings."""
    data = read_movielens(path, **options)
    settings = {name: value for name, value in options.items() if name in ("seed", "public_users")}
    items, ratings, _ = user_ratings(path, **settings)
    features = torch.zeros(len(items), data.train.x.shape[1])
    for side in ("train", "test"):
        features[ratings.side(side).x] = data.side(side).x
    train = ratings.train
    matrix = csr_array(
        (train.y.numpy(), train.x.numpy(), train.offsets.numpy()), shape=(len(data), len(items))
    )
    return SimpleNamespace(
        data=data, ratings=ratings, items=items, features=features, matrix=matrix
    )


def by_user(given, side):
    """{(user, item): (x, y)} of a side."""
    part = given.data.side(side)
    item = given.items[given.ratings.side(side).x].tolist()
    owner = np.repeat(given.data.ids, part.counts.numpy())
    return {
        (int(u[5:]), i): (x, y)
        for u, i, x, y in zip(owner, item, part.x, part.y.tolist(), strict=True)
    }


def test_ratings_are_split_by_user_and_centred_by_their_training_mean(tmp_path):
    lines = rows()
    given = read(write(tmp_path / "u.data", lines), **SMALL)
    rating = {(user, item): value for user, item, value, _ in lines}
    train, test = by_user(given, "train"), by_user(given, "test")
    assert sorted(train.keys() | test.keys()) == sorted(rating)
    assert not train.keys() & test.keys()
    assert given.data.ids == tuple(f"user-{7 * i + 3}" for i in range(12))
    for user in range(3, 80, 7):
        own = [pair for pair in train if pair[0] == user]
        count = sum(pair[0] == user for pair in rating)
        assert count - len(own) == round(0.2 * count)
        mean = sum(rating[pair] for pair in own) / len(own)
        for side in (train, test):
            for pair in (p for p in side if p[0] == user):
                assert side[pair][1] == pytest.approx(rating[pair] - mean, abs=1e-6)
    assert given.data.notes[0] == LEARNED_FEATURES
    assert given.data.notes[-1] == USER_CENTRE
    raw = given.matrix.toarray()
    assert {
        (3 + 7 * int(i), int(given.items[j])): raw[i, j]
        for i, j in zip(*np.nonzero(raw), strict=True)
    } == {pair: rating[pair] for pair in train}
    assert given.data.domain.l2 >= given.data.train.x.norm(dim=1).max()
    assert given.data.domain.l1 >= given.data.train.x.abs().sum(1).max()


def test_features_are_those_of_the_training_side_and_zero_for_items_unseen_there(tmp_path):
    lines = rows()
    path = write(tmp_path / "u.data", lines)
    seed = next(s for s in range(50) if (3, 900) in by_user(read(path, seed=s, **SMALL), "test"))
    given = read(path, seed=seed, **SMALL)
    matrix = given.matrix
    means = np.array([matrix[[i]].data.mean() for i in range(12)])
    matrix.data = matrix.data - np.repeat(means, np.diff(matrix.indptr))
    expected = als_features(matrix, 2, sweeps=5, seed=seed)
    np.testing.assert_allclose(given.features.numpy(), expected, rtol=1e-6, atol=1e-7)
    x, y = by_user(given, "test")[3, 900]
    assert (x == 0).all()
    assert y == pytest.approx(2 - means[0], abs=1e-6)
    for side in ("train", "test"):
        for (_, item), (x, _) in by_user(given, side).items():
            assert torch.equal(x, given.features[given.items.tolist().index(item)])


def test_a_public_centre_has_a_constant_feature_and_no_note_of_means(tmp_path):
    lines = rows()
    path = write(tmp_path / "u.data", lines)
    given = read(path, centre=3.5, constant=2.0, **SMALL)
    rating = {(user, item): value for user, item, value, _ in lines}
    for pair, (x, y) in by_user(given, "train").items():
        assert y == pytest.approx(rating[pair] - 3.5)
        assert x[-1] == 2
    assert USER_CENTRE not in given.data.notes
    assert given.data.domain.target == 3
    plain = read(path, **SMALL)
    torch.testing.assert_close(given.features[:, :-1], plain.features)
    assert given.data.domain.l2 == pytest.approx((plain.data.domain.l2**2 + 4) ** 0.5)
    assert given.data.domain.l1 == pytest.approx(plain.data.domain.l1 + 2)


def test_with_public_users_no_rating_of_a_client_moves_the_features(tmp_path):
    lines = rows()
    given = read(write(tmp_path / "u.data", lines), public_users=4, centre=3, **SMALL)
    assert len(given.data) == 8
    clients = {int(name[5:]) for name in given.data.ids}
    other = [(u, i, 6 - r if u in clients else r, t) for u, i, r, t in lines]
    again = read(write(tmp_path / "other", other), public_users=4, centre=3, **SMALL)
    assert torch.equal(given.features, again.features)
    assert torch.equal(given.data.train.y, -again.data.train.y)
    assert "4 users are taken as public" in given.data.notes[0]
    before = [
        *lines,
        (min(clients), 1, 4, 0),
    ]  # an item before all others, which no public user rates
    more = read(write(tmp_path / "before", before), public_users=4, centre=3, **SMALL)
    assert more.items.tolist() == [1, *given.items.tolist()]
    assert torch.equal(more.features[1:], given.features)
    assert more.data.domain == given.data.domain
    other = [(u, i, r if u in clients else r % 5 + 1, t) for u, i, r, t in lines]
    changed = read(write(tmp_path / "third", other), public_users=4, centre=3, **SMALL)
    assert not torch.equal(given.features, changed.features)


def test_the_order_of_the_file_and_other_users_do_not_matter(tmp_path):
    lines = rows()
    given = read(write(tmp_path / "a", lines), **SMALL)
    assert (
        given.data.fingerprint()
        == read(write(tmp_path / "b", lines[::-1]), **SMALL).data.fingerprint()
    )
    fewer = read(write(tmp_path / "c", [line for line in lines if line[0] != 10]), **SMALL)
    mine = {pair for pair in by_user(given, "test") if pair[0] != 10}
    assert mine == set(by_user(fewer, "test"))
    assert len(read_movielens(tmp_path / "a", min_examples=7, **SMALL)) == 1  # only user 3 has 7


def test_by_name_and_impossible_settings(tmp_path):
    path = write(tmp_path / "u.data", rows())
    assert (
        load_data("movielens", root=path, **SMALL).fingerprint()
        == read_movielens(path, **SMALL).fingerprint()
    )
    for options, message in (
        (
            {"centre": "item"},
            "centre is 'item'; it must be a public number from 0.5 to 5, or 'user'",
        ),
        ({"centre": 7.0}, "read_movielens.centre is 7.0"),
        ({"public_users": 12}, "public_users is 12, but there are 12 users"),
        ({"public_users": -1}, "read_movielens.public_users is -1"),
        ({"constant": 0.0}, "read_movielens.constant is 0.0"),
        ({"features": 0}, "read_movielens.features is 0"),
        ({"test_fraction": 1.0}, "test_fraction"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_movielens(path, **options)
    with pytest.raises(DataError, match="no client has 20 or more examples"):
        read_movielens(path, min_examples=20)


def test_the_graph_joins_users_whose_training_ratings_are_alike(tmp_path):
    path = write(tmp_path / "u.data", rows(users=20, items=12))
    given = read(path, public_users=3, **SMALL)
    graph = RatingsGraph(path, k=4, public_users=3).build(given.data)
    ratings = given.matrix.toarray()
    unit = ratings / np.linalg.norm(ratings, axis=1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -2)
    expected = np.zeros((17, 17))
    for i in range(17):
        expected[i, np.argsort(-cosine[i])[:4]] = 1
    assert np.array_equal(graph.weights.toarray(), np.maximum(expected, expected.T))
    assert graph.ids == given.data.ids
    assert RatingsGraph.from_data
    for other in (RatingsGraph(path), RatingsGraph(path, public_users=3, test_fraction=0.4)):
        with pytest.raises(ConfigError, match="give the settings of the data"):
            other.build(given.data)
