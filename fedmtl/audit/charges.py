"""Checks of the accounting: the charges, and the statements about them. All deterministic."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .._rounding import rounded_up
from ..errors import BudgetExhausted, PrivacyError
from ..privacy.accounting.library import TOLERANCE
from ..privacy.activation_channel import ActivationChannel
from ..privacy.channel_report import privacy_report
from ..privacy.round_channel import RoundChannel
from .claim import event_of, weighted
from .findings import Finding, exact, skipped, too_large
from .lines import Reading, differences, spread
from .play import activation, rounds, silence, stated_multiplier, summed
from .setup import ACTIVATIONS, CLIENTS, MOST_ELEMENTS, Clocks, Setup

_OTHER = "{} is {} in the cost, and {} in the settings or public facts"
_SLACK = 1 + 1e-6
_STEPS = 20  # of a run whose ledger is read back
_EXAMINED = 6  # accounts of one run that are computed again

_Channel: TypeAlias = RoundChannel | ActivationChannel
_Block: TypeAlias = tuple[int, Tensor, list[list[int]] | None]
"""The first step, the clients of the block as ``begin`` has them, and the accounts that each step
is charged to, -1 for that of all clients; None if the block must be refused."""


def charges(setup: Setup, seed: int) -> list[Finding]:
    """Makes all checks of the accounting: of noise on rows, whose account no ledger has, those of
    its cost."""
    if setup.rows:
        return [_costs(setup, seed), _budgets(setup, np.array([_paid(setup, seed)]))]
    wrong, ledger = _steps(setup, seed)
    detail = (
        f"{len(ledger.steps):,} steps charged before they release, once, uses and epsilons of all "
        "accounts"
    )
    uses = setup.claims.charged(ledger.caps if setup.one_at_a_time else ledger.uses)
    findings = [
        exact("charges: steps in the ledger", wrong, detail),
        _costs(setup, seed),
        _budgets(setup, uses),
    ]
    return [*findings, _by_library(setup, ledger)]


# The stated cost of a release


def _costs(setup: Setup, seed: int) -> Finding:
    """Checks that the costs agree with the settings, the public facts, and the noise that the
    channel says it adds, in the first use of every account, the last and one between."""
    channel = setup.open(seed)
    wrong = []
    if channel.bound != setup.privacy.initial_norm:
        wrong.append(
            f"the clip norm is {channel.bound:g}, the settings have {setup.privacy.initial_norm:g}"
        )
    for k in setup.claims.accounts:
        found = _wrong_costs(setup, channel, k)
        if setup.gradients is not None:
            found = [f"{setup.name(k)}: {contradiction}" for contradiction in found]
        wrong += found
    wrong += _wrong_divisor(setup, channel)
    detail = "law, noise, clip, delta, sampling, numbers of sums and of coordinates"
    return exact("charges: event of a release", wrong, detail)


def _wrong_costs(setup: Setup, channel: Any, k: int) -> list[str]:
    """Returns the contradictions of the cost of account ``k``."""
    claims = setup.claims
    cost, multiplier = claims.cost(k)
    cap = setup.steps
    wrong = differences(vars(cost), claims.facts(k), _OTHER)
    if setup.gradients is not None:
        cap = int(channel.caps[k])
        rows = setup.records.x
        if rows is not None and len(rows[k]) != setup.sizes[k]:
            wrong.append(f"{len(rows[k])} rows of {setup.sizes[k]} records")
    for use in sorted({0, cap // 2, cap - 1} & set(range(cap))):
        for name in claims.names:
            claim = claims.of(name, k, use)
            stated = stated_multiplier(setup, channel, name, k, use)
            if not math.isclose(stated, claim.multiplier, rel_tol=1e-9):
                wrong.append(
                    f"{name} has noise {stated:.6g} in use {use}, the cost {claim.multiplier:.6g}"
                )
        charged = claims.costs.event(k, use)
        due = event_of(cost, weighted(cost, multiplier, use))
        # each use by itself: uses of unequal weight may cost the same in total
        if claims.refuted is None and charged != due:
            wrong.append(f"the event of use {use} is {charged}, its cost makes {due}")
    return wrong


def _wrong_divisor(setup: Setup, channel: Any) -> list[str]:
    """Returns the contradiction of the total of an account of rows, or of the divisor of sums."""
    if setup.rows:
        stated = channel.row_noise[setup.rows].epsilon_at(setup.steps)
        spent = setup.claims.spent(0, setup.steps)
        if math.isclose(stated, spent, rel_tol=1e-9):
            return []
        return [
            f"epsilon is {rounded_up(stated, 6)}, {setup.steps} uses cost {rounded_up(spent, 6)}"
        ]
    if setup.gradients is not None:
        return []
    claim = setup.claims.of(setup.claims.names[0])
    if channel.denominator == claim.denominator:
        return []
    return [f"sums are divided by {channel.denominator:g}, not by the expected cohort"]


# The ledger, by the audit's own reader


def _read(path: Path) -> Reading:
    return Reading([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def _paid(setup: Setup, seed: int) -> int:
    """Returns the number of paid rounds of a run without a folder, whose charges are counted in
    memory."""
    with closing(setup.open(seed)) as channel:
        return sum(1 for _ in rounds(setup, channel))


def _steps(setup: Setup, seed: int) -> tuple[list[str], Reading]:
    """Makes the steps of a run, and more, until they are refused, and reads them from the file.

    Each is charged once, before it releases something, to those that take part, and happens once; a
    block that must be refused is not charged.

    Returns:
        The contradictions, and the ledger that was written.
    """
    wrong = list[str]()
    charged = dict[int, list[int]]()
    with tempfile.TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        path = Path(folder) / "ledger.jsonl"
        with closing(setup.open(seed, ledger=path)) as channel:
            channel.start(0)
            for block in _blocks(setup, channel, seed):
                first, members, clients = block
                try:
                    channel.begin(first, members)
                except BudgetExhausted:
                    if clients is None:
                        continue
                    wrong += [
                        f"step {first} is within the caps, and is refused"
                    ] * setup.one_at_a_time
                    break
                if clients is None:
                    wrong.append(f"step {first} begins a block past the cap of a client")
                    break
                charged |= dict(enumerate(clients, first))
                if (setup.one_at_a_time or len(charged) <= _STEPS) and _read(
                    path
                ).by_step != charged:
                    wrong.append(f"steps from {first} began without a charge on the disk")
                acted = setup.one_at_a_time or first < 3 or first % 16 == 0
                if acted and (more := _acted(setup, channel, block)):
                    wrong += more
                    break
        ledger = _read(path)
        if ledger.by_step != charged:
            wrong.append(f"{len(charged)} steps began, others stay charged, or to others")
        wrong += ledger.problems()
    if not setup.one_at_a_time and (made := _paid(setup, seed)) != min(len(charged), setup.steps):
        wrong.append(f"{made} rounds are paid for without a file, {len(charged)} with one")
    try:
        wrong += _misstated(setup, channel, ledger)
    except PrivacyError as error:  # no figure for so many uses
        wrong.append(str(error))
    return wrong, ledger


def _misstated(setup: Setup, channel: _Channel, ledger: Reading) -> list[str]:
    """Returns the differences of the account and the report from the ledger."""
    wrong = list[str]()
    report = privacy_report(channel)
    uses = ledger.uses.tolist()
    if channel.accountant.uses[0].tolist() != uses:
        wrong.append("the account has other uses than the ledger")
    if report.releases != ledger.releases:
        wrong.append(f"{ledger.releases} releases happened, the report has {report.releases}")
    if setup.claims.refuted is not None and (report.refuted is None or report.epsilon != math.inf):
        wrong.append(
            "the published accounting does not hold, and the report states its figure "
            "without the reason"
        )
    if report.delta != setup.delta:
        wrong.append(
            f"delta is {report.delta} in the report, the settings have {rounded_up(setup.delta, 6)}"
        )
    stated = {
        f"account {k}": float(epsilon) for k, epsilon in enumerate(channel.accountant.epsilons()[0])
    }
    spent = {f"account {k}": setup.claims.spent(k, used) for k, used in enumerate(uses)}
    stated["the report"] = report.epsilon
    spent["the report"] = max(spent.values())
    for of in stated if setup.claims.refuted is None else ():
        if not math.isclose(stated[of], spent[of], rel_tol=1e-9, abs_tol=1e-12):
            wrong.append(f"{of} has epsilon {stated[of]}, its uses {rounded_up(spent[of], 6)}")
    return wrong


def _blocks(setup: Setup, channel: _Channel, seed: int) -> Iterator[_Block]:
    """Yields the blocks of a run, and blocks beyond its last step."""
    if isinstance(channel, ActivationChannel):
        yield from _blocks_of_activations(setup, channel, seed)
        return
    for step in range(4 * setup.steps + 64):
        try:
            cohort = channel.draw(step)
        except BudgetExhausted:
            return
        accounts = [-1]
        if channel.accountant.by_client:
            accounts = sorted(cohort.tolist())
        yield step, cohort, [accounts]


def _blocks_of_activations(setup: Setup, channel: ActivationChannel, seed: int) -> Iterator[_Block]:
    """Yields blocks in which clients act one at a time.

    The schedule makes half of all uses, ``ACTIVATIONS`` at most. In the blocks that follow one
    client after the other acts up to its cap, and once more, in the same block and after it: silent
    and free, or refused.
    """
    assert isinstance(setup.schedule, Clocks)
    end = 0
    left = np.where(setup.sizes > 0, channel.caps, 0)
    most = min(ACTIVATIONS, int(left.sum()) // 2)
    for first, clients in setup.schedule.blocks(channel, seed):
        charged = None
        if first < most:
            charged = _charged(setup, left, clients)
        if charged is None:
            break
        yield first, clients, charged
        end = first + len(charged)
    # clients whose gradients fit in memory at once
    for k in np.flatnonzero(left[:CLIENTS] * setup.records.dimension <= MOST_ELEMENTS):
        for count in (left[k] + 1, left[k], 1) if setup.sizes[k] and channel.caps[k] else ():
            clients = torch.full((1, int(count)), int(k))
            charged = _charged(setup, left, clients)
            if count:
                yield end, clients, charged
            if charged is not None:
                end += len(charged)


def _charged(setup: Setup, left: np.ndarray, clients: Tensor) -> list[list[int]] | None:
    """Returns the accounts that each activation of ``clients``, (1, S), is charged to, and takes
    them off the uses that are ``left``, (n,); None, and no use is taken, if the block must be
    refused."""
    after = left.copy()
    charged = list[list[int]]()
    for k in clients[0].tolist():
        acts = k >= 0 and after[k] > 0
        if not acts and k >= 0 and setup.sizes[k] and setup.records.at_cap == "stop":
            return None
        after[k] -= acts
        charged.append([k] if acts else [])
    left[:] = after
    return charged


# Acts that must be refused


def _acts(
    setup: Setup, channel: _Channel, block: _Block
) -> Iterator[tuple[Callable[[], Any], int]]:
    """Yields the acts of a block that has begun, and how often each is paid for: releases of
    clients that contribute nothing, of local steps those of one client and of another one that
    takes no part; and the beginning, again."""
    first, members, clients = block
    sent = silence(setup)
    if isinstance(channel, ActivationChannel):
        yield partial(activation, setup, channel, first, sent), len(members[0])
    elif channel.local is None:
        for plan in channel.plans:
            yield partial(channel.release, plan.name, *sent(plan.name, first, members)), 1
    elif setup.pooled is not None:
        for plan in channel.plans:
            gradients, owners = sent(plan.name, first, members)
            rows, who = summed(channel, gradients, owners, members)
            yield partial(channel.release, plan.name, rows, who), 1
        # the sums of the round are made
        nothing = [(torch.zeros(0, rows.shape[1]), torch.zeros(0, dtype=torch.int64))]
        yield partial(channel.local.grid_sums, who[:1], nothing), 0
    elif clients is not None:
        records = channel.local.plan
        taking = clients[0]
        nothing = [(torch.zeros(0, records.dimension), torch.zeros(0, dtype=torch.int64))]
        others = [k for k in range(len(records.ids)) if k not in taking]
        for k, paid in [(k, int(records.local_steps[k])) for k in taking[:1]] + [
            (k, 0) for k in others[:1]
        ]:
            yield partial(channel.local.release, torch.tensor([k]), nothing), paid
    yield (
        lambda: channel.begin(
            first, members if isinstance(channel, ActivationChannel) else channel.draw(first)
        ),
        0,
    )


def _acted(setup: Setup, channel: _Channel, block: _Block) -> list[str]:
    """Makes the acts of a block as often as they are paid for, and once more; returns the faults:
    acts that were not refused, and releases of clients that must release zeros."""
    first, _, clients = block
    wrong = list[str]()
    for act, paid in _acts(setup, channel, block):
        values = [act() for _ in range(paid)]
        with suppress(PrivacyError, BudgetExhausted):
            act()
            wrong.append(f"step {first} is begun twice, or releases once more than is paid for")
        silent = [value for value, taking in zip(values, clients or (), strict=False) if not taking]
        if setup.one_at_a_time and any(bool(value.any()) for value in silent):
            wrong.append(
                f"a client without records, or at its cap, released in the block of step {first}"
            )
    return wrong


# Figures


def _budgets(setup: Setup, uses: np.ndarray) -> Finding:
    """Checks that the largest epsilon that an account can reach, after ``uses`` (m,), is within its
    budget."""
    limits = {k: budget for k, budget in enumerate(setup.budgets) if budget is not None and uses[k]}
    if not limits:
        return skipped("charges: budget", "no budget is set")
    ratio, worst = max(
        (setup.claims.spent(k, int(uses[k])) / budget, k) for k, budget in limits.items()
    )
    detail = f"largest epsilon over budget, of account {worst} after {uses[worst]} uses"
    return too_large("charges: budget", ratio, _SLACK, detail)


def _by_library(setup: Setup, ledger: Reading) -> Finding:
    """Checks that no epsilon of the charged uses of an account is below the one that dp-accounting
    computes from the same cost."""
    check = "charges: epsilon by dp-accounting"
    worst = -1.0
    text = ""
    lacking = "no finite epsilon is stated"
    for account in (
        spread(ledger.most_charged, _EXAMINED) if ledger.header["refuted"] is None else ()
    ):
        uses = int(ledger.uses[account])
        figure = setup.claims.spent(account, uses)
        least = None
        if math.isfinite(figure):
            least = ledger.library_epsilon(account, figure)
        if least is None:
            if math.isfinite(figure):
                lacking = "dp-accounting lacks a law of the run"
            continue
        if figure > 0:
            ratio = least / figure
        elif least:
            ratio = math.inf
        else:
            ratio = 0.0
        if not ratio <= worst:
            worst = ratio
            text = f"epsilon {rounded_up(figure, 5)} of {uses} uses, by dp-accounting {least:.5g}"
    if text:
        return too_large(check, worst, 1 + TOLERANCE, text)
    return skipped(check, lacking)


def planned_epsilon(setup: Setup, seed: int) -> float:
    """Returns epsilon of all planned steps, or of every client up to its cap."""
    account = setup.open(seed).accountant
    claims = setup.claims
    if claims.refuted is not None:
        return math.inf
    caps = account.caps if account.by_client else None
    uses = claims.charged(np.array([_paid(setup, seed)]) if caps is None else caps)
    return max(claims.spent(k, int(uses[k])) for k in claims.accounts)
