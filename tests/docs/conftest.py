"""Settings of the tests that run whole commands in one process."""

import logging
from collections.abc import Iterator

import pytest

from fedmtl.algorithms.base import BASELINES, METHODS
from fedmtl.algorithms.finetune import PERSONALIZATIONS
from fedmtl.data import LOADERS


@pytest.fixture(autouse=True)
def open_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the stream that pytest writes to open: Hydra closes all handlers of logging, and absl's its stream too."""
    monkeypatch.setattr("absl.logging.PythonHandler.close", logging.StreamHandler.close)


@pytest.fixture(autouse=True)
def own_names() -> Iterator[None]:
    """Takes back the names that the modules of a page register, which other tests must not find."""
    registries: tuple[dict[str, object], ...] = (METHODS, BASELINES, PERSONALIZATIONS, LOADERS)  # type: ignore[assignment]
    before = [dict(registry) for registry in registries]
    yield
    for registry, names in zip(registries, before, strict=True):
        registry.clear()
        registry.update(names)
