"""Networks by name: sizes of the papers, starts, shapes."""

import pytest
import torch
import torchvision

from fedmtl import FedAvg, LocalSGD, models
from fedmtl.data import DataSpec, FederatedDataset
from fedmtl.errors import ConfigError, ModelError
from fedmtl.local import prepare_module
from fedmtl.privacy import ClientPrivacy
from tests import small


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
    ("factory", "classes", "outputs"),
    [("softmax_regression", 10, 10), ("linear_regression", None, 1)],
)
def test_linear_models_start_at_zero(factory, classes, outputs):
    module = getattr(models, factory)()(DataSpec((1, 8, 8), classes, 5))
    assert parameters(module) == 65 * outputs
    assert all(not p.any() for p in module.parameters())
    assert module(torch.ones(4, 1, 8, 8)).shape == (4, outputs)
    assert (
        parameters(getattr(models, factory)(bias=False)(DataSpec((1, 8, 8), classes, 5)))
        == 64 * outputs
    )


def test_mlp_layers_and_dropout():
    module = models.mlp(hidden=16, layers=2, dropout=0.5)(DataSpec((6,), 3, 5))
    assert parameters(module) == 6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3
    assert sum(isinstance(m, torch.nn.Dropout) for m in module.modules()) == 2
    assert parameters(models.mlp(hidden=4)(DataSpec((6,), None, 5))) == 6 * 4 + 4 + 4 + 1
    with pytest.raises(ConfigError, match=r"mlp\.hidden"):
        models.mlp(hidden=0)


def test_the_image_networks_have_the_papers_sizes():
    celeba, cifar = DataSpec((3, 84, 84), 2, 9), DataSpec((3, 32, 32), 10, 9)
    convolutions = 3 * 3 * 3 * 32 + 32 + 3 * (3 * 3 * 32 * 32 + 32)
    last = 32 * 5 * 5 * 2 + 2
    assert parameters(models.celeba_cnn(norm="none")(celeba)) == convolutions + last
    assert parameters(models.celeba_cnn()(celeba)) == convolutions + last + 4 * 2 * 32 == 30_498
    body = (25 * 3 * 64 + 64) + (25 * 64 * 64 + 64) + (1600 * 120 + 120) + (120 * 64 + 64)
    assert parameters(models.fedrep_cnn()(cifar)) == body + 64 * 10 + 10 == 307_842
    for factory, spec in ((models.celeba_cnn(), celeba), (models.fedrep_cnn(), cifar)):
        assert factory(spec)(torch.zeros(2, *spec.shape)).shape == (2, spec.classes)
        with pytest.raises(ModelError, match="images"):
            factory(DataSpec((784,), 2, 3))


def test_batch_normalization_of_vectors_becomes_that_of_a_layer():
    """A group of each number would be constant, whatever goes in."""
    net = models.with_group_norm(
        torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.BatchNorm1d(16))
    )
    x = torch.randn(4, 5)
    torch.testing.assert_close(net(x), torch.nn.functional.layer_norm(net[0](x), (16,)))
    torch.testing.assert_close(net(x[:1]), net(x)[:1])


def test_batch_normalization_becomes_group_normalization():
    plain = torchvision.models.resnet18(num_classes=10)
    names = [n for n, m in plain.named_modules() if isinstance(m, torch.nn.BatchNorm2d)]
    torch.nn.init.normal_(plain.bn1.weight)
    scale = plain.bn1.weight.detach().clone()
    made = models.with_group_norm(plain, groups=32)
    assert [n for n, m in made.named_modules() if isinstance(m, torch.nn.GroupNorm)] == names
    assert len(names) == 20
    assert torch.equal(made.bn1.weight, scale)
    assert (made.bn1.num_groups, made.bn1.num_channels) == (32, 64)
    odd = models.with_group_norm(torch.nn.Sequential(torch.nn.BatchNorm2d(30)), groups=16)
    assert odd[0].num_groups == 15
    assert not any(buffers for buffers in made.named_buffers())


@pytest.mark.parametrize(("name", "channels"), [("resnet18", 3), ("mobilenet_v3_small", 1)])
def test_torchvision_networks_train_privately(name, channels):
    generator = torch.Generator().manual_seed(0)
    rows = {
        f"c{i}": (torch.randn(4, channels, 32, 32, generator=generator), torch.tensor([0, 1, 2, 1]))
        for i in range(3)
    }
    run = small.trainer(
        algorithm=FedAvg(local=LocalSGD(lr=0.01, batch_size=2)),
        data=FederatedDataset.from_tensors(rows, classes=3),
        model=models.torchvision_model(name),
        privacy=ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-2),
        dtype="float32",
    ).fit()
    assert run.shared is not None
    assert torch.isfinite(run.shared).all()


def test_torchvision_networks_that_do_not_fit_are_refused():
    spec = DataSpec((3, 32, 32), 10, 3)
    with pytest.raises(
        ConfigError, match=r"torchvision_model\.name is 'resnet'; accepted: alexnet, "
    ):
        models.torchvision_model("resnet")(spec)
    with pytest.raises(ConfigError, match=r"'resnet18' with weights=None cannot be made: .*depth"):
        models.torchvision_model("resnet18", depth=3)(spec)
    with pytest.raises(ModelError, match="torchvision_model needs images"):
        models.torchvision_model()(DataSpec((64,), 10, 3))
    with pytest.raises(ModelError, match=r"Layer 'bn1' is BatchNorm2d.*GroupNorm"):
        prepare_module(
            models.torchvision_model(norm="keep")(spec), torch.zeros(2, 3, 32, 32), seed=0
        )
