"""The least number of honest rows in a sum, beside an exhaustive search for small rosters and an attack that reaches
it."""

from __future__ import annotations

import random
from itertools import combinations, product

import numpy as np
import pytest

from fedmtl.secure import roster
from fedmtl.secure.roster import accepted, honest_rows, least_roster
from tests.mutation import edit

View = tuple[frozenset[int], frozenset[int]]
"""What a server shows a client: whose boxes it leaves out, and who is missing on its list, these among them."""


def views_of(client: int, clients: int, missing: int) -> list[View]:
    """Everything that one client accepts."""
    others = [one for one in range(clients) if one != client]
    found = []
    for size in range(missing + 1):
        for gone in combinations(others, size):
            for left in range(size + 1):
                found += [(frozenset(out), frozenset(gone)) for out in combinations(gone, left)]
    return found


def smallest_sums(clients: int, colluding: int, missing: int) -> np.ndarray:
    """The number of rows in the smallest sum that a server learns, for every way to lie; above all numbers if none is.

    Honest clients come first. Their views are all combinations, as bits of integers."""
    honest = clients - colluding
    each = [views_of(client, clients, missing) for client in range(honest)]
    bits = [
        np.array([[sum(1 << one for one in part) for part in view] for view in views])
        for views in each
    ]
    where = np.indices([len(views) for views in each]).reshape(honest, -1)
    out = [bits[client][where[client], 0] for client in range(honest)]
    gone = [bits[client][where[client], 1] for client in range(honest)]
    needed = clients - missing - colluding
    own, key = [], []
    for v in range(honest):
        came = sum((gone[u] >> v & 1) == 0 for u in range(honest))
        lost = sum((gone[u] & ~out[u]) >> v & 1 for u in range(honest) if u != v)
        own.append(came >= needed)
        key.append(lost >= needed)
        assert not (own[-1] & key[-1]).any(), "both secrets of one client"
    smallest = np.full(where.shape[1], clients + 1)
    for u in range(honest):
        members = [own[w] & (out[w] == out[u]) for w in range(honest)]
        opened = own[u]
        for v in range(honest):
            opened = opened & (members[v] | (out[u] >> v & 1 == 1) | key[v])
        smallest = np.where(
            opened, np.minimum(smallest, sum(m.astype(int) for m in members)), smallest
        )
    return smallest


SMALL = [(2, 0, 0), (3, 1, 0), (4, 0, 1), (5, 0, 1), (5, 1, 1), (6, 2, 1)]


@pytest.mark.parametrize("setting", [*SMALL, (6, 1, 1)], ids=str)
def test_no_way_to_lie_has_fewer_honest_rows_and_one_has_as_few(
    setting: tuple[int, int, int],
) -> None:
    assert accepted(*setting)
    assert smallest_sums(*setting).min() == honest_rows(*setting)


def formal(views: list[View], clients: int, missing: int) -> int:
    """The smallest set of rows of which some combination has no mask that the server does not know: every mask is a
    variable of its own, named by all that its key is made of."""
    honest = len(views)
    needed = clients - missing - (clients - honest)
    came = [sum(v not in gone for _, gone in views) for v in range(honest)]
    lost = [sum(v in gone and v not in out for out, gone in views) for v in range(honest)]
    variables: dict[object, int] = {}
    rows = []
    for u, (out, _) in enumerate(views):
        row = {}
        if came[u] < needed:
            row["own", u] = 1
        for v in range(honest):
            if v != u and v not in out and max(lost[u], lost[v]) < needed:
                row["pair", min(u, v), max(u, v), out] = 1 if u < v else -1
        for name in row:
            variables.setdefault(name, len(variables))
        rows.append(row)
    matrix = np.zeros((honest, max(1, len(variables))))
    for u, row in enumerate(rows):
        for name, sign in row.items():
            matrix[u, variables[name]] = sign
    for size in range(1, honest + 1):
        for some in combinations(range(honest), size):
            if np.linalg.matrix_rank(matrix[list(some)]) < size:
                return size
    return clients + 1


@pytest.mark.parametrize("setting", [(4, 0, 1), (5, 1, 1), (6, 2, 1), (7, 0, 2)], ids=str)
def test_the_search_agrees_with_masks_as_formal_variables(setting: tuple[int, int, int]) -> None:
    clients, colluding, missing = setting
    generator = random.Random(0)
    each = [views_of(client, clients, missing) for client in range(clients - colluding)]
    if clients < 7:
        all_ways = list(product(*each))
        sums = smallest_sums(*setting)
        # in most ways nothing is learnt: half of those that are looked at open a sum
        some = np.flatnonzero(sums <= clients)
        chosen = [*generator.sample(some.tolist(), 60), *generator.sample(range(len(sums)), 60)]
        for way in chosen:
            assert formal(list(all_ways[way]), clients, missing) == sums[way]
        return
    for _ in range(25):
        views = [generator.choice(one) for one in each]
        assert formal(views, clients, missing) >= honest_rows(*setting)


