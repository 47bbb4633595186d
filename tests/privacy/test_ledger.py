"""The ledger through crashes: what was charged stays charged."""

import builtins
import errno
import hashlib
import json
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

from fedmtl.errors import PrivacyError, ResumeError
from fedmtl.privacy import (
    ClientPrivacy,
    Ledger,
    PoissonSampling,
    ReleasePlan,
    open_channel,
    privacy_report,
)
from fedmtl.privacy.chain import Head, head_file, read_chain
from fedmtl.privacy.noise import sources

STEPS = 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def door(
    path: Path | None,
    *,
    source: str = "seeded",
    fingerprint: str = "a",
    sampler=None,
    clip_norm: float = 1.0,
    **options,
):
    settings = ClientPrivacy(clip_norm=clip_norm, noise_multiplier=2.0, source=source)
    plans, sampler = (
        (ReleasePlan(name="update", dimension=4),),
        sampler or PoissonSampling(5).bind(50),
    )
    return open_channel(
        settings,
        plans,
        sampler,
        seed=1,
        steps=STEPS,
        fingerprint=fingerprint,
        ledger_path=path,
        **options,
    )


def advance(channel, start: int, stop: int) -> list[torch.Tensor]:
    values = []
    for step in range(start, stop):
        ranks = channel.draw(step)
        channel.begin(step, ranks)
        values.append(channel.release("update", torch.ones(len(ranks), 4), ranks))
    return values


class Full:
    """A file on a disk that is full after so many bytes."""

    def __init__(self, file, room: int) -> None:
        self._file = file
        self._room = room

    def __getattr__(self, name: str):
        return getattr(self._file, name)

    def write(self, data) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(data[: self._room])
        self._room -= written
        return written


