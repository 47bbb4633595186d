"""Privacy: settings, samplers, typed releases, the ledger and the channel.

No number leaves a client except through a :class:`Release`, and no release happens that the :class:`Ledger`
has not already charged. :func:`open_channel` is the one door.
"""

from .calibration import calibrate_noise
from .channel import Channel, grid_width
from .clip import L2Clip, clip_factors, clip_rows, clipped_sum
from .composition import epsilon, largest_uses
from .ledger import Ledger
from .mechanisms import GaussianNoise
from .opening import open_channel
from .release import Release, ReleasePlan, step_event
from .report import PrivacyReport, SignalToNoise
from .samplers import (
    BoundSampler,
    FixedCohort,
    FullParticipation,
    PoissonSampling,
    Sampler,
    SamplingLaw,
    distinct_ranks,
)
from .settings import ClientPrivacy
from .sources import NoiseSource, SecureSource, SeededSource

__all__ = [
    "BoundSampler",
    "Channel",
    "ClientPrivacy",
    "FixedCohort",
    "FullParticipation",
    "GaussianNoise",
    "L2Clip",
    "Ledger",
    "NoiseSource",
    "PoissonSampling",
    "PrivacyReport",
    "Release",
    "ReleasePlan",
    "Sampler",
    "SamplingLaw",
    "SecureSource",
    "SeededSource",
    "SignalToNoise",
    "calibrate_noise",
    "clip_factors",
    "clip_rows",
    "clipped_sum",
    "distinct_ranks",
    "epsilon",
    "grid_width",
    "largest_uses",
    "open_channel",
    "step_event",
]
