"""Text with prefixes, bits and bytes, and numbers without."""

import pytest

from perfmodel.units import (
    format_bytes,
    format_duration,
    format_rate,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)

PREFIXES = [
    ("", 1),
    ("k", 10**3),
    ("K", 10**3),
    ("M", 10**6),
    ("G", 10**9),
    ("T", 10**12),
    ("P", 10**15),
    ("Ki", 1024),
    ("Mi", 1024**2),
    ("Gi", 1024**3),
    ("Ti", 1024**4),
    ("Pi", 1024**5),
]


@pytest.mark.parametrize(("prefix", "factor"), PREFIXES)
def test_every_prefix_of_a_size(prefix: str, factor: int) -> None:
    assert parse_bytes(f"3{prefix}B") == 3 * factor


@pytest.mark.parametrize(("prefix", "factor"), PREFIXES)
def test_every_prefix_of_a_bandwidth_in_bytes_and_in_bits(prefix: str, factor: int) -> None:
    assert parse_bandwidth(f"16{prefix}B/s") == 16 * factor
    assert parse_bandwidth(f"16{prefix}b/s") == 2 * factor
    assert parse_bandwidth(f"16{prefix}bit/s") == 2 * factor


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7ns", 7e-9),
        ("10us", 10e-6),
        ("2.5 ms", 2.5e-3),
        ("3s", 3),
        ("2min", 120),
        ("1.5h", 5400),
        (" .5 s ", 0.5),
        ("1e-3s", 1e-3),
    ],
)
def test_every_unit_of_a_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MiB",
        "25",
        "25b",
        "25 Mb",
        "25mB",
        "25EB",
        "-1B",
        "nanB",
        "infB",
        "1e999B",
        "1,5GB",
        "2 G B",
    ],
)
def test_a_bad_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must (look like '25MiB'|end in B)"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["400Gb", "400", "400Gbps", "50GB/h", "-1Gb/s", "GB/s"])
def test_a_bad_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must (look like '400Gb/s'|end in B/s or b/s or bit/s)"):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["10", "10 sec", "10kS", "ms", "-1s", "10 S"])
def test_a_bad_duration_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"must (look like '10us'|be one of ns, us, ms, s, min, h)"
    ):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.234e-8, "12.3 ns"),
        (1.234e-5, "12.3 us"),
        (0.01234, "12.3 ms"),
        (1.5, "1.5 s"),
        (90, "90 s"),
        (120, "2 min"),
        (3600, "60 min"),
        (7200, "2 h"),
        (3600 * 47, "47 h"),
        (3600 * 48, "2 d"),
        (86400 * 5000, "5000 d"),
        (-0.01234, "-12.3 ms"),
    ],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1 KiB"),
        (25 * 2**20, "25 MiB"),
        (2**30, "1 GiB"),
        (3 * 2**40, "3 TiB"),
        (1.5 * 2**50, "1.5 PiB"),
        (1023 * 2**20, "1023 MiB"),
    ],
)
def test_sizes_in_words(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (12, "12 B/s"),
        (1000.0, "1 kB/s"),
        (2500000.0, "2.5 MB/s"),
        (50000000000.0, "50 GB/s"),
        (3350000000000.0, "3.35 TB/s"),
        (2000000000000000.0, "2 PB/s"),
    ],
)
def test_rates_in_words(per_second: float, text: str) -> None:
    assert format_rate(per_second, "B") == text
