"""The ledger through crashes: what was charged stays charged."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
import torch

from fedmtl.errors import BudgetExhausted, PrivacyError, ResumeError
from fedmtl.privacy import ClientPrivacy, FixedCohort, Ledger, PoissonSampling, ReleasePlan, open_channel
from fedmtl.privacy.noise import sources

STEPS = 40


def door(
    path: Path | None,
    *,
    resume: bool = False,
    source: str = "seeded",
    fingerprint: str = "a",
    steps: int = STEPS,
    block: int = 8,
    sampler=None,
    **privacy,
):
    settings = ClientPrivacy(**{"clip_norm": 1.0, "noise_multiplier": 2.0, "source": source, **privacy})
    plan = ReleasePlan(name="update", dimension=4, uses=steps)
    return open_channel(
        settings,
        (plan,),
        sampler or PoissonSampling(5).bind(50),
        seed=1,
        steps=steps,
        fingerprint=fingerprint,
        ledger_path=path,
        resume=resume,
        block=block,
    )


def advance(channel, start: int, stop: int) -> list[torch.Tensor]:
    values = []
    for step in range(start, stop):
        ranks = channel.draw(step)
        channel.begin(step, ranks)
        values.append(channel.release("update", torch.ones(len(ranks), 4), ranks))
    return values


def crash(channel) -> None:
    """The process is gone: the system closes its files, and nothing else happens."""
    channel.account.ledger._file.close()


def test_seeded_replay_is_charged_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    whole = advance(door(None), 0, STEPS)
    first = door(path)
    values = advance(first, 0, 13)
    assert first.account.charged == 16  # two blocks of eight
    assert int(first.account.uses.max()) == 13
    crash(first)
    second = door(path, resume=True)
    assert (
        int(second.account.uses.max()) == 16
    )  # until it says where it continues, all that was reserved may have been released
    replayed = advance(second, 10, STEPS)
    assert second.account.charged == int(second.account.uses.max()) == STEPS
    second.close()
    assert all(torch.equal(a, b) for a, b in zip(whole, values[:10] + replayed, strict=True))
    assert second.report.epsilon == second.epsilon_at(STEPS)


def test_charges_of_two_sessions_do_not_stand_for_steps_that_none_has_charged(tmp_path: Path) -> None:
    """Steps 0 to 3 twice are eight charges, and none of them is for steps 4 to 6."""
    path = tmp_path / "ledger.jsonl"
    for resume in (False, True):
        channel = door(path, resume=resume, source="secure", block=4)
        advance(channel, 0, 4)
        crash(channel)
    late = door(path, resume=True, source="secure", block=4)
    with pytest.raises(ResumeError, match=r"continues at step 7.*step 4 is not charged"):
        late.start(7)
    late.start(4)
    assert late.account.charged == 8


def test_seeded_replay_on_other_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = door(path)
    advance(first, 0, 3)
    first.close()
    with pytest.raises(ResumeError, match="same noise on other data"):
        door(path, resume=True, fingerprint="b")


def test_secure_replay_is_charged_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = door(path, source="secure")
    values = advance(first, 0, 13)
    crash(first)
    second = door(path, resume=True, source="secure")
    assert int(second.account.uses.max()) == 16
    again = advance(second, 10, 13)
    assert not any(torch.equal(a, b) for a, b in zip(values[10:], again, strict=True))
    assert int(second.account.uses.max()) == 16 + 3
    assert second.account.charged == 16 + 8
    second.close()
    assert second.account.charged == 16 + 3  # the five unused of its own block return, the crashed block does not
    assert second.report.epsilon == pytest.approx(second.epsilon_at(19))


def test_unused_reservations_return_on_a_clean_close_only(tmp_path: Path) -> None:
    for source in ("seeded", "secure"):
        path = tmp_path / source
        first = door(path, source=source)
        advance(first, 0, 5)
        first.close()
        first.close()
        second = door(path, resume=True, source=source)
        assert second.account.charged == 5
        advance(second, 5, 6)
        crash(second)
        assert door(path, resume=True, source=source).account.charged == 5 + 8


@pytest.mark.parametrize(
    "torn", [b'{"kind":"reserve","session":1,"first":8,"end":16}', b'{"kind":"res', b"\x00\x00\x00", b"{}x\n"]
)
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    first = door(path)
    advance(first, 0, 5)
    crash(first)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    second = door(path, resume=True)
    assert second.account.charged == 8
    advance(second, 5, 9)
    second.close()
    assert path.read_bytes().startswith(whole + b'{"kind":"open","session":2,"previous":')
    assert door(path, resume=True).account.charged == 9


def test_damage_before_the_last_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
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


def test_a_ledger_torn_in_its_header_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"kind":"head')
    advance(door(path, resume=True), 0, 3)


def test_missing_charges_are_noticed(tmp_path: Path) -> None:
    for source in ("seeded", "secure"):
        channel = door(tmp_path / source, resume=True, source=source)
        with pytest.raises(ResumeError, match="step 0 is not charged"):
            channel.draw(7)


def test_a_ledger_is_neither_overwritten_nor_shared(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
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
        advance(first, 20, 21)


def test_one_flush_a_block_and_before_any_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    flushed: list[int] = []
    fsync, normal = os.fsync, sources.SeededSource.normal

    def count(handle: int) -> None:
        fsync(handle)
        flushed.append(path.stat().st_size if path.exists() else 0)

    def check(self, purpose: str, step: int, size: int):
        lines = [json.loads(line) for line in path.read_bytes()[: flushed[-1]].splitlines()]
        assert any(line["kind"] == "reserve" and line["first"] <= step < line["end"] for line in lines)
        return normal(self, purpose, step, size)

    monkeypatch.setattr(os, "fsync", count)
    monkeypatch.setattr(sources.SeededSource, "normal", check)
    channel = door(path)
    opened = len(flushed)
    advance(channel, 0, STEPS)
    assert len(flushed) - opened == STEPS // 8


def test_kill_at_random_times_between_reserve_and_release(tmp_path: Path) -> None:
    """Children die by SIGKILL anywhere; the spend never decreases and the releases are the same bits."""
    whole = advance(door(None), 0, STEPS)
    path, out = tmp_path / "ledger.jsonl", tmp_path / "releases"
    out.mkdir()
    choose, spent, start = random.Random(0), 0, 0
    while start < STEPS:
        limit = choose.randrange(1, 14)
        child = os.fork()
        if child == 0:
            try:
                channel, budget = door(path, resume=True), limit
                for step in range(start, STEPS):
                    for stage in ("draw", "begin", "release"):
                        if budget == 0:
                            os.kill(os.getpid(), signal.SIGKILL)
                        budget -= 1
                        if stage == "draw":
                            ranks = channel.draw(step)
                        elif stage == "begin":
                            channel.begin(step, ranks)
                        else:
                            value = channel.release("update", torch.ones(len(ranks), 4), ranks)
                            torch.save(value, out / f"{step}")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        now = Ledger(path, json_header(path), fingerprint="a", replays_free=True, resume=True)
        assert now.charged() >= spent
        spent = now.charged()
        now.close()
        done = [step for step in range(STEPS) if (out / f"{step}").exists()]
        assert all(now.reserved(step) for step in done)
        assert all(torch.equal(torch.load(out / f"{step}"), whole[step]) for step in done)
        start = max(0, len(done) - choose.randrange(0, 3))  # a checkpoint that lags behind
        start = len(done) if len(done) == STEPS else start
    assert spent == STEPS


def json_header(path: Path) -> dict:
    header = json.loads(path.read_bytes().splitlines()[0])
    return {
        key: value for key, value in header.items() if key not in {"kind", "version", "fingerprint", "replays_free"}
    }


@pytest.mark.parametrize("free", [True, False])
def test_random_histories_against_a_plain_model(tmp_path: Path, free: bool) -> None:
    """The specification, one step at a time: a set of steps (seeded) or a list of them (secure)."""
    choose = random.Random(int(free))
    for trial in range(20):
        path, kept = tmp_path / f"{trial}", []
        for _ in range(5):
            ledger = Ledger(path, {}, fingerprint="a", replays_free=free, resume=True)
            mine, begun, last = [], [], ledger.charged()
            for _ in range(choose.randrange(6)):
                step = choose.randrange(25)
                if not ledger.reserved(step):
                    end = step + choose.randrange(1, 5)
                    ledger.reserve(step, end)
                    mine += list(range(step, end))
                if step not in begun:
                    ledger.begin(step)
                    begun.append(step)
                assert ledger.charged() == (len(set(kept + mine)) if free else len(kept + mine))
                assert ledger.charged() >= last
                last = ledger.charged()
            if not free and len(set(mine)) != len(mine):
                ledger._file.close()
                kept += mine
                continue
            if choose.random() < 0.5:
                ledger.close()
                kept += [step for step in mine if step in begun]
            else:
                ledger._file.close()
                kept += mine
        again = Ledger(path, {}, fingerprint="a", replays_free=free, resume=True)
        assert again.charged() == (len(set(kept)) if free else len(kept))


def begin_until_exhausted(channel, step: int) -> int:
    """The first step that did not fit."""
    while True:
        ranks = channel.draw(step)
        try:
            channel.begin(step, ranks)
        except BudgetExhausted:
            return step
        step += 1


def test_budget_is_exhausted_before_any_data_is_read(tmp_path: Path) -> None:
    channel = door(tmp_path / "ledger", epsilon=2.0, noise_multiplier=1.5, steps=STEPS * 100)
    done = begin_until_exhausted(channel, 0)
    assert channel.epsilon_at(done) <= 2.0 < channel.epsilon_at(done + 1)
    assert channel.epsilon <= 2.0
    ranks = channel.draw(done)
    with pytest.raises(PrivacyError, match="no step has begun"):
        channel.release("update", torch.ones(len(ranks), 4), ranks)


def test_a_calibrated_run_has_room_for_all_its_steps_and_no_more() -> None:
    channel = door(None, epsilon=3.0, noise_multiplier=None)
    advance(channel, 0, STEPS)
    assert 2.999 < channel.epsilon <= 3.0
    with pytest.raises(BudgetExhausted):
        advance(channel, STEPS, STEPS + 1)


def test_crashes_of_a_secure_run_eat_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first = door(path, source="secure", epsilon=3.0, noise_multiplier=None)
    advance(first, 0, 20)
    crash(first)
    second = door(path, resume=True, source="secure", epsilon=3.0, noise_multiplier=None)
    assert second.noise_multiplier == first.noise_multiplier
    assert begin_until_exhausted(second, 16) == 16 + STEPS - 24  # 24 were charged before


def test_fixed_cohorts_record_participants_and_survive_crashes(tmp_path: Path) -> None:
    sampler = FixedCohort(4).bind(12)
    whole = door(None, sampler=sampler)
    expected = advance(whole, 0, STEPS)
    path = tmp_path / "ledger"
    first = door(path, sampler=sampler)
    advance(first, 0, 17)
    crash(first)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert sum(len(cohort) for line in lines for cohort in line.get("cohorts", ())) == 17 * 4
    second = door(path, resume=True, sampler=sampler)
    values = advance(second, 14, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(expected[14:], values, strict=True))
    assert int(second.account.uses.max()) == int(whole.account.uses.max()) == second.account.charged
    assert second.report.releases == STEPS

    secure = door(tmp_path / "secure", sampler=sampler, source="secure")
    advance(secure, 0, 10)
    crash(secure)
    again = door(tmp_path / "secure", resume=True, sampler=sampler, source="secure")
    advance(again, 5, 10)
    assert int(again.account.participations.sum()) == 15 * 4


@pytest.mark.parametrize("free", [True, False])
def test_how_far_a_ledger_has_reached(free: bool, tmp_path: Path) -> None:
    """Over all sessions, and without what a clean close returns."""
    kept = {"fingerprint": "a", "replays_free": free, "clients": 1}
    with Ledger(tmp_path / "ledger.jsonl", {}, **kept) as first:
        assert first.reached == 0
        first.reserve(0, 2, [[], [0]])
        first.begin(0, 2)
        first.reserve(2, 5, [[0]] * 3)
        assert first.reached == 5
    with Ledger(tmp_path / "ledger.jsonl", {}, **kept, resume=True) as again:
        assert again.reached == 2
        again.reserve(0, 1, [[]])
        assert again.reached == 2
