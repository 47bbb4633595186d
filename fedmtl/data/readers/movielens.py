"""MovieLens: ratings of films, one client a user, with item features by alternating least squares.

The recommendation task of Bellet, Guerraoui, Taziki, Tommasi: "Personalized and private
peer-to-peer machine learning", AISTATS 2018, section 5.2: user i predicts the rating of item j as
theta_i . phi_j, with features phi_j in R^20 that are known to all. A row of the dataset is (x, y) =
(phi_j, centred rating): a linear regression without bias.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from scipy.sparse import csr_array

from ..._check import Checked, Count, Fraction, Positive, Range, Whole, check_arguments
from ..._extras import pandas as pd
from ...errors import ConfigError, DataError
from ...graphs import Graph, knn_cosine
from ...random import derive_key
from ..assemble import sample, stack
from ..dataset import FederatedDataset
from ..examples import Domain, Examples
from ..loaders import reader, with_settings
from ..rows import by_number
from ..transforms import SHRINK
from .als import als_features
from .columns import Table
from .delimited import AS_WRITTEN
from .table_files import find_file, loaded
from .text_format import Format

FILES = ("u.data", "ratings.csv", "ratings.dat", "u.data.gz", "ratings.csv.gz")
RATINGS = (0.5, 5.0)
"""The public range of a rating."""
Rating = Annotated[
    float, Range(lambda v: RATINGS[0] <= v <= RATINGS[1], "a public number from 0.5 to 5")
]
HEADER = ("userId", "movieId", "rating", "timestamp")
_FIELDS = ("user", "item", "rating", "timestamp")

USER_CENTRE = (
    "the mean of each user's own training ratings was removed from them without noise: replacing "
    "one rating moves every residual of its user, which no clipping of single records bounds"
)
PUBLIC_USERS = (
    "{} users are taken as public and are no clients: their ratings fitted the item features, and "
    "no epsilon covers them"
)
LEARNED_FEATURES = (
    "the item features were learned by alternating least squares from the training ratings of "
    "these users, without noise: they are in every model, and no epsilon covers them"
)


@dataclass(frozen=True)
class MovieLensSettings:
    """Settings of :func:`~fedmtl.data.read_movielens`, which takes them as its arguments.

    Args:
        root: the file, or its folder.
        features: p of the learned features.
        reg: ridge of the factorization, on ratings less their user's mean.
        sweeps: of the factorization.
        centre: ``"user"``: targets are ratings less the mean of the user's own training ratings,
            which is outside of every guarantee, as ``notes`` says. A number such as 3.5: a public
            centre instead; then rows have one more feature, ``constant``, by which a user's level
            is learned.
        constant: value of that feature; a larger one lets levels differ more between neighbours,
            and moves them faster, and is part of every row's norm.
        public_users: so many users are taken as public: they are no clients, all their ratings fit
            the features, and no training rating of a client does. A draw keyed by their numbers
            chooses them. 0: the training ratings of the clients fit the features, which is outside
            of every guarantee, as ``notes`` says.
        test_fraction: share of a user's ratings held out for test.
        min_examples: users with fewer ratings are left out.
        seed: of the split, keyed by the user's id, and of the factorization's start.
    """

    root: str | Path
    _: KW_ONLY
    features: Count = 20
    reg: Positive = 0.5
    sweeps: Count = 20
    centre: Rating | Literal["user"] = "user"
    constant: Positive = 1.0
    public_users: Whole = 0
    test_fraction: Fraction = 0.2
    min_examples: Count = 2
    seed: int = 0


@reader("movielens")
@check_arguments
@with_settings(MovieLensSettings)
def read_movielens(settings: MovieLensSettings) -> FederatedDataset:
    """Reads ``u.data``, ``ratings.csv`` or ``ratings.dat`` (also .gz) and learns item features.

    Item features are those of :func:`~fedmtl.data.readers.als.als_features` on ratings less their
    user's mean: the training ratings of all users, or all ratings of the public users. An item
    without such a rating has the features 0. Its prediction is then the user's mean, or with a
    public centre the centre plus the user's own constant.

    Args:
        settings: the fields of :class:`~fedmtl.data.MovieLensSettings`, each an argument of its
            own: ``read_movielens("ml-100k", features=10)``.

    Returns:
        Features (p,), or (p + 1,) with a public centre, and targets, float32. Users are in the
        order of their numbers, a user's rows in the order of the items' numbers.

    Raises:
        DataError: an unreadable or malformed file; the message names the line and the field. No
            user with enough ratings.
        ConfigError: an impossible setting.

    Example:
        >>> from itertools import product
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedmtl.data import read_movielens
        >>> with TemporaryDirectory() as folder:
        ...     with Path(folder, "ratings.csv").open("w") as file:
        ...         print("userId,movieId,rating,timestamp", file=file)
        ...         for user, item in product((1, 2, 3), (1, 2, 3, 4, 5)):
        ...             print(user, item, 1 + user * item % 5, 0, sep=",", file=file)
        ...     data = read_movielens(folder, features=2)
        >>> data.ids, data.spec.shape
        (('user-1', 'user-2', 'user-3'), (2,))
    """
    features = settings.features
    centre = settings.centre
    seed = settings.seed
    items, ratings, public = user_ratings(
        settings.root, settings.public_users, settings.test_fraction, settings.min_examples, seed
    )
    source = ratings.train if public is None else public
    centred = _matrix(source, _centred(source, source), len(items))
    # an item without ratings predicts 0, the mean of the user
    phi = np.zeros((len(items), features), np.float32)
    # which items clients rated is private
    if public is None:
        own = np.arange(len(items))
    else:
        own = np.unique(public.x)
    phi[own] = als_features(
        centred[:, own], features, reg=settings.reg, sweeps=settings.sweeps, seed=seed
    )
    l1, l2 = (
        float(np.linalg.norm(phi.astype(float), ord=order, axis=1).max()) / SHRINK
        for order in (1, 2)
    )
    notes = [LEARNED_FEATURES]
    if public is not None:
        notes = [PUBLIC_USERS.format(settings.public_users)]
    notes.append("the number of ratings of each user is public")
    if centre == "user":
        notes.append(USER_CENTRE)
        target = RATINGS[1] - RATINGS[0]
    else:
        constant = settings.constant
        phi = np.column_stack([phi, np.full(len(phi), constant, np.float32)])
        l1 = l1 + constant
        # the constant is one more feature, at a right angle to the others
        l2 = float(np.hypot(l2, constant))
        # the farther end of the scale
        target = max(RATINGS[1] - centre, centre - RATINGS[0])
    sides = []
    for side in (ratings.train, ratings.test):
        if centre == "user":
            y = _centred(side, ratings.train)
        else:
            y = side.y.numpy() - centre
        sides.append(
            Examples(
                torch.from_numpy(phi)[side.x], torch.from_numpy(y.astype(np.float32)), side.offsets
            )
        )
    domain = Domain(l1, l2, float(target))
    return FederatedDataset(
        sides[0], sides[1], ratings.ids, name="movielens", notes=tuple(notes), domain=domain
    )


@dataclass(frozen=True)
class RatingsGraph(Checked):
    """The paper's graph of users, as a setting: the k nearest by cosine similarity of their
    training ratings.

    An item that a user did not rate counts as 0. The graph is made of the ratings without noise: no
    epsilon covers it.

    Args:
        root: of the data, and
        test_fraction, min_examples, public_users, seed: likewise; they must be those of
            :func:`read_movielens`.
        k: neighbours of each user.

    Example:
        >>> from itertools import product
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedmtl.data import RatingsGraph, read_movielens
        >>> with TemporaryDirectory() as folder:
        ...     with Path(folder, "ratings.csv").open("w") as file:
        ...         print("userId,movieId,rating,timestamp", file=file)
        ...         for user, item in product((1, 2, 3), (1, 2, 3, 4, 5)):
        ...             print(user, item, 1 + user * item % 5, 0, sep=",", file=file)
        ...     graph = RatingsGraph(root=folder, k=1).build(read_movielens(folder, features=2))
        >>> graph.ids
        ('user-1', 'user-2', 'user-3')
    """

    root: str | Path
    k: Count = 10
    test_fraction: Fraction = 0.2
    min_examples: Count = 2
    public_users: Whole = 0
    seed: int = 0
    from_data = True

    def build(self, data: FederatedDataset) -> Graph:
        """Returns the graph of the users of ``data``; see :func:`~fedmtl.graphs.knn_cosine`.

        Args:
            data: as :func:`read_movielens` read them, with the same settings.

        Raises:
            ConfigError: ``data`` were read with other settings, or a user without a direction.
        """
        settings = self.public_users, self.test_fraction, self.min_examples, self.seed
        items, ratings, _ = user_ratings(self.root, *settings)
        train = ratings.train
        # a graph of other training ratings would have used the test ratings of some user
        if ratings.ids != data.ids or not torch.equal(train.counts, data.train.counts):
            raise ConfigError(
                f"RatingsGraph: {data.name} has {len(data):,} clients with {len(data.train):,} "
                f"training examples, and the graph's settings give {len(ratings):,} with "
                f"{len(train):,}; give the settings of the data."
            )
        return knn_cosine(_matrix(train, train.y.numpy(), len(items)), self.k, ids=ratings.ids)


def _users(side: Examples) -> np.ndarray:
    """Returns the user of every rating, int64 (N,)."""
    return np.repeat(np.arange(len(side.counts)), side.counts.numpy())


def _centred(side: Examples, train: Examples) -> np.ndarray:
    """Returns ratings (N,) less the mean of their user's ratings in ``train``."""
    means = np.bincount(_users(train), train.y.numpy(), len(train.counts)) / train.counts.numpy()
    return side.y.numpy() - means[_users(side)]


