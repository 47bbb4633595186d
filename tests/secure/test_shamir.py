"""Shares of a secret, beside the definition of the scheme and exact interpolation after Newton."""

import secrets
from collections import Counter
from itertools import combinations, product

import pytest

from fedmtl.secure import shamir
from fedmtl.secure.shamir import PRIME, SECRET, joined, split, weights
from tests.mutation import edit


def newton(points: list[int], values: list[int], prime: int = PRIME) -> int:
    """The value at 0 of the polynomial through points, by divided differences."""
    differences = list(values)
    for order in range(1, len(points)):
        for i in range(len(points) - 1, order - 1, -1):
            over = pow(points[i] - points[i - order], prime - 2, prime)  # Fermat's inverse
            differences[i] = (differences[i] - differences[i - 1]) * over % prime
    value = 0
    for point, difference in zip(reversed(points), reversed(differences), strict=True):
        value = (value * -point + difference) % prime
    return value


def check_subsets() -> None:
    """Every subset of the threshold's size gives the secret, and no smaller one does."""
    for clients in range(1, 6):
        for threshold in range(1, clients + 1):
            points = [7 * i + 1 for i in range(clients)]
            secret = secrets.token_bytes(SECRET)
            shares = dict(zip(points, split(secret, points, threshold), strict=True))
            for size in range(1, clients + 1):
                for some in combinations(points, size):
                    those = [shares[point] for point in some]
                    found = newton(list(some), those)
                    assert (found == int.from_bytes(secret, "little")) == (size >= threshold)
                    assert joined(those, weights(some)) == (
                        secret if size >= threshold else as_bytes(found)
                    )


def as_bytes(value: int) -> bytes | None:
    return value.to_bytes(SECRET, "little") if value < 1 << (8 * SECRET) else None


def test_all_subsets_of_the_threshold_give_the_secret_and_no_smaller_one_does() -> None:
    check_subsets()


def test_a_share_is_the_value_of_the_polynomial(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [secrets.randbelow(PRIME) for _ in range(4)]
    stream = iter(drawn)
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda below: next(stream))
    points = [1, 2, 3, 999, 2**32]
    shares = split(b"\x05" + bytes(30), points, 5)
    coefficients = [5, *reversed(drawn)]  # of the powers 0, 1, 2, ...
    for point, share in zip(points, shares, strict=True):
        assert share == sum(c * point**power for power, c in enumerate(coefficients)) % PRIME


def check_secrecy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modulo 7, over all coefficients: any two of four shares at threshold 3 have the same law for every secret, the
    uniform one."""
    monkeypatch.setattr(shamir, "PRIME", 7)
    points = [1, 2, 3, 5]
    for secret, some in product(range(7), combinations(range(4), 2)):
        seen: Counter[tuple[int, ...]] = Counter()
        for drawn in product(range(7), repeat=2):
            stream = iter(drawn)
            monkeypatch.setattr(shamir.secrets, "randbelow", lambda below, s=stream: next(s))
            shares = split(bytes([secret]), points, 3)
            seen[tuple(shares[i] for i in some)] += 1
        assert set(seen.values()) == {1}
        assert len(seen) == 49


def test_fewer_shares_than_the_threshold_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_secrecy(monkeypatch)


def test_coefficients_are_drawn_from_the_whole_field(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda below: asked.append(below) or 1)
    split(bytes(SECRET), [1, 2, 3], 3)
    assert asked == [2**255 - 19] * 2


def test_shares_of_no_secret_are_found() -> None:
    assert joined([PRIME - 1], [1]) is None
    assert joined([(1 << 248) - 1], [1]) == b"\xff" * 31
    assert joined([1 << 248], [1]) is None


def test_sixty_seven_of_a_hundred() -> None:
    secret = secrets.token_bytes(SECRET)
    shares = split(secret, range(1, 101), 67)
    some = list(range(30, 97))
    assert joined([shares[i] for i in some], weights([i + 1 for i in some])) == secret


MUTANTS = {
    "a degree too high": edit(split, "range(threshold - 1)", "range(threshold)"),
    "a degree too low": edit(split, "range(threshold - 1)", "range(threshold - 2)"),
    "weights of another point than 0": edit(weights, "above * other %", "above * (other - 1) %"),
    "a sign": edit(weights, "(other - point)", "(point + other)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_shares_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        check_subsets()


def test_coefficients_that_are_not_used_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    edit(
        split,
        "(value * point + coefficient) % PRIME",
        "(value * point + coefficient * (value == 0)) % PRIME",
    )(monkeypatch)
    with pytest.raises(AssertionError):
        check_secrecy(monkeypatch)
