"""Cluster files and data sheets: examples, one device for every name, and what does not add up."""

from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.documents.hardware import (
    find_device,
    host_link_bytes_per_s,
    most_memory_bytes,
    open_cluster,
    read_catalogue,
    read_cluster,
    shipped_catalogue,
)
from perfmodel.errors import InvalidDocument
from perfmodel.machine import Cluster
from tests.existing import existing

EXAMPLES = sorted((Path(__file__).parents[3] / "docs" / "clusters").glob("*.toml"))
GOOD = """
schema_version = 1
name = "small"
devices = 16

[[tier]]
name = "node"
of = "device"
count = 8
bandwidth = "100GB/s"
latency = "1us"
source = "test"

[[tier]]
name = "fabric"
of = "node"
count = 2
bandwidth = "100Gb/s"
latency = "5us"
source = "test"
"""


def read(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return read_cluster(path)


def test_the_examples_and_the_file_of_their_page_are_read(tmp_path: Path) -> None:
    page = (EXAMPLES[0].parents[1] / "several-nodes.md").read_text(encoding="utf-8")
    assert len(list(map(read_cluster, EXAMPLES))) >= 5
    found = read(tmp_path, page.split("```toml\n")[1].split("```")[0])
    inner, outer = found.tiers
    assert (inner.count, inner.link_bytes_per_s, inner.latency_s) == (4, 20e9, 6e-6)
    assert (outer.count, outer.link_bytes_per_s, outer.latency_s) == (2, 23e9 / 8, 14e-6)


# Clusters in words.
def test_words_are_tiers_from_the_inside_out() -> None:
    cluster = open_cluster("8 nvlink3, 4 eth-100 x2, 3 400Gb/s")

    node, fabric, spine = cluster.tiers
    assert cluster.num_devices == 8 * 4 * 3
    assert cluster.devices_per_node == 8
    assert (node.of, fabric.of, spine.of) == ("device", "node", "fabric")
    # 300 GB/s and 100 Gb/s of the data sheets, of which collectives reach 80 %; a rate is taken as it is.
    assert node.bytes_per_s == pytest.approx(0.8 * 300e9)
    assert fabric.bytes_per_s == pytest.approx(2 * 0.8 * 12.5e9)
    assert spine.bytes_per_s == pytest.approx(50e9)


def test_a_file_that_says_no_more_than_words_is_those_words(tmp_path: Path) -> None:
    plain = open_cluster("8 100GB/s, 2 100Gb/s").tiers
    named = (replace(tier, source="given", latency_s=14e-6) for tier in read(tmp_path, GOOD).tiers)
    assert list(named) == [replace(tier, latency_s=14e-6) for tier in plain]


def test_a_message_takes_as_long_as_its_slowest_kind_of_link() -> None:
    """NCCL's tuner: 3.4 us over NVLink, 5.7 us over PCIe, 14 us over a network, all in all."""
    node, fabric = open_cluster("8 nvlink4, 2 ib-ndr x8").tiers
    assert node.latency_s == pytest.approx(3.4e-6)
    assert node.latency_s + fabric.latency_s == pytest.approx(14e-6)
    assert open_cluster("2 pcie4-x16").tiers[0].latency_s == pytest.approx(5.7e-6)
    assert open_cluster("16 eth-25").tiers[0].latency_s == pytest.approx(14e-6)


def test_a_file_is_a_file_even_if_its_name_could_be_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path("docs/clusters/pcie-box.toml").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("2 pcie4-x16").write_text(text, encoding="utf-8")
    assert open_cluster("2 pcie4-x16").name == "8 PCIe cards"
    with pytest.raises(InvalidDocument, match=r"other\.toml: cluster file cannot be read"):
        open_cluster("other.toml")


GIB = 2**30
SMALL = """
schema_version = 1
[sources.leaflet]
title = "A leaflet"
where = "drawer"
date = "2020-02-02"
[[devices]]
id = "one"
name = "One"
vendor = "Nobody"
kind = "cuda"
architecture = "first"
form = "card"
memory = { value = "1GiB", source = "leaflet" }
peaks.fp32 = { value = "1TFLOP/s", source = "leaflet" }
"""


def test_figures_are_in_si_units() -> None:
    sheet = find_device("h100-sxm5", shipped_catalogue())
    assert sheet.memory.size_bytes == 80 * GIB
    assert existing(sheet.bandwidth).bytes_per_s == 3.35e12
    assert sheet.peaks["bf16"].flop_per_s == 989e12
    assert existing(sheet.link).bytes_per_s == 450e9
    assert host_link_bytes_per_s(sheet, shipped_catalogue()) == pytest.approx(0.8 * 63e9)
    for name, size_bytes in (("A100", 80 * GIB), ("a100-sxm4-40", 40 * GIB), ("abacus", None)):
        assert most_memory_bytes(name, shipped_catalogue()) == size_bytes


def test_figures_of_the_shipped_catalogue_are_plausible() -> None:
    """Sparse peaks, or units a prefix off, would break one of these."""
    for sheet in shipped_catalogue().devices:
        peaks = {name: peak.flop_per_s for name, peak in sheet.peaks.items()}
        rising = [peaks[name] for name in ("fp64", "fp32", "tf32", "bf16", "fp8") if name in peaks]
        assert rising == sorted(rising), sheet.id
        assert peaks.get("bf16", peaks.get("fp16")) == peaks.get("fp16", peaks.get("bf16"))
        assert 1e11 < min(peaks.values()) <= max(peaks.values()) < 1e16, sheet.id
        if sheet.bandwidth is not None:
            assert 1e-3 < sheet.memory.size_bytes / sheet.bandwidth.bytes_per_s < 0.2, sheet.id
        if sheet.achieved is not None:
            assert 0.5 < sheet.achieved.flop_per_s / peaks["bf16"] < 1, sheet.id
        assert not (sheet.link_joins_pairs and "SXM" in sheet.form), sheet.id
        if sheet.power is not None:
            assert 50 < sheet.power.power_w < 2000, sheet.id


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('value = "1GiB"', "value = 1073741824", "must be text with a unit"),
        ('value = "1GiB"', 'value = "1GB/s"', "unit of '1GB/s' must end in B"),
        ('"1TFLOP/s", source = "leaflet"', '"1TFLOP/s"', "source"),
        ('"1TFLOP/s", source = "leaflet"', '"1TFLOP/s", source = "hearsay"', "got 'hearsay'"),
        ('form = "card"', 'form = "card"\nprice = 3', "price"),
        ('name = "One"', 'name = "One"\naliases = ["two"]', None),
        ("schema_version = 1", "schema_version = 2", "schema_version"),
        ("[[devices]]", "[[devices", "catalogue cannot be read"),
    ],
)
def test_a_figure_needs_its_unit_and_source(
    tmp_path: Path, old: str, new: str, says: str | None
) -> None:
    path = tmp_path / "catalogue.toml"
    path.write_text(f"links = []\n{SMALL.replace(old, new)}", encoding="utf-8")
    if says is None:
        assert read_catalogue(path).devices[0].aliases == ("two",)
        return
    with pytest.raises(InvalidDocument) as caught:
        read_catalogue(path)
    assert says in str(caught.value)
