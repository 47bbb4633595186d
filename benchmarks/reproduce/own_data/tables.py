"""The data sets of the study: tables with declared bounds, as a user would load them, and one of images.

Ranges of features are those of the rows of all clients, which the study treats as declared.
Ranges of targets and the categories of Adult are public facts of the data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.io
from sklearn.datasets import load_diabetes

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "comparison"), str(HERE.parents[2])]

from judges import TABLES  # noqa: E402
from pairs import PAIRS, as_judge  # noqa: E402
from settings import half_size  # noqa: E402

from fedmtl import FederatedDataset, load_data  # noqa: E402
from fedmtl.data import Domain, RowBound  # noqa: E402
from fedmtl.data.readers.adult import CATEGORIES  # noqa: E402
from fedmtl.data.readers.movielens import read_movielens  # noqa: E402

AUTOMATIC, SHARED = "automatic", "automatic, shared model"
BEFORE = "automatic, before"
"""The settings without votes, of epsilon for a client; for a record those that measured the noise that a client with a
single record feels by the size of its target."""
NETWORK, SHARED_NETWORK = "automatic, network", "automatic, shared network"
FINETUNED, AVERAGED = "FedAvg, finetuned, by hand", "FedAvg, averaged, by hand"
LEAST = 10  # rows of a client
LENDING = (
    "annual_income", "debt_to_income", "delinq_2y", "inquiries_last_12m", "total_credit_lines", "open_credit_lines",
    "loan_amount", "term", "accounts_opened_24m", "num_mort_accounts", "public_record_bankrupt",
)  # fmt: skip
ADULT = ("marital-status", "relationship", "race", "gender")


@dataclass(frozen=True)
class Source:
    """A data set.

    Attributes:
        title: in the table.
        file: its file below the folder of data, or empty where there is none.
        load: from that file's path and the split's seed.
        by_hand: the methods that are tuned for it.
        chosen: whether the constants of the automatic settings were chosen with this data set among others.
    """

    title: str
    file: str
    load: Callable[[Path, int], FederatedDataset]
    chosen: bool = False
    by_hand: tuple[str, ...] = (AVERAGED, FINETUNED)


def ranges(frame: pd.DataFrame, features: Sequence[str]) -> dict[str, list[float]]:
    """Return the range of every feature that is not constant."""
    low, high = frame[list(features)].min(), frame[list(features)].max()
    return {
        name: [float(low[name]), float(high[name])] for name in features if high[name] > low[name]
    }


def table(
    frame: pd.DataFrame,
    client: str,
    target: str,
    bounds: Mapping[str, Sequence[object]],
    seed: int,
    least: int = LEAST,
    **more: object,
) -> FederatedDataset:
    """Read a table of pandas with declared bounds; its features are the columns with bounds but the target.

    Errors stay in units in which the target's range is [-1, 1], so that those of data sets can be compared.
    """
    features = [name for name in bounds if name != target]
    data = load_data(
        "table", path=frame, client=client, target=target, features=features, bounds=bounds, seed=seed,
        min_examples=least, **more,
    )  # fmt: skip
    return replace(data, target_range=None)


def school(path: Path, seed: int) -> FederatedDataset:
    """Exam scores of pupils by school."""
    file = scipy.io.loadmat(path)
    parts = [
        pd.DataFrame(x).add_prefix("x").assign(score=y.ravel(), school=f"school-{i}")
        for i, (x, y) in enumerate(zip(file["X"].ravel(), file["Y"].ravel(), strict=True))
    ]
    frame = pd.concat(parts, ignore_index=True)
    features = [name for name in frame if name not in ("score", "school")]
    return table(frame, "school", "score", ranges(frame, features) | {"score": [1, 70]}, seed)


def lending(path: Path, seed: int) -> FederatedDataset:
    """Interest rates of loans by state."""
    frame = pd.read_csv(path)[["state", "interest_rate", *LENDING]].dropna()
    bounds = ranges(frame, LENDING) | {"annual_income": [0, 300000], "debt_to_income": [0, 60]}
    return table(frame, "state", "interest_rate", bounds | {"interest_rate": [5, 31]}, seed)


def medpar(path: Path, seed: int) -> FederatedDataset:
    """Days in hospital by hospital."""
    frame = pd.read_csv(path)
    features = ("hmo", "white", "died", "age80", "type2", "type3")
    return table(frame, "provnum", "los", ranges(frame, features) | {"los": [1, 60]}, seed)


def azpro(path: Path, seed: int) -> FederatedDataset:
    """Days in hospital after a heart operation by hospital."""
    frame = pd.read_csv(path).assign(hospital=lambda rows: rows["hospital"].round(2).astype(str))
    return table(
        frame,
        "hospital",
        "los",
        ranges(frame, ("procedure", "sex", "age75", "admit")) | {"los": [1, 60]},
        seed,
    )


def adult(path: Path, seed: int) -> FederatedDataset:
    """Whether a person earns more than 50,000 dollars, by kind of employer and occupation: at most 75 persons each."""
    frame = pd.read_csv(path, skipinitialspace=True).rename(columns={"sex": "gender"})
    frame["job"] = frame["workclass"] + ", " + frame["occupation"]
    frame = frame.groupby("job").head(75)
    frame = frame[frame.groupby("job")["job"].transform("size") >= 20].copy()
    for name in ("capital-gain", "capital-loss"):
        frame[name] = np.log1p(frame[name])
    bounds = {
        "age": [17, 90], "educational-num": [1, 16], "hours-per-week": [1, 99], "capital-gain": [0, 11.6],
        "capital-loss": [0, 8.4], **{name: list(CATEGORIES[name]) for name in ADULT},
    }  # fmt: skip
    return table(frame, "job", "income", bounds, seed, labels=["<=50K", ">50K"])


def films(path: Path, seed: int) -> FederatedDataset:
    """Ratings of films by user; ten features of a film are fitted to the ratings of 200 public users."""
    return table(*_films(path), seed)


@cache
def _films(path: Path) -> tuple[pd.DataFrame, str, str, dict[str, list[int]]]:
    data, names = (
        read_movielens(path, features=10, centre=3.5, public_users=200),
        [f"film-{i}" for i in range(10)],
    )
    parts = []
    for side in (data.train, data.test):
        ids = np.repeat(np.array(data.ids), side.counts.numpy())
        x = RowBound(1.0)(side.x[:, :10]).double().numpy()
        rating = side.y.double().numpy() + 3.5
        parts.append(pd.DataFrame(x, columns=names).assign(user=ids, rating=rating))
    bounds = {"rating": [1, 5]} | {name: [-1, 1] for name in names}
    return pd.concat(parts, ignore_index=True), "user", "rating", bounds


def femnist(path: Path, seed: int) -> FederatedDataset:
    """Characters by writer, 62 classes, at half the resolution: 196 numbers in [0, 2]."""
    return replace(
        half_size(load_data("femnist", root=path, seed=seed)), domain=Domain(392.0, 28.0, 1.0)
    )


def made(
    clients: int, rows: int, spread: float, key: int, *, nonlinear: bool = False
) -> Callable[[Path, int], FederatedDataset]:
    """Return a source of made rows with ten features, whose clients' models lie ``spread`` around a common one.

    Args:
        clients: their number.
        rows: of each client, training and test; of nonlinear ones the median of numbers that vary.
        spread: standard deviation of a client's slopes, over that of the common ones.
        key: of the draw.
        nonlinear: a sine, a product of two features and noise with heavy tails (Student's t, 2 degrees) instead of
            linear models with Gaussian noise.
    """

    @cache
    def drawn() -> pd.DataFrame:
        rng = np.random.default_rng(key)
        common = rng.normal(size=10) * 0.6 / np.sqrt(10)
        parts = []
        for i in range(clients):
            count = max(LEAST, int(rows * np.exp(0.8 * rng.normal()))) if nonlinear else rows
            x = rng.uniform(-1, 1, (count, 10))
            slopes = common + spread * rng.normal(size=10) / np.sqrt(10)
            y = x @ slopes + 0.3 * spread * rng.normal()
            if nonlinear:
                y += (
                    0.3 * np.sin(3 * x[:, 0])
                    + 0.3 * x[:, 1] * x[:, 2]
                    + 0.1 * rng.standard_t(2, count)
                )
            else:
                y += 0.2 * rng.normal(size=count)
            parts.append(pd.DataFrame(x).add_prefix("x").assign(y=y, client=f"client-{i}"))
        return pd.concat(parts, ignore_index=True)

    bounds = {f"x{i}": [-1, 1] for i in range(10)} | {"y": [-1, 1]}
    return lambda path, seed: table(drawn(), "client", "y", bounds, seed)


def diabetes(path: Path, seed: int) -> FederatedDataset:
    """Progression of a disease; patients are dealt to 20 clients at random."""
    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame["clinic"] = np.random.default_rng(0).integers(0, 20, len(frame))
    features = [name for name in frame if name not in ("clinic", "target")]
    return table(frame, "clinic", "target", ranges(frame, features) | {"target": [25, 346]}, seed)


def panel(
    client: str,
    target: str,
    features: Sequence[str],
    texts: Sequence[str] = (),
    wide: float = 1.0,
    labels: bool = False,
) -> Callable[[Path, int], FederatedDataset]:
    """Source of a table with a few rows a client, at least two.

    Args:
        client: column of the clients.
        target: column to predict.
        features: columns of numbers.
        texts: columns of categories.
        wide: how many times too wide the ranges of the numbers are declared; that of the target upwards only, as a
            range of wages would be.
        labels: True if the target is a class, whose values are declared.
    """

    def load(path: Path, seed: int) -> FederatedDataset:
        frame = pd.read_csv(path)[[client, target, *features, *texts]].dropna()
        if "year" in features:
            frame["year"] = frame["year"].astype(str).str[:4].astype(int)
        bounds: dict[str, list[object]] = {
            name: sorted(map(str, frame[name].unique())) for name in texts
        }
        for name, (low, high) in ranges(frame, features).items():
            middle, half = (low + high) / 2, wide * (high - low) / 2
            bounds[name] = [middle - half, middle + half]
        if labels:
            frame = frame.astype(dict.fromkeys((client, target, *texts), str))
            names = sorted(frame[target].unique())
            return table(frame, client, target, bounds, seed, least=2, labels=names)
        low, high = ranges(frame, [target])[target]
        bounds[target] = [low, low + wide * (high - low)]
        frame = frame.astype(dict.fromkeys((client, *texts), str))
        return table(frame, client, target, bounds, seed, least=2, classes=None)

    return load


def panels(wide: float = 1.0) -> dict[str, Source]:
    """The three tables of panels, with ranges that are ``wide`` times too wide."""
    names = "" if wide == 1.0 else f"{wide:g}"
    said = "" if wide == 1.0 else f", ranges {wide:g} times"
    men = ("year", "black", "exper", "hisp", "hours", "married", "educ")
    loads = {
        "fares": (
            "air fares",
            panel("route", "fare", ("year", "dist", "passen", "bmktshr"), wide=wide),
        ),
        "wages": ("wages of men", panel("nr", "wage", men, ("union", "occupation"), wide=wide)),
        "exercise": (
            "exercise of girls",
            panel("subject", "exercise", ("age",), ("group",), wide=wide),
        ),
    }
    return {
        f"{name}{names}": Source(
            f"{title}{said}", f"own/{name}.csv.gz", load, chosen=True, by_hand=()
        )
        for name, (title, load) in loads.items()
    }


def judges(wide: float = 1.0) -> dict[str, Source]:
    """The panels of :mod:`judges` and :mod:`pairs`, with ranges that are ``wide`` times too wide."""
    names = "" if wide == 1.0 else f"{wide:g}"
    said = "" if wide == 1.0 else f", ranges {wide:g} times"
    tables = {**TABLES, **{name: as_judge(pair) for name, pair in PAIRS.items()}}
    return {
        f"{name}{names}": Source(
            f"{judge.title}{said}",
            f"own/{name}.csv.gz",
            panel(
                judge.client,
                judge.target,
                judge.numbers,
                judge.texts,
                wide=wide,
                labels=judge.labels,
            ),
            by_hand=(),
        )
        for name, judge in tables.items()
    }


SOURCES = {
    **panels(),
    **panels(3.0),
    **panels(3.0),
    **panels(10.0),
    **judges(),
    **judges(3.0),
    **judges(3.0),
    **judges(10.0),
    "diabetes": Source("diabetes, dealt", "", diabetes),
    "azpro": Source("hospital stays, azpro", "hospital/azpro.csv", azpro, chosen=True),
    "medpar": Source("hospital stays, medpar", "hospital/medpar.csv", medpar, chosen=True),
    "close": Source("made, close tasks", "", made(100, 20, 0.05, 1)),
    "far": Source("made, far tasks", "", made(60, 40, 0.5, 2)),
    "tails": Source("made, not linear, heavy tails", "", made(80, 40, 0.2, 3, nonlinear=True)),
    "lending": Source("lending by state", "lending/loans_full_schema.csv.gz", lending, chosen=True),
    "school": Source("School", "school/school.mat", school, chosen=True),
    "adult": Source("Adult by job (classes)", "adult/adult.csv.gz", adult, chosen=True),
    "films": Source("MovieLens", "ml-100k/u.data", films),
    "femnist": Source(
        "FEMNIST, 206 writers (classes)",
        "femnist/leaf_femnist_206.json.zip",
        femnist,
        True,
        (FINETUNED,),
    ),
}
"""From small to large."""
