"""Files of tables as programs and people write them: each is read with the right numbers, or refused in words."""

import gzip
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedmtl.data import read_table
from fedmtl.errors import ConfigError, DataError

from .rows import rows_of

ROWS = [("a", 61.5, 3.0), ("a", 40.0, 1.0), ("b", 1.5, 3.0), ("b", 2.5, 5.0)]
PLAIN = "ward,age,days\na,61.5,3\na,40,1\nb,1.5,3\nb,2.5,5\n"
SEMICOLONS = PLAIN.replace(",", ";")
COMMAS = SEMICOLONS.replace(".", ",")
NOTE = "# wards of the north\n"


def with_heading(heading: str) -> str:
    return heading + PLAIN[PLAIN.index("\n") :]


def odd(text: str, codec: str = "utf-8", file: str = "t.csv", **options) -> tuple[str, bytes, dict]:
    return file, text.encode(codec), options


READ = {
    "plain": odd(PLAIN),
    "semicolons": odd(SEMICOLONS, separator=";"),
    "semicolons by name": odd(SEMICOLONS, separator="semicolon"),
    "decimal commas": odd(COMMAS, separator="semicolon", decimal="comma"),
    "quoted decimal commas": odd(
        'ward,age,days\na,"61,5",3\na,40,1\nb,"1,5",3\nb,"2,5",5\n', decimal=","
    ),
    "tabs": odd(PLAIN.replace(",", "\t"), separator="tab"),
    "tabs in shell letters": odd(PLAIN.replace(",", "\t"), separator="\\t"),
    "tabs of .tsv": odd(PLAIN.replace(",", "\t"), file="t.tsv"),
    "bars": odd(PLAIN.replace(",", "|"), separator="|"),
    "blanks": odd(PLAIN.replace(",", "   "), separator="space"),
    "blanks around": odd(" " + PLAIN.replace(",", " ").replace("\n", "  \n "), separator="space"),
    "UTF-8 with its mark": odd(PLAIN, "utf-8-sig"),
    "mark and quotes": odd(with_heading('"ward","age","days"'), "utf-8-sig"),
    "UTF-16": odd(PLAIN, "utf-16", encoding="utf-16"),
    "UTF-16 without a mark": odd(PLAIN, "utf-16-le", encoding="utf-16-le"),
    "latin-1": odd(with_heading("ward,age,days"), "latin-1", encoding="latin-1"),
    "spaces about headings": odd(with_heading(" ward , age,days ")),
    "carriage returns": odd(PLAIN.replace("\n", "\r\n")),
    "old Macintosh": odd(PLAIN.replace("\n", "\r")),
    "blank lines": odd("\n\n" + PLAIN.replace("\n", "\n   \n")),
    "no last line end": odd(PLAIN.rstrip()),
    "separators at every end": odd(PLAIN.replace("\n", ",\n")),
    "comments above": odd(NOTE + "\n" + NOTE + PLAIN, comment="#"),
    "a heading with a number sign": odd(with_heading("#ward,age,days"), client="#ward"),
    "Excel's note": odd("sep=;\n" + SEMICOLONS, comment="sep=", separator=";"),
    "upper case": odd(PLAIN, file="T.CSV"),
    "compressed": ("t.csv.gz", gzip.compress(PLAIN.encode()), {}),
    "compressed UTF-16": (
        "t.csv.gz",
        gzip.compress(PLAIN.encode("utf-16")),
        {"encoding": "utf-16"},
    ),
    "line breaks in quotes": odd(
        PLAIN.replace("ward,", '"ward","no\nte",')
        .replace("\na,", '\na,"x\n\ny",')
        .replace("\nb,", "\nb,z,"),
        features=["age"],
    ),
    "a long text": odd(
        "ward,note,age,days\n"
        + PLAIN.split("\n", 1)[1]
        .replace(",", f",{'x' * 200_000},", 1)
        .replace("\na,40", "\na,y,40")
        .replace("\nb,", "\nb,z,"),
        features=["age"],
    ),
}


