"""Settings of asynchronous runs: Poisson clocks, and latencies with or without waiting."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._check import Checked, Count, Range, bounded, non_negative, positive, positive_int
from ..errors import ConfigError
from ..random import id_keys
from .activations import ENDLESS, BoundSchedule
from .dropouts import Dropouts
from .latency import Law, RandomLatency, TraceLatency, constant, exponential


class AsynchronousSchedule(Checked, ABC):
    """Settings that become a :class:`BoundSchedule` once the clients are known.

    Example:
        >>> from fedmtl import PoissonClocks
        >>> from fedmtl.schedules import AsynchronousSchedule
        >>> schedule: AsynchronousSchedule = PoissonClocks(per_client=2)
        >>> sorted(schedule.bind(3).activations(0, 0, 6).client.flatten().tolist())
        [0, 0, 1, 1, 2, 2]
    """

    def bind(
        self, clients: int, *, names: Sequence[str] | None = None, keys: Tensor | None = None
    ) -> BoundSchedule:
        """Returns the schedule of ``clients`` clients.

        Args:
            clients: n, at least 1.
            names: their names, for traces, absences and messages; None for "0", "1", ...
            keys: int64 (n,), their keys for random draws; None to make them of the names, or of the
                positions without names.

        Raises:
            ConfigError: a setting does not fit n clients, or no client ever acts.
            DataError: a trace is malformed or misses a client.
        """
        positive_int("bind", clients=clients)
        # a client keeps its draws when others join, by the key of its name
        if keys is None and names is not None:
            keys = torch.from_numpy(id_keys(names))
        if keys is None:
            keys = torch.arange(clients)
        if names is None:
            names = [str(place) for place in range(clients)]
        return self._bound(names, keys.cpu())

    @abstractmethod
    def _bound(self, names: Sequence[str], keys: Tensor) -> BoundSchedule:
        """Returns the schedule of the clients ``names`` with these keys for random draws."""


@dataclass(frozen=True, kw_only=True)
class PoissonClocks(AsynchronousSchedule):
    """Schedules activations by independent Poisson clocks (Farokhi et al., section III; Bellet et
    al., section 2.3).

    The merged process has exponential gaps of the summed rate, and each activation belongs to
    client i with probability rate_i / sum of rates, independently. A client that has reached
    its cap acts no more.

    Args:
        activations: of the whole run, T; None runs until every client has reached its cap.
        per_client: the most activations of each client, one number or one for each client; None for
            no cap.
        rate: activations per unit of time, one number or one for each client; 0 never acts.

    Example:
        >>> from fedmtl import PoissonClocks
        >>> schedule = PoissonClocks(per_client=3).bind(4)
        >>> schedule.steps, schedule.caps.tolist()
        (12, [3, 3, 3, 3])
    """

    activations: Count | None = None
    per_client: int | Sequence[int] | None = None
    rate: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        _check_length(self, self.activations, self.per_client)
        non_negative(self, **entries_of("rate", self.rate))

    def _bound(self, names: Sequence[str], keys: Tensor) -> BoundSchedule:
        rate = _per_client(self, "rate", len(names), np.float64)
        caps = _per_client(self, "per_client", len(names), np.int64)
        caps[rate == 0] = 0  # such a client never acts
        # the mean gap is the inverse of the rate
        scale = 1.0 / np.where(rate > 0, rate, 1.0)
        description = "independent Poisson clocks"
        limit = self.activations
        return BoundSchedule(description, exponential, scale, caps, names, keys, "poisson", limit)


@dataclass(frozen=True, kw_only=True)
class Latencies(AsynchronousSchedule):
    """Schedules independent clients with latencies, for which the server never waits.

    An activation ends one latency after the client's last one, and the first ends one latency after
    time 0. Activations at the same time come in the order of the clients.

    Args:
        latency: law of the time from one activation to the next; a number is a constant time.
        activations: of the whole run; None runs until every client has reached its cap.
        per_client: the most activations of each client, one number or one for each client (0 never
            acts); None for no cap.
        scale: factor of the latencies, one number or one for each client: stragglers have large
            ones.
        dropouts: clients that leave and come back.

    Example:
        >>> from fedmtl import Latencies
        >>> schedule = Latencies(latency=1.0, per_client=2, scale=[1.0, 1.0, 5.0]).bind(3)
        >>> schedule.activations(0, 0, 6).client.tolist()
        [[0, 1, 0, 1, 2, 2]]
    """

    latency: float | RandomLatency | TraceLatency
    activations: Count | None = None
    per_client: int | Sequence[int] | None = None
    scale: float | Sequence[float] = 1.0
    dropouts: Dropouts | None = None

    # True if the server waits for the slowest client of a round
    waits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.latency, RandomLatency | TraceLatency):
            positive(self, latency=self.latency)
        _check_length(self, self.activations, self.per_client)
        positive(self, **entries_of("scale", self.scale))

    def _bound(self, names: Sequence[str], keys: Tensor) -> BoundSchedule:
        if self.dropouts is not None:
            self.dropouts.check(names)
        caps = _per_client(self, "per_client", len(names), np.int64)
        scale = _per_client(self, "scale", len(names), np.float64)
        law: Law = constant
        if isinstance(self.latency, RandomLatency):
            behaviour = f"{self.latency.law} latencies"
            law = self.latency.bind()
        elif isinstance(self.latency, TraceLatency):
            behaviour = "latencies of a trace"
            law = self.latency.bind(names)
        else:
            behaviour = "equal latencies"
            scale = scale * self.latency
        server = "the server never waits"
        if self.waits:
            server = "the server waits for the slowest"
        return BoundSchedule(
            description=f"{behaviour} between activations, {server}",
            law=law,
            scale=scale,
            caps=caps,
            names=names,
            keys=keys,
            purpose="latency",
            max_activations=self.activations,
            waits=self.waits,
            dropouts=self.dropouts,
            measured=isinstance(self.latency, TraceLatency),
        )


@dataclass(frozen=True, kw_only=True)
class Synchronous(Latencies):
    """Schedules rounds with latencies, in which the server waits for the slowest client.

    A round has one activation of each client, in the order of the clients, all at the time of the
    slowest. Activation k of a client takes exactly the latency that it takes under
    :class:`Latencies` with the same seed.

    Example:
        >>> from fedmtl import Synchronous
        >>> schedule = Synchronous(latency=1.0, per_client=2, scale=[1.0, 1.0, 5.0]).bind(3)
        >>> schedule.activations(0, 0, 6).client.tolist()
        [[0, 1, 2, 0, 1, 2]]
    """

    waits = True


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and 0 <= int(value) < ENDLESS


COUNT = Range(_is_count, "a whole number in [0, 2**31)")


def _entries(value: Any) -> list[Any] | None:
    """Returns the entries of a setting by client; None for a single value of any type."""
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return None
    return list(value)


def _per_client(settings: object, name: str, clients: int, dtype: type) -> NDArray[Any]:
    """Returns a setting that is one number, or has one for each client, as (n,) of ``dtype``.

    None is :data:`ENDLESS`.
    """
    value = getattr(settings, name)
    entries = _entries(value)
    if entries is not None and len(entries) != clients:
        raise ConfigError(
            f"{type(settings).__name__}.{name} has {len(entries):,} entries for {clients:,} "
            "clients; give one number, or one a client."
        )
    if value is None:
        value = ENDLESS
    if entries is not None:
        value = entries
    # a copy: a broadcast view of one number cannot be written to
    return np.broadcast_to(np.asarray(value, dtype), (clients,)).copy()


def entries_of(name: str, value: Any) -> dict[str, Any]:
    """Returns a setting by its name, or its entries by client, by their names."""
    entries = _entries(value)
    if entries is None:
        return {name: value}
    return {f"{name}[{place}]": entry for place, entry in enumerate(entries)}


def _check_length(
    settings: object, activations: int | None, caps: int | Sequence[int] | None
) -> None:
    """Refuses caps that are no whole numbers, or a run without an end."""
    if activations is None and caps is None:
        needed = "activations, per_client or both: a run must end"
        raise ConfigError(f"{type(settings).__name__} needs {needed}.")
    if caps is None:
        return
    # a single client may have the cap 0, all of them may not
    if _entries(caps) is None:
        positive_int(settings, per_client=caps)
    bounded(settings, entries_of("per_client", caps), COUNT)
