"""Networks by name: sizes of the papers, starts, shapes."""

import pytest
import torch

from fedmtl import models
from fedmtl.data import DataSpec
from fedmtl.errors import ConfigError, ModelError


def parameters(module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_femnist_cnn_has_the_papers_size():
    module = models.femnist_cnn()(DataSpec((1, 28, 28), 62, 206))
    assert parameters(module) == 115_646
    assert module(torch.zeros(3, 1, 28, 28)).shape == (3, 62)


def test_femnist_cnn_refuses_what_is_no_image():
    for shape in ((784,), (1, 8, 8)):
        with pytest.raises(ModelError, match="images"):
            models.femnist_cnn()(DataSpec(shape, 62, 2))


@pytest.mark.parametrize(
    ("factory", "classes", "outputs"), [("softmax_regression", 10, 10), ("linear_regression", None, 1)]
)
def test_linear_models_start_at_zero(factory, classes, outputs):
    module = getattr(models, factory)()(DataSpec((1, 8, 8), classes, 5))
    assert parameters(module) == 65 * outputs
    assert all(not p.any() for p in module.parameters())
    assert module(torch.ones(4, 1, 8, 8)).shape == (4, outputs)
    assert parameters(getattr(models, factory)(bias=False)(DataSpec((1, 8, 8), classes, 5))) == 64 * outputs


def test_mlp_layers_and_dropout():
    module = models.mlp(hidden=16, layers=2, dropout=0.5)(DataSpec((6,), 3, 5))
    assert parameters(module) == 6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3
    assert sum(isinstance(m, torch.nn.Dropout) for m in module.modules()) == 2
    assert parameters(models.mlp(hidden=4)(DataSpec((6,), None, 5))) == 6 * 4 + 4 + 4 + 1
    with pytest.raises(ConfigError, match=r"mlp\.hidden"):
        models.mlp(hidden=0)
