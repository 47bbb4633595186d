"""The chain of a ledger: what was taken out, altered, rolled back or copied is refused by name."""

import builtins
import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from fedmtl.errors import PrivacyError, ResumeError
from fedmtl.privacy.chain import Head, head_file

from .test_ledger import advance, crash, door


def written(path: Path, source: str = "seeded", steps: int = 3) -> list[bytes]:
    """A ledger whose run has crashed; its lines."""
    channel = door(path, source=source)
    advance(channel, 0, steps)
    crash(channel)
    return path.read_bytes().splitlines(keepends=True)


def chained(lines: list[bytes]) -> list[bytes]:
    """The lines with hashes computed anew, by the definition: each line holds the SHA-256 of the one before."""
    made, digest = [], "0" * 64
    for line in lines:
        made.append(json.dumps(json.loads(line) | {"previous": digest}, separators=(",", ":")).encode() + b"\n")
        digest = hashlib.sha256(made[-1]).hexdigest()
    return made


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_every_line_holds_the_hash_of_the_one_before(tmp_path: Path, source: str) -> None:
    lines = written(tmp_path / "ledger.jsonl", source)
    assert len(lines) == 5
    assert lines == chained(lines)
    kept = Head.parse((tmp_path / "ledger.head").read_text())
    assert kept == Head(5, hashlib.sha256(lines[-1]).hexdigest())


@pytest.mark.parametrize("source", ["seeded", "secure"])
@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_line_that_is_missing_is_noticed(tmp_path: Path, source: str, gone: int) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = written(path, source)
    path.write_bytes(b"".join(lines[:gone] + lines[gone + 1 :]))
    with pytest.raises(ResumeError, match=f"line {gone + 1}: it does not follow"):
        door(path, resume=True, source=source)


def test_a_line_that_was_altered_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = written(path, "secure")
    path.write_bytes(b"".join(lines).replace(b'"first":0,"end":1', b'"first":0,"end":0'))
    with pytest.raises(ResumeError, match="line 4: it does not follow"):
        door(path, resume=True, source="secure")


@pytest.mark.parametrize("source", ["seeded", "secure"])
@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_ledger_that_was_rolled_back_by_whole_lines_is_noticed(tmp_path: Path, source: str, gone: int) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = written(path, source)
    path.write_bytes(b"".join(lines[:-gone]))
    with pytest.raises(ResumeError, match="rolled back"):
        door(path, resume=True, source=source)
    path.write_bytes(b"".join(lines))
    door(path, resume=True, source=source).close()


def test_a_chain_computed_anew_is_not_the_one_that_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = written(path, "secure")
    path.write_bytes(b"".join(chained([*lines[:2], *lines[3:], lines[-1]])))
    with pytest.raises(ResumeError, match="rolled back or replaced"):
        door(path, resume=True, source="secure")


def test_a_secure_ledger_needs_its_head_file(tmp_path: Path) -> None:
    for source in ("seeded", "secure"):
        path = tmp_path / source / "ledger.jsonl"
        written(path, source)
        head_file(path).unlink()
    door(tmp_path / "seeded/ledger.jsonl", resume=True).close()
    with pytest.raises(ResumeError, match=r"ledger\.head is missing"):
        door(tmp_path / "secure/ledger.jsonl", resume=True, source="secure")


def test_a_head_file_that_lags_behind_is_no_fault(tmp_path: Path) -> None:
    """After a crash of the system the ledger is on the disk, its head file perhaps an older one."""
    path = tmp_path / "ledger.jsonl"
    channel = door(path, source="secure")
    advance(channel, 0, 3)
    older = head_file(path).read_bytes()
    advance(channel, 3, 20)
    crash(channel)
    head_file(path).write_bytes(older)
    again = door(path, resume=True, source="secure")
    assert again.account.ledger.charged == 20
    assert head_file(path).read_bytes() != older


def test_an_older_ledger_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(
        b'{"kind":"header","version":1,"fingerprint":"a","replays_free":true}\n{"kind":"open","session":1}\n'
    )
    with pytest.raises(ResumeError, match="version 1, this is version 8"):
        door(path, resume=True)


def test_a_folder_that_was_renamed_and_a_seeded_copy_go_on(tmp_path: Path) -> None:
    path = tmp_path / "run/ledger.jsonl"
    written(path, "secure", steps=2)
    path.parent.rename(tmp_path / "renamed")
    door(tmp_path / "renamed/ledger.jsonl", resume=True, source="secure").close()
    written(tmp_path / "seeded/ledger.jsonl", steps=2)
    shutil.copytree(tmp_path / "seeded", tmp_path / "twin")
    door(tmp_path / "twin/ledger.jsonl", resume=True).close()


def test_a_secure_run_needs_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without(name: str, *args, **options):
        if name == "fcntl":
            raise ImportError(name)
        return load(name, *args, **options)

    monkeypatch.delitem(sys.modules, "fcntl", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PrivacyError, match="needs file locks"):
        door(tmp_path / "secure", source="secure")
    assert not (tmp_path / "secure").exists() or (tmp_path / "secure").stat().st_size == 0
    advance(door(tmp_path / "seeded"), 0, 3)
    advance(door(None, source="secure"), 0, 3)


def test_a_folder_that_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(*args) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(PrivacyError, match="No locks available"):
        door(tmp_path / "secure", source="secure")
    door(tmp_path / "seeded").close()
