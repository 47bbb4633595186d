"""The laws of noise by name: a new law is one class with its facts, and one entry here."""

from __future__ import annotations

from .laws import GaussianNoise, L2LaplaceNoise, LaplaceNoise, NoiseLaw

LAWS: dict[str, type[NoiseLaw]] = {law.name: law for law in (GaussianNoise, LaplaceNoise, L2LaplaceNoise)}