@pytest.mark.parametrize("case", READ)
def test_odd_files_are_read_as_the_plain_one(tmp_path, case):
    name, content, options = READ[case]
    (tmp_path / name).write_bytes(content)
    data = read_table(
        tmp_path / name, **{"client": "ward", "target": "days", "classes": None} | options
    )
    assert data.ids == ("a", "b")
    found = [(client, *row) for i, client in enumerate(data.ids) for row in rows_of(data, i)]
    assert sorted(found) == sorted(ROWS)


REFUSED = {
    "a heading twice": (
        with_heading("ward,days,days"),
        {},
        r"column 'days' occurs twice; every column",
    ),
    "twice but for spaces": (with_heading("ward,days, days"), {}, r"column 'days' occurs twice"),
    "thrice": ("ward,x,x,x,days\na,1,2,3,4\n", {}, r"column 'x' occurs 3 times"),
    "semicolons": (
        SEMICOLONS,
        {},
        r"separated by ';', not by ','; data\.separator=semicolon reads it",
    ),
    "semicolons and decimal commas": (
        COMMAS,
        {},
        r"by ';', not by ',', and numbers to have a decimal comma; data\.separator=semicolon data\.decimal=comma",
    ),
    "a comma in a heading": (
        with_heading("ward;age, whole;days").replace(",", ";").replace("age; ", "age, "),
        {},
        r"separated by ';', not by ','",
    ),
    "tabs": (
        PLAIN.replace(",", "\t"),
        {},
        r"separated by '\\t', not by ','; data\.separator=tab reads it",
    ),
    "bars": (PLAIN.replace(",", "|"), {}, r"data\.separator=bar reads it"),
    "blanks": (PLAIN.replace(",", "  "), {}, r"data\.separator=space reads it"),
    "commas where semicolons are set": (
        PLAIN,
        {"separator": ";"},
        r"by ',', not by ';'; data\.separator=comma",
    ),
    "a decimal comma": (
        PLAIN.replace("2.5", '"2,5"'),
        {},
        r"client 'b', line 5, column 'age' holds '2,5'; accepted: .* decimal comma \(data\.decimal=comma reads it\)",
    ),
    "a decimal comma in the target": (
        PLAIN.replace(",5\n", ',"5,5"\n'),
        {},
        r"line 5, column 'days' .* decimal comma",
    ),
    "decimals after another text": (
        PLAIN.replace("61.5", "NA").replace("2.5", '"2,5"'),
        {},
        r"line 5, column 'age' holds '2,5'; .*decimal comma",
    ),
    "a decimal point": (
        COMMAS.replace("2,5", "2.5"),
        {"separator": ";", "decimal": ","},
        r"line 5, column 'age' holds '2\.5'; accepted: .*\(data\.decimal=point reads decimal points\)",
    ),
    "UTF-16": (
        PLAIN.encode("utf-16"),
        {},
        r"is text in UTF-16, not in UTF-8; data\.encoding=utf-16 reads it",
    ),
    "UTF-16 without a mark": (PLAIN.encode("utf-16-be"), {}, r"data\.encoding=utf-16-be reads it"),
    "UTF-32": (PLAIN.encode("utf-32"), {}, r"data\.encoding=utf-32 reads it"),
    "UTF-8 where UTF-16 is set": (
        PLAIN,
        {"encoding": "utf-16"},
        r"is not text in UTF-16; give its encoding",
    ),
    "marked UTF-8 as latin-1": (
        PLAIN.encode("utf-8-sig"),
        {"encoding": "latin-1"},
        r"data\.encoding=utf-8 reads it",
    ),
    "latin-1": (
        ("ward,age,days\n\na,1,2\n" + "zürich,1,2\n" * 2).encode("latin-1"),
        {},
        r"is not text in UTF-8 \(line 4 holds the byte 0xfc\); give its encoding, such as data\.encoding=cp1252",
    ),
    "a null byte": (PLAIN.replace("40", "4\x000"), {}, r"line 3 holds a null byte"),
    "a number beyond single precision": (
        PLAIN.replace("b,1.5", "b,-1e39"),
        {},
        r"client 'b', line 4, column 'age' holds -1e\+39; accepted: a number of at most 3\.4e\+38",
    ),
    "a target beyond single precision": (
        PLAIN.replace(",5\n", ",5e38\n"),
        {},
        r"client 'b', line 5, column 'days' holds 5e\+38; accepted: .* the range of float32",
    ),
    "an empty file": ("", {}, r"cannot be read as a table: it is empty"),
    "blank lines alone": ("\n\n \n", {}, r"it is empty"),
    "only a heading": ("ward,age,days\n", {}, r"has no rows; at least 2 a client"),
    "one column": ("ward\na\nb\n", {}, r"target column 'days' is missing; the columns are 'ward'"),
    "separators at the ends of rows": (
        PLAIN.replace("\n", ",\n").replace("days,", "days"),
        {},
        r"line 2 is 4, that of the header 3; it ends with a sep",
    ),
    "a second column without a heading": (
        "ward,,age,days\na,0,1,2\na,1,3,4\n",
        {},
        r"column 2 has no heading; give it one, or list",
    ),
    "an index beyond the headings": (
        "ward,age,days\n0,a,1,2\n1,a,3,4\n",
        {},
        r"line 2 is 4, that of the header 3",
    ),
    "an unclosed quote": (
        PLAIN.replace("40", '"40'),
        {},
        r"a quote that opens in line 3 is not closed",
    ),
    "a quote closed too late": (
        PLAIN.replace("a,40", 'a,"40').replace("2.5", '2.5"'),
        {},
        r"line 3, column 'age' holds '40,1.* \(a quote may not be closed\)",
    ),
    "a quote that joins short lines": (
        PLAIN.replace("40,1", '"40,1').replace("b,1.5", 'b",1.5'),
        {},
        r"line 3 is 4, .* joins the lines 3 to 4",
    ),
    "a comment above": (
        NOTE + PLAIN,
        {},
        r"the heading follows lines that begin with '#'; comment='#' leaves",
    ),
    "a comment between": (
        PLAIN.replace("\nb,1", "\n# north\nb,1"),
        {},
        r"line 4 is 1, .*; comments are left out above",
    ),
    "Excel's note": (
        "sep=;\n" + SEMICOLONS,
        {},
        r"the heading follows lines that begin with 'sep='",
    ),
    "a workbook": (
        b"PK\x03\x04" + bytes(99),
        {},
        r"is a zip archive, such as a workbook of Excel; accepted: text",
    ),
    "a page": (
        "<!DOCTYPE html><p>sign in</p>",
        {},
        r"is a page of the web; accepted: text with a row a line",
    ),
    "an uncalled-for compression": (
        gzip.compress(PLAIN.encode()),
        {},
        r"is compressed \(name it \.csv\.gz\)",
    ),
    "line breaks before": (
        NOTE + 'ward,note,age,days\n\na,"x\n\ny",1,2\n\nb,z,?,3\n',
        {"features": ["age"], "comment": "#"},
        r"client 'b', line 8, column 'age' holds '\?'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_odd_files_are_refused_in_words(tmp_path, case):
    content, options, message = REFUSED[case]
    if isinstance(content, str):
        content = content.encode()
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=rf"t\.csv.*{message}") as caught:
        read_table(
            tmp_path / "t.csv", **{"client": "ward", "target": "days", "classes": None} | options
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "https://example.org/visits.csv",
            r"visits\.csv is an address; accepted: the path of a file, so fetch it",
        ),
        ("", r" is a folder; accepted: the path of one file"),
        ("none.csv", r"none\.csv cannot be read as a table: it does not exist"),
        ("plain.csv.gz", r"ends in \.gz and is not compressed"),
        ("plain.txt", r"has an unknown suffix; accepted: \.csv, \.csv\.gz"),
        ("double.parquet", r"double\.parquet: column 'age' occurs twice"),
    ],
)
def test_places_without_a_table_are_named(tmp_path, path, message):
    for name in ("plain.csv.gz", "plain.txt"):
        (tmp_path / name).write_text(PLAIN)
    import pyarrow as pa
    import pyarrow.parquet

    columns = [pa.array(["a", "a"]), pa.array([1, 2]), pa.array([1, 2])]
    pyarrow.parquet.write_table(
        pa.Table.from_arrays(columns, names=["ward", "age", "age"]), tmp_path / "double.parquet"
    )
    source = path if "://" in path else tmp_path / path
    with pytest.raises(DataError, match=message):
        read_table(source, client="ward", target="days")


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text(PLAIN)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refused)
    with pytest.raises(
        DataError,
        match=r"t\.csv cannot be read \(Permission denied\); give a file that this user may",
    ):
        read_table(tmp_path / "t.csv", client="ward", target="days")


