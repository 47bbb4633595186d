"""Settings of the tests of Flower apps."""

import logging

import pytest


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmtl.flower.nodes._PAUSE", 0.0)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What server and nodes report."""
    caplog.set_level(logging.INFO, "fedmtl")
    return caplog
