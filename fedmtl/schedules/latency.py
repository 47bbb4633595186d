"""Latencies: the times of clients from one activation to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._files import csv_rows
from ..errors import ConfigError, DataError

Array = NDArray[np.float64]


Law = Callable[[Array, NDArray[np.int64], NDArray[np.int64]], Array]
"""A function from numbers in [0, 1), clients and numbers of activations to latencies.

The arrays have one shape or are broadcast.
"""


def exponential(uniform: Array, client: NDArray[np.int64], index: NDArray[np.int64]) -> Array:
    """Returns exponential latencies of mean 1: each client is a Poisson clock."""
    gaps: Array = -np.log1p(-uniform)
    return gaps


def constant(uniform: Array, client: NDArray[np.int64], index: NDArray[np.int64]) -> Array:
    """Returns latencies of 1."""
    return np.ones(index.shape)


@dataclass(frozen=True)
class RandomLatency:
    """Independent latencies by a distribution of SciPy, in any one unit of time.

    Args:
        law: name of a continuous distribution in :mod:`scipy.stats`: ``"uniform"``, ``"expon"``,
            ``"lognorm"``, ...
        parameters: of the distribution by name, such as ``{"scale": 15.0}`` for uniform latencies
            on [0, 15), or ``{"s": 2.0, "scale": 3.0}`` for log-normal ones of median 3.

    Raises:
        ConfigError: there is no such distribution, it has other parameters, or latencies are below
            0.

    Example:
        >>> from fedmtl import Latencies
        >>> from fedmtl.schedules import RandomLatency
        >>> latency = RandomLatency("uniform", {"scale": 15.0})
        >>> schedule = Latencies(latency=latency, activations=3).bind(2)
        >>> block = schedule.activations(seed=0, start=0, stop=3)
        >>> bool((block.time[0].diff() >= 0).all())
        True
    """

    law: str
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameters = ", ".join(f"{name}={value!r}" for name, value in self.parameters.items())
        try:
            self._distribution()
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"RandomLatency is {self.law!r} with {parameters or 'no parameters'}; give a "
                "continuous distribution of scipy.stats of numbers of at least 0, such as uniform, "
                f"expon or lognorm, with its parameters by name ({error})."
            ) from error

    def _distribution(self) -> Any:
        """Returns the distribution with its parameters; the errors are those of the settings."""
        from scipy.stats import distributions  # takes a second to import

        law = getattr(distributions, self.law)
        if not isinstance(law, distributions.rv_continuous):
            raise ValueError(f"scipy.stats.{self.law} is no continuous distribution")
        frozen = law(**self.parameters)
        least = float(frozen.support()[0])  # NaN for parameters outside of their range
        finite = all(map(math.isfinite, self.parameters.values()))
        if not least >= 0 or not finite:
            raise ValueError(f"its least value is {least:g}")
        return frozen

    def bind(self) -> Law:
        """Returns the law, the quantile function of the distribution."""
        distribution = self._distribution()

        def law(uniform: Array, client: NDArray[np.int64], index: NDArray[np.int64]) -> Array:
            latencies: Array = distribution.ppf(uniform)
            return latencies

        return law


@dataclass(frozen=True)
class TraceLatency:
    """Measured latencies, in seconds, used in their order and then again from the first.

    Every replicate sees the same trace.

    Args:
        source: a CSV file (.csv or .csv.gz) with the header ``client,seconds`` and one row for each
            activation, or a mapping from client names to lists, or one list for each client in the
            order of their positions.

    Example:
        >>> from fedmtl import Latencies
        >>> from fedmtl.schedules import TraceLatency
        >>> latency = TraceLatency([[1.0], [2.5]])  # seconds of two clients
        >>> schedule = Latencies(latency=latency, activations=3).bind(2)
        >>> block = schedule.activations(seed=0, start=0, stop=3)
        >>> block.time[0].tolist(), block.client[0].tolist()
        ([1.0, 2.0, 2.5], [0, 0, 1])
    """

    source: str | Path | Mapping[str, Sequence[float]] | Sequence[Sequence[float]]

    def bind(self, names: Sequence[str]) -> Law:
        """Returns the law of the latencies of clients.

        Args:
            names: ids of the n clients, in the order of the data.

        Returns:
            A function from uniform numbers, clients and the numbers of their activations, int64, to
            latencies in seconds; the shapes are broadcast.

        Raises:
            ConfigError: lists in the order of the clients, but not one for each of them.
            DataError: a trace is malformed or has no row for a client.
        """
        where = "TraceLatency.source"
        if isinstance(self.source, str | Path):
            where = str(self.source)
            traces = _read_trace(Path(self.source))
        elif isinstance(self.source, Mapping):
            traces = {str(name): list(seconds) for name, seconds in self.source.items()}
        else:
            if len(self.source) != len(names):
                needed = f"one a client, {len(names):,}"
                raise ConfigError(f"{where} has {len(self.source):,} lists; it must have {needed}.")
            traces = dict(zip(names, map(list, self.source), strict=True))
        lists = []
        for name in names:
            latencies = []
            for row, value in enumerate(traces.get(name, ()), start=1):
                latencies.append(_number(value, f"{where}: client {name!r}, value {row}"))
            # time would stand still
            if not sum(latencies) > 0:
                without = f"client {name!r} has no latency above 0"
                raise DataError(f"{where}: {without}; every client needs one at least.")
            lists.append(np.array(latencies, np.float64))
        # the lists of all clients one after another, from ``first`` on
        counts = np.array([len(seconds) for seconds in lists], np.int64)
        flat = np.concatenate(lists)
        first = np.cumsum(counts) - counts

        def law(uniform: Array, client: NDArray[np.int64], index: NDArray[np.int64]) -> Array:
            latencies: Array = flat[first[client] + index % counts[client]]
            return latencies

        return law


def _number(value: Any, where: str) -> float:
    """Returns a latency as a number; ``where`` is its place, for the message."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise DataError(f"{where} is {value!r}; a latency must be a finite number of at least 0.")
    return seconds


def _read_trace(path: Path) -> dict[str, list[float]]:
    """Reads the latencies of each client from rows ``client,seconds``; the header is row 1."""
    traces: dict[str, list[float]] = {}
    for where, (client, value) in csv_rows(path, "client,seconds", subject="a trace is"):
        if not client:
            raise DataError(f"{where}: no client; a row is client,seconds.")
        seconds = _number(value, f"{where}: the latency of client {client!r}")
        traces.setdefault(client, []).append(seconds)
    return traces
