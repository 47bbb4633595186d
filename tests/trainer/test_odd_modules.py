"""Modules that no run can start from are refused in one sentence, and lazy ones get their shapes."""

import warnings

import pytest
import torch
from torch import nn

from fedmtl.errors import ModelError
from tests import small
from tests.helpers import ragged_classification

DATA = ragged_classification(3)
WIDTH = DATA.spec.shape[0]


def plain() -> nn.Module:
    return nn.Linear(WIDTH, DATA.classes)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(torch.nn.utils.weight_norm(plain()))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(torch.jit.script(plain()))


def not_finite() -> nn.Module:
    module = plain()
    module.bias.data[0] = torch.nan
    return module


def with_activation() -> nn.Module:
    module = plain()
    module.last = module.weight * 2
    return module


class OptimizedModule(nn.Linear):
    """Has the name of what torch.compile returns, whose import takes seconds."""


class UnusedLazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = plain(), nn.LazyLinear(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            old_weight_norm,
            r"'0' has torch\.nn\.utils\.weight_norm.*use torch\.nn\.utils\.parametrizations\.weight_norm",
        ),
        (lambda: nn.Linear(WIDTH, DATA.classes, device="meta"), r"'weight' is on the device 'meta'.*device='cpu'"),
        (scripted, r"'0' is of class RecursiveScriptModule.*give the module that it was made from"),
        (lambda: OptimizedModule(WIDTH, 2), r"is of class OptimizedModule.*give the module that it was made from"),
        (lambda: nn.DataParallel(plain()), r"is of class DataParallel.*model\.module"),
        (not_finite, r"'bias' has values that are not finite"),
        (lambda: nn.Linear(WIDTH, 2, dtype=torch.complex64), r"'weight' has complex numbers"),
        (with_activation, r"cannot be copied"),
        (UnusedLazy, r"'unused\.weight' is lazy"),
        (lambda: nn.Sequential(nn.LazyConv2d(2, 3)), r"lazy parameters \(0\.weight, 0\.bias\), and fails on a batch"),
    ],
)
@pytest.mark.parametrize("as_factory", [False, True])
def test_a_module_that_cannot_be_trained_is_refused_before_anything_is_written(make, text, as_factory, tmp_path):
    module = make()
    model = module
    if as_factory:
        model = lambda spec: module  # noqa: E731
    with pytest.raises(ModelError, match=text):
        small.trainer(data=DATA, model=model, dtype="float32", folder=tmp_path / "run").fit()
    assert not list((tmp_path / "run").rglob("*.jsonl"))


def test_the_remedy_for_the_old_weight_norm_trains() -> None:
    module = torch.nn.utils.parametrizations.weight_norm(plain())
    assert len(small.trainer(data=DATA, model=module, dtype="float32").fit().ids) == 3


def test_lazy_parameters_follow_from_the_seed_and_not_from_the_global_generator() -> None:
    def start(generator: int, seed: int) -> torch.Tensor:
        torch.manual_seed(generator)
        module = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(DATA.classes))
        initial = small.trainer(data=DATA, model=module, seed=seed).problem().initial
        assert module[0].has_uninitialized_params()
        return initial

    assert torch.equal(start(1, 0), start(2, 0))
    assert not torch.equal(start(1, 0), start(1, 5))
    assert len(start(1, 0)) == WIDTH * 4 + 4 + 4 * DATA.classes + DATA.classes


def test_a_lazy_network_trains() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(DATA.classes))
    assert len(small.trainer(data=DATA, model=module).fit().ids) == 3