def _matrix(side: Examples, values: np.ndarray, items: int) -> csr_array:
    """Returns values (N,) of ratings as a matrix (users, items) float64."""
    return csr_array(
        (values, side.x.numpy(), side.offsets.numpy()), shape=(len(side.counts), items)
    )


def user_ratings(
    root: str | Path,
    public_users: int = 0,
    test_fraction: float = 0.2,
    min_examples: int = 2,
    seed: int = 0,
) -> tuple[np.ndarray, FederatedDataset, Examples | None]:
    """Returns the numbers of items (items,), the ratings of the clients, and those of the public
    users.

    Ratings have x, the position of the item, and y float64 as in the file, in the order of items.
    """
    frame = read_ratings(root).sort_values(["user", "item"])
    items, place = np.unique(frame["item"], return_inverse=True)
    numbers, user = np.unique(frame["user"], return_inverse=True)
    if public_users >= len(numbers):
        raise ConfigError(
            f"movielens.public_users is {public_users:,}, but there are {len(numbers):,} users; "
            "some must remain as clients."
        )
    x = torch.from_numpy(place)
    y = torch.from_numpy(frame["rating"].to_numpy(copy=True))
    rated = by_number(user, [f"user-{number}" for number in numbers])
    pairs = {name: (x[rows], y[rows]) for name, rows in rated.items()}
    # seed 0: the public users may not change with the seed of a run, or each would be public in
    # some run
    public = sample(list(pairs), public_users, derive_key(0, "movielens/public"))
    clients = FederatedDataset.from_tensors(
        {name: pair for name, pair in pairs.items() if name not in public},
        test_fraction=test_fraction,
        seed=seed,
        min_examples=min_examples,
        classes=None,
        name="movielens",
        source=str(root),
    )
    return items, clients, stack(pairs, public) if public else None


