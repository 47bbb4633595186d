"""How long a client takes from one activation to the next."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from .._check import non_negative, positive
from .._files import csv_rows
from ..errors import ConfigError, DataError

Array = NDArray[np.float64]


class Latency(ABC):
    """The law of the time between two activations of one client, in any one unit of time.

    ``random`` tells whether :meth:`gaps` needs uniform numbers.
    """

    random: ClassVar[bool] = True

    def resolve(self, names: Sequence[str]) -> Latency:
        """Return the law for these clients, every file read and every client found.

        Args:
            names: the clients' names, in the order of their positions.

        Raises:
            DataError: a trace is malformed or has no row for a client.
        """
        return self

    @abstractmethod
    def gaps(self, uniform: Array, client: NDArray[np.int64], index: NDArray[np.int64]) -> Array:
        """Return the latencies of given activations, before any per-client scale.

        Args:
            uniform: numbers in [0, 1), one an activation; empty if not ``random``.
            client: positions, broadcast against ``index``.
            index: numbers of the activations, from 0 for each client.
        """

    @abstractmethod
    def typical(self, clients: int) -> Array:
        """Return (clients,) about the latency of each client: how far to draw ahead, never what comes out."""


@dataclass(frozen=True)
class ConstantLatency(Latency):
    """The same time for every activation."""

    value: float
    random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        positive(self, value=self.value)

    def gaps(self, uniform: Array, client: NDArray[np.int64], index: NDArray[np.int64]) -> Array:
        return np.full(np.broadcast_shapes(client.shape, index.shape), float(self.value))

    def typical(self, clients: int) -> Array:
        return np.full(clients, float(self.value))


@dataclass(frozen=True)
class UniformLatency(Latency):
    """Uniform on [low, high); 0 to 15 ms in Xie et al., section 4."""

    low: float
    high: float

    def __post_init__(self) -> None:
        non_negative(self, low=self.low)
        positive(self, high=self.high)
        if self.high <= self.low:
            raise ConfigError(f"UniformLatency.high is {self.high!r}; it must be above low ({self.low!r}).")

    def gaps(self, uniform: Array, client: NDArray[np.int64], index: NDArray[np.int64]) -> Array:
        return self.low + (self.high - self.low) * uniform

    def typical(self, clients: int) -> Array:
        return np.full(clients, (self.low + self.high) / 2.0)


@dataclass(frozen=True)
class LogNormalLatency(Latency):
    """median * exp(sigma N(0, 1)): many quick activations and a few very slow ones."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        positive(self, median=self.median)
        non_negative(self, sigma=self.sigma)
        if self.sigma > 10.0:
            raise ConfigError(f"LogNormalLatency.sigma is {self.sigma!r}; it must be in [0, 10].")

    def gaps(self, uniform: Array, client: NDArray[np.int64], index: NDArray[np.int64]) -> Array:
        return self.median * np.exp(self.sigma * ndtri(np.maximum(uniform, 2.0**-54)))

    def typical(self, clients: int) -> Array:
        return np.full(clients, float(self.median))


@dataclass(frozen=True)
class ExponentialLatency(Latency):
    """Exponential with a given mean: each client is a Poisson clock."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        positive(self, scale=self.scale)

    def gaps(self, uniform: Array, client: NDArray[np.int64], index: NDArray[np.int64]) -> Array:
        return -self.scale * np.log1p(-uniform)

    def typical(self, clients: int) -> Array:
        return np.full(clients, float(self.scale))


@dataclass(frozen=True)
class TraceLatency(Latency):
    """Measured latencies, in seconds, used in their order and then again from the first.

    Every replicate sees the same trace.

    Args:
        source: a CSV file (.csv or .csv.gz) with the header ``client,seconds`` and one row an activation, or a mapping
            from client names to lists, or one list a client in the order of their positions.
    """

    source: str | Path | Mapping[str, Sequence[float]] | Sequence[Sequence[float]]
    random: ClassVar[bool] = False

    def resolve(self, names: Sequence[str]) -> Latency:
        where = "TraceLatency.source"
        if isinstance(self.source, str | Path):
            where, traces = str(self.source), _read_trace(Path(self.source))
        elif isinstance(self.source, Mapping):
            traces = {str(name): list(seconds) for name, seconds in self.source.items()}
        else:
            if len(self.source) != len(names):
                raise ConfigError(f"{where} has {len(self.source):,} lists; it must have one a client, {len(names):,}.")
            traces = dict(zip(names, map(list, self.source), strict=True))
        lists = []
        for name in names:
            if name not in traces:
                raise DataError(f"{where}: client {name!r} has no row; every client needs at least one latency.")
            lists.append(_checked(traces[name], f"{where}: client {name!r}"))
        counts = np.array([len(seconds) for seconds in lists], np.int64)
        return _Lookup(np.concatenate(lists), np.cumsum(counts) - counts, counts)

    def gaps(self, uniform: Array, client: NDArray[np.int64], index: NDArray[np.int64]) -> Array:
        raise ConfigError("TraceLatency must be resolved for the clients' names first.")

    def typical(self, clients: int) -> Array:
        raise ConfigError("TraceLatency must be resolved for the clients' names first.")


@dataclass(frozen=True)
class _Lookup(Latency):
    """Lists of latencies, one a client, flat with offsets."""

    flat: Array
    first: NDArray[np.int64]
    counts: NDArray[np.int64]
    random: ClassVar[bool] = False

    def gaps(self, uniform: Array, client: NDArray[np.int64], index: NDArray[np.int64]) -> Array:
        return self.flat[self.first[client] + index % self.counts[client]]

    def typical(self, clients: int) -> Array:
        return np.add.reduceat(self.flat, self.first) / self.counts


def _checked(seconds: list[Any], where: str) -> Array:
    """Return float64 (m,) latencies: at least one, finite, none negative, not all of them 0."""
    if not seconds:
        raise DataError(f"{where} has an empty list; every client needs at least one latency.")
    for row, value in enumerate(seconds, start=1):
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise DataError(f"{where}, value {row} is {value!r}; a latency must be a finite number of at least 0.")
    if sum(seconds) <= 0:
        raise DataError(f"{where} has only latencies of 0; at least one must be above 0.")
    return np.array(seconds, np.float64)


def _read_trace(path: Path) -> dict[str, list[float]]:
    """Return latencies of each client, from ``client,seconds`` rows; rows are counted with the header as row 1."""
    traces: dict[str, list[float]] = {}
    for where, (client, value) in csv_rows(path, "client,seconds", what="a trace is"):
        if not client:
            raise DataError(f"{where}: no client; a row is client,seconds.")
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds) or seconds < 0:
            text = repr(value) if value else "missing"
            raise DataError(
                f"{where}: the latency of client {client!r} is {text}; it must be a finite number of at least 0."
            )
        traces.setdefault(client, []).append(seconds)
    if not traces:
        raise DataError(f"{path}: no rows under the header; every client needs at least one.")
    return traces
