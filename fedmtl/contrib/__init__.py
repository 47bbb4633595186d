"""Methods, forecasts and automatic settings that are new here, or that published methods are
compared with.

They keep to the contracts of :mod:`fedmtl.algorithms`: all values that leave a client are released
and charged. :mod:`fedmtl.contrib.published` holds the private methods of four papers as they were
published. The report of such a run says which of their claims of privacy do not hold.
"""

from .average import Average, LocalAverage
from .forecast import CostOfPrivacy, cost_of_privacy
from .mp_mtl_layers import MPMTLayers
from .one_answer import Moments, PublicStart
from .peer_averaging import PeerAveraging
from .prior_layers import PriorLayers
from .private_prior import PrivatePrior
from .proximal_point import ProximalPoint
from .ranged_sgd import RangedSGD
from .shared_directions import SharedDirections

__all__ = [
    "Average",
    "CostOfPrivacy",
    "LocalAverage",
    "MPMTLayers",
    "Moments",
    "PeerAveraging",
    "PriorLayers",
    "PrivatePrior",
    "ProximalPoint",
    "PublicStart",
    "RangedSGD",
    "SharedDirections",
    "cost_of_privacy",
]