@pytest.mark.parametrize(("room", "charged"), [(0, 3), (20, 3), (10_000, 4)])
def test_a_charge_that_was_not_written_releases_nothing_and_the_run_goes_on(
    path: Path, room: int, charged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the line is in the file, and only the disk did not answer: it then counts."""
    channel = door(path, source="secure")
    advance(channel, 0, 3)
    file = channel.accountant.ledger._file

    def failing(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(file, "_lines", Full(file._lines, room))
        patch.setattr(os, "fsync", failing)
        members = channel.draw(3)
        with pytest.raises(OSError, match=r"No space|Input/output"):
            channel.begin(3, members)
        with pytest.raises(PrivacyError, match="no step has begun"):
            channel.release("update", torch.ones(len(members), 4), members)
    with pytest.raises(PrivacyError, match="could not be written, and no other one follows it"):
        channel.begin(3, members)
    channel.close()
    resumed = door(path, source="secure", resume=True)
    assert resumed.accountant.ledger.charged == charged
    advance(resumed, 3, 5)
    resumed.close()
    assert door(path, source="secure", resume=True).accountant.ledger.charged == charged + 2


def crash(channel) -> None:
    """The process is gone: the system closes its files, and nothing else happens."""
    channel.accountant.ledger._file.close()


def test_seeded_replay_is_charged_once(path: Path) -> None:
    whole = advance(door(None), 0, STEPS)
    first = door(path)
    values = advance(first, 0, 13)
    assert first.accountant.ledger.charged == int(first.accountant.uses.max()) == 13
    crash(first)
    second = door(path, resume=True)
    assert (
        int(second.accountant.uses.max()) == 13
    )  # until it says where it continues, all of it may have been released
    replayed = advance(second, 10, STEPS)
    assert second.accountant.ledger.charged == int(second.accountant.uses.max()) == STEPS
    second.close()
    assert all(torch.equal(a, b) for a, b in zip(whole, values[:10] + replayed, strict=True))
    assert privacy_report(second).epsilon == second.epsilon_at(STEPS)


def test_charges_of_two_sessions_do_not_stand_for_steps_that_none_has_charged(path: Path) -> None:
    """Steps 0 to 3 twice are eight charges, and none of them is for steps 4 to 6."""
    for resume in (False, True):
        channel = door(path, resume=resume, source="secure")
        advance(channel, 0, 4)
        crash(channel)
    late = door(path, resume=True, source="secure")
    with pytest.raises(ResumeError, match=r"continues at step 7.*step 4 is not charged"):
        late.start(7)
    late.start(4)
    assert late.accountant.ledger.charged == 8


def test_seeded_replay_on_other_data_is_refused(path: Path) -> None:
    first = door(path)
    advance(first, 0, 3)
    first.close()
    with pytest.raises(ResumeError, match="same noise on other data"):
        door(path, resume=True, fingerprint="b")


def test_a_session_that_charges_nothing_leaves_the_file_as_it_is(path: Path) -> None:
    first = door(path)
    advance(first, 0, 3)
    first.close()
    whole = path.read_bytes()
    door(path, resume=True).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "torn", [b'{"kind":"charge","first":5,"end":6}', b'{"kind":"cha', b"\x00\x00\x00", b"{}x\n"]
)
def test_a_torn_last_line_is_dropped(path: Path, torn: bytes) -> None:
    first = door(path)
    advance(first, 0, 5)
    crash(first)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    second = door(path, resume=True)
    assert second.accountant.ledger.charged == 5
    advance(second, 5, 9)
    second.close()
    assert path.read_bytes().startswith(whole + b'{"kind":"open","session":2,"previous":')
    assert door(path, resume=True).accountant.ledger.charged == 9


def test_damage_before_the_last_line_is_refused(path: Path) -> None:
    first = door(path)
    advance(first, 0, 20)
    first.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{broken\n", *lines[3:]]))
    with pytest.raises(ResumeError, match="damaged"):
        door(path, resume=True)
    path.write_bytes(b"".join([*lines[:2], b'{"kind":"gift"}\n', *lines[3:]]))
    with pytest.raises(ResumeError, match="line 3"):
        door(path, resume=True)
    path.write_bytes(b"".join(lines[1:]))
    with pytest.raises(ResumeError, match="header"):
        door(path, resume=True)


def test_a_ledger_torn_in_its_header_begins_again(path: Path) -> None:
    path.write_bytes(b'{"kind":"head')
    advance(door(path, resume=True), 0, 3)


def test_missing_charges_are_noticed(tmp_path: Path) -> None:
    for source in ("seeded", "secure"):
        channel = door(tmp_path / source, resume=True, source=source)
        with pytest.raises(ResumeError, match="step 0 is not charged"):
            channel.draw(7)


def test_a_ledger_is_neither_overwritten_nor_shared(path: Path) -> None:
    first = door(path)
    with pytest.raises(ResumeError, match="in use"):
        door(path, resume=True)
    advance(first, 0, 1)
    first.close()
    with pytest.raises(ResumeError, match="already holds"):
        door(path)
    with pytest.raises(ResumeError, match="privacy"):
        door(path, resume=True, clip_norm=3.0)
    with pytest.raises(PrivacyError, match="closed"):
        advance(first, 1, 2)


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_a_line_a_step_and_before_any_noise(
    path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """In secure mode on the disk, as far as the system was told to write it there; else in the file."""
    flushed: list[int] = []
    kind = {"seeded": sources.SeededSource, "secure": sources.SecureSource}[source]
    fsync, normal = os.fsync, kind.normal

    def count(handle: int) -> None:
        fsync(handle)
        flushed.append(path.stat().st_size if path.exists() else 0)

    def check(self, purpose: str, step: int, size: int):
        there = path.read_bytes()[: flushed[-1] if source == "secure" else None]
        lines = [json.loads(line) for line in there.splitlines()]
        assert any(
            line["kind"] == "charge" and line["first"] <= step < line["end"] for line in lines
        )
        return normal(self, purpose, step, size)

    monkeypatch.setattr(os, "fsync", count)
    monkeypatch.setattr(kind, "normal", check)
    channel = door(path, source=source)
    opened = len(flushed)
    advance(channel, 0, STEPS)
    assert len(flushed) - opened == (STEPS if source == "secure" else 0)
    assert (
        sum(json.loads(line)["kind"] == "charge" for line in path.read_bytes().splitlines())
        == STEPS
    )
    channel.sync()
    assert flushed[-1] == path.stat().st_size


@pytest.mark.parametrize("free", [True, False])
def test_random_histories_against_a_plain_model(tmp_path: Path, free: bool) -> None:
    """The specification, one step at a time: charges (step, client), each step once (seeded) or every time (secure)."""
    choose = random.Random(int(free))
    for trial in range(20):
        path, kept, reached = tmp_path / f"{trial}", [], 0
        whole = [[choose.randrange(3) for _ in range(choose.randrange(3))] for _ in range(60)]
        for _ in range(5):
            ledger = Ledger(path, {}, fingerprint="a", replays_free=free, clients=3, resume=True)
            step = choose.randrange(reached + 1)
            for _ in range(choose.randrange(4)):
                end = step + choose.randrange(1, 5)
                ledger.charge(step, end, whole[step:end])
                new = range(max(step, reached) if free else step, end)
                kept += [(each, client) for each in new for client in whole[each]]
                reached, step = max(reached, end), end
                with pytest.raises(PrivacyError, match="does not follow"):
                    ledger.charge(end - 1, end, whole[end - 1 : end])
                with pytest.raises(PrivacyError, match="does not follow"):
                    ledger.charge(end + 1, end + 2, whole[end + 1 : end + 2])
            if choose.random() < 0.5:
                ledger.close()
            else:
                ledger._file.close()
            for before in (None, choose.randrange(20)):
                some = [client for each, client in kept if before is None or each < before]
                assert ledger.uses(before).tolist() == [some.count(client) for client in range(3)]
        again = Ledger(path, {}, fingerprint="a", replays_free=free, clients=3, resume=True)
        assert again.reached == reached
        assert again.uses().tolist() == [
            [client for _, client in kept].count(client) for client in range(3)
        ]
        again.close()


@pytest.mark.parametrize("source", ["secure", "seeded"])
def test_a_run_that_stops_early_again_after_a_crash_is_charged_to_its_end(
    source: str, path: Path
) -> None:
    """The steps that a crash has lost are charged beside all that are planned from the checkpoint on."""
    first = door(path, source=source)
    first.start(0)
    advance(first, 0, 20)
    first.charge_remaining(20)
    assert first.accountant.spent.max() == STEPS
    crash(first)
    second = door(path, source=source, resume=True)
    second.start(10)
    advance(second, 10, 20)
    second.charge_remaining(20)
    charged = STEPS + 10 * (source == "secure")
    assert second.accountant.spent.max() == charged
    assert second.epsilon == second.accountant.claimed_at(charged)
    crash(second)
    third = door(path, source=source, resume=True)
    third.start(20)  # it has stopped, and is resumed again
    third.charge_remaining(20)
    assert third.accountant.spent.max() == charged
    crash(third)


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize(
    "line",
    [
        {"first": 3, "end": 4, "cohorts": [[0]]},
        {"first": 2, "end": 2, "cohorts": []},
        {"first": -1, "end": 1, "cohorts": [[], []]},
        {"first": 2, "end": 4, "cohorts": [[0]]},
        {"first": 2, "end": 3, "cohorts": [[1]]},
        {"first": 2, "end": 3, "cohorts": [["0", {}]]},
        {"first": "2", "end": None},
        {"end": 3},
    ],
)
def test_charges_that_do_not_follow_are_no_ledger(free: bool, line: dict, tmp_path: Path) -> None:
    about = {"fingerprint": "a", "replays_free": free, "clients": 1}
    with Ledger(tmp_path / "ledger.jsonl", {}, **about) as first:
        first.charge(0, 2, [[], [0]])
        first._append({"kind": "charge", **line})
    with pytest.raises(ResumeError, match="line 4: not a line of a ledger"):
        Ledger(tmp_path / "ledger.jsonl", {}, **about, resume=True)


@pytest.mark.parametrize("free", [False, True])
def test_a_step_below_zero_is_not_charged(free: bool, tmp_path: Path) -> None:
    """Its line would be one that no later session can read."""
    about = {"fingerprint": "a", "replays_free": free, "clients": 1}
    first = Ledger(tmp_path / "ledger.jsonl", {}, **about)
    with pytest.raises(PrivacyError, match="Step -1 does not follow"):
        first.charge(-1, 1, [[0], [0]])
    first.close()
    with Ledger(tmp_path / "ledger.jsonl", {}, **about, resume=True) as second:
        second.charge(0, 1, [[0]])
        assert second.uses().tolist() == [1]


# The chain: what was taken out, altered, rolled back or copied is refused by name


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
        made.append(
            json.dumps(json.loads(line) | {"previous": digest}, separators=(",", ":")).encode()
            + b"\n"
        )
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
def test_lines_that_are_missing_in_the_middle_or_at_the_end_are_noticed(
    path: Path, source: str, gone: int
) -> None:
    lines = written(path, source)
    middle = lines[:gone] + lines[gone + 1 :]
    for left, error in (
        (middle, f"line {gone + 1}: it does not follow"),
        (lines[:-gone], "rolled back"),
    ):
        path.write_bytes(b"".join(left))
        with pytest.raises(ResumeError, match=error):
            door(path, resume=True, source=source)
    path.write_bytes(b"".join(lines))
    door(path, resume=True, source=source).close()


@pytest.mark.parametrize("source", ["seeded", "secure"])
@pytest.mark.parametrize("left", [b"", b'{"kind":"hea', None], ids=["empty", "torn", "removed"])
def test_a_ledger_that_lost_all_its_lines_does_not_begin_again(
    path: Path, source: str, left: bytes | None
) -> None:
    written(path, source)
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    with pytest.raises(ResumeError, match="has 0 lines and does not have line 5"):
        door(path, resume=True, source=source)


def test_a_chain_computed_anew_is_not_the_one_that_was_recorded(path: Path) -> None:
    lines = written(path, "secure")
    path.write_bytes(b"".join(chained([*lines[:2], *lines[3:], lines[-1]])))
    with pytest.raises(ResumeError, match="rolled back or replaced"):
        door(path, resume=True, source="secure")


def test_a_head_belongs_to_its_number_of_lines(path: Path) -> None:
    channel = door(path)
    advance(channel, 0, 2)
    channel.close()
    chain = read_chain(path)
    assert len(chain.digests) > 2
    for place, digest in enumerate(chain.digests):
        for lines in range(1, len(chain.digests) + 2):
            assert chain.has(Head(lines, digest)) == (lines == place + 1)


def test_a_secure_ledger_needs_its_head_file(tmp_path: Path) -> None:
    for source in ("seeded", "secure"):
        path = tmp_path / source / "ledger.jsonl"
        written(path, source)
        head_file(path).unlink()
    door(tmp_path / "seeded/ledger.jsonl", resume=True).close()
    with pytest.raises(ResumeError, match=r"ledger\.head is missing"):
        door(tmp_path / "secure/ledger.jsonl", resume=True, source="secure")


def test_a_head_file_that_lags_behind_is_no_fault(path: Path) -> None:
    """After a crash of the system the ledger is on the disk, its head file perhaps an older one."""
    channel = door(path, source="secure")
    advance(channel, 0, 3)
    older = head_file(path).read_bytes()
    advance(channel, 3, 20)
    crash(channel)
    head_file(path).write_bytes(older)
    again = door(path, resume=True, source="secure")
    assert again.accountant.ledger.charged == 20
    assert head_file(path).read_bytes() != older


def test_an_older_ledger_is_refused_by_name(path: Path) -> None:
    path.write_bytes(
        b'{"kind":"header","version":1,"fingerprint":"a","replays_free":true}\n{"kind":"open","session":1}\n'
    )
    with pytest.raises(ResumeError, match="version 1, this is version 9"):
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
