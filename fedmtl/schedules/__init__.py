"""Participation schedules: iterators of the activations of clients in virtual time."""

from .activations import BoundSchedule
from .block import Block, rounds
from .buffered import BoundBuffered, Buffered
from .clocks import AsynchronousSchedule, Latencies, PoissonClocks, Synchronous
from .deadline import Deadline
from .dropouts import Dropouts
from .latency import RandomLatency, TraceLatency

__all__ = [
    "AsynchronousSchedule",
    "Block",
    "BoundBuffered",
    "BoundSchedule",
    "Buffered",
    "Deadline",
    "Dropouts",
    "Latencies",
    "PoissonClocks",
    "RandomLatency",
    "Synchronous",
    "TraceLatency",
    "rounds",
]
