"""Schedules of asynchronous runs: Poisson clocks, latencies without waiting, and the synchronous counterpart.

Who acts when depends on no data, so the draws are those of a simulation: addressed by
(seed, purpose, replicate, client, index). A replicate is the same alone and among others, a client keeps its times
when others join, and a window of a run is the same whatever was asked before.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._check import positive_int
from ..errors import ConfigError
from ..random import id_keys
from .block import Block
from .draws import KeyedDraws
from .dropouts import Absences, Dropouts
from .latency import ExponentialLatency, Latency
from .streams import ClientRates, Merged, Stream, Waiting


class BoundSchedule:
    """A schedule for n given clients.

    The last position is kept, so that windows asked in order cost only themselves; going back, or a new process,
    makes the events before the window again (about a second per million).

    Attributes:
        steps: the most events of a run. Fewer clients may be left to act in the end (absences without return); a
            table is then filled up with -1.
        clients: n.
    """

    def __init__(
        self,
        pace: ClientRates,
        names: Sequence[str],
        keys: NDArray[np.int64],
        *,
        events: int | None,
        waits: bool,
        dropouts: Dropouts | None,
    ) -> None:
        self._pace, self._names, self._keys, self._dropouts, self._waits = pace, names, keys, dropouts, waits
        self.clients = len(keys)
        total = int(pace.caps.sum()) if pace.caps.max() < _ENDLESS else _ENDLESS
        self.steps = total if events is None else min(total, events)
        self._last: tuple[tuple[int, tuple[int, ...]], Stream] | None = None

    @property
    def caps(self) -> NDArray[np.int64]:
        """Return the most events of each client in a run, int64 (n,)."""
        return np.minimum(self._pace.caps, self.steps)

    def describe(self) -> str:
        """Return one phrase for the report."""
        kind = "independent Poisson clocks"
        if not isinstance(self._pace.latency, ExponentialLatency) or self._waits:
            waits = "the server waits for the slowest" if self._waits else "the server never waits"
            kind = f"{type(self._pace.latency).__name__} between activations, {waits}"
        low, high = int(self.caps.min()), int(self.caps.max())
        most = f"{high}" if low == high else f"{low} to {high}"
        return f"{self.clients} clients, {kind}, at most {most} activations of one client"

    def events(self, seed: int, start: int, stop: int, *, replicates: int | Sequence[int] = 1) -> Block:
        """Return events ``start`` to ``stop - 1``.

        Args:
            seed: of the run.
            start, stop: 0 <= start <= stop <= ``steps``.
            replicates: R for replicates 0 to R - 1, or their indices.

        Raises:
            ConfigError: the window is not inside the run, or there is no replicate.
        """
        if not 0 <= start <= stop <= self.steps:
            raise ConfigError(f"events {start} to {stop} were asked for; a window must be within [0, {self.steps}].")
        indices = tuple(range(replicates)) if isinstance(replicates, int) else tuple(int(r) for r in replicates)
        if not indices:
            raise ConfigError(f"replicates is {replicates!r}; at least one is needed.")
        stream = self._stream(seed, indices, start)
        while stream.position < start:
            stream.take(min(_SKIP, start - stream.position))
        time, client = stream.take(stop - start)
        self._last = ((seed, indices), stream)
        return Block(start, torch.from_numpy(time), torch.from_numpy(client)[:, :, None])

    def _stream(self, seed: int, replicates: tuple[int, ...], start: int) -> Stream:
        last, self._last = self._last, None  # a stream that an error interrupts is not used again
        if last is not None and last[0] == (seed, replicates) and last[1].position <= start:
            return last[1]
        rows = KeyedDraws(seed, replicates, self._keys)
        away = Absences(self._dropouts, rows, self._names) if self._dropouts is not None else None
        return (Waiting if self._waits else Merged)(self._pace, rows, away, self.steps)


class AsynchronousSchedule(ABC):
    """Settings that become a :class:`BoundSchedule` once the clients are known."""

    @abstractmethod
    def bind(self, clients: int, *, names: Sequence[str] | None = None, keys: Tensor | None = None) -> BoundSchedule:
        """Return the schedule of ``clients`` clients.

        Args:
            clients: n, at least 1.
            names: their names, for traces, absences and messages; None for "0", "1", ...
            keys: int64 (n,), their keys for random draws; None to make them of the names, or of the positions where
                there are no names.

        Raises:
            ConfigError: a setting does not fit n clients, or no client ever acts.
            DataError: a trace is malformed or misses a client.
        """


@dataclass(frozen=True, kw_only=True)
class PoissonClocks(AsynchronousSchedule):
    """Independent Poisson clocks (Farokhi et al., section 2; Bellet et al., section 2).

    The merged process has exponential gaps of the summed rate, and each event belongs to client i with probability
    rate_i / sum of rates, independently. A client that has reached its cap acts no more.

    Args:
        events: of the whole run, T; None to go on until every client has reached its cap.
        per_client: the most activations of each client, one number or one a client; None for no cap.
        rate: activations per unit of time, one number or one a client; 0 never acts.
    """

    events: int | None = None
    per_client: int | Sequence[int] | None = None
    rate: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        _check_length(self, events=self.events, per_client=self.per_client)
        _check_numbers(self, "rate", self.rate, positive=False)

    def bind(self, clients: int, *, names: Sequence[str] | None = None, keys: Tensor | None = None) -> BoundSchedule:
        named, key = _names_and_keys(clients, names, keys)
        rate = _per_client(self, "rate", self.rate, clients, np.float64)
        caps = _caps(self, "per_client", self.per_client, clients)
        caps[rate == 0] = 0
        _check_one_acts(self, caps)
        scale = 1.0 / np.where(rate > 0, rate, 1.0)
        pace = ClientRates(ExponentialLatency(), scale, caps, "poisson")
        return BoundSchedule(pace, named, key, events=self.events, waits=False, dropouts=None)


@dataclass(frozen=True, kw_only=True)
class Latencies(AsynchronousSchedule):
    """Every client works on its own: an activation ends one latency after its last; the server never waits.

    The first activation ends one latency after time 0. Those at the same time come in the order of the clients.

    Args:
        latency: law of the time from one activation to the next.
        activations: the most activations of each client, one number or one a client (0 never acts); None for no cap.
        events: of the whole run; None to go on until every client has reached its cap.
        scale: factor of the latencies, one number or one a client: stragglers have large ones.
        dropouts: clients that leave and come back.
    """

    latency: Latency
    activations: int | Sequence[int] | None = None
    events: int | None = None
    scale: float | Sequence[float] = 1.0
    dropouts: Dropouts | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.latency, Latency):
            raise ConfigError(f"{type(self).__name__}.latency is {self.latency!r}; it must be a Latency.")
        _check_length(self, events=self.events, activations=self.activations)
        _check_numbers(self, "scale", self.scale, positive=True)

    def bind(self, clients: int, *, names: Sequence[str] | None = None, keys: Tensor | None = None) -> BoundSchedule:
        return self._bound(clients, names, keys, waits=False)

    def _bound(self, clients: int, names: Sequence[str] | None, keys: Tensor | None, *, waits: bool) -> BoundSchedule:
        named, key = _names_and_keys(clients, names, keys)
        if self.dropouts is not None:
            self.dropouts.check(named)
        caps = _caps(self, "activations", self.activations, clients)
        _check_one_acts(self, caps)
        scale = _per_client(self, "scale", self.scale, clients, np.float64)
        pace = ClientRates(self.latency.resolve(named), scale, caps, "latency")
        return BoundSchedule(pace, named, key, events=self.events, waits=waits, dropouts=self.dropouts)


@dataclass(frozen=True, kw_only=True)
class Synchronous(Latencies):
    """The same latencies, where the server waits for the slowest client of every round.

    A round is one event a client, in the order of the clients, all at the time of the slowest. Activation k of
    a client takes exactly the latency that it takes under :class:`Latencies` with the same seed.
    """

    def bind(self, clients: int, *, names: Sequence[str] | None = None, keys: Tensor | None = None) -> BoundSchedule:
        return self._bound(clients, names, keys, waits=True)


_ENDLESS = 1 << 31
_SKIP = 1 << 16


def _names_and_keys(
    clients: int, names: Sequence[str] | None, keys: Tensor | None
) -> tuple[Sequence[str], NDArray[np.int64]]:
    positive_int("bind", clients=clients)
    for what, values in (("names", names), ("keys", keys)):
        if values is not None and len(values) != clients:
            raise ConfigError(f"{len(values):,} {what} were given for {clients:,} clients; give one a client.")
    if keys is not None:
        key = keys.detach().cpu().to(torch.int64).numpy().copy()
    elif names is not None:
        key = id_keys(names)
    else:
        key = np.arange(clients, dtype=np.int64)
    named = [str(i) for i in range(clients)] if names is None else list(names)
    for what, distinct in (("names", len(set(named))), ("keys", len(np.unique(key)))):
        if distinct != clients:
            raise ConfigError(f"two of the {clients:,} clients have the same {what[:-1]}; {what} must be distinct.")
    return named, key


def _entries(value: Any) -> list[Any] | None:
    """Return the entries of a setting that has one a client; None for a single value, of whatever type."""
    return list(value) if hasattr(value, "__len__") and not isinstance(value, str) else None


def _per_client(settings: object, name: str, value: Any, clients: int, dtype: type) -> NDArray[Any]:
    entries = _entries(value)
    if entries is not None and len(entries) != clients:
        raise ConfigError(
            f"{type(settings).__name__}.{name} has {len(entries):,} entries for {clients:,} clients; "
            "give one number, or one a client."
        )
    return np.broadcast_to(np.asarray(value if entries is None else entries, dtype), (clients,)).copy()


def _caps(settings: object, name: str, value: int | Sequence[int] | None, clients: int) -> NDArray[np.int64]:
    return _per_client(settings, name, _ENDLESS if value is None else value, clients, np.int64)


def _check_one_acts(settings: object, caps: NDArray[np.int64]) -> None:
    if not caps.any():
        raise ConfigError(
            f"{type(settings).__name__}: no client ever acts; at least one client needs a rate and a cap above 0."
        )


def _check_length(settings: object, *, events: int | None, **caps: int | Sequence[int] | None) -> None:
    ((name, cap),) = caps.items()
    if events is None and cap is None:
        raise ConfigError(f"{type(settings).__name__} needs events, {name} or both: a run must end.")
    if events is not None:
        positive_int(settings, events=events)
    if cap is None:
        return
    entries = _entries(cap)
    if entries is None:
        positive_int(settings, **{name: cap})
    for position, value in enumerate([cap] if entries is None else entries):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) < _ENDLESS:
            where = f"{type(settings).__name__}.{name}" + ("" if entries is None else f"[{position}]")
            raise ConfigError(f"{where} is {value!r}; it must be a whole number in [0, 2**31).")


def _check_numbers(settings: object, name: str, value: float | Sequence[float], *, positive: bool) -> None:
    entries = _entries(value)
    for position, each in enumerate([value] if entries is None else entries):
        number = isinstance(each, numbers.Real) and not isinstance(each, bool) and math.isfinite(each)
        if not number or each < 0 or (positive and each == 0):
            where = f"{type(settings).__name__}.{name}" + ("" if entries is None else f"[{position}]")
            least = "above 0" if positive else "of at least 0"
            raise ConfigError(f"{where} is {each!r}; it must be a finite number {least}.")
