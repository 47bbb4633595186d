"""Agents on a circle: the stated model holds, exactly where it is exact and by its law where it is random."""

import numpy as np
import pytest
import scipy.stats
import torch

from fedmtl.data import TargetAngles, load_data, load_synthetic_agents
from fedmtl.data.synthetic.agents import target_angles
from fedmtl.errors import ConfigError

ALPHA = 1e-6


def parts(given, side):
    part = given.side(side)
    return list(
        zip(
            part.x.double().split(part.counts.tolist()),
            part.y.split(part.counts.tolist()),
            strict=True,
        )
    )


def separators(given, seed):
    angles = target_angles(given.ids, seed)
    return torch.nn.functional.pad(
        torch.stack([angles.cos(), angles.sin()], 1), (0, given.train.x.shape[1] - 2)
    )


def test_labels_are_those_of_the_separators_where_none_is_flipped():
    given = load_synthetic_agents(20, features=5, flip=0, seed=4)
    for side in ("train", "test"):
        for i, (x, y) in enumerate(parts(given, side)):
            angle = float(target_angles(given.ids, 4)[i])
            expected = x[:, 0] * np.cos(angle) + x[:, 1] * np.sin(angle) >= 0
            assert torch.equal(y, expected.long())
            assert float(x.norm(dim=1).max()) <= given.domain.l2
            assert float(x.abs().sum(1).max()) <= given.domain.l1
            assert float(x.abs().max()) <= 1


def test_the_laws_are_the_stated_ones():
    given = load_synthetic_agents(300, features=3, flip=0.05, seed=1)
    assert (
        scipy.stats.kstest(target_angles(given.ids, 1).numpy() / (2 * np.pi), "uniform").pvalue
        > ALPHA
    )
    counts = given.train.counts.numpy()
    assert counts.min() >= 10
    assert counts.max() <= 100
    assert scipy.stats.chisquare(np.bincount(counts - 10, minlength=91)).pvalue > ALPHA
    x = given.train.x.numpy().ravel()
    assert scipy.stats.kstest((x + 1) / 2, "uniform").pvalue > ALPHA
    models = separators(given, 1)
    wrong = sum(
        int((((x @ models[i]) >= 0).long() != y).sum())
        for i, (x, y) in enumerate(parts(given, "train"))
    )
    assert scipy.stats.binomtest(wrong, len(given.train), 0.05).pvalue > ALPHA
    assert (given.test.counts == 100).all()
    assert all(
        bool((((x @ models[i]) >= 0).long() == y).all())
        for i, (x, y) in enumerate(parts(given, "test"))
    )


def test_an_agent_is_the_same_among_few_and_among_many():
    few, many = (
        load_synthetic_agents(3, features=4, seed=2),
        load_synthetic_agents(9, features=4, seed=2),
    )
    assert torch.equal(target_angles(few.ids, 2), target_angles(many.ids, 2)[:3])
    for side in ("train", "test"):
        for (x, y), (x2, y2) in zip(parts(few, side), parts(many, side), strict=False):
            assert torch.equal(x, x2)
            assert torch.equal(y, y2)
    other = load_synthetic_agents(3, features=4, seed=3)
    assert not torch.equal(target_angles(few.ids, 2), target_angles(other.ids, 3))
    x, y = (torch.cat(part) for part in zip(*parts(few, "train"), strict=True))
    assert len(x.unique(dim=0)) == len(x)
    assert 0.2 < y.double().mean() < 0.8


def test_weights_are_those_of_the_angles():
    given = load_synthetic_agents(12, features=6, seed=5)
    angles = target_angles(given.ids, 5).numpy()
    expected = np.exp((np.cos(angles[:, None] - angles[None]) - 1) / 0.1)
    np.fill_diagonal(expected, 0)
    expected[expected < 1e-3] = 0
    built = TargetAngles(seed=5).build(given)
    np.testing.assert_allclose(built.weights.toarray(), expected, rtol=1e-9)
    assert built.ids == given.ids
    with pytest.raises(ConfigError, match="has no neighbours"):
        TargetAngles(seed=5, cut=0.999999).build(given)
    with pytest.raises(ConfigError, match="cut is 1"):
        TargetAngles(cut=1.0)


def test_by_name_and_impossible_settings():
    assert (
        load_data("synthetic_agents", agents=3).fingerprint()
        == load_synthetic_agents(3).fingerprint()
    )
    for options, message in (
        ({"agents": 0}, "load_synthetic_agents.agents is 0"),
        ({"features": 1}, "features is 1; the circle of models needs at least 2"),
        ({"least": 20, "most": 10}, "most is 10; it must be at least least, 20"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_synthetic_agents(**options)
