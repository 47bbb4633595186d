"""Who acts, and when: iterators of events."""

from .clocks import AsynchronousSchedule, BoundSchedule, Latencies, PoissonClocks, Synchronous
from .commuting import Adjacency, block_bounds, blocks
from .dropouts import Dropouts
from .events import Event, EventTable, rounds
from .latency import (
    ConstantLatency,
    ExponentialLatency,
    Latency,
    LogNormalLatency,
    TraceLatency,
    UniformLatency,
)

__all__ = [
    "Adjacency",
    "AsynchronousSchedule",
    "BoundSchedule",
    "ConstantLatency",
    "Dropouts",
    "Event",
    "EventTable",
    "ExponentialLatency",
    "Latencies",
    "Latency",
    "LogNormalLatency",
    "PoissonClocks",
    "Synchronous",
    "TraceLatency",
    "UniformLatency",
    "block_bounds",
    "blocks",
    "rounds",
]
