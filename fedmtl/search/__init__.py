"""Private choice of the best of several settings under one epsilon."""

from .search import PrivateSearch, SearchResult

__all__ = ["PrivateSearch", "SearchResult"]
