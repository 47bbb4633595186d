"""Agents with linear separators on a circle: the synthetic problem of peer-to-peer learning.

Bellet, Guerraoui, Taziki, Tommasi: "Personalized and private peer-to-peer machine learning", AISTATS 2018, section
5.1, after Vanhaesebrouck, Bellet, Tommasi: "Decentralized collaborative learning of personalized models over
networks", AISTATS 2017. What they leave open is stated in :func:`make_synthetic_agents`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..._check import Checked, Count, Positive, Range, check_arguments
from ...errors import ConfigError
from ...graphs import Graph, exp_angle
from ..dataset import FederatedDataset
from ..examples import Domain, Examples, client_keys
from ..loaders import data_of, reader
from ..rows import offsets_of
from ..transforms import SHRINK
from .tasks import keyed_normal, keyed_unit

_NAME = "synthetic agents"
Flip = Annotated[float, Range(lambda v: 0 <= v < 0.5, "at least 0 and below 0.5")]


@dataclass(frozen=True, eq=False)
class SyntheticAgents:
    """Generated agents and the models that generated them.

    Args:
        data: one client an agent, ids ``agent-0``, ``agent-1``, ...; two classes.
        angles: float64 (n,), of the target models, in [0, 2 pi).
        models: float64 (n, p), the target models, of norm 1.
    """

    data: FederatedDataset
    angles: Tensor
    models: Tensor


@check_arguments
def make_synthetic_agents(
    agents: Count = 100,
    *,
    features: Count = 100,
    least: Count = 10,
    most: Count = 100,
    test_examples: Count = 100,
    rows: Literal["cube", "sphere"] = "cube",
    flip: Flip = 0.05,
    seed: int = 0,
) -> SyntheticAgents:
    """Make tasks of linear classification: agent i has the separator theta_i = (cos phi_i, sin phi_i, 0, ..., 0) in
    R^p.

    The angles phi_i are uniform on the circle, and m_i is uniform among ``least``, ..., ``most``. The label of a row x
    is 1 where theta_i . x >= 0, else 0, and a training label, not one for test, is then flipped with probability
    ``flip``.

    Every draw is keyed by (seed, agent's id, example): an agent is the same among 10 and among 1,000 agents, and its
    test examples do not depend on ``most``.

    Args:
        agents: n.
        features: p, at least 2.
        least, most: of the numbers of training examples.
        test_examples: of every agent.
        rows: ``"cube"``: every entry uniform between -1 and 1, the paper's "uniformly around the origin"; then
            ||x||_1 <= p and ||x||_2 <= sqrt(p). ``"sphere"``: uniform on the unit sphere, ||x||_2 = 1, for which the
            logistic loss is 1-Lipschitz in the L2 norm.
        flip: share of wrong training labels, below 1/2.
        seed: of all draws.

    Returns:
        Features (p,), float32, and int64 labels of 0 and 1.

    Raises:
        ConfigError: an impossible setting.
    """
    where = "make_synthetic_agents"
    if features < 2:
        raise ConfigError(f"{where}.features is 1; the circle of models needs at least 2.")
    if most < least:
        raise ConfigError(f"{where}.most is {most}; it must be at least least, {least}.")
    ids = tuple(f"agent-{i}" for i in range(agents))
    keys = client_keys(ids)
    angles = 2 * math.pi * keyed_unit(seed, "agents/angle", keys, 0, 1)[:, 0]
    models = torch.zeros(agents, features, dtype=torch.float64)
    models[:, 0], models[:, 1] = angles.cos(), angles.sin()
    span = most - least + 1
    counts = least + (span * keyed_unit(seed, "agents/count", keys, 0, 1)[:, 0]).long().clamp(max=span - 1)
    train = _side(seed, 0, keys, counts, models, rows, flip)
    test = _side(seed, 1, keys, torch.full_like(counts, test_examples), models, rows, 0.0)
    name = f"{_NAME} ({rows}, p = {features})"
    domain = Domain(float(features), math.sqrt(features), 1.0)
    if rows == "sphere":
        domain = Domain(math.sqrt(features), 1.0, 1.0)
    data = FederatedDataset(train, test, ids, classes=2, name=name, domain=domain)
    return SyntheticAgents(data, angles, models)


load_synthetic_agents = reader("synthetic_agents")(data_of(make_synthetic_agents))


def _side(seed: int, step: int, keys: Tensor, counts: Tensor, models: Tensor, rows: str, flip: float) -> Examples:
    """Return examples of all agents; step 0 is the training and 1 the test side."""
    p, x, y = models.shape[1], [], []
    for key, count, model in zip(keys.split(1), counts.tolist(), models, strict=True):  # ragged, so one at a time
        if rows == "cube":
            own = (2 * keyed_unit(seed, "agents/x", key, step, count * p) - 1).view(count, p).float()
        else:
            normal = keyed_normal(seed, "agents/x", key, step, count * p).view(count, p)
            own = (SHRINK * normal / normal.norm(dim=1, keepdim=True)).float()
        wrong = keyed_unit(seed, "agents/flip", key, step, count)[0] < flip
        x.append(own)
        y.append(((own.double() @ model >= 0) ^ wrong).to(torch.int64))
    return Examples(torch.cat(x), torch.cat(y), offsets_of(counts))


@dataclass(frozen=True)
class TargetAngles(Checked):
    """The paper's graph of :func:`make_synthetic_agents`, as a setting: from the target models themselves.

    No real network knows these.

    Args:
        seed: of the data, which decides their angles.
        gamma: above 0.
        cut: weights below it are left out.
    """

    seed: int = 0
    gamma: Positive = 0.1
    cut: float = 1e-3
    from_data = False

    def build(self, data: Any) -> Graph:
        """Return the graph of the clients of ``data``, W_ij = exp((cos(phi_i - phi_j) - 1) / gamma); see
        :func:`~fedmtl.graphs.exp_angle`.

        Raises:
            ConfigError: data of another origin, whose clients have no such angles.
        """
        if not data.name.startswith(_NAME):
            raise ConfigError(
                f"TargetAngles is the graph of the synthetic agents, not of {data.name}; give another, such as "
                "algorithm/graph=ring, complete, knn or edges."
            )
        angles = 2 * math.pi * keyed_unit(self.seed, "agents/angle", client_keys(data.ids), 0, 1)[:, 0].numpy()
        return exp_angle(np.stack([np.cos(angles), np.sin(angles)], axis=1), self.gamma, cut=self.cut, ids=data.ids)
