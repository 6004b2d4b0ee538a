"""Cluster files: the examples, the way back, and what does not add up."""

from pathlib import Path

import pytest

from perfmodel.documents.clusters import open_cluster, read_cluster
from perfmodel.machine import Cluster

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


def test_the_file_of_the_page_is_read(tmp_path: Path) -> None:
    page = (EXAMPLES[0].parents[1] / "several-nodes.md").read_text(encoding="utf-8")
    assert len(EXAMPLES) >= 5
    found = read(tmp_path, page.split("```toml\n")[1].split("```")[0])
    inner, outer = found.tiers
    assert (inner.count, inner.link_bytes_per_s, inner.latency_s) == (4, 20e9, 6e-6)
    assert (outer.count, outer.link_bytes_per_s, outer.latency_s) == (2, 23e9 / 8, 14e-6)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_read_and_name_their_sources(path: Path) -> None:
    assert all(tier.source for tier in read_cluster(path).tiers)


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
