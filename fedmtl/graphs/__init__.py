"""Weighted graphs of agents: sparse, symmetric, rows by id."""

from .graph import Graph, knn_cosine
from .settings import Complete, EdgesFile, GraphSettings, KNNCosine, Ring

__all__ = ["Complete", "EdgesFile", "Graph", "GraphSettings", "KNNCosine", "Ring", "knn_cosine"]