FRAME = pd.DataFrame({"ward": list("aabb"), "age": [1.0, 2.0, 3.0, 4.0], "days": [1, 2, 3, 4]})


@pytest.mark.parametrize(
    ("frame", "options", "error", "message"),
    [
        (
            FRAME.set_axis(["ward", "days", "days"], axis=1),
            {},
            DataError,
            r"table: column 'days' occurs twice",
        ),
        (
            FRAME,
            {"separator": ";"},
            ConfigError,
            r"table is no file of text; data\.separator, .* are for CSV files",
        ),
        (FRAME, {"decimal": "'"}, ConfigError, r"data\.decimal is \"'\"; accepted: point, comma"),
        (
            FRAME,
            {"encoding": "klingon"},
            ConfigError,
            r"data\.encoding is 'klingon'; accepted: utf-8",
        ),
        (FRAME, {"encoding": "hex"}, ConfigError, r"data\.encoding is 'hex'; accepted: utf-8"),
        (
            FRAME,
            {"separator": "::"},
            ConfigError,
            r"data\.separator is '::'; accepted: comma, semicolon",
        ),
        (FRAME, {"comment": ""}, ConfigError, r"data\.comment is empty"),
        (
            FRAME.assign(age=FRAME.age + 0j),
            {},
            DataError,
            r"row 0, column 'age' holds \(1\+0j\)|holds 1\.0\+0\.0j",
        ),
        (
            FRAME.assign(age="1,5"),
            {},
            DataError,
            r"row 0, column 'age' holds '1,5'; accepted: .*decimal comma",
        ),
        (
            FRAME.assign(age=pd.Timestamp("2020-01-01")),
            {},
            DataError,
            r"column 'age' holds 2020-01-01",
        ),
        (
            FRAME.assign(days=np.array([1, 2, 3, 2**63], "u8")),
            {},
            DataError,
            r"column 'days' holds 9223372036854775808",
        ),
        (
            FRAME.assign(age=pd.array([1, 2, None, 4], "Int64")),
            {},
            DataError,
            r"row 2, column 'age' is empty",
        ),
    ],
)
def test_odd_frames_are_refused_in_words(frame, options, error, message):
    with pytest.raises(error, match=message):
        read_table(frame, **{"client": "ward", "target": "days", "classes": None} | options)


