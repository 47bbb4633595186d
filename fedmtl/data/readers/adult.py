"""Adult census income: whether a person earns more than 50,000 dollars a year, coded with public
constants only.

Categories and ranges are those that the data's documentation publishes (Becker, Kohavi: "Adult",
UCI Machine Learning Repository, 1996), so that nothing about the coding comes from the clients'
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..._check import one_of, positive, positive_int
from ..dataset import FederatedDataset
from ..examples import Domain
from ..loaders import reader, with_settings
from .bounded_rows import clip_rows, with_intercept
from .cells import codes
from .columns import Table
from .dealing import DealtTable, assemble, deal_table, texts_of
from .table_files import find_file
from .whitening import fit_whitening

FILES = ("adult.csv.gz", "adult.csv")
TARGET = "income"
UNKNOWN = "?"
INCOMES = {"<=50K": 0, ">50K": 1, "<=50K.": 0, ">50K.": 1}

RANGES = {
    "age": (17.0, 90.0),
    "educational-num": (1.0, 16.0),
    "capital-gain": (0.0, 99999.0),
    "capital-loss": (0.0, 4356.0),
    "hours-per-week": (1.0, 99.0),
}
"""Public ranges; a value outside counts as the nearer end."""
LOGARITHMIC = ("capital-gain", "capital-loss")
"""Columns coded by log(1 + value)."""

CATEGORIES = {
    "workclass": (
        "Private", "?", "Federal-gov", "Local-gov", "Never-worked", "Self-emp-inc",
        "Self-emp-not-inc", "State-gov",
        "Without-pay",
    ),
    "marital-status": (
        "Married-civ-spouse", "Divorced", "Married-AF-spouse", "Married-spouse-absent",
        "Never-married", "Separated",
        "Widowed",
    ),
    "occupation": (
        "Prof-specialty", "?", "Adm-clerical", "Armed-Forces", "Craft-repair",
        "Exec-managerial", "Farming-fishing",
        "Handlers-cleaners", "Machine-op-inspct", "Other-service", "Priv-house-serv",
        "Protective-serv", "Sales",
        "Tech-support", "Transport-moving",
    ),
    "relationship": (
        "Husband", "Not-in-family", "Other-relative", "Own-child", "Unmarried", "Wife",
    ),
    "race": ("White", "Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other"),
    "gender": ("Male", "Female"),
    "native-country": (
        "United-States", "?", "Cambodia", "Canada", "China", "Columbia", "Cuba",
        "Dominican-Republic", "Ecuador",
        "El-Salvador", "England", "France", "Germany", "Greece", "Guatemala", "Haiti",
        "Holand-Netherlands",
        "Honduras", "Hong", "Hungary", "India", "Iran", "Ireland", "Italy", "Jamaica", "Japan",
        "Laos", "Mexico",
        "Nicaragua", "Outlying-US(Guam-USVI-etc)", "Peru", "Philippines", "Poland", "Portugal",
        "Puerto-Rico",
        "Scotland", "South", "Taiwan", "Thailand", "Trinadad&Tobago", "Vietnam", "Yugoslavia",
    ),
}  # fmt: skip
"""Public categories, spelled as in the data; the first one, the most frequent, is coded by
zeros."""
DROPPED = {
    "fnlwgt": "a weight of the survey's sampling, not of the person",
    "education": "the text of educational-num",
}
"""The columns that are never features, with the reason."""
ALIASES = {"sex": "gender", "education-num": "educational-num"}
"""Other names that copies of the data give to a column."""


@dataclass(frozen=True)
class AdultSettings(DealtTable):
    """Settings of :func:`~fedmtl.data.read_adult`, which takes them as its arguments.

    Args:
        root: the .csv or .csv.gz file, or its folder.
        clients: their number N; ids ``owner-0``, ``owner-1``, ...
        sizes: persons of each client, training and test together: None for all in N equal parts,
            one number for all clients, or one number a client.
        public_rows: the last rows of the file, taken as public; they belong to no client.
        components: principal components k.
        z_clip: bound on a coded column's z-score.
        l1: bound on ``||x||_1`` without the 1 at the end, a public constant; longer rows are scaled
            down.
        test_fraction: share of each client's persons held out for test; None trains on all of them
            and tests every client on the public rows.
        seed: of the deal and of the split.
        labels: ``"signed"``: floating targets -1 and +1, for margin losses; ``"class"``: int64
            labels 0 and 1.
    """

    labels: Literal["signed", "class"] = "signed"


@reader("adult")
@with_settings(AdultSettings)
def read_adult(settings: AdultSettings) -> FederatedDataset:
    """Reads adult.csv and deals its persons to clients.

    Five numbers are mapped from their public range to 0 to 1 (capital gain and loss after log(1 +
    value)), and seven categories are one-hot columns. The public rows fit z-scores and a whitened
    PCA of these: fewer dimensions that are equally long, for which few noised gradients are enough.

    Args:
        settings: the fields of :class:`~fedmtl.data.AdultSettings`, each an argument of its own:
            ``read_adult("adult.csv", clients=5, labels="class")``.

    Returns:
        Features (k + 1,), of which the last is 1, float32, and targets; +1 or class 1 for more than
        50,000 dollars.

    Raises:
        DataError: an unreadable file, a missing column, a value that is no number, an unknown
            category.
        ConfigError: an impossible setting, or more components than the public rows have directions.
    """
    where = "adult"
    l1 = settings.l1
    labels = settings.labels
    components = settings.components
    public_rows = settings.public_rows
    one_of(where, ("signed", "class"), labels=labels)
    positive(where, z_clip=settings.z_clip, l1=l1)
    positive_int(where, components=components)
    file = find_file(settings.root, FILES)
    table = Table.of(file, (*CATEGORIES, "sex", TARGET))
    table = replace(table, frame=table.frame.rename(columns=ALIASES))
    table.check_columns((TARGET, *RANGES, *CATEGORIES))
    parts = deal_table(len(table), settings, where=where, file=file)
    public = slice(len(table) - public_rows, None)
    features = coded(table)
    whiten = fit_whitening(
        features[public], components=components, z_clip=settings.z_clip, where=where
    )
    x = with_intercept(clip_rows(whiten(features), l1=l1))
    y = np.asarray(list(INCOMES.values()), dtype=np.int64)[
        _known(table, TARGET, tuple(INCOMES), "<=50K, >50K")
    ]
    if labels == "signed":
        targets = (2 * y - 1).astype(np.float32)
    else:
        targets = y
    note = (
        f"the last {public_rows} persons of the file are taken as public: they fitted the z-scores "
        f"and the {components} principal components, and no epsilon covers them; the number of "
        "persons of each client is public"
    )
    classes = None
    if labels == "class":
        classes = 2
    data = assemble(
        x,
        targets,
        parts,
        public,
        test_fraction=settings.test_fraction,
        seed=settings.seed,
        classes=classes,
        name="adult",
    )
    # the intercept adds 1 to every norm: to the sum of absolute values, and at a right angle
    domain = Domain(l1 + 1, float(np.sqrt(l1**2 + 1)), 1.0)
    return replace(data, domain=domain, notes=(note,), verify=False)


def coded(table: Table) -> np.ndarray:
    """Turns the rows (n,) into float64 features (n, d) in [0, 1]: the numbers, then the categories,
    in order."""
    features = []
    for column, (low, high) in RANGES.items():
        # the range is public, so values beyond it are cut and not fitted
        values = np.clip(table.numbers(column), low, high)
        if column in LOGARITHMIC:
            values = np.log1p(values)
            low = np.log1p(low)
            high = np.log1p(high)
        features.append(((values - low) / (high - low))[:, None])
    for column, categories in CATEGORIES.items():
        number = _known(table, column, categories, ", ".join(categories))[:, None]
        # the first category is the one without a column of its own: all zeros
        features.append(number == np.arange(1, len(categories)))
    return np.concatenate(features, axis=1).astype(np.float64)


def _known(table: Table, column: str, categories: Sequence[str], accepted: str) -> np.ndarray:
    """Returns the category (n,) of each row; an empty one is the unknown one, if there is such a
    category."""
    values = texts_of(table, column)
    number = codes(np.where(values == "", UNKNOWN, values), categories)
    table.refuse(number < 0, column, accepted)
    return number
