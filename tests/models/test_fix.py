"""Layers with a batching rule in the place of those without: the same outputs, and trained with both units."""

import pickle

import pytest
import torch
from torch import nn

from fedmtl import ClientPrivacy, RecordPrivacy, Trainer, models
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError, ModelError
from tests import small


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: object) -> None:
        super().__init__()
        self.layer = kind(4, 6, batch_first=True, **options)  # type: ignore[call-arg]
        self.out = nn.LazyLinear(3)
        self(torch.zeros(1, 5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x, x, x, need_weights=False)[0].flatten(1))


MODELS = {
    "RNN": lambda: Recurrent(nn.RNN),
    "RNN of relu": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "LSTM, two layers, both ways": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "GRU without bias": lambda: Recurrent(nn.GRU, bias=False),
    "attention": Attention,
    "transformer": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(20, 3)
    ),
}

ONE_AFTER_ANOTHER = (
    "RNN",
    "RNN of relu",
    "LSTM",
    "LSTM, two layers, both ways",
    "GRU without bias",
)
"""Those that train as they are, where no gradients of single records are needed."""


def sequences() -> FederatedDataset:
    generator = torch.Generator().manual_seed(0)
    parts = {
        f"client-{i}": (
            torch.randn(9, 5, 4, generator=generator),
            torch.randint(3, (9,), generator=generator),
        )
        for i in range(4)
    }
    return FederatedDataset.from_tensors(parts, test=parts, classes=3)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_parameters_are_those_of_the_given_model(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]().double().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fixed = models.fix(model)
    x = torch.randn(7, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(fixed(x), model(x), rtol=1e-10, atol=1e-12)
    assert sum(p.numel() for p in fixed.parameters()) == sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(pickle.loads(pickle.dumps(fixed))(x), fixed(x))
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())


@pytest.mark.parametrize(
    "privacy",
    [ClientPrivacy(clip_norm=1.0, epsilon=8.0), RecordPrivacy(clip_norm=1.0, epsilon=8.0)],
)
@pytest.mark.parametrize("name", ["RNN", "LSTM, two layers, both ways", "attention", "transformer"])
def test_clients_train_together_what_was_refused(
    name: str, privacy: ClientPrivacy | RecordPrivacy
) -> None:
    def trainer(model: nn.Module) -> Trainer:
        return small.trainer(
            data=sequences(), model=model, privacy=privacy, rounds=2, dtype="float32"
        )

    if name in ONE_AFTER_ANOTHER:
        assert bool(torch.isfinite(trainer(MODELS[name]()).fit().shared).all())  # type: ignore[arg-type]
    elif name != "attention":
        with pytest.raises(ModelError, match=r"models\.fix|nn\.Dropout"):
            trainer(MODELS[name]()).fit()
    result = trainer(models.fix(MODELS[name]())).fit()
    assert bool(torch.isfinite(result.shared).all())  # type: ignore[arg-type]


def test_a_layer_with_two_places_stays_one() -> None:
    model = nn.ModuleDict({"one": Recurrent(nn.LSTM), "other": nn.ModuleList()})
    model["other"].append(model["one"].layer)
    model["one"].again = model["one"].layer
    fixed = models.fix(model)
    assert fixed["one"].layer is fixed["one"].again is fixed["other"][0]
    assert sum(p.numel() for p in fixed.parameters()) == sum(p.numel() for p in model.parameters())


def test_frozen_layers_stay_frozen_and_a_part_of_one_is_refused() -> None:
    model = Recurrent(nn.GRU)
    model.layer.requires_grad_(False)
    assert not any(p.requires_grad for p in models.fix(model).layer.parameters())
    model.layer.bias_hh_l0.requires_grad_(True)
    with pytest.raises(ConfigError, match="layer 'layer' of which some parameters are frozen"):
        models.fix(model)


def test_batch_normalization_becomes_normalization_by_groups() -> None:
    model = nn.Sequential(nn.Conv1d(5, 8, 1), nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(32, 3))
    fixed = models.fix(lambda spec: model)(None)  # type: ignore[arg-type]
    assert isinstance(fixed[1], nn.GroupNorm)  # type: ignore[index]
    assert isinstance(models.fix(nn.BatchNorm1d(8)), nn.GroupNorm)


@pytest.mark.parametrize("model", [3, nn.LSTM])
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(ConfigError, match=r"give a module, or a factory"):
        models.fix(model)  # type: ignore[call-overload]
