"""How long a client takes from one activation to the next."""

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
"""Numbers in [0, 1), clients and the numbers of their activations, of one shape or broadcast, to latencies."""


def exponential(uniform: Array, client: NDArray[np.int64], index: NDArray[np.int64]) -> Array:
    """Returns exponential latencies of mean 1: each client is a Poisson clock."""
    gaps: Array = -np.log1p(-uniform)
    return gaps


@dataclass(frozen=True)
class RandomLatency:
    """Independent latencies by a distribution of SciPy, in any one unit of time.

    Args:
        law: name of a continuous distribution in :mod:`scipy.stats`: ``"uniform"``, ``"expon"``,
            ``"lognorm"``, ...
        parameters: of the distribution by name, such as ``{"scale": 15.0}`` for uniform latencies
            on [0, 15), or ``{"s": 2.0, "scale": 3.0}`` for log-normal ones of median 3.

    Raises:
        ConfigError: no such distribution, other parameters than it has, or latencies below 0.
    """

    law: str
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameters = ", ".join(f"{name}={value!r}" for name, value in self.parameters.items())
        try:
            self._distribution()
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"RandomLatency is {self.law!r} with {parameters or 'no parameters'}; give a continuous distribution "
                f"of scipy.stats of numbers of at least 0, such as uniform, expon or lognorm, with its parameters by "
                f"name ({error})."
            ) from error

    def _distribution(self) -> Any:
        from scipy.stats import distributions

        law = getattr(distributions, self.law)
        if not isinstance(law, distributions.rv_continuous):
            raise ValueError(f"scipy.stats.{self.law} is no continuous distribution")
        frozen = law(**self.parameters)
        if not (least := float(frozen.support()[0])) >= 0 or not all(map(math.isfinite, self.parameters.values())):
            raise ValueError(f"its least value is {least:g}")
        return frozen

    def bind(self) -> Law:
        """Returns the law."""
        distribution = self._distribution()
        return lambda uniform, client, index: distribution.ppf(uniform)


@dataclass(frozen=True)
class TraceLatency:
    """Measured latencies, in seconds, used in their order and then again from the first.

    Every replicate sees the same trace.

    Args:
        source: a CSV file (.csv or .csv.gz) with the header ``client,seconds`` and one row an
            activation, or a mapping from client names to lists, or one list a client in the order
            of their positions.
    """

    source: str | Path | Mapping[str, Sequence[float]] | Sequence[Sequence[float]]

    def bind(self, names: Sequence[str]) -> Law:
        """Returns the law for clients of these names.

        Raises:
            DataError: a trace is malformed or has no row for a client.
        """
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
            values = enumerate(traces.get(name, ()), start=1)
            latencies = [_number(value, f"{where}: client {name!r}, value {row}") for row, value in values]
            if not sum(latencies) > 0:
                raise DataError(f"{where}: client {name!r} has no latency above 0; every client needs one at least.")
            lists.append(np.array(latencies, np.float64))
        counts = np.array([len(seconds) for seconds in lists], np.int64)
        flat, first = np.concatenate(lists), np.cumsum(counts) - counts
        return lambda uniform, client, index: flat[first[client] + index % counts[client]]


def _number(value: Any, where: str) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise DataError(f"{where} is {value!r}; a latency must be a finite number of at least 0.")
    return seconds


def _read_trace(path: Path) -> dict[str, list[float]]:
    """Returns latencies of each client, from ``client,seconds`` rows; rows are counted with the header as row 1."""
    traces: dict[str, list[float]] = {}
    for where, (client, value) in csv_rows(path, "client,seconds", what="a trace is"):
        if not client:
            raise DataError(f"{where}: no client; a row is client,seconds.")
        traces.setdefault(client, []).append(_number(value, f"{where}: the latency of client {client!r}"))
    return traces
