"""MovieLens: ratings of films, one client a user, with item features by alternating least squares.

The recommendation task of Bellet, Guerraoui, Taziki, Tommasi: "Personalized and private peer-to-peer machine
learning", AISTATS 2018, section 5.2: user i predicts the rating of item j as theta_i . phi_j, with features phi_j in
R^20 that are known to all. A row of the dataset is (x, y) = (phi_j, centred rating): a linear regression without bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from ..._check import given, positive, positive_int
from ...errors import ConfigError, DataError
from ...graphs import Graph, knn_cosine
from ...random import derive_key, keyed_bits
from ..checks import check_fraction, say_left_out
from ..dataset import FederatedDataset
from ..examples import Domain, Examples
from ..loaders import data_of, reader
from ..rows import offsets_of
from ..split import client_keys, split_rows
from .als import als_features
from .bounded_rows import SHRINK, clip_rows, with_intercept
from .movielens_files import RATINGS, Ratings, read_ratings

USER_CENTRE = (
    "the mean of each user's own training ratings was removed from them without noise: replacing one rating moves "
    "every residual of its user, which no clipping of single records bounds"
)
LEARNED_FEATURES = (
    "the item features were learned by alternating least squares from the training ratings of these users, without "
    "noise: they are in every model, and no epsilon covers them"
)


@dataclass(frozen=True, eq=False)
class MovieLens:
    """Ratings as a dataset, and what it was made of.

    Attributes:
        data: one client a user, ids ``user-1``, ...; its ``notes`` name what is outside of every epsilon, and its
            ``domain`` bounds the catalogue, not a user's own rows.
        features: of all items, float32 (items, p), with a last column ``constant`` where the centre is public; the
            first p entries of an item that no user rated in training are 0.
        items: int64 (items,), the items' numbers in the file.
        train_item: int64, the item (a row of ``features``) of every training row.
        test_item: likewise of every test row.
        train_rating: float64, the rating of every training row as it is in the file.
    """

    data: FederatedDataset
    features: Tensor
    items: Tensor
    train_item: Tensor
    test_item: Tensor
    train_rating: Tensor

    def training_ratings(self) -> csr_array:
        """Return (users, items) float64: the ratings of the training side, as in the file; for the similarity of
        users."""
        offsets = self.data.train.offsets.numpy()
        stored = (self.train_rating.numpy(), self.train_item.numpy(), offsets)
        return csr_array(stored, shape=(len(self.data), len(self.items)))


def movielens_users(
    root: str | Path,
    *,
    features: int = 20,
    reg: float = 0.5,
    sweeps: int = 20,
    centre: float | Literal["user"] = "user",
    constant: float = 1.0,
    public_users: int = 0,
    feature_norm: float | None = None,
    test_fraction: float = 0.2,
    min_examples: int = 2,
    seed: int = 0,
) -> MovieLens:
    """Read ``u.data`` or ``ratings.csv`` (also .gz, or in the .zip they come in) and learn item features.

    Item features are those of :func:`~fedmtl.data.readers.als.als_features` on ratings less their user's mean, of the
    training ratings of all users or of the public users. An item that none of these ratings is about has the features
    0, so that its prediction is the user's mean (with a public centre: the centre plus the user's own constant).

    Args:
        root: the file, or its folder.
        features: p of the learned features.
        reg: ridge of the factorization, on ratings less their user's mean.
        sweeps: of the factorization.
        centre: ``"user"``: targets are ratings less the mean of the user's own training ratings, which is outside of
            every guarantee, as ``notes`` says. A number such as 3.5: a public centre instead; then rows have one more
            feature, ``constant``, by which a user's level is learned.
        constant: value of that feature; a larger one lets levels differ more between neighbours, and moves them
            faster, and is part of every row's norm.
        public_users: so many users are taken as public: they are no clients, all their ratings fit the features, and
            no training rating of a client does. Which users is fixed by their numbers. 0: the training ratings of the
            clients fit the features, which is outside of every guarantee, as ``notes`` says.
        feature_norm: a public bound on ``||phi||_2`` without the constant: longer features are scaled down; None: none
            are, and the domain has the largest norm of the catalogue.
        test_fraction: share of a user's ratings held out for test.
        min_examples: users with fewer ratings are left out.
        seed: of the split, keyed by the user's id, and of the factorization's start.

    Returns:
        Features (p,), or (p + 1,) with a public centre, and targets, float32. Users are in the order of their numbers,
        a user's rows in the order of the items' numbers.

    Raises:
        DataError: an unreadable or malformed file; the message names the line and the field. No user with enough
            ratings.
        ConfigError: an impossible setting.
    """
    where = "movielens"
    positive_int(where, features=features, sweeps=sweeps, min_examples=min_examples)
    positive(where, reg=reg, constant=constant, **given(feature_norm=feature_norm))
    check_fraction(test_fraction)
    if centre != "user":
        _check_centre(centre)
    items, train, test, public = _read(root, public_users, test_fraction, min_examples, seed)
    if public is not None:
        source = public.centred()
        note = (
            f"{public_users} users are taken as public and are no clients: their ratings fitted the item features, "
            "and no epsilon covers them"
        )
    else:
        source, note = train.centred(), LEARNED_FEATURES
    ratings, phi = source.matrix(len(items)), np.zeros((len(items), features))
    own = np.arange(len(items)) if public is None else np.unique(public.item)  # which items clients rated is private
    phi[own] = als_features(ratings[:, own], features, reg=reg, sweeps=sweeps, seed=seed)
    phi = clip_rows(phi, l2=feature_norm)
    notes = [note, "the number of ratings of each user is public"]
    if centre == "user":
        means = train.means()
        y_train, y_test = train.rating - means[train.user], test.rating - means[test.user]
        target = RATINGS[1] - RATINGS[0]
        notes.append(USER_CENTRE)
    else:
        y_train, y_test = train.rating - centre, test.rating - centre
        target = max(RATINGS[1] - centre, centre - RATINGS[0])
    wide = phi.astype(np.float64)
    l1, l2 = (float(np.linalg.norm(wide, ord=order, axis=1).max()) / SHRINK for order in (1, 2))
    if centre != "user":
        phi = with_intercept(phi)
        phi[:, -1] = constant
        l1, l2 = l1 + constant, float(np.hypot(l2, constant))
    table = torch.from_numpy(phi)
    sides = [
        Examples(table[part.item], torch.from_numpy(y.astype(np.float32)), torch.from_numpy(part.offsets))
        for part, y in ((train, y_train), (test, y_test))
    ]
    domain = Domain(l1, l2, float(target))
    data = FederatedDataset(sides[0], sides[1], train.ids, classes=None, name=where, notes=tuple(notes), domain=domain)
    return MovieLens(
        data,
        table,
        torch.from_numpy(items),
        torch.from_numpy(train.item),
        torch.from_numpy(test.item),
        torch.from_numpy(train.rating),
    )


read_movielens = reader("movielens")(data_of(movielens_users))


@dataclass(frozen=True)
class RatingsGraph:
    """The paper's graph of users, as a setting: the k nearest by cosine similarity of their training ratings.

    An item that a user did not rate counts as 0. The graph is made of the ratings without noise: no epsilon covers it.

    Args:
        root: of the data, and
        test_fraction, min_examples, public_users, seed: likewise; they must be those of :func:`movielens_users`.
        k: neighbours of each user.
        centred: compare ratings less their user's mean instead of the ratings themselves.
    """

    root: str | Path
    k: int = 10
    test_fraction: float = 0.2
    min_examples: int = 2
    public_users: int = 0
    seed: int = 0
    centred: bool = False
    from_data = True

    def __post_init__(self) -> None:
        positive_int(self, k=self.k, min_examples=self.min_examples)
        check_fraction(self.test_fraction)

    def build(self, data: FederatedDataset) -> Graph:
        """Return the graph of the users of ``data``; see :func:`~fedmtl.graphs.knn_cosine`.

        Raises:
            ConfigError: ``data`` were read with other settings, or a user without a direction.
        """
        items, train, _, _ = _read(self.root, self.public_users, self.test_fraction, self.min_examples, self.seed)
        counts = np.diff(train.offsets)
        if train.ids != data.ids or not np.array_equal(counts, data.train.counts.numpy()):
            raise ConfigError(
                f"RatingsGraph: {data.name} has {len(data):,} clients with {len(data.train):,} training examples, and "
                f"the graph's settings give {len(train.ids):,} with {len(train.item):,}; give the settings of the data."
            )
        return knn_cosine((train.centred() if self.centred else train).matrix(len(items)), self.k, ids=train.ids)


@dataclass(frozen=True, eq=False)
class _Users:
    """Ratings in the order of users and items.

    Attributes:
        ids: of the users.
        item: int64 (N,), positions of items.
        rating: float64 (N,).
        offsets: int64 (users + 1,).
    """

    ids: tuple[str, ...]
    item: np.ndarray
    rating: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, ratings: Ratings, item: np.ndarray, used: np.ndarray, least: int) -> _Users:
        """Return the ratings of the rows ``used``, of users with ``least`` of them; ``item`` has a position a row."""
        rows = np.flatnonzero(used)
        users, counts = np.unique(ratings.user[rows], return_counts=True)
        if not (counts >= least).any():
            raise DataError(f"{ratings.file}: no user has {least} or more ratings (min_examples).")
        say_left_out(int((counts < least).sum()), str(ratings.file), f"fewer than {least} ratings (min_examples)")
        rows = rows[np.isin(ratings.user[rows], users[counts >= least])]
        rows = rows[np.lexsort((item[rows], ratings.user[rows]))]
        offsets = np.concatenate([[0], np.cumsum(counts[counts >= least])]).astype(np.int64)
        ids = tuple(f"user-{user}" for user in users[counts >= least])
        return cls(ids, item[rows], ratings.rating[rows], offsets)

    @property
    def user(self) -> np.ndarray:
        """Return the user of every rating, int64 (N,)."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def means(self) -> np.ndarray:
        """Return (users,) mean rating."""
        return np.bincount(self.user, self.rating, len(self.offsets) - 1) / np.diff(self.offsets)

    def centred(self) -> _Users:
        """Return ratings less their user's mean."""
        return _Users(self.ids, self.item, self.rating - self.means()[self.user], self.offsets)

    def matrix(self, items: int) -> csr_array:
        """Return (users, items) float64."""
        return csr_array((self.rating, self.item, self.offsets), shape=(len(self.ids), items))

    def split(self, test_fraction: float, seed: int) -> tuple[_Users, _Users]:
        """Return the training and the test part."""
        offsets = torch.from_numpy(self.offsets)
        parts = split_rows(offsets, self.ids, test_fraction=test_fraction, seed=seed, where="movielens")
        user, sides = self.user, []
        for rows in (part.numpy() for part in parts):
            counts = torch.from_numpy(np.bincount(user[rows], minlength=len(self.ids)))
            sides.append(_Users(self.ids, self.item[rows], self.rating[rows], offsets_of(counts).numpy()))
        return sides[0], sides[1]


