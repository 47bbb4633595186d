"""Who acts, and when: iterators of events."""

from .clocks import AsynchronousSchedule, BoundSchedule, Latencies, PoissonClocks, Synchronous
from .commuting import Adjacency, block_bounds, blocks
from .dropouts import Dropouts
from .event import Event
from .latency import (
    ConstantLatency,
    ExponentialLatency,
    Latency,
    LogNormalLatency,
    TraceLatency,
    UniformLatency,
)
from .rounds import rounds
from .table import EventTable

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
