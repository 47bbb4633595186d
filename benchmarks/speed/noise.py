"""Milliseconds a release by the law and source of its noise (Gaussian noise of secure mode is drawn in whole numbers),
beside the discrete Gaussian noise of OpenDP.

A release of fedmtl is the channel's: charge, clip and sum of one row, noise, grid, division; that of OpenDP is its
noise on a vector of zeros. The contenders take turns. Processor seconds of all threads, of which there is one.

    OMP_NUM_THREADS=1 python benchmarks/speed/noise.py --opendp-python /path/to/bin/python
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from rounds import interpreter, machine  # noqa: E402

from fedmtl.privacy import Channel, ClientPrivacy, FullParticipation, ReleasePlan, open_channel  # noqa: E402

LAWS = [
    (mechanism, source)
    for mechanism in ("gaussian", "l2_laplace")
    for source in ("seeded", "secure")
]
CELLS = 2.0**40  # deviation of OpenDP's noise: the least of fedmtl's
CLIENTS = 100


def opened(mechanism: str, source: str, size: int, steps: int) -> Channel:
    """Return a channel whose steps each release one vector."""
    privacy = ClientPrivacy(
        clip_norm=1.0, noise_multiplier=1.0, delta=1e-6, mechanism=mechanism, source=source
    )
    plan = ReleasePlan(name="update", dimension=size)
    return open_channel(privacy, (plan,), FullParticipation().bind(CLIENTS), seed=0, steps=steps)


def released(channel: Channel, step: int, row: torch.Tensor) -> float:
    """Return processor seconds of one release."""
    channel.begin(step, channel.draw(step))
    begun = time.process_time()
    channel.release("update", row, torch.tensor([0]))
    return time.process_time() - begun


def main() -> None:
    """Parse the command line, take turns, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6])
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument(
        "--opendp-python",
        type=interpreter,
        help="interpreter of an environment with OpenDP; none leaves it out",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print(
        "\n| numbers | law of the noise | ms a release | nanoseconds a number |\n| ---: | --- | ---: | ---: |"
    )
    for size in given.sizes:
        channels = [opened(*law, size, given.repetitions) for law in LAWS]
        row = torch.randn(1, size, generator=torch.Generator().manual_seed(0)) / size**0.5
        spent: dict[str, list[float]] = {f"{mechanism}, {source}": [] for mechanism, source in LAWS}
        for step in range(given.repetitions):
            for name, channel in zip(spent, channels, strict=True):
                spent[name].append(released(channel, step, row))
        if given.opendp_python:
            few = max(3, min(given.repetitions, 10**6 // size))
            command = [
                given.opendp_python,
                str(HERE / "contenders/opendp_noise.py"),
                str(size),
                str(CELLS),
                str(few),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            spent["OpenDP's discrete Gaussian"] = json.loads(done.stdout)["seconds"]
        for name, seconds in spent.items():
            low, middle, high = (
                1e3 * value for value in (min(seconds), median(seconds), max(seconds))
            )
            print(
                f"| {size:,} | {name} | {middle:.3g} ({low:.3g} to {high:.3g}) | {middle / size * 1e6:.0f} |"
            )


if __name__ == "__main__":
    main()
