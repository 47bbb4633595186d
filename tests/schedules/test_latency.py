"""Laws of latencies, traces from files, and absences: what is refused, and how it is said."""

import gzip

import pytest

from fedmtl.errors import ConfigError, DataError
from fedmtl.schedules import Dropouts, Latencies, RandomLatency, TraceLatency


def times(source, names, per_client):
    bound = Latencies(latency=TraceLatency(source), per_client=per_client).bind(
        len(names), names=names
    )
    table = bound.activations(0, 0, bound.steps)
    return [table.time[0][table.client[0] == i].tolist() for i in range(len(names))]


def test_a_trace_is_used_in_order_and_again(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client, seconds\nann,1.5\nbob,4\nann,0.25\nunused,7\n")
    expected = [[1.5, 1.75, 3.25, 3.5, 5.0], [4.0, 8.0, 12.0, 16.0, 20.0]]
    assert times(path, ["ann", "bob"], 5) == expected
    assert times(str(path), ["bob", "ann"], 5) == expected[::-1]
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert times(packed, ["ann", "bob"], 5) == expected
    assert times({"ann": [1.5, 0.25], "bob": (4,)}, ["ann", "bob"], 5) == expected
    assert times([[1.5, 0.25], [4]], ["ann", "bob"], 5) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "row 1: the header is ''"),
        ("client,ms\na,1\n", "row 1: the header is 'client,ms'"),
        ("client,seconds\na,1\nb,\n", "row 3: the latency of client 'b' is ''"),
        ("client,seconds\na,-1\n", "row 2: the latency of client 'a' is '-1'"),
        ("client,seconds\na,inf\n", "row 2: the latency of client 'a' is 'inf'"),
        ("client,seconds\na,0\na,0\nb,1\n", "client 'a' has no latency above 0"),
        ("client,seconds\na,fast\n", "row 2: the latency of client 'a' is 'fast'"),
        ("client,seconds\na,1,2\n", "row 2: 3 cells"),
        ("client,seconds\na,1\n\nb,1\n", "row 3: 0 cells"),
        ("client,seconds\n,1\n", "row 2: no client"),
    ],
)
def test_bad_trace_files_are_refused_by_file_row_and_client(tmp_path, text, says):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=says) as error:
        times(path, ["a", "b"], 2)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        ({"a": [1.0], "b": []}, DataError, "client 'b' has no latency above 0"),
        ({"a": [1.0], "b": [1.0, -2.0]}, DataError, "client 'b', value 2 is -2.0"),
        ({"a": [1.0], "b": [None]}, DataError, "client 'b', value 1 is None"),
        ([[1.0]], ConfigError, "has 1 lists; it must have one a client, 2"),
        ("nowhere.csv", DataError, "nowhere.csv: no such file"),
    ],
)
def test_bad_traces_are_refused(source, error, says):
    with pytest.raises(error, match=says):
        times(source, ["a", "b"], 2)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: RandomLatency("uniform", {"loc": -1.0}),
            "of numbers of at least 0, such as .*least value is -1",
        ),
        (lambda: RandomLatency("uniform", {"scale": 0.0}), "least value is nan"),
        (lambda: RandomLatency("expon", {"scale": float("inf")}), "scale=inf"),
        (
            lambda: RandomLatency("lognorm"),
            "'lognorm' with no parameters; give a continuous distribution",
        ),
        (lambda: RandomLatency("uniform", {"low": 1.0}), "'uniform' with low=1.0; give"),
        (lambda: RandomLatency("poisson", {"mu": 1.0}), "scipy.stats.poisson is no continuous"),
        (lambda: Dropouts(), "needs intervals, or both"),
        (lambda: Dropouts(intervals={}, rate=1.0), "give one of the two"),
        (lambda: Dropouts(intervals={"a": [(2.0, 1.0)]}), "client 'a'"),
        (lambda: Dropouts(intervals={"a": [(0.0, 1.0, 2.0)]}), "0 <= from < to"),
        (
            lambda: Dropouts(intervals={"a": [(0.0, 5.0), (5.0, 6.0)]}),
            "in order and must not touch",
        ),
    ],
)
def test_bad_laws_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
