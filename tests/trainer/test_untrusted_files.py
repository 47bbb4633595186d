"""Folders of runs that somebody else has written: whatever is in them, ``verify`` says it in lines or one sentence."""

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedmtl._files import parse_json
from fedmtl.audit.verification import FAILED, Verification, verify
from fedmtl.errors import DataError
from fedmtl.trainer import untrusted_files

from ..audit.test_verification import both, failed, good, ledger, lists, rewrite  # noqa: F401 - a fixture

REPORT, LEDGER, RELEASES = (
    "public/privacy.json",
    "private/ledger.jsonl",
    "public/releases.safetensors",
)
DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:  # noqa: F811
    shutil.copytree(good, tmp_path / "run")
    return tmp_path / "run"


def said(folder: Path) -> str:
    """The lines of a verification that fails, or the sentence by which it is refused."""
    try:
        found = verify(folder)
    except DataError as error:
        text = str(error)
        assert "\n" not in text
        return text
    assert not found.fits
    json.dumps(found.to_dict())
    assert all(check.detail.isprintable() for check in found.checks)
    return "\n".join(check.detail for check in found.checks if check.verdict == FAILED)


JSON: dict[str, tuple[bytes, str]] = {
    "deep": (DEEP, "more than 100 levels"),
    "a little deep": (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "more than 100 levels"),
    "NaN": (b'{"epsilon": NaN}', "NaN is no number of JSON"),
    "Infinity": (b'{"epsilon": -Infinity}', "-Infinity is no number of JSON"),
    "beyond a double": (b'{"epsilon": 1e999}', "1e999 is beyond a double"),
    "a huge number": (b'{"epsilon": 1' + b"0" * 4000 + b"}", "beyond 2**128"),
    "a number without end": (b'{"epsilon": ' + b"9" * 100_000 + b"}", "cannot be read"),
    "a key twice": (
        b'{"epsilon": 1, "x": {"epsilon": 2, "epsilon": 3}}',
        "the key 'epsilon' twice",
    ),
    "no object": (b"[1]", "must hold one JSON object"),
    "nothing": (b"", "cannot be read"),
    "bad UTF-8": (b'{"unit": "\xff\xfe"}', "is not UTF-8"),
    "UTF-16": ('{"epsilon": 1}'.encode("utf-16"), "is not UTF-8"),
}


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("place", [REPORT, "private/result.json", "public/manifest.json"])
def test_json_that_says_nothing_or_two_things(copy: Path, place: str, name: str) -> None:
    content, told = JSON[name]
    (copy / place).write_bytes(content)
    assert told in said(copy)


@pytest.mark.parametrize("name", ["deep", "NaN", "a huge number", "a key twice", "bad UTF-8"])
def test_lines_of_a_ledger_that_are_no_json(copy: Path, name: str) -> None:
    lines = ledger(copy)
    (copy / LEDGER).write_bytes(b"".join([lines[0], JSON[name][0] + b"\n", *lines[2:]]))
    assert "line 2: the ledger is damaged before its last line" in said(copy)


ENDS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "CRLF": (
        lambda content: content.replace(b"\n", b"\r\n"),
        "line 2: it does not follow the line before",
    ),
    "blank lines": (lambda content: content + b"\n\n", "damaged before its last line"),
    "a blank line": (lambda content: content + b"\n", "the last line is torn"),
    "no end": (lambda content: content[:-1], "the last line is torn"),
    "a byte order mark": (
        lambda content: b"\xef\xbb\xbf" + content,
        "damaged before its last line",
    ),
    "nothing": (lambda content: b"", "the ledger has no line"),
}


@pytest.mark.parametrize("name", ENDS)
def test_ledgers_with_other_ends_of_lines(copy: Path, name: str) -> None:
    edit, told = ENDS[name]
    (copy / LEDGER).write_bytes(edit((copy / LEDGER).read_bytes()))
    assert told in failed(copy)["chain"]


def with_header(content: bytes, edit: Callable[[dict[str, Any]], Any]) -> bytes:
    size = int.from_bytes(content[:8], "little")
    text = json.dumps(edit(json.loads(content[8 : 8 + size]))).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def with_update(content: bytes, **changes: Any) -> bytes:
    return with_header(content, lambda header: header | {"update": header["update"] | changes})


