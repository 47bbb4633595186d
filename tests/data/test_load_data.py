import pytest

from fedmtl.data import FederatedDataset, load_data, load_digits_clients, loaders, reader
from fedmtl.errors import ConfigError


def test_data_by_name_are_the_loaders_data():
    assert load_data("digits", clients=5).fingerprint() == load_digits_clients(5).fingerprint()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "digit",
            {},
            "data.name is 'digit'; accepted: .*'celeba', 'cifar', 'digits', .*'synthetic_tasks', 'table'",
        ),
        (
            "digits",
            {"client": 5},
            "data.client is no option of 'digits'; accepted: clients, train_images, .*seed",
        ),
        ("femnist", {}, "data.root is missing; 'femnist' needs it"),
        ("femnist", {"root": None}, "data.root is missing; 'femnist' needs it"),
        ("table", {}, "data.path is missing; 'table' needs it"),
    ],
)
def test_unknown_names_and_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        load_data(name, **options)


def test_a_reader_outside_of_the_package_registers_itself(monkeypatch):
    monkeypatch.setattr(loaders, "LOADERS", dict(loaders.LOADERS))

    @reader("few_digits")
    def read_few(clients: int = 2) -> FederatedDataset:
        return load_digits_clients(clients)

    assert load_data("few_digits", clients=3).ids == ("client-0", "client-1", "client-2")
    with pytest.raises(
        ConfigError, match=r"data 'digits' is read by .*load_digits_clients; choose another name"
    ):
        reader("digits")(read_few)
    assert load_data("digits", clients=1).name == "digits"
