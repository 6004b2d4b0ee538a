"""Text with prefixes, bits and bytes, and numbers without."""

from collections.abc import Callable

import pytest

from perfmodel.units import (
    format_bytes,
    format_duration,
    format_rate,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)

FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
FACTORS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
SECONDS = {"7ns": 7e-9, "10us": 10e-6, "2.5 ms": 2.5e-3, "3s": 3, "2min": 120, "1.5h": 5400}
SECONDS |= {" .5 s ": 0.5, "1e-3s": 1e-3}
DURATIONS: dict[float, str] = {0: "0 s", 1.234e-8: "12.3 ns", 1.234e-5: "12.3 us", 1.5: "1.5 s"}
DURATIONS |= {90: "90 s", 120: "2 min", 3600: "60 min", 7200: "2 h", 3600 * 47: "47 h"}
DURATIONS |= {3600 * 48: "2 d", 86400 * 5000: "5000 d", -0.01234: "-12.3 ms", 0.01234: "12.3 ms"}
SIZES: dict[float, str] = {0: "0 B", 1000: "1000 B", 1024: "1 KiB", 25 * 2**20: "25 MiB"}
SIZES |= {3 * 2**40: "3 TiB", 1.5 * 2**50: "1.5 PiB", 1023 * 2**20: "1023 MiB", 2**30: "1 GiB"}
RATES = {12: "12 B/s", 1000.0: "1 kB/s", 2.5e6: "2.5 MB/s", 50e9: "50 GB/s", 3.35e12: "3.35 TB/s"}
RATES |= {2e15: "2 PB/s"}


@pytest.mark.parametrize(("prefix", "factor"), FACTORS.items())
def test_every_prefix_of_sizes_and_of_rates_in_bytes_and_bits(prefix: str, factor: int) -> None:
    assert parse_bytes(f"3{prefix}B") == 3 * factor
    assert parse_bandwidth(f"16{prefix}B/s") == 16 * factor
    assert parse_bandwidth(f"16{prefix}b/s") == 2 * factor
    assert parse_bandwidth(f"16{prefix}bit/s") == 2 * factor


@pytest.mark.parametrize(("text", "seconds"), SECONDS.items())
def test_every_unit_of_a_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    ("parse", "texts", "message"),
    [
        (
            parse_bytes,
            "|MiB|25|25b|25 Mb|25mB|25EB|-1B|nanB|infB|1e999B|1,5GB|2 G B",
            "'25MiB'|in B",
        ),
        (
            parse_bandwidth,
            "400Gb|400|400Gbps|50GB/h|-1Gb/s|GB/s",
            "'400Gb/s'|in B/s or b/s or bit/s",
        ),
        (parse_duration, "10|10 sec|10kS|ms|-1s|10 S", "'10us'|be one of ns, us, ms, s, min, h"),
    ],
)
def test_bad_quantities_are_refused(
    parse: Callable[[str], float], texts: str, message: str
) -> None:
    for text in texts.split("|"):
        with pytest.raises(ValueError, match=f"must .*({message})"):
            parse(text)


def test_quantities_in_words() -> None:
    assert {seconds: format_duration(seconds) for seconds in DURATIONS} == DURATIONS
    assert {size: format_bytes(size) for size in SIZES} == SIZES
    assert {rate: format_rate(rate, "B") for rate in RATES} == RATES