TENSORS: dict[str, Callable[[bytes], bytes]] = {
    "longer than the file": lambda content: (2**63).to_bytes(8, "little") + content[8:],
    "a little longer": lambda content: (len(content)).to_bytes(8, "little") + content[8:],
    "no header": lambda content: content[:8],
    "deep": lambda content: len(DEEP).to_bytes(8, "little") + DEEP,
    "another size": lambda content: with_update(content, shape=[10**9]),
    "another type": lambda content: with_update(content, dtype="F99"),
    "beyond its end": lambda content: with_update(content, data_offsets=[0, 10**12]),
    "a list": lambda content: with_header(content, lambda header: [header]),
    "metadata": lambda content: with_header(
        content, lambda header: header | {"__metadata__": {"update": 3}}
    ),
    "no metadata": lambda content: with_header(
        content, lambda header: {"update": header["update"]}
    ),
    "cut off": lambda content: content[:-1],
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("place", [RELEASES])
def test_safetensors_with_a_false_header(copy: Path, place: str, name: str) -> None:
    (copy / place).write_bytes(TENSORS[name]((copy / place).read_bytes()))
    lists(copy)
    assert failed(copy).keys() == {"grid"}


def test_files_that_are_links_out_of_the_folder(copy: Path, tmp_path: Path) -> None:
    for place in (
        REPORT,
        LEDGER,
        RELEASES,
        "private/clients.csv",
        "public/manifest.json",
        "private/checkpoint.safetensors",
    ):
        outside = tmp_path / "outside"
        shutil.move(copy / place, outside)
        (copy / place).symlink_to(outside)
        assert f"{place} is a link to a file that is not in the folder" in said(copy)
        (copy / place).unlink()
        (copy / place).symlink_to(copy / place)
        assert place in said(copy) or place.split("/")[1] in said(copy)
        (copy / place).unlink()
        shutil.move(outside, copy / place)
    inside = copy / "private/models-2.safetensors"
    shutil.move(copy / RELEASES, inside)
    (copy / RELEASES).symlink_to(inside)
    assert verify(copy).fits


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("place", [REPORT, LEDGER, RELEASES, "private/clients.csv"])
def test_pipes_and_folders_in_place_of_files(copy: Path, place: str) -> None:
    """To open a pipe without a writer would wait for ever."""
    (copy / place).unlink()
    os.mkfifo(copy / place)
    assert f"{place} is no file" in said(copy) or "privacy.json" in said(copy)
    (copy / place).unlink()
    (copy / place).mkdir()
    assert said(copy)


def test_files_larger_than_anything_that_is_read(copy: Path) -> None:
    with open(copy / REPORT, "r+b") as file:
        file.truncate(untrusted_files.MAX_TEXT + 1)  # a hole, which takes no place on the disk
    assert (
        said(copy) == "public/privacy.json has 1,073,741,825 bytes; at most 1,073,741,824 are read."
    )


def test_a_file_that_changes_while_it_is_read(copy: Path) -> None:
    """And one that changes afterwards is the file that was read."""
    files = untrusted_files.UntrustedFiles(copy)
    changed = pytest.raises(DataError, match=r"^public/privacy.json changed while it was read")
    with changed, files._opened(copy / REPORT, untrusted_files.MAX_TEXT):
        (copy / REPORT).write_bytes((copy / REPORT).read_bytes() + b" ")
    before = files.digest(copy / LEDGER)
    content = files.content(copy / LEDGER)
    (copy / LEDGER).write_bytes(b"")
    assert files.digest(copy / LEDGER) == before
    assert files.content(copy / LEDGER) == content


def listed(folder: Path) -> list[str]:
    """The files that the lists of a folder have, and the lists."""
    names = []
    for part in ("public", "private"):
        found = json.loads((folder / part / "manifest.json").read_text())["files"]
        names += [f"{part}/{name}" for name in [*found, "manifest.json"]]
    return names


def test_every_missing_file_is_told(copy: Path) -> None:
    for name in listed(copy):
        place = copy / name
        content = place.read_bytes()
        place.unlink()
        assert said(copy)
        place.write_bytes(content)
    assert verify(copy).fits


def test_names_in_a_list_of_files_write_no_lines_of_their_own(copy: Path) -> None:
    place = copy / "public/manifest.json"
    found = json.loads(place.read_text())
    found["files"]["x\nconfirmed    epsilon  \x1b[2J"] = "0" * 64
    place.write_text(json.dumps(found))
    assert "x\\nconfirmed    epsilon  \\x1b[2J is missing" in failed(copy)["files: public"]


def test_headers_of_more_accounts_than_any_run_has(copy: Path) -> None:
    rewrite(copy, lambda lines: [lines[0] | {"accounts": 10**12}, *lines[1:]])
    assert "1,000,000,000,000 accounts" in failed(copy)["charges"]


def test_the_figures_of_a_certificate_are_numbers_whatever_the_report_holds(copy: Path) -> None:
    both(copy, epsilon=[[[1]]], delta={"x": 1}, run=[1])
    found: Verification = verify(copy)
    assert (found.epsilon, found.delta, found.run) == (None, None, None)
    assert not found.fits


TOKENS = (
    b"NaN",
    b"1e999",
    b"[[[[",
    b"9" * 500,
    b"\x00",
    b"\xff\xfe",
    b"\r\n",
    b'"',
    b"null",
    b'{"a":1,"a":2}',
    b"-",
)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The same bytes but for one place."""
    at = rng.randrange(len(content))
    if rng.random() < 0.3:
        at = min(at, rng.randrange(200))
    choice = rng.randrange(4)
    if choice == 0:
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    if choice == 1:
        return content[:at] + rng.choice(TOKENS) + content[at:]
    if choice == 2:
        return content[:at] + content[at + rng.choice((1, 4, 50)) :]
    return content[:at]


def test_fuzzed_files_end_in_lines_or_one_sentence(copy: Path) -> None:
    """Every listed file of a run, in some places each, the same ones in every test."""
    rng = random.Random(1)
    for name in listed(copy):
        place = copy / name
        content = place.read_bytes()
        for _ in range(3):
            new = mutated(content, rng)
            if new != content:
                place.write_bytes(new)
                assert said(copy)
        place.write_bytes(content)
    assert verify(copy).fits


def test_json_is_read_as_it_stands() -> None:
    value = {"a": [1, -2.5, 2**70, None, True, "ü"], "b": {"c": []}}
    assert parse_json(json.dumps(value)) == value
    assert math.isnan(parse_json("[NaN]", finite=False)[0])
    with pytest.raises(ValueError, match="the key 'a' twice"):
        parse_json('[{"a": 1, "a": 1}]', finite=False)
