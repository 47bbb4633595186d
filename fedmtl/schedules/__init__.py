"""Who acts, and when: iterators of events."""

from .block import Block, rounds
from .clocks import AsynchronousSchedule, BoundSchedule, Latencies, PoissonClocks, Synchronous
from .commuting import Adjacency, Conflicts, block_bounds, bounds_of_each
from .dropouts import Dropouts
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
    "Block",
    "BoundSchedule",
    "Conflicts",
    "ConstantLatency",
    "Dropouts",
    "ExponentialLatency",
    "Latencies",
    "Latency",
    "LogNormalLatency",
    "PoissonClocks",
    "Synchronous",
    "TraceLatency",
    "UniformLatency",
    "block_bounds",
    "bounds_of_each",
    "rounds",
]
