from __future__ import annotations

import pytest

from fedmtl.data import load_data, load_digits_clients
from fedmtl.errors import ConfigError


def test_data_by_name_are_the_loaders_data():
    assert load_data("digits", clients=5).fingerprint() == load_digits_clients(5).fingerprint()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "digit",
            {},
            "data.name is 'digit'; accepted: 'adult', 'digits', 'femnist', 'hospital', 'leaf', 'lending', "
            "'movielens', 'school', 'synthetic_agents', 'synthetic_tasks', 'table'",
        ),
        (
            "digits",
            {"client": 5},
            "data.client is no option of 'digits'; accepted: clients, train_images, .*seed",
        ),
        ("femnist", {}, "data.root is missing; 'femnist' needs it"),
        ("femnist", {"root": None}, "data.root is missing; 'femnist' needs it"),
        ("table", {"path": "a.csv"}, "data.client is missing; 'table' needs it"),
    ],
)
def test_unknown_names_and_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        load_data(name, **options)
