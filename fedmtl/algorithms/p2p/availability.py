"""Agents that join and leave while a run goes on.

Who is there when is public. An agent that is away does not wake. Its neighbours count its model from its first
wake-up on: until then it has not broadcast one. When it leaves, its model stays as it is and its neighbours stop
counting it (or keep it, as the settings say); when it comes back it goes on from its own model, and its budget from
what is left of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...schedules import Dropouts

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class Availability:
    """When each agent is away.

    Attributes:
        joined: bool (n,), who is there at time 0.

    Args:
        absences: intervals [from, to) of virtual time, by id.
        ids: of the agents.

    Raises:
        ConfigError: absences at random, or of an unknown agent.
    """

    def __init__(self, absences: Dropouts, ids: Sequence[str]) -> None:
        if absences.intervals is None:
            raise ConfigError("PeerToPeer.absences needs intervals: agents must know who is there.")
        absences.check(ids)
        place = {name: i for i, name in enumerate(ids)}
        self.ids = tuple(ids)
        self._away: dict[int, Array] = {
            place[str(name)]: np.array(pairs, dtype=np.float64).reshape(-1, 2)
            for name, pairs in absences.intervals.items()
        }
        edges = [(start, agent) for agent, pairs in self._away.items() for start in pairs[:, 0] if start > 0]
        edges.sort()
        self._leave_time = np.array([time for time, _ in edges])
        self._leave_agent = np.array([agent for _, agent in edges], dtype=np.int64)
        self.joined = np.ones(len(ids), dtype=bool)
        for agent, pairs in self._away.items():
            self.joined[agent] = not bool((pairs[:, 0] == 0).any())

    def check(self, agents: Ints, times: Array) -> None:
        """Raise ConfigError if one of ``agents`` (k,) is away at its time (k,)."""
        for place, agent in enumerate(agents.tolist()):
            pairs = self._away.get(agent)
            if pairs is not None and bool(((pairs[:, 0] <= times[place]) & (times[place] < pairs[:, 1])).any()):
                raise ConfigError(
                    f"Agent {self.ids[agent]!r} wakes at time {times[place]:g}, when PeerToPeer.absences has it away; "
                    f"give the schedule the same absences (Latencies(..., dropouts=...))."
                )

    def left(self, times: Array) -> Ints:
        """Return how many departures have happened by ``times``, of any shape."""
        return np.searchsorted(self._leave_time, times, side="right").astype(np.int64)

    def leavers(self, before: int, after: int) -> Ints:
        """Return the agents of departures number ``before`` to ``after - 1``."""
        return self._leave_agent[before:after]


def arrival_steps(
    arrivals: Mapping[str, Sequence[int]] | None, ids: Sequence[str], counts: Ints
) -> tuple[Ints, ...] | None:
    """Return the event from which each record of each agent is there, int64 (m_i,) each; None where all are from the
    start.

    Args:
        arrivals: by id; agents that are not named have all their records from the start.
        ids: of the agents.
        counts: (n,) records.

    Raises:
        ConfigError: an unknown agent, or numbers that do not fit its records.
    """
    if arrivals is None:
        return None
    place = {name: i for i, name in enumerate(ids)}
    times = [np.zeros(count, dtype=np.int64) for count in counts.tolist()]
    for name, steps in arrivals.items():
        if name not in place:
            raise ConfigError(f"PeerToPeer.arrivals names {name!r}, which is not in the data.")
        given, records = np.array(steps, dtype=np.int64), int(counts[place[name]])
        if given.shape != (records,) or (given < 0).any():
            raise ConfigError(
                f"PeerToPeer.arrivals of {name!r} has {len(steps)} numbers; it must have one of at least 0 for each of "
                f"its {records} training records."
            )
        times[place[name]] = given
    return tuple(times)
