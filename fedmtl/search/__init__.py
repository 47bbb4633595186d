"""Private choice of the best of several settings under one epsilon."""

from .result import SearchResult
from .search import PrivateSearch

__all__ = ["PrivateSearch", "SearchResult"]
