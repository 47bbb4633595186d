"""PP-DMTL's simulated step size, public and better than that of the worst delays; the last step along shared
directions, against SciPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import optimize

from fedmtl import PPDMTL, Latencies, RecordPrivacy, SharedDirections, models
from fedmtl.algorithms.pp_dmtl.step_size import largest_delay, synthetic_tasks
from fedmtl.data import load_synthetic_tasks
from fedmtl.errors import ConfigError
from fedmtl.schedules import RandomLatency
from fedmtl.trainer.run_channel import bind_schedule
from tests.algorithms.harness import problem_of, run_activations

TASKS, EVENTS = 8, 900
SLOW = Latencies(
    latency=RandomLatency("uniform"), activations=EVENTS, scale=[8.0, 8.0] + [1.0] * (TASKS - 2)
)


def problem(
    seed: int = 0, *, kind: str = "classification", rounds: int = EVENTS, bias: bool = False
):
    data = load_synthetic_tasks(
        tasks=TASKS, train_examples=20, test_examples=3, features=6, rank=2, problem=kind, seed=seed
    )
    return problem_of(data, model=models.linear_regression(bias=bias), loss="auto", rounds=rounds)


def resolved(algorithm: PPDMTL, work, *privacy: RecordPrivacy) -> PPDMTL:
    return algorithm.resolve_auto(work, bind_schedule(SLOW, work.data), privacy or [None])


def test_it_is_a_function_of_public_things_alone() -> None:
    algorithm = PPDMTL(feature_norm=1.0, lam=0.02, a2="auto")
    one, other = (resolved(algorithm, problem(seed, rounds=200)) for seed in (0, 5))
    assert (one.a2, one.delay) == (other.a2, other.delay)
    again = resolved(algorithm, replace(problem(rounds=200), seed=1))
    assert again.a2 > 0


def test_it_is_simulated_with_noise_of_a_seed_whatever_the_runs_own_source() -> None:
    """The step is public, and a resumed run has to find the same one."""
    work = problem(rounds=40)
    algorithm = PPDMTL(feature_norm=1.0, lam=0.02, a2="auto")
    seeded = RecordPrivacy(clip_norm=1.0, epsilon=1.0, delta=1e-5)
    secure = replace(seeded, source="secure")
    found = [resolved(algorithm, work, privacy) for privacy in (seeded, secure)]
    assert found[0].a2 == found[1].a2


@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_it_is_stable_and_faster_than_the_step_for_the_worst_delays(loss: str) -> None:
    work = problem(kind="classification" if loss == "logistic" else "regression")
    target = 4.0 if loss == "squared" else "auto"
    algorithm = PPDMTL(
        feature_norm=1.0, loss=loss, target=target, lam=0.01, tau=0.01, a1=0.4, a2="auto"
    )
    found = resolved(algorithm, work)
    smooth = 0.25 if loss == "logistic" else 2.0
    assert found.delay >= 1
    assert (found.delay + 1) * found.a2 * smooth <= 2 * (1 + 1e-9)
    block = bind_schedule(SLOW, work.data).activations(3, 0, EVENTS, replicates=1)
    worst = replace(algorithm, a2=None, delay=largest_delay(block.client))
    ends = []
    for one in (found, worst):
        state, _ = run_activations(one, work, block.client)
        ends.append(float(one.objective(work, state)))
    assert found.a2 > 2 * worst.step_size(work)
    assert ends[0] < ends[1]


def test_louder_noise_asks_for_a_smaller_step() -> None:
    algorithm, steps = PPDMTL(feature_norm=1.0, lam=0.01, a2="auto"), []
    for epsilon in (0.5, 1e5):
        privacy = RecordPrivacy(clip_norm=1.0, epsilon=epsilon, delta=1e-5)
        steps.append(resolved(algorithm, problem(rounds=300), privacy).a2)
    assert steps[0] < steps[1]
    several = [
        RecordPrivacy(clip_norm=1.0, epsilon=epsilon, delta=1e-5) for epsilon in (1e5, 0.5, 1e5)
    ]
    assert resolved(algorithm, problem(rounds=300), *several).a2 == steps[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smooth", [0.1, 0.2])
def test_synthetic_tasks_have_the_sizes_and_the_curvature(bias: bool, smooth: float) -> None:
    work, algorithm = problem(bias=bias), PPDMTL(feature_norm=1.0)
    made = synthetic_tasks(algorithm, work, smooth, 3)
    assert made.ids == work.data.ids
    assert torch.equal(made.train.counts, work.data.train.counts)
    assert made.train.x.shape == work.data.train.x.shape
    assert float(made.train.x.norm(dim=1).max()) <= 1.0
    largest = 0.0
    for part in made.train.x.double().split(made.train.counts.tolist()):
        rows = torch.cat([part, torch.ones(len(part), 1)], dim=1).numpy() if bias else part.numpy()
        largest = max(largest, np.linalg.eigvalsh(rows.T @ rows / len(rows)).max() / 4)
    uniform = (
        largest if bias and smooth < 0.25 else smooth
    )  # the 1 of a bias alone has a curvature of 1/4
    assert largest == pytest.approx(uniform, rel=1e-3)


def test_a_trainer_fills_it_in() -> None:
    with pytest.raises(ConfigError, match=r"a2 is 'auto', which a Trainer fills in"):
        PPDMTL(feature_norm=1.0, a2="auto").init(problem())


@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_the_refinement_along_and_across_shared_directions(loss: str) -> None:
    """Every task's own minimum, by SciPy; with a P of rank 2, and without any signal."""
    work = problem(kind="classification" if loss == "logistic" else "regression")
    settings = {
        "feature_norm": 1.0,
        "loss": loss,
        "target": 4.0 if loss == "squared" else "auto",
        "refine_tau": 0.02,
    }
    algorithm = SharedDirections(refine_across=0.7, a2=None, **settings)
    state, everyone = algorithm.init(work, 2), torch.arange(TASKS)
    draw = torch.Generator().manual_seed(2)
    factors = [
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((TASKS, 2), (2, 6))
    ]
    state.public["shared"][0] = factors[0] @ factors[1]
    found = algorithm.models(work, state, everyone)
    plain = PPDMTL(**settings).models(work, state, everyone)
    torch.testing.assert_close(found[1], plain[1])
    data = algorithm.data(work)
    basis = np.linalg.qr(factors[1].numpy().T)[0]
    for t in range(TASKS):
        x, y, p = data.x[t].numpy(), data.y[t].numpy(), state.public["shared"][0, t].numpy()

        def value(q, x=x, y=y, p=p):
            m = x @ (p + q)
            each = np.logaddexp(0, -y * m) if loss == "logistic" else (m - y) ** 2
            along = basis.T @ q
            return each.mean() + 0.01 * along @ along + 0.35 * (q @ q - along @ along)

        best = optimize.minimize(value, np.zeros(6), method="BFGS", options={"gtol": 1e-9}).x
        np.testing.assert_allclose(found[0, t].numpy(), p + best, atol=2e-6)
