"""Agents with linear separators on a circle: the synthetic problem of peer-to-peer learning.

Bellet, Guerraoui, Taziki, Tommasi: "Personalized and private peer-to-peer machine learning",
AISTATS 2018, section 5.1, after Vanhaesebrouck, Bellet, Tommasi: "Decentralized collaborative
learning of personalized models over networks", AISTATS 2017. Choices that they leave open are
stated in :func:`load_synthetic_agents`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._check import Below1, Checked, Count, Positive, check_arguments
from ...errors import ConfigError
from ...graphs import Graph
from ..dataset import FederatedDataset
from ..examples import Domain, Examples, client_keys
from ..loaders import reader
from ..rows import offsets_of
from .tasks import keyed_unit

_NAME = "synthetic agents"


@reader("synthetic_agents")
@check_arguments
def load_synthetic_agents(
    agents: Count = 100,
    *,
    features: Count = 100,
    least: Count = 10,
    most: Count = 100,
    test_examples: Count = 100,
    flip: Below1 = 0.05,
    seed: int = 0,
) -> FederatedDataset:
    """Makes tasks of linear classification: agent i has the separator theta_i = (cos phi_i, sin
    phi_i, 0, ..., 0) in R^p.

    The angles phi_i are uniform on the circle (:func:`target_angles`), and m_i is uniform among
    ``least``, ..., ``most``. Every entry of a row x is uniform between -1 and 1, the paper's
    "uniformly around the origin". The label is 1 if theta_i . x >= 0, else 0, and a training
    label, not one for test, is then flipped with probability ``flip``.

    Every draw is keyed by (seed, agent's id, example): an agent is the same among 10 and among
    1,000 agents, and its test examples do not depend on ``most``.

    Args:
        agents: n.
        features: p, at least 2.
        least: smallest number of training examples of an agent.
        most: largest one.
        test_examples: of every agent.
        flip: share of wrong training labels, below 1.
        seed: of all draws.

    Returns:
        Ids ``agent-0``, ``agent-1``, ...; features (p,), float32, and int64 labels of 0 and 1.

    Raises:
        ConfigError: an impossible setting.

    Example:
        >>> from fedmtl.data import load_synthetic_agents
        >>> data = load_synthetic_agents(agents=3, features=4, least=2, most=5)
        >>> data.ids, data.spec.shape, data.classes
        (('agent-0', 'agent-1', 'agent-2'), (4,), 2)
    """
    where = "load_synthetic_agents"
    if features < 2:
        raise ConfigError(f"{where}.features is 1; the circle of models needs at least 2.")
    if most < least:
        raise ConfigError(f"{where}.most is {most}; it must be at least least, {least}.")
    ids = tuple(f"agent-{i}" for i in range(agents))
    keys = client_keys(ids)
    angles = target_angles(ids, seed)
    span = most - least + 1
    counts = least + (span * keyed_unit(seed, "agents/count", keys, 0, 1)[:, 0]).long().clamp(
        max=span - 1
    )
    sides = []
    sides_of_agents = ((counts, flip), (torch.full_like(counts, test_examples), 0.0))
    for step, (sizes, flipped) in enumerate(sides_of_agents):
        x = []
        y = []
        # ragged, so one at a time
        for key, count, angle in zip(keys.split(1), sizes.tolist(), angles, strict=True):
            rows = (
                (2 * keyed_unit(seed, "agents/x", key, step, count * features) - 1)
                .view(count, features)
                .float()
            )
            wrong = keyed_unit(seed, "agents/flip", key, step, count)[0] < flipped
            model = torch.zeros(features, dtype=torch.float64)
            model[0] = angle.cos()
            model[1] = angle.sin()
            x.append(rows)
            y.append(((rows.double() @ model >= 0) ^ wrong).long())
        sides.append(Examples(torch.cat(x), torch.cat(y), offsets_of(sizes)))
    domain = Domain(float(features), math.sqrt(features), 1.0)
    return FederatedDataset(
        sides[0], sides[1], ids, classes=2, name=f"{_NAME} (p = {features})", domain=domain
    )


def target_angles(ids: Sequence[str], seed: int = 0) -> Tensor:
    """Returns the angles phi of the agents' models, float64 (n,), in [0, 2 pi)."""
    return 2 * math.pi * keyed_unit(seed, "agents/angle", client_keys(ids), 0, 1)[:, 0]


@dataclass(frozen=True)
class TargetAngles(Checked):
    """The paper's graph of :func:`load_synthetic_agents`, as a setting: from the target models
    themselves.

    No real network knows these.

    Args:
        seed: of the data, which decides their angles.
        gamma: above 0.
        cut: weights below it are left out.

    Example:
        >>> from fedmtl.data import TargetAngles, load_synthetic_agents
        >>> graph = TargetAngles(seed=1).build(load_synthetic_agents(agents=5, seed=1))
        >>> len(graph.ids)
        5
    """

    seed: int = 0
    gamma: Positive = 0.1
    cut: Below1 = 1e-3
    from_data = False

    def build(self, data: Any) -> Graph:
        """Returns the graph of the clients of ``data``, W_ij = exp((cos(phi_i - phi_j) - 1) /
        gamma) (section 5.1).

        The paper leaves out "negligible" weights and prints no number.

        Args:
            data: of :func:`load_synthetic_agents`.

        Raises:
            ConfigError: data of another origin, whose clients have no such angles.
        """
        if not data.name.startswith(_NAME):
            raise ConfigError(
                f"TargetAngles is the graph of the synthetic agents, not of {data.name}; give "
                "another, such as algorithm/graph=ring, complete, knn or edges."
            )
        angles = target_angles(data.ids, self.seed).numpy()
        weights = np.exp((np.cos(angles[:, None] - angles) - 1) / self.gamma)
        first, second = np.nonzero(np.triu(weights >= self.cut, 1))
        return Graph.from_pairs(first, second, weights[first, second], data.ids)
