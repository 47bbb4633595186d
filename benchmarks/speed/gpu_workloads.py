"""The workloads of gpu.py, and who takes part in each."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rounds import SCRIPTS

FEMNIST = {
    "lr": 0.1,
    "lam": 0.1,
    "batch": 10,
    "clip": 0.5,
    "cohort": 100,
    "epsilon": 8.0,
    "seed": 0,
}
# Random images teach nothing: with little noise the final losses can be compared.
STILL = {"clip": 1e-4}
# Clients of whom there is a final loss, which JAX's and the host's side compute on the CPU.
SCORED = {"scored": 16}
IMAGES = {"shape": [1, 28, 28], "classes": 62}
LIKE_FEMNIST = IMAGES | {"clients": 206, "least": 10, "most": 46}
# The time of a round does not depend on the number of clients that take no part in it.
LARGE = IMAGES | {"clients": 340, "least": 20, "most": 180}
COLOUR = {"clients": 200, "least": 56, "most": 56, "shape": [3, 32, 32], "classes": 10}
WORKLOADS: dict[str, dict[str, Any]] = {
    "W1-fedprox": FEMNIST | {"model": "cnn", "method": "fedprox"},
    "W2-fedprox": FEMNIST | {"model": "logistic", "method": "fedprox"},
    "W3": FEMNIST
    | STILL
    | {"model": "cnn3", "method": "fedprox", "batch": 20, "cohort": 10, "data": LARGE},
    "W4": FEMNIST | STILL | {"model": "cifar", "method": "fedprox", "cohort": 50, "data": COLOUR},
    "W5": FEMNIST
    | {"model": "cnn", "method": "fedprox", "unit": "record", "noise_multiplier": 1.0},
    "W1": FEMNIST | {"model": "cnn", "method": "pmtl"},
    "W2": FEMNIST | {"model": "logistic", "method": "pmtl"},
}
"""Settings by name, in the order in which they run: what comes last is left out where the time is short."""
ABOUT = {
    "W1-fedprox": "CNN, 115,646 parameters, FedProx, cohorts of 100",
    "W2-fedprox": "logistic regression, 48,670 parameters, FedProx, cohorts of 100",
    "W3": "CNN, 1.2 million parameters, FedProx, cohorts of 10 with 20 to 180 images each",
    "W4": "CNN of images in colour, 1.6 million parameters, FedProx, cohorts of 50 with 50 images each",
    "W5": "the CNN of W1, DP-SGD of single records in every local step, cohorts of 100",
    "W1": "as W1-fedprox, with personal models",
    "W2": "as W2-fedprox, with personal models",
}
OURS, ON_CPU, FACTS = "fedmtl", "fedmtl, CPU", "facts"
CPU_ROUNDS = 3
"""Rounds of fedmtl on the CPU beside a GPU, those of the warm-up included: the large networks take seconds."""
PROGRAMS = SCRIPTS | {ON_CPU: SCRIPTS[OURS], FACTS: "fedmtl_facts.py"}


class Side(NamedTuple):
    """A contender, or the process that measures facts about fedmtl: its name, interpreter, device and rounds."""

    name: str
    python: str
    device: str
    rounds: int | None = None


def settings_of(key: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a workload, on made-up data where there are no others."""
    settings = WORKLOADS[key] | SCORED
    if given.root is None and "data" not in settings:
        settings |= STILL | {"data": LIKE_FEMNIST}
    if given.small:
        settings |= {"cohort": 3}
        if "data" in settings:
            settings |= {"data": settings["data"] | {"clients": 12, "least": 6, "most": 12}}
    return settings


def sides_of(key: str, given: argparse.Namespace) -> list[Side]:
    """Return who takes part in a workload: in personal models, and under DP-SGD, not everyone can."""
    settings = WORKLOADS[key]
    by_client = settings.get("unit", "client") == "client"
    sides = [Side(OURS, sys.executable, given.device)]
    if given.jax_python and settings["method"] == "fedprox":
        sides.append(Side("JAX", given.jax_python, given.device))
    sides.append(Side("plain loop", sys.executable, given.device))
    if given.device != "cpu":
        sides.append(Side(ON_CPU, sys.executable, "cpu", CPU_ROUNDS))
    # its own networks are those of rounds.py
    networks = settings["model"] in ("cnn", "logistic")
    if given.pfl_python and settings["method"] == "fedprox" and by_client and networks:
        sides.append(Side("pfl", given.pfl_python, given.device))
    return sides


def prepare(key: str, given: argparse.Namespace, folder: Path) -> None:
    """Write the work of a workload."""
    from fedmtl_run import Run
    from work import WARM_UP

    total = WARM_UP + given.rounds
    settings = settings_of(key, given)
    run = Run.of(settings, total, str(given.root), None)
    run.work(settings, total).write(folder)
    run.channel.close()
