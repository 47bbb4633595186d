"""Where the time of a run goes: parts add up, nested parts are counted once, the run stays the same."""

from __future__ import annotations

import pytest

from fedmtl.errors import ConfigError
from fedmtl.privacy import ScaledRows
from fedmtl.trainer import profile as module
from fedmtl.trainer.profile import PARTS, Stopwatch, profile

from . import settings, test_replicates


class Clock:
    """A clock that its user moves."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_parts_inside_others_are_counted_once(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    watch = Stopwatch()

    def gradients(*_):
        clock.now += 4.0

    def release(inner):
        clock.now += 2.0
        inner.factors(0, None, None)
        clock.now += 1.0

    with watch("other"):
        clock.now += 10.0
        watch.timed("release", release)(ScaledRows(gradients))
        clock.now += 0.5
    clock.now += 100.0  # outside of everything
    assert dict(watch.seconds) == {"other": 10.5, "release": 3.0, "local work": 4.0}


def test_a_part_that_fails_is_closed(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    watch = Stopwatch()

    def fails():
        clock.now += 2.0
        raise ValueError

    with watch("other"):
        with pytest.raises(ValueError):  # noqa: PT011
            watch.timed("data", fails)()
        clock.now += 1.0
    assert dict(watch.seconds) == {"other": 1.0, "data": 2.0}


@pytest.mark.parametrize(
    ("run", "step", "without"),
    [
        (settings.trainer(), "round", ()),
        (test_replicates.trainer("learner"), "activation", ("data",)),
    ],
)
def test_every_part_of_a_short_run_is_there(run, step, without, tmp_path):
    found = profile(run, rounds=4, folder=tmp_path / "run")
    assert (found.rounds, found.step) == (4, step)
    expected = set(PARTS) - set(without)
    assert expected <= set(found.seconds)
    assert found.total == pytest.approx(sum(found.seconds.values()))
    lines = found.text().splitlines()
    assert len(lines) == len(found.seconds) + 2
    assert f"ms/{step}" in lines[0]


def test_a_profiled_run_is_the_run(tmp_path):
    run = settings.trainer(rounds=4)
    profile(run, rounds=4, folder=tmp_path / "run")
    from safetensors.torch import load_file

    written = load_file(tmp_path / "run/public/model.safetensors")
    shared = run.fit().shared
    assert sum(value.numel() for value in written.values()) == shared.numel()
    assert sorted(v for t in written.values() for v in t.flatten().tolist()) == sorted(shared.tolist())


def test_at_least_one_round():
    with pytest.raises(ConfigError, match=r"profile\.rounds is 0"):
        profile(settings.trainer(), rounds=0)
