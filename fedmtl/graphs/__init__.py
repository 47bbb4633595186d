"""Weighted graphs of agents: sparse, symmetric, rows by id."""

from .builders import clusters, complete, exp_angle, from_edges, knn_cosine, ring
from .graph import Graph
from .settings import Clusters, Complete, EdgesFile, GraphSettings, KNNCosine, Ring

__all__ = [
    "Clusters",
    "Complete",
    "EdgesFile",
    "Graph",
    "GraphSettings",
    "KNNCosine",
    "Ring",
    "clusters",
    "complete",
    "exp_angle",
    "from_edges",
    "knn_cosine",
    "ring",
]
