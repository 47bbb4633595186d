"""Federated data: the dataset type, readers (one file a format), partitioners."""

from __future__ import annotations

from .dataset import DataSpec, Examples, FederatedDataset
from .transforms import Affine, Cast, Transform

__all__ = ["Affine", "Cast", "DataSpec", "Examples", "FederatedDataset", "Transform"]