def test_frames_of_exact_decimals_are_numbers():
    from decimal import Decimal

    data = read_table(
        FRAME.assign(age=[Decimal("1.5")] * 4), client="ward", target="days", classes=None
    )
    assert torch.equal(torch.cat([data.train.x, data.test.x]), torch.full((4, 1), 1.5))


def test_a_column_of_decimal_commas_is_no_draft_of_categories(caplog):
    from fedmtl.data.readers.table_summary import Summary

    caplog.set_level(logging.WARNING)
    column = Summary(pd.Series(["61,5", "40,2", "1,5", "?"]))
    assert column.doubt == "has numbers with a decimal comma"
    assert column.remedy == "give data.decimal=comma"
    assert Summary(pd.Series(["a,b", "1,5", "c"])).doubt == ""


def test_the_index_that_pandas_writes_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "x.csv"
    table = pd.DataFrame(
        {"ward": ["a"] * 6, "age": [0.5, 3, 4, 1, 2, 9], "days": [0.5, 1, 2, 3, 4, 5]}
    )
    table.to_csv(file)
    settings = {"client": "ward", "target": "days", "classes": None}
    data = read_table(file, **settings)
    assert (
        "column 1 has no heading, as the index that pandas and R write, and is left out"
        in caplog.text
    )
    table.to_csv(file, index=False)
    assert data.fingerprint() == read_table(file, **settings).fingerprint()