def read_ratings(root: str | Path) -> pd.DataFrame:
    """Reads a rating file: columns user and item, int64, and rating, float64, in the order of the
    file.

    ``ratings.csv``: with commas, and the header ``userId,movieId,rating,timestamp``;
    ``ratings.dat``: user, item, rating, timestamp with ``::`` between them; any other name: with
    tabs between them, as in ``u.data``. Each may be compressed (.gz). Timestamps are checked and
    not returned.

    Args:
        root: the file, or its folder.

    Raises:
        DataError: no such file, or a malformed one; the message names the row and the column.
    """
    path = find_file(root, FILES)
    accepted = "a whole number of at least 0"
    if path.suffix == ".gz":
        kind = path.with_suffix("").suffix
    else:
        kind = path.suffix
    sep, engine = {".csv": (",", "c"), ".dat": ("::", "python")}.get(kind, ("\t", "c"))
    fields: dict[str, Any] = {"header": None, "names": _FIELDS}
    if kind == ".csv":
        fields = {"header": 0}
    options: dict[str, Any] = {
        "sep": sep,
        "engine": engine,
        "encoding": "utf-8-sig",
        **fields,
        **AS_WRITTEN,
    }
    frame = cast("pd.DataFrame", loaded(pd.read_csv, path, "ratings", **options))
    if kind == ".csv":
        if tuple(frame.columns) != HEADER:
            raise DataError(
                f"{path}: the header is {','.join(frame.columns)!r}; accepted: {','.join(HEADER)}."
            )
        frame.columns = pd.Index(_FIELDS)
    if frame.empty:
        raise DataError(f"{path} holds no ratings.")
    table = Table(frame, path, form=Format() if kind == ".csv" else None)
    for column in ("user", "item", "timestamp"):
        values = table.numbers(column, low=0, accepted=accepted)
        # float64 has no gaps between whole numbers below 2^53
        table.refuse((values != np.floor(values)) | (values >= 2.0**53), column, accepted)
    rating = table.numbers("rating", low=RATINGS[0], high=RATINGS[1])
    # the protected unit is a rating, and two of one item would be one cell of the matrix
    again = frame.duplicated(["user", "item"]).to_numpy()
    table.refuse(again, "item", "an item that the user has not rated in a row before")
    return frame[["user", "item"]].astype(np.int64).assign(rating=rating)
