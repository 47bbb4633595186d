"""Who acts, and when: iterators of events."""

from .event import Event
from .rounds import rounds

__all__ = ["Event", "rounds"]
