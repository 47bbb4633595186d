"""Privacy: settings, samplers, typed releases, the ledger and the channel.

No number leaves a client except through a :class:`Release`, and no release happens that the
:class:`Ledger` has not already charged. :func:`open_channel` is the one door.
"""

from ..random import distinct_numbers
from .accounting.composition import epsilon
from .accounting.knorm import KNormDpEvent
from .accounting.loss_laws import PureDpEvent
from .accounting.multipliers import calibrate_selection, selection_epsilon
from .accounting.selection import draw_repetitions
from .activation_channel import ActivationChannel
from .adaptive import CountBelowNorm
from .aggregation import SecureAggregation
from .channel import Channel
from .channel_report import privacy_report, signal_to_noise
from .channel_setup import open_channel
from .clip import Clip, clip_rows, clipped_sum
from .cost import PrivacyCost
from .dp_sgd import LocalSteps
from .gradients import GradientPlan, PublishedClaim
from .ledger import Ledger
from .mechanism import ClippedSum, Mechanism, OuterProductSum
from .noise.laws import GaussianNoise, L2LaplaceNoise, LaplaceNoise, NoiseLaw
from .noise.sources import NoiseSource, SecureSource, SeededSource
from .quantile import QuantileClip
from .receipt import BlockReceipt, LocalReceipt, Receipt
from .records import Gradients
from .release import Release, ReleasePlan
from .report import PrivacyReport, SignalToNoise
from .round_channel import RoundChannel
from .sampler_settings import (
    CyclicCohorts,
    FixedCohort,
    FullParticipation,
    PoissonSampling,
    Sampler,
)
from .samplers import BoundSampler
from .settings import ClientPrivacy, Privacy, RecordPrivacy

__all__ = [
    "ActivationChannel",
    "BlockReceipt",
    "BoundSampler",
    "Channel",
    "ClientPrivacy",
    "Clip",
    "ClippedSum",
    "CountBelowNorm",
    "CyclicCohorts",
    "FixedCohort",
    "FullParticipation",
    "GaussianNoise",
    "GradientPlan",
    "Gradients",
    "KNormDpEvent",
    "L2LaplaceNoise",
    "LaplaceNoise",
    "Ledger",
    "LocalReceipt",
    "LocalSteps",
    "Mechanism",
    "NoiseLaw",
    "NoiseSource",
    "OuterProductSum",
    "PoissonSampling",
    "Privacy",
    "PrivacyCost",
    "PrivacyReport",
    "PublishedClaim",
    "PureDpEvent",
    "QuantileClip",
    "Receipt",
    "RecordPrivacy",
    "Release",
    "ReleasePlan",
    "RoundChannel",
    "Sampler",
    "SecureAggregation",
    "SecureSource",
    "SeededSource",
    "SignalToNoise",
    "calibrate_selection",
    "clip_rows",
    "clipped_sum",
    "distinct_numbers",
    "draw_repetitions",
    "epsilon",
    "open_channel",
    "privacy_report",
    "selection_epsilon",
    "signal_to_noise",
]
