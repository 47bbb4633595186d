"""Print of fedmtl on a device, on a given work, how far its models are from those of a CPU, and what a round launches.

The models are computed in float64 on both, after a few rounds of a few clients, with the same noise: their largest
difference is that of rounding, or there is a mistake. A further round, of the whole cohort and in the work's own
dtype, is profiled: kernels that are launched, copies, and waits of the host for the device. On a CPU there are none,
and the operators of PyTorch are counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from fedmtl_run import Run
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from work import WARM_UP, Work, arguments

import fedmtl

MARK = "a round"
ROUNDS = 3
EXACT = {"dtype": "float64", "cohort": 5, "clip": 1.0, "noise_multiplier": 1e-3}
"""Settings of these rounds: few clients, and updates that move the models."""


def models_after(settings: dict[str, Any], rounds: int, root: str, device: str) -> Tensor:
    """Return the shared model and those of the clients that took part after some rounds, in float64 on the host:
    (1 + k, D)."""
    run = Run.of(settings | EXACT, rounds, root, None, device)
    seen = []
    for cohort, after in run.steps(rounds):
        seen.append(cohort)
        state = after
    members = torch.unique(torch.cat(seen))
    shared = run.algorithm.shared(state)
    assert shared is not None
    rows = run.algorithm.personalize(run.problem, state, members)
    run.channel.close()
    return torch.cat([shared[None], rows]).cpu()


def difference(settings: dict[str, Any], rounds: int, root: str, device: str) -> dict[str, float]:
    """Return the largest absolute difference of a device's models from a CPU's, and the largest move of a model from
    the start, beside which it is to be read."""
    found, expected = (models_after(settings, rounds, root, place) for place in (device, "cpu"))
    run = Run.of(settings | EXACT, rounds, root, None)
    moved = (expected - run.problem.initial).abs().max()
    run.channel.close()
    return {"difference": float((found - expected).abs().max()), "moved": float(moved)}


def counted(names: Iterable[str]) -> dict[str, int]:
    """Return how many of the events of a profile, by their names, are launches, waits, copies and operators.

    A wait is a call of the driver in which the host stands until the device has come so far. Copies are counted apart:
    one from the host's ordinary memory may wait, and one within the device does not.
    """
    found = Counter(dict.fromkeys(("kernels", "waits", "copies", "operators"), 0))
    for name in names:
        if "Launch" in name and name.startswith(
            "cu"
        ):  # cudaLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch
            found["kernels"] += 1
        elif "Synchronize" in name and name.startswith("cu"):
            found["waits"] += 1
        elif name.startswith(("cudaMemcpy", "cuMemcpy")):
            found["copies"] += 1
        elif name.startswith("aten::"):
            found["operators"] += 1
    return dict(found)


def within(events: Iterable[Any], mark: str) -> Iterator[str]:
    """Yield the names of the host's events of a profile that began within the range of this name: what the profiler
    itself asks of the driver at its end is none of them."""
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    whole = next(event.time_range for event in on_host if event.name == mark)
    for event in on_host:
        if whole.start <= event.time_range.start <= whole.end:
            yield event.name


def profiled(settings: dict[str, Any], root: str, device: str) -> dict[str, int]:
    """Return the counts of one round, after those of the warm-up."""
    run = Run.of(settings, WARM_UP + 1, root, None, device)
    steps = run.steps(WARM_UP + 1)
    for _ in range(WARM_UP):
        next(steps)
    activities = [ProfilerActivity.CPU]
    if device != "cpu":
        torch.cuda.synchronize()
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler, record_function(MARK):
        next(steps)
    run.channel.close()
    return counted(within(profiler.events(), MARK))


def main() -> None:
    """Print a line of JSON."""
    given = arguments(__doc__)
    settings = Work.read(given.work).settings
    line = {"contender": "facts", "version": fedmtl.__version__, "torch": torch.__version__}
    line |= {"device": given.device} | difference(settings, ROUNDS, given.root, given.device)
    print(json.dumps(line | profiled(settings, given.root, given.device)))


if __name__ == "__main__":
    main()
