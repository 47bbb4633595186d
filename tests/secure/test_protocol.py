"""The secure sum: the sum without masks, whoever is lost; what is refused; and what the server sees before it opens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, product

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("cryptography", reason="secure aggregation needs the extra secure")

from fedmtl.errors import ConfigError, SecureSumError
from fedmtl.secure import agreement, server
from fedmtl.secure.masks import Identity, Words
from fedmtl.secure.member import Member
from fedmtl.secure.parameters import PublicParameters
from fedmtl.secure.server import SecureSumServer
from fedmtl.secure.shamir import weights
from fedmtl.secure.wire import Kind, packed, table
from tests.mutation import edit
from tests.secure.parties import STEPS, Parties, parties

ALPHA = 1e-6
ENTRY = 160  # bytes of a client's keys with their signature


# The sum


def check_sums(clients: int = 4, missing: int = 1, some: int = 0, **options: object) -> None:
    """Every way to lose at most so many clients, each in one of three steps; ``some`` of them only if asked."""
    ways: list[dict[str, str]] = []
    for count in range(missing + 1):
        for lost in combinations([f"c{i}" for i in range(clients)], count):
            ways += [
                dict(zip(lost, steps, strict=True)) for steps in product(STEPS[1:], repeat=count)
            ]
    for gone in random.Random(0).sample(ways, some or len(ways)):
        one = parties(clients, 0, missing, **options)
        total = one.run(gone)
        # A row that came is in the sum, also if its client is lost afterwards.
        left_out = [name for name, step in gone.items() if step != "opening"]
        assert total.tolist() == one.plain(left_out)
        assert one.server.counted == tuple(n for n in one.rows if n not in left_out)


def test_the_sum_is_that_of_the_plain_rows_whoever_is_lost() -> None:
    check_sums(6, 1)


def test_the_sum_of_seven_clients_whoever_two_are_lost() -> None:
    check_sums(7, 2, some=12, length=2)


@pytest.mark.parametrize("bits", [32, 64])
def test_rows_longer_than_a_block_of_the_stream(bits: int) -> None:
    one = parties(4, 0, 1, length=140_001, bits=bits)
    assert one.run({"c2": "row"}).tolist() == one.plain(["c2"])


def test_clients_that_are_away_before_the_roster_are_no_loss() -> None:
    one = parties(9, 1, 1)
    away = {f"c{i}": "keys" for i in range(4)}
    assert one.run({**away, "c8": "row"}).tolist() == one.plain([*away, "c8"])


@pytest.mark.parametrize("step", STEPS)
def test_more_clients_are_lost_than_may_be(step: str) -> None:
    one = parties(5, 1, 1)
    with pytest.raises(
        SecureSumError,
        match=r"3 clients are left in the step of \w+, and the secure sum takes [45]",
    ):
        one.run({"c0": step, "c3": step})
    with pytest.raises(SecureSumError, match="is not the one that is open"):
        one.server.total()
    with pytest.raises(SecureSumError, match="the sum has ended"):
        one.server.take("c1", one.members["c1"].keys)


@pytest.mark.parametrize("steps", list(product(STEPS[1:], repeat=2)), ids=str)
def test_two_clients_of_six_are_lost_where_one_may_be(steps: tuple[str, str]) -> None:
    one = parties(6, 0, 1)
    with pytest.raises(SecureSumError, match=r"4 clients are left in the step of .* takes 5"):
        one.run({"c1": steps[0], "c4": steps[1]})
    with pytest.raises(SecureSumError, match="is not the one that is open"):
        one.server.total()


def test_clients_are_lost_one_by_one_until_they_are_too_many() -> None:
    with pytest.raises(
        SecureSumError, match=r"4 clients are left in the step of opening, .* takes 5"
    ):
        parties(7, 0, 2).run({"c0": "shares", "c3": "row", "c5": "opening"})


def test_who_has_not_answered() -> None:
    one = parties(4, 0, 1)
    one.run_to("shares", {"c2": "shares"})
    assert one.server.waiting == ("c2",)
    one.server.boxes()
    assert one.server.waiting == ("c0", "c1", "c3")


# What a client answers


def asked(one: Parties, step: str) -> bytes:
    """The question of a step to client c0, which it has not answered."""
    one.run_to(STEPS[STEPS.index(step) - 1], {})
    if step == "shares":
        return one.server.roster()
    if step == "row":
        return one.server.boxes()["c0"]
    assert step == "opening"
    return one.server.names()


def check_refused(member: Member, step: str, message: object, match: str = "is refused: ") -> None:
    """A message has no answer, in one sentence, and no row is charged."""

    def contribute(roster: int) -> np.ndarray:
        raise AssertionError("charged")

    answer = partial(getattr(member, step), message)
    if step == "row":
        answer = partial(answer, contribute)
    with pytest.raises(SecureSumError, match=match) as caught:
        answer()
    text = str(caught.value)
    assert text.count(". ") == 0
    assert "\n" not in text
    assert text.endswith(".")


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_step_is_answered_once_and_repeated_to_the_same_question(step: str) -> None:
    one = parties(5, 1, 1)
    question = asked(one, step)
    first = one.answer("c0", step, question)
    assert one.answer("c0", step, question) == first
    other = question[:-1] + bytes([question[-1] ^ 1])
    check_refused(one.members["c0"], step, other, "another one was answered in this attempt")
    one.server.take("c0", first)
    with pytest.raises(SecureSumError, match="has answered this step already"):
        one.server.take("c0", first)


def test_the_second_list_has_no_answer() -> None:
    """Two lists would have both kinds of shares of one client."""
    one = parties(5, 1, 1)
    one.run_to("row", {})
    lists = [names_of(one, [i for i in range(5) if i != gone]) for gone in (3, 4)]
    for name in ("c0", "c1"):
        one.members[name].opening(lists[0])
        check_refused(one.members[name], "opening", lists[1], "another one was answered")


def names_of(one: Parties, places: list[int]) -> bytes:
    """A list of names as a server would send it."""
    return packed(
        Kind.NAMES, one.public.digest, one.server._views, table(dict.fromkeys(places, b""))
    )


def test_an_answer_to_a_list_has_one_kind_of_share_of_each_client() -> None:
    one = parties(5, 1, 1)
    one.run_to("row", {})
    member = one.members["c0"]
    held = dict(member._held)
    answer = member.opening(names_of(one, [0, 1, 3, 4]))
    for place, (mask, own) in held.items():
        kind, other = (mask, own) if place == 2 else (own, mask)
        assert kind in answer
        assert other not in answer
    assert not member._held


def test_steps_out_of_order_have_no_answer() -> None:
    one = parties(5, 1, 1)
    roster = asked(one, "shares")
    check_refused(one.members["c0"], "row", roster, "out of order")
    check_refused(one.members["c0"], "opening", roster, "out of order")
    check_refused(one.members["c0"], "shares", one.members["c0"].keys, "another kind")
    assert one.answer("c0", "shares", roster)


def test_the_charge_comes_after_all_checks_and_before_the_row() -> None:
    one = parties(5, 1, 1)
    boxes = asked(one, "row")
    calls: list[int] = []
    rows = one.members["c0"].row(boxes, lambda roster: calls.append(roster) or one.rows["c0"])
    assert calls == [5]
    assert one.members["c0"].row(boxes, lambda roster: calls.append(roster)) == rows  # type: ignore[arg-type, func-returns-value]
    assert calls == [5]


def test_a_client_that_cannot_pay_has_no_row_and_no_further_answer() -> None:
    one = parties(5, 1, 1)
    boxes = asked(one, "row")

    def broke(roster: int) -> np.ndarray:
        raise ArithmeticError("the budget is used up")

    with pytest.raises(ArithmeticError, match="used up"):
        one.members["c0"].row(boxes, broke)
    check_refused(one.members["c0"], "row", boxes, "has ended")
    check_refused(one.members["c0"], "opening", boxes, "has ended")


@pytest.mark.parametrize(
    "words",
    [np.zeros(4, "<u4"), np.zeros(5, "<i4"), np.zeros(5, "<u8"), np.zeros((1, 5), "<u4")],
    ids=str,
)
def test_rows_of_another_shape_or_dtype(words: np.ndarray) -> None:
    one = parties(5, 1, 1)
    boxes = asked(one, "row")
    with pytest.raises(
        ConfigError, match=r"A client contributes .* accepted: uint32 of shape \(5,\)"
    ):
        one.members["c0"].row(boxes, lambda roster: words)


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_client_that_is_started_again_has_no_answer_to_its_old_attempt(step: str) -> None:
    """Its secrets were in memory: after a restart it has other keys, and the server none of its shares."""
    one = parties(5, 1, 1)
    question = asked(one, step)
    again = Member(one.public, "c0", one.identities["c0"])
    assert again.keys != one.members["c0"].keys
    match = {
        "shares": "does not have the keys of this client",
        "row": "out of order",
        "opening": "out of order",
    }
    check_refused(again, step, question, match[step])
    with pytest.raises(
        SecureSumError, match=r"has answered this step already|a message of another kind"
    ):
        one.server.take("c0", again.keys)


# Messages that are not those of this attempt, or not whole


@pytest.mark.parametrize(
    "changes", [{"attempt": 1}, {"attempt": 0, "round": 4}, {"attempt": 0, "run": "other"},
                {"attempt": 0, "settings": "other"}, {"attempt": 0, "length": 6}, {"attempt": 0, "missing": 0},
                {"attempt": 0, "colluding": 0}, {"attempt": 0, "bits": 64}], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("step", STEPS[1:])
def test_messages_of_other_attempts_and_settings(step: str, changes: dict[str, object]) -> None:
    one = parties(5, 1, 1)
    other = one.again(**changes)
    question = asked(one, step)
    foreign = asked(other, step)
    check_refused(one.members["c0"], step, foreign, "of another run, round or attempt, or of other")
    answer = other.answer("c0", step, foreign)
    with pytest.raises(SecureSumError, match="of another run, round or attempt, or of other"):
        one.server.take("c0", answer)
    one.server.take("c0", one.answer("c0", step, question))


def test_keys_of_another_attempt_in_a_message_of_this_one() -> None:
    one = parties(5, 1, 1)
    other = one.again()
    moved = other.members["c1"].keys.replace(other.public.digest, one.public.digest)
    with pytest.raises(SecureSumError, match="'c1' are not signed by it for this attempt"):
        one.server.take("c1", moved)
    roster = asked(one, "shares")
    entry = one.members["c1"].keys[-ENTRY:]
    check_refused(
        one.members["c0"],
        "shares",
        roster.replace(entry, moved[-ENTRY:]),
        "'c1' are not signed by it",
    )


def rosters() -> Iterator[tuple[str, Callable[[dict[int, bytes]], dict[int, bytes]], str]]:
    """What a server may do to the entries of a roster, and the refusal of c0."""
    yield "swapped keys", lambda e: {**e, 1: e[2], 2: e[1]}, "not signed by it"
    yield (
        "without the client",
        lambda e: {p: e[p] for p in e if p != 0},
        "not have the keys of this client",
    )
    yield "other keys of the client", lambda e: {**e, 0: e[1]}, "not have the keys of this client"
    yield (
        "a signature of nothing",
        lambda e: {**e, 1: e[1][:-1] + bytes([e[1][-1] ^ 1])},
        "not signed by it",
    )
    yield "another mask key", lambda e: {**e, 1: bytes(32) + e[1][32:]}, "not signed by it"
    yield (
        "another box key",
        lambda e: {**e, 1: e[1][:32] + bytes(32) + e[1][64:]},
        "not signed by it",
    )
    yield "another seed", lambda e: {**e, 1: e[1][:64] + bytes(32) + e[1][96:]}, "not signed by it"
    yield "too few", lambda e: {p: e[p] for p in (0, 1, 2, 3)}, "too few clients"
    yield "nobody", lambda e: {}, "not have the keys of this client"
    yield "a stranger", lambda e: {**e, 9: e[1]}, "not in the population"


@pytest.mark.parametrize(
    ("name", "change", "match"), list(rosters()), ids=[each[0] for each in rosters()]
)
def test_rosters_of_a_server_that_lies(
    name: str, change: Callable[[dict[int, bytes]], dict[int, bytes]], match: str
) -> None:
    one = parties(5, 1, 1)
    question = asked(one, "shares")
    entries = {place: member.keys[-ENTRY:] for place, member in enumerate(one.members.values())}
    assert packed(Kind.ROSTER, one.public.digest, table(entries)) == question
    message = packed(Kind.ROSTER, one.public.digest, table(change(entries)))
    check_refused(one.members["c0"], "shares", message, match)
    assert one.answer("c0", "shares", question)


def test_a_key_with_which_nothing_is_secret() -> None:
    """A client signs a point of small order: the server refuses it, and so does a client."""
    one = parties(5, 1, 1)
    for zeros in (slice(0, 32), slice(32, 64)):
        keys = bytearray(one.members["c1"].keys[-ENTRY:-64])
        keys[zeros] = bytes(32)
        entry = bytes(keys) + one.identities["c1"].signed(one.public.statement(1, bytes(keys)))
        message = packed(Kind.KEYS, one.public.digest, (1).to_bytes(4, "little"), entry)
        with pytest.raises(SecureSumError, match="nothing is secret"):
            SecureSumServer(one.public).take("c1", message)
    one.run_to("keys", {})
    entries = {place: member.keys[-ENTRY:] for place, member in enumerate(one.members.values())}
    roster = packed(Kind.ROSTER, one.public.digest, table({**entries, 1: entry}))
    check_refused(one.members["c0"], "shares", roster, "nothing is secret")


def test_boxes_of_a_server_that_lies() -> None:
    one = parties(6, 1, 1)
    one.run_to("shares", {})
    server = one.server
    question = server.boxes()["c0"]
    boxes = {place: server._boxes[place][0] for place in range(1, 6)}

    def message(entries: dict[int, bytes], roster: bytes = server._roster_digest) -> bytes:
        return packed(Kind.BOXES, one.public.digest, roster, table(entries))

    assert message(boxes) == question
    member = one.members["c0"]
    check_refused(member, "row", message(boxes, bytes(32)), "another roster")
    check_refused(member, "row", message({**boxes, 0: boxes[1]}), "has none for this one")
    check_refused(member, "row", message({**boxes, 6: boxes[1]}), "has none for this one")
    check_refused(
        member, "row", message({p: boxes[p] for p in (1, 2, 3)}), "lacks the boxes of more clients"
    )
    check_refused(member, "row", message({**boxes, 1: boxes[2]}), "box of client 'c1' is not one")
    check_refused(
        member, "row", message({**boxes, 1: server._boxes[1][2]}), "box of client 'c1' is not one"
    )
    # its own box, sent back
    check_refused(
        member, "row", message({**boxes, 1: server._boxes[0][1]}), "box of client 'c1' is not one"
    )
    other = one.again()
    other.run_to("shares", {})
    check_refused(
        member,
        "row",
        message({**boxes, 1: other.server._boxes[1][0]}),
        "box of client 'c1' is not one",
    )
    assert one.row("c0", question)


def test_lists_of_a_server_that_lies() -> None:
    one = parties(6, 1, 1)
    one.run_to("row", {"c5": "shares"})
    member = one.members["c0"]
    check_refused(
        member, "opening", names_of(one, [0, 1, 2, 3, 4, 5]), "whose box did not come here"
    )
    check_refused(
        member, "opening", names_of(one, [1, 2, 3, 4, 0][:4]), "does not name this client"
    )
    check_refused(
        member, "opening", names_of(one, [0, 1, 2, 3]), "more clients are missing than may be"
    )
    other = packed(Kind.NAMES, one.public.digest, bytes(32), table(dict.fromkeys(range(5), b"")))
    check_refused(member, "opening", other, "of another roster or of other boxes")
    assert member.opening(names_of(one, [0, 1, 2, 3, 4]))


def test_clients_that_were_shown_different_rosters_have_masks_that_do_not_cancel() -> None:
    """Of seven clients c0 to c4 are shown five, and c2 to c6 another five: nobody of both groups can read the other's
    boxes, and c2 answers one roster only."""
    one = parties(7, 1, 1)
    entries = {place: member.keys[-ENTRY:] for place, member in enumerate(one.members.values())}
    shown = [
        packed(Kind.ROSTER, one.public.digest, table({p: entries[p] for p in places}))
        for places in (range(5), range(2, 7))
    ]
    for name in ("c0", "c1", "c2"):
        one.members[name].shares(shown[0])
    check_refused(one.members["c2"], "shares", shown[1], "another one was answered")
    for name in ("c3", "c4", "c5", "c6"):
        one.members[name].shares(shown[1])
    digests = {one.members[f"c{i}"]._roster_digest for i in range(7)}
    assert len(digests) == 2


def test_clients_that_were_shown_different_boxes_have_masks_that_do_not_cancel() -> None:
    one = parties(7, 0, 2)
    one.run_to("shares", {})
    server = one.server
    server.boxes()
    rows = []
    for place in range(7):
        left_out = (5, 6) if place < 3 else (1, 2)
        boxes = {p: server._boxes[p][place] for p in range(7) if p != place and p not in left_out}
        message = packed(Kind.BOXES, one.public.digest, server._roster_digest, table(boxes))
        row = one.row(f"c{place}", message)
        rows.append(row)
        with pytest.raises(SecureSumError, match="has seen other boxes"):
            server.take(f"c{place}", row)
    views = {one.members[f"c{i}"]._views for i in range(7)}
    assert len(views) == 2


def test_a_client_that_repeats_the_keys_of_another_has_other_masks() -> None:
    """The mask key of a pair is of the two clients, not of their public keys alone."""
    agreed, views = bytes(32), bytes(32)
    keys = {agreement.mask_key(agreed, views, *pair) for pair in combinations(range(5), 2)}
    assert len(keys) == 10
    assert agreement.mask_key(agreed, views, 3, 1) == agreement.mask_key(agreed, views, 1, 3)


# Messages of clients


def test_messages_of_clients_that_lie() -> None:
    one = parties(5, 1, 1)
    with pytest.raises(SecureSumError, match="of another client than the one that sent it"):
        one.server.take("c1", one.members["c0"].keys)
    with pytest.raises(ConfigError, match="'x' is not in the population"):
        one.server.take("x", one.members["c0"].keys)
    one.run_to("shares", {"c4": "shares"})
    late = one.members["c4"]
    boxes = one.server.boxes()
    row = one.row("c0", boxes["c0"])
    with pytest.raises(SecureSumError, match="the client was missing before"):
        one.server.take("c4", row.replace((0).to_bytes(4, "little"), (4).to_bytes(4, "little"), 1))
    with pytest.raises(SecureSumError, match="a message of another kind"):
        one.server.take("c4", late.keys)
    with pytest.raises(SecureSumError, match="another length"):
        one.server.take("c0", row + b"\0")


def test_a_wrong_share_is_found_with_who_sent_it() -> None:
    one = parties(6, 1, 1)
    one.run_to("opening", {})
    one.server._shares[3][2] ^= 1
    with pytest.raises(
        SecureSumError, match=r"client 'c2' do not give its secret back \(that of 'c3' is wrong\)"
    ):
        one.server.total()
    with pytest.raises(SecureSumError, match="not the one that is open"):
        one.server.total()


def test_a_wrong_share_among_as_few_as_are_needed() -> None:
    one = parties(6, 1, 1)
    one.run_to("opening", {"c5": "row"})
    one.server._shares[3][5] ^= 1
    with pytest.raises(
        SecureSumError, match=r"client 'c5' do not .* \(too few others answered to find whose\)"
    ):
        one.server.total()


def test_wrong_shares_of_several_clients() -> None:
    one = parties(6, 1, 1)
    one.run_to("opening", {})
    one.server._shares[3][2] ^= 1
    one.server._shares[4][2] ^= 1
    with pytest.raises(
        SecureSumError, match="more than one answer, or the shares themselves, are wrong"
    ):
        one.server.total()


def test_a_client_that_divides_another_secret_is_named_and_not_those_who_pass_it_on() -> None:
    one = parties(5, 1, 1)
    one.run_to("opening", {})
    for shares in one.server._shares.values():
        shares[2] = 2**256 - 1  # no number of the field
    with pytest.raises(
        SecureSumError, match=r"client 'c2' do not give .* or the shares themselves, are wrong"
    ):
        one.server.total()


def test_a_wrong_share_is_not_looked_for_among_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SEARCHED", 5)
    one = parties(6, 1, 1)
    one.run_to("opening", {})
    one.server._shares[3][2] ^= 1
    with pytest.raises(SecureSumError, match=r"'c2' do not .* \(too many answered to find whose\)"):
        one.server.total()


# Anything at all


@pytest.mark.parametrize("step", STEPS)
def test_whatever_bytes_come_are_one_refusal_and_change_nothing(step: str) -> None:
    """A thousand alterations of a message to the client and to the server: each is refused or is the message itself."""
    generator = random.Random(step)
    one = parties(5, 1, 1)
    question = b"" if step == "keys" else asked(one, step)
    if step != "keys":
        for message in alterations(question, generator):
            check_refused(one.members["c0"], step, message)
        answer = one.answer("c0", step, question)
    else:
        answer = one.members["c0"].keys
    for message in alterations(answer, generator):
        # a row's words may be any, and so may shares; they are bound by what is opened
        whole = (
            isinstance(message, bytes)
            and len(message) == len(answer)
            and message[:46] == answer[:46]
        )
        if step in ("row", "opening", "shares") and whole:
            continue
        with pytest.raises(SecureSumError) as caught:
            one.server.take("c0", message)
        assert str(caught.value).startswith("A message of the secure sum (")
    one.server.take("c0", answer)


def alterations(message: bytes, generator: random.Random) -> Iterator[bytes]:
    yield b""
    yield None  # type: ignore[misc]
    yield "roster"  # type: ignore[misc]
    yield message + b"\0"
    yield message[:42] + b"\xff" * (len(message) - 42)
    for _ in range(200):
        yield generator.randbytes(generator.randrange(200))
        yield message[: generator.randrange(len(message))]
        place = generator.randrange(len(message))
        yield (
            message[:place]
            + bytes([message[place] ^ 1 << generator.randrange(8)])
            + message[place + 1 :]
        )
        yield message[:place] + generator.randbytes(4) + message[place:]


def test_tables_out_of_order_or_with_a_name_twice() -> None:
    one = parties(5, 1, 1)
    question = asked(one, "shares")
    head, rows = question[:42], [question[i : i + 164] for i in range(42, len(question), 164)]
    for order in ([1, 0, 2, 3, 4], [0, 1, 1, 2, 3, 4], [0, 0, 1, 2, 3]):
        message = head[:38] + len(order).to_bytes(4, "little") + b"".join(rows[i] for i in order)
        check_refused(
            one.members["c0"], "shares", message, "names a client twice, or clients out of order"
        )
    assert one.answer("c0", "shares", question)


def test_versions_and_names_of_formats() -> None:
    one = parties(5, 1, 1)
    question = asked(one, "shares")
    check_refused(one.members["c0"], "shares", b"fmsb" + question[4:], "does not begin as")
    check_refused(one.members["c0"], "shares", b"fmsa\x02" + question[5:], "another one than 1")
    check_refused(one.members["c0"], "shares", 3, "is not bytes")


# What the server sees before it opens


def seen(one: Parties) -> np.ndarray:
    """The words of all rows, as the server gets them."""
    boxes = questions_of(one)
    size = one.public.length * one.public.bits // 8
    return np.stack(
        [np.frombuffer(one.row(name, boxes[name])[-size:], "<u4") for name in one.members]
    )


def questions_of(one: Parties) -> dict[str, bytes]:
    one.run_to("shares", {})
    return one.server.boxes()


def check_masks() -> None:
    """Rows of zeros: their bytes are uniform, and no two clients or attempts have words in common or correlated."""
    one = parties(4, 0, 1, length=4000)
    one.rows = {name: np.zeros(4000, "<u4") for name in one.rows}
    other = one.again()
    other.rows = one.rows
    words = np.concatenate([seen(one), seen(other)])
    for row in words:
        assert stats.chisquare(np.bincount(row.view(np.uint8), minlength=256)).pvalue > ALPHA
    # of 32,000 words at random about 0.1 pairs are equal
    assert words.size - len(np.unique(words)) < 5
    between = np.corrcoef(words.astype(float)) - np.eye(len(words))
    assert np.abs(between).max() < 6 / 4000**0.5
    # No two rows, added or subtracted, are anything but noise: one mask is not enough to hide three.
    for one_row, other_row in combinations(words, 2):
        for both in (one_row + other_row, one_row - other_row):
            assert stats.chisquare(np.bincount(both.view(np.uint8), minlength=256)).pvalue > ALPHA


def test_masks_are_uniform_and_new_in_every_attempt() -> None:
    check_masks()


def test_rows_of_two_constants_cannot_be_told_apart_before_the_opening() -> None:
    one = parties(4, 0, 1, length=4000)
    one.rows = {name: np.full(4000, i % 2 * 2**31, "<u4") for i, name in enumerate(one.rows)}
    words = seen(one).astype(float)
    assert stats.mannwhitneyu(words[::2].ravel(), words[1::2].ravel()).pvalue > ALPHA


def test_a_mask_is_the_stream_of_its_key() -> None:
    """The zero block of AES-256 under the zero key (FIPS 197 in counter mode, NIST SP 800-38A: CTR-AES256 encrypts the
    counter)."""
    words = Words(4, 32)
    words.add_mask(bytes(32))
    assert words.to_bytes().hex() == "dc95c078a2408989ad48a21492842087"
    words.subtract_mask(bytes(32))
    assert not words.signed().any()


# Identities and public parameters


def test_a_node_with_another_identity_than_in_the_settings() -> None:
    one = parties(5, 1, 1)
    with pytest.raises(ConfigError, match="'c0' on this node is not that of the settings"):
        Member(one.public, "c0", Identity(bytes(32)))
    with pytest.raises(ConfigError, match="'x' is not in the population"):
        Member(one.public, "x", Identity(bytes(32)))


@pytest.mark.parametrize(
    ("changes", "match"), [
        ({"colluding": 3}, "of which 3 may collude and 1 may be missing, protects none of them; it takes 7"),
        ({"missing": 2}, "it takes 8 clients"), ({"bits": 16}, "bits is 16; accepted: 32, 64"),
        ({"length": 0}, "length is 0"), ({"round": -1}, "round is -1"), ({"colluding": -1}, "colluding is -1")],
)  # fmt: skip
def test_terms_that_protect_nobody(changes: dict[str, object], match: str) -> None:
    one = parties(5, 1, 1)
    with pytest.raises(ConfigError, match=match):
        one.again(**changes)


def test_keys_of_identities_that_are_none() -> None:
    public = parties(5, 1, 1).public
    options = {
        "run": "r",
        "round": 0,
        "attempt": 0,
        "settings": "",
        "length": 1,
        "colluding": 1,
        "missing": 1,
    }
    keys = dict(public.identities)
    for wrong, match in (
        ({"c0": b"x"}, "'c0' is not 32 bytes"),
        ({"c0": keys["c1"]}, "one identity key"),
    ):
        with pytest.raises(ConfigError, match=match):
            PublicParameters(identities={**keys, **wrong}, **options)


# Broken protocols


def check_order() -> None:
    test_the_charge_comes_after_all_checks_and_before_the_row()


def check_lists() -> None:
    test_the_second_list_has_no_answer()


def check_bad_boxes() -> None:
    test_boxes_of_a_server_that_lies()


def check_attempts() -> None:
    for step in STEPS[1:]:
        test_messages_of_other_attempts_and_settings(step, {"attempt": 1})


def check_signed() -> None:
    test_keys_of_another_attempt_in_a_message_of_this_one()


MUTANTS: dict[str, tuple[Callable[..., None], Callable[[], None]]] = {
    "a sign of the masks": (edit(Member._masked, "self._place < place", "self._place > -1"), check_sums),
    "a sign of the masks of who is lost": (edit(SecureSumServer._unmask, "place < lost", "place > lost"), check_sums),
    "no mask of its own": (edit(Member._masked, "words.add_mask(own_key", "bytes(own_key"), check_sums),
    "no masks at all": (edit(Words._mask, "change(part, mask, out=part)", "pass"), check_masks),
    "one word of a mask for all": (edit(Words._mask, "change(part, mask, out=part)", "change(part, mask[:1], out=part)"), check_masks),
    "one mask of a pair left out": (edit(Member._masked, "in masks.items():", "in list(masks.items())[1:]:"), check_sums),
    "the threshold one lower": (edit(Member._divided, "public.threshold(len(entries))", "public.threshold(len(entries)) - 1"), lambda: check_threshold()),
    "the threshold one higher": (edit(Member._divided, "public.threshold(len(entries))", "public.threshold(len(entries)) + 1"), check_sums),
    "one more may be missing from a list": (edit(Member._opened, "< public.threshold(len(self._roster))", "< public.threshold(len(self._roster)) - 1"), test_lists_of_a_server_that_lies),
    "one more may be missing from the boxes": (edit(Member._masked, "< public.threshold(size)", "< public.threshold(size) - 1"), check_bad_boxes),
    "both kinds of shares": (edit(Member._answered, "asked != digest(message)", "False"), check_lists),
    "a second answer to a list": (edit(Member._answered, "if kind in self._answers:", "if kind in self._answers and kind != Kind.NAMES:"), check_lists),
    "the other kind of share": (edit(Member._opened, "shares[place] = mask", "shares[place] = own"), lambda: test_an_answer_to_a_list_has_one_kind_of_share_of_each_client()),
    "a signature that is not checked": (edit(agreement.checked_keys, "not is_signed(", "None is is_signed("), check_signed),
    "a signature that is not of the attempt": (edit(PublicParameters.statement, "self.digest + ", ""), check_signed),
    "attempts that are not told apart": (edit(PublicParameters.digest.func, "            self.attempt,\n", ""), check_attempts),  # type: ignore[attr-defined]
    "a list that is not bound to the boxes": (edit(Member._opened, "reader.expect(self._views, ", "reader.take(32) and bool("), test_lists_of_a_server_that_lies),
    "views without the boxes": (edit(agreement.views_digest, ", roster, table(dict.fromkeys(sent, b\"\"))", ", roster"), test_clients_that_were_shown_different_boxes_have_masks_that_do_not_cancel),
    "views without the roster": (edit(agreement.views_digest, "b\"fedmtl views\", roster, ", "b\"fedmtl views\", "), lambda: check_views()),
    "a box for everybody": (edit(agreement.box_key, ", roster, number(sender), number(receiver)", ""), check_bad_boxes),
    "a mask of two public keys": (edit(agreement.mask_key, "number(min(one, other)) + number(max(one, other))", "b\"\""), test_a_client_that_repeats_the_keys_of_another_has_other_masks),
    "two charges for a row": (edit(Member._masked, "contributed = contribute(size)", "contributed = contribute(size) if contribute(size) is None else contribute(size)"), check_order),
    "a charge before the checks": (edit(Member._masked, "whole = self._roster_digest", "whole = (contribute(1), self._roster_digest)[1]"), check_bad_boxes),
    "a row after a charge that failed": (edit(Member._masked, "self._over = True", "pass"), test_a_client_that_cannot_pay_has_no_row_and_no_further_answer),
    "steps in any order": (edit(Member._answered, "if kind != _QUESTIONS[len(self._answers)]:", "if False:"), test_steps_out_of_order_have_no_answer),
    "a wrong secret that is not found": (edit(SecureSumServer._secret, "right = digest(seed) == keys.own", "right = True"), test_a_wrong_share_is_found_with_who_sent_it),
    "a client that is counted twice": (edit(SecureSumServer.take, "if place in self._came:", "if False:"), lambda: test_a_step_is_answered_once_and_repeated_to_the_same_question("row")),
}  # fmt: skip


def check_threshold() -> None:
    """Fewer answers than the threshold do not give a secret."""
    one = parties(5, 1, 1)
    one.run_to("opening", {})
    few = [0, 1, 2]
    assert one.server._secret(0, few, weights([1, 2, 3])) is None


def check_views() -> None:
    assert agreement.views_digest(bytes(32), [1, 2]) != agreement.views_digest(b"\1" * 32, [1, 2])


def test_fewer_answers_than_the_threshold_give_no_secret() -> None:
    check_threshold()
    check_views()


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_protocols_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, check = MUTANTS[name]
    mutant(monkeypatch)
    with pytest.raises((AssertionError, SecureSumError, pytest.fail.Exception)):
        check()


@pytest.mark.parametrize("lost", [{}, {"c2": "shares", "c5": "row"}, {"c1": "opening"}], ids=str)
def test_answers_from_processes_of_their_own_give_the_same_sum(lost: dict[str, str]) -> None:
    """Each client is written down and made anew before every message."""
    group = parties(12, 4, 2)

    def made_anew(name: str, step: str, question: bytes) -> bytes:
        member = group.members[name]
        member = Member.restored(group.public, name, group.identities[name], member.saved())
        group.members[name] = member
        answer = Parties.answer(group, name, step, question)
        # a message that is repeated, in yet another process, has the same answer
        again = Member.restored(group.public, name, group.identities[name], member.saved())
        group.members[name] = again
        assert Parties.answer(group, name, step, question) == answer
        return answer

    group.answer = made_anew  # type: ignore[method-assign]
    gone = [name for name, step in lost.items() if step != "opening"]
    assert group.run(lost).tolist() == group.plain(gone)


def test_a_client_that_is_made_anew_answers_a_step_once() -> None:
    group = parties(12, 4, 2)
    group.run_to("row", {"c3": "row"})
    came = group.server.names()
    member = group.members["c0"]
    member.opening(came)
    saved = member.saved()
    secret = saved["seeds"] + saved["held"][4:]
    assert secret == b""  # forgotten: only answers are left
    again = Member.restored(group.public, "c0", group.identities["c0"], saved)
    assert again.opening(came) == member.opening(came)
    with pytest.raises(SecureSumError, match="another one was answered in this attempt"):
        again.opening(came[:-4] + b"\x07\x00\x00\x00")
    with pytest.raises(SecureSumError, match="another one was answered in this attempt"):
        again.row(b"", lambda roster: group.rows["c0"])


def test_a_client_whose_charge_failed_stays_so_when_it_is_made_anew() -> None:
    group = parties(12, 4, 2)
    group.run_to("shares", {})
    boxes = group.server.boxes()["c0"]
    member = group.members["c0"]

    def broke(roster: int) -> np.ndarray:
        raise OSError("no entropy")

    with pytest.raises(OSError, match="no entropy"):
        member.row(boxes, broke)
    again = Member.restored(group.public, "c0", group.identities["c0"], member.saved())
    with pytest.raises(SecureSumError, match="the part of this client in the attempt has ended"):
        again.row(boxes, lambda roster: group.rows["c0"])


def test_the_memory_of_another_attempt_is_refused() -> None:
    group = parties(12, 4, 2)
    group.run_to("shares", {})
    other = group.again().public
    with pytest.raises(SecureSumError, match="not signed by it for this attempt"):
        Member.restored(other, "c0", group.identities["c0"], group.members["c0"].saved())