@pytest.mark.parametrize(
    ("colluding", "missing"), [(0, 0), (1, 0), (0, 1), (4, 2), (10, 10), (33, 10), (2, 25)]
)
def test_larger_rosters_have_more_honest_rows(colluding: int, missing: int) -> None:
    least = least_roster(colluding, missing)
    assert not accepted(least - 1, colluding, missing)
    before = 0
    for size in range(least, least + 150):
        rows = honest_rows(size, colluding, missing)
        assert accepted(size, colluding, missing)
        assert max(before, 2, 2 * missing + 1) <= rows <= size - colluding - missing
        before = rows


def test_nothing_is_promised_if_both_shares_can_be_had() -> None:
    assert honest_rows(6, 2, 2) == 0
    assert honest_rows(2, 3, 0) == 0


def test_numbers_of_honest_rows() -> None:
    """Counted by hand. With 18 and 5, eleven clients of a sum leave out one and call four of six others missing:
    6 x 13 = 78 answers are needed, and there are 11 x 4 + 5 + 6 x 5 = 79."""
    assert honest_rows(18, 0, 5) == 11
    assert honest_rows(3, 1, 0) == 2
    assert honest_rows(100, 10, 0) == 90


def attack() -> tuple[list[int], list[int]]:
    """A server that shows 18 clients other boxes and other lists. Returns the sum of eleven rows that it learns, and
    that of the plain rows."""
    from fedmtl.secure import agreement
    from fedmtl.secure.masks import Pair, Words
    from fedmtl.secure.shamir import joined, weights
    from fedmtl.secure.wire import Kind, packed, table
    from tests.secure.parties import parties

    clients, missing, inside = 18, 5, range(11)
    out, others = 11, list(range(12, 18))
    lists = {place: {others[(4 * place + i) % 6] for i in range(4)} | {out} for place in inside}
    lists |= {place: set(others) - {place} for place in others}
    lists[out] = set(others[1:])  # the first of them has one call more of the others
    for target in others:
        assert sum(target in lists[p] for p in lists if p != target) >= clients - missing
    one = parties(clients, 0, missing)
    one.run_to("shares", {})
    server = one.server
    server.boxes()
    words = Words(one.public.length, 32)
    views = b""
    for place in range(clients):
        left_out = {out} if place in inside else set()
        boxes = {p: server._boxes[p][place] for p in range(clients) if p not in {place, *left_out}}
        row = one.row(
            f"c{place}", packed(Kind.BOXES, one.public.digest, server._roster_digest, table(boxes))
        )
        if place in inside:
            words.add(np.frombuffer(row[-4 * one.public.length :], "<u4"))
            views = one.members[f"c{place}"]._views
    shares = {}
    for place in range(clients):
        member = one.members[f"c{place}"]
        names = table(dict.fromkeys(set(range(clients)) - lists[place], b""))
        answer = member.opening(packed(Kind.NAMES, one.public.digest, member._views, names))
        body = answer[38 + 4 + 32 :]  # after the head, the sender and the digest of the list
        shares[place] = {
            int.from_bytes(body[i : i + 4], "little"): int.from_bytes(
                body[i + 4 : i + 36], "little"
            )
            for i in range(4, len(body), 36)
        }

    def seed(of: int, answered: list[int]) -> bytes:
        some = answered[: clients - missing]
        found = joined([shares[p][of] for p in some], weights([p + 1 for p in some]))
        assert found is not None
        return found

    for place in inside:
        came = [p for p in range(clients) if place not in lists[p]]
        words.subtract_mask(agreement.own_key(seed(place, came), views, place))
    for target in others:
        pair = Pair(seed(target, [p for p in lists if target in lists[p] and p != target]))
        for place in inside:  # all of them smaller
            agreed = pair.agreed(server._roster[place].mask)
            words.subtract_mask(agreement.mask_key(agreed, views, place, target))
    return words.signed().tolist(), one.plain([f"c{place}" for place in (out, *others)])


def check_attack() -> None:
    pytest.importorskip("cryptography", reason="secure aggregation needs the extra secure")
    learnt, plain = attack()
    assert learnt == plain
    assert honest_rows.__wrapped__(18, 0, 5) <= 11


def test_a_server_that_lies_learns_a_sum_of_as_few_rows() -> None:
    check_attack()


def check_small() -> None:
    for setting in SMALL:
        assert smallest_sums(*setting).min() == honest_rows.__wrapped__(*setting)


MUTANTS = {
    "one row more": (edit(honest_rows.__wrapped__, "int(inside[possible].min())", "int(inside[possible].min()) + 1"), check_small),
    "one row less": (edit(honest_rows.__wrapped__, "int(inside[possible].min())", "int(inside[possible].min()) - 1"), check_small),
    "boxes that all have": (edit(honest_rows.__wrapped__, "np.arange(missing + 1)[:, None]", "np.arange(1)[:, None]"), check_attack),
    "a server that follows the protocol": (edit(honest_rows.__wrapped__, "int(inside[possible].min())", "roster - colluding - missing"), check_attack),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_counts_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, check = MUTANTS[name]
    mutant(monkeypatch)
    try:
        with pytest.raises(AssertionError):
            check()
    finally:
        # what a broken count has left there is no number of the tests that follow
        honest_rows.cache_clear()
        least_roster.cache_clear()


def test_the_module_promises_no_more_than_it_has_shown() -> None:
    assert "honest but curious" in (roster.__doc__ or "")
