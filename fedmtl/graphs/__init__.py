"""Weighted graphs of agents: sparse, symmetric, rows by id."""

from .graph import Graph
from .settings import Complete, EdgesFile, GraphSettings, KNNCosine, Ring
from .vectors import exp_angle, knn_cosine

__all__ = [
    "Complete",
    "EdgesFile",
    "Graph",
    "GraphSettings",
    "KNNCosine",
    "Ring",
    "exp_angle",
    "knn_cosine",
]