def _read(
    root: str | Path, public_users: int, test_fraction: float, min_examples: int, seed: int
) -> tuple[np.ndarray, _Users, _Users, _Users | None]:
    """Return the numbers of items (items,), the training and the test ratings of the clients, and those of the public
    users."""
    if isinstance(public_users, bool) or public_users != 0:
        positive_int("movielens", public_users=public_users)
    ratings = read_ratings(root)
    items, item = np.unique(ratings.item, return_inverse=True)
    public = _public_rows(ratings, public_users)
    clients = _Users.of(ratings, item, ~public, min_examples)
    return items, *clients.split(test_fraction, seed), _Users.of(ratings, item, public, 1) if public_users else None


def _public_rows(ratings: Ratings, count: int) -> np.ndarray:
    """Return which rows are of public users, bool (N,): users are ordered by a hash of their numbers."""
    users = np.unique(ratings.user)
    if count >= len(users):
        raise ConfigError(
            f"movielens.public_users is {count:,}, but there are {len(users):,} users; some must remain as clients."
        )
    keys = client_keys([f"user-{user}" for user in users])
    score = keyed_bits(derive_key(0, "movielens/public"), keys, 0, torch.zeros(len(keys), dtype=torch.int64))
    return np.isin(ratings.user, users[np.argsort(score.numpy(), kind="stable")[:count]])


def _check_centre(centre: float) -> None:
    low, high = RATINGS
    if isinstance(centre, (bool, str)) or not low <= centre <= high:
        raise ConfigError(
            f"movielens.centre is {centre!r}; accepted: 'user', or a public number from {low:g} to {high:g}."
        )
