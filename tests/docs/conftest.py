"""Settings of the tests that run whole commands in one process."""

import logging

import pytest


@pytest.fixture(autouse=True)
def open_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the stream that pytest writes to open: Hydra closes all handlers of logging, and absl's its stream too."""
    monkeypatch.setattr("absl.logging.PythonHandler.close", logging.StreamHandler.close)
