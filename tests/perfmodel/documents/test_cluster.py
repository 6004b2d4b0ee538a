"""Cluster files: the examples, the way back, and what does not add up."""

from pathlib import Path

import pytest

from perfmodel.documents.clusters import read_cluster
from perfmodel.errors import InvalidDocument
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("devices = 16", "devices = 24", r"product of all counts \(8 x 2 = 16\), got 24"),
        ('of = "node"', 'of = "rack"', "fabric: of must be device or another tier, got 'rack'"),
        ('of = "device"', 'of = "fabric"', "a cycle of node, fabric"),
        ('of = "node"', 'of = "device"', "only one tier may join each device, got node, fabric"),
        ('"100GB/s"', '"0GB/s"', "tier.0.bandwidth: .*greater than 0"),
        ('"100GB/s"', "100", "must be text with a unit"),
        ('"1us"', '"1 fortnight"', "unit of '1 fortnight' must be one of"),
        ("count = 8", "count = 8\nin_switch_reduction = 1.5", "less than or equal to 1"),
        (
            "count = 2",
            "count = 2\nin_switch_reduction = 0.9",
            "for the innermost tier alone, got 0.9",
        ),
        ("count = 8", "count = 0", "tier.0.count: .*greater than 0"),
        ("count = 8", "count = 8\nspeed = 3", "tier.0.speed: unknown key"),
        ("bandwidth =", "bandwdth =", r"unknown key, got 100GB/s; did you mean bandwidth\?"),
        ('source = "test"', "", "tier.0.source: Field required"),
        ("schema_version = 1", "schema_version = 2", "schema_version: Input should be 1"),
        ("name =", "name ", "cluster file cannot be read"),
        ('name = "fabric"', 'name = "node"', "must have different names"),
    ],
)
def test_files_that_do_not_add_up_are_refused(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidDocument, match=message):
        read(tmp_path, GOOD.replace(old, new, 1))
