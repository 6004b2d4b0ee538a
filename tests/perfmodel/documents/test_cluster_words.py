"""Clusters in words."""

from pathlib import Path

import pytest

from perfmodel.documents.clusters import open_cluster
from perfmodel.errors import InvalidDocument, UsageError


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("8 nvlink9", "got 'nvlink9'; did you mean nvlink"),
        ("8 100parsec", "got '100parsec'"),
        ("0 nvlink3", "counts must be at least 1"),
        ("8 nvlink3 x0", "counts must be at least 1"),
        ("2 pcie4-x16, 2 eth-25, 2 eth-25, 2 eth-25", "at most 3 tiers, got 4"),
        ("8 nvlink3, 8 measured", "'measured' must come with a profile of several nodes"),
        ("8 measured", "'measured' must be the second tier"),
    ],
)
def test_words_without_a_meaning_are_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_cluster(words)


@pytest.mark.parametrize("words", ["8 nvlink3 8 eth-100", "\u0668 nvlink3"])
def test_anything_else_is_a_file_that_is_missing(words: str) -> None:
    with pytest.raises(InvalidDocument, match="cluster file cannot be read"):
        open_cluster(words)
