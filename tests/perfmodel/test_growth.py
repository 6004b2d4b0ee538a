"""Samples per second on more devices than were measured: sums by hand, tables of users."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel import growth
from perfmodel.documents.prediction import GrowthDocument
from perfmodel.growth import Series
from tests.perfmodel.cli.command import Run, complaint


def series(
    *steps: float, devices: tuple[int, ...], model: str = "a model", machine: str = "a box"
) -> Series:
    return Series(
        model=model,
        machine=machine,
        devices=np.array(devices, dtype=float),
        per_node=8.0,
        step=np.array(steps, dtype=float),
    )


def many(name: str, *losses: float, first: int = 8, batch: float | None = None) -> list[Series]:
    """Models that lose so much on twice as many devices."""
    steps = {name.format(i): 1 + loss for i, loss in enumerate(losses)}
    found = [series(1.0, step, devices=(first, 2 * first), model=m) for m, step in steps.items()]
    return [replace(each, batch=batch) for each in found]


def grown(one: Series, *at: int, **how: Any) -> tuple[Any, Any, Any]:
    return growth.predict_growth(one, np.array(at, float), **how)


def test_two_devices_that_lose_much_predict_a_ring() -> None:
    one = series(1.0, 1.5, devices=(1, 2))
    low, middle, high = grown(one, 8, inside=(0.04, 10.0), slope=growth.BETWEEN_NODES)
    # The prior is vague: the loss of 50 % at two is 87.5 % at eight (2 x 7/8).
    assert middle == pytest.approx(1 + 0.5 * 2 * 7 / 8, rel=1e-3)
    assert low < middle < high


def test_more_counts_narrow_the_interval() -> None:
    one = series(1.0, 1.04, 1.06, devices=(1, 2, 4))
    widths = []
    for known in (1, 2, 3):
        low, _, high = growth.grow(one.fewest(known), (), np.array([8.0]))
        widths.append(float(high[0] - low[0]))
    assert widths[0] > widths[1] > widths[2]


def test_one_device_alone_keeps_the_prior_and_is_wide() -> None:
    """What another count shows is no matter where it is not known."""
    one = series(1.0, 1.05, 9.0, devices=(1, 2, 8))
    alone, seen = (
        grown(one.fewest(known), 2, 8, inside=(0.04, 0.2), slope=growth.BETWEEN_NODES)
        for known in (1, 2)
    )
    assert alone[1] == pytest.approx([1.04, 1 + 0.04 * 2 * 7 / 8])
    assert alone[2][1] - alone[1][1] > 1.3 * (seen[2][1] - seen[1][1])


def test_other_models_on_the_same_machine_tell_what_a_doubling_of_nodes_costs() -> None:
    """5 % on this machine, 20 % on others; sizes of the same model tell nothing, nor do few series."""
    here, own = many("m{}", *[0.05] * 5), many("a model [{}]", *[2.0] * 9)
    there = [replace(each, machine="other") for each in many("m{}", *[0.2] * 9)]
    one = series(1.0, 9.0, devices=(1, 8))
    assert growth.between_prior(one, [*here, *there, *own]) == pytest.approx((0.05, 0.005))
    # Four on this machine are too few.
    more = growth.between_prior(one, [*here[1:], *there])
    assert more == pytest.approx((0.2, 0.15 / 1.35))
    assert growth.between_prior(one, [*here[1:], *own]) == growth.BETWEEN_NODES


def test_models_alike_tell_what_a_node_loses() -> None:
    """Steps of 20 ms lose 3 ms, those of 2 s nothing; machines that lose tell more."""
    short = many("s{}", *[0.15] * 9, first=1, batch=0.02)
    long = many("l{}", *[0.0] * 9, first=1, batch=2.0)
    own = many("a model [{}]", *[8.0] * 9, first=1)
    others = [*short, *long, *own]
    one = series(1.0, 9.0, devices=(1, 8))
    found = {s: growth.expected_loss(replace(one, batch=s), others) for s in (0.02, 2.0)}
    assert found[0.02][0] == pytest.approx(0.15, rel=0.2)
    assert found[2.0][0] == pytest.approx(0.005, rel=0.2)
    elsewhere = [replace(other, machine="other") for other in short]
    alike = replace(one, batch=2.0, machine="other")
    assert growth.expected_loss(alike, [*elsewhere, *long])[0] > 0.007
    # The spread grows with the loss; few tell nothing.
    assert found[2.0][1] == growth.INSIDE[1] < found[0.02][1]
    assert growth.expected_loss(one, [*short[:4], *own]) == growth.INSIDE


def test_tails_of_losses_are_no_matter_and_no_median_gains() -> None:
    """Quartiles of a normal distribution are 1.35 spreads apart."""
    losses = [-0.33, *[-0.01] * 8, 0.0, 0.0, *[0.01] * 8, 0.33]
    one = series(1.0, 9.0, devices=(1, 8))
    for told, prior in ((losses, (0.0, 0.02 / 1.35)), ([-0.1] * 5, (0.0, 0.005))):
        assert growth.between_prior(one, many("m{}", *told)) == pytest.approx(prior)


def test_losses_inside_and_between_nodes() -> None:
    """Ring of 8: 2 x 7/8; 16 and 64 devices are one and three doublings of a node of 8."""
    one = series(1.0, 1.35, 1.65, devices=(1, 8, 64))
    assert growth.inside_loss(one) == pytest.approx(0.35 / (2 * 7 / 8))
    assert growth.between_loss(one) == pytest.approx(0.1)
    assert growth.inside_loss(series(1.0, 1.2, devices=(8, 16))) is None
    assert growth.between_loss(series(2.0, 2.2, devices=(8, 16))) == pytest.approx(0.1)
    assert growth.between_loss(series(1.0, 1.2, devices=(1, 8))) is None


def test_from_one_node_on_a_doubling_costs_what_the_second_count_shows() -> None:
    one = series(1.0, 1.06, devices=(8, 16))
    low, middle, high = grown(one, 64, inside=growth.INSIDE, slope=(0.0, 10.0))
    # The prior is vague: 6 % for one doubling of the nodes are 18 % for three.
    assert middle == pytest.approx(1.18, rel=1e-3)
    assert low < middle < high
    alone = grown(one.fewest(1), 16, 64, inside=growth.INSIDE, slope=(0.02, 0.01))
    assert alone[1] == pytest.approx([1.02, 1.06])


def test_losses_may_grow_faster_or_slower_than_the_law() -> None:
    """By 90 % of an exponent of 0.6 with others of a node, and of 0.3 with the doublings of nodes."""
    sure: dict[str, Any] = {"inside": (0.1, 1e-9), "slope": (0.1, 1e-9), "noise": 1e-9}
    inside = grown(series(1, 1.1, devices=(1, 2)), 8, **sure)
    between = grown(series(1, 1.1, devices=(8, 16)), 64, **sure)
    for (low, middle, high), steeper in (
        (inside, 7 ** (1.645 * 0.6)),
        (between, 3 ** (1.645 * 0.3)),
    ):
        lost = middle - 1
        assert low == pytest.approx(1 + lost / steeper, rel=1e-3)
        assert high == pytest.approx(1 + lost * steeper, rel=1e-3)


def test_no_device_is_faster_among_more_than_as_runs_scatter() -> None:
    found = grown(series(1.0, devices=(1,)), 8, inside=(0.0, 0.9), slope=growth.BETWEEN_NODES)
    assert found[0] == pytest.approx(1 / 1.1)


def test_second_counts_that_gain_tell_scatter() -> None:
    pairs = [series(1.0, step, 1.0, devices=(1, 2, 4)) for step in (0.92, 1.3, 0.94)]
    assert growth.noise_of(pairs) == pytest.approx(np.sqrt((0.08**2 + 0.06**2) / 2))
    assert growth.noise_of(pairs[1:2]) == growth.NOISE
    # Runs that were repeated tell it better.
    repeated = replace(pairs[0], scatter=((-0.01, 0.0, 0.01), (-0.01, 0.01), ()))
    assert growth.noise_of([*pairs, repeated]) == pytest.approx(np.sqrt(4e-4 / 5))


TWO = "devices,samples_per_s\n1,400\n2,760\n"


@pytest.fixture
def table(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "runs.csv"
        path.write_text(text)
        return path

    return write


def test_one_and_two_devices_predict_eight(run: Run, table: Callable[[str], Path]) -> None:
    asked = f"predict --from-runs {table(TWO)} --devices 1,2,8"
    document = GrowthDocument.of_text(run(f"{asked} --json").stdout)
    [found] = document.series
    assert found.measured == (1, 2)
    [eight] = found.points
    one = series(1 / 400, 2 / 760, devices=(1, 2))
    low, middle, high = growth.grow(one, (), np.array([8.0]))
    assert eight.samples_per_s.nominal == pytest.approx(8 / middle[0])
    assert (eight.samples_per_s.p5, eight.samples_per_s.p95) == pytest.approx(
        (8 / high[0], 8 / low[0])
    )
    assert eight.efficiency.nominal == pytest.approx(1 / 400 / middle[0])
    result = run(asked)
    assert "your runs 1, 2 8" in result.words
    assert "caveat: fewer than 5 other models" in result.words


def test_a_step_with_its_batch_is_a_rate_and_runs_alike_are_one(
    table: Callable[[str], Path],
) -> None:
    text = "devices;step_time_s;batch;devices_per_node\n1;0.10;32;4\n1;0.12;32;4\n8;0.13;32;4\n"
    [one], notes = growth.read_series(table(text))
    assert list(one.step) == pytest.approx([0.11 / 32, 0.13 / 32])
    assert one.per_node == 4
    assert one.first_step_s == pytest.approx(0.11)
    assert one.scatter[0] == pytest.approx(np.log([0.10 / 0.11, 0.12 / 0.11]))
    assert notes == []


def test_other_models_of_the_table_tell_what_more_nodes_cost(
    run: Run, table: Callable[[str], Path]
) -> None:
    rows = [f"m{i},{n},{n / (1.2 if n > 8 else 1)}" for i in range(6) for n in (8, 16)]
    text = "\n".join(["model,devices,samples_per_s", "mine,8,80", *rows])
    [mine, *_] = GrowthDocument.of_text(
        run(f"predict --from-runs {table(text)} --devices 16,32 --json").stdout
    ).series
    assert [point.efficiency.nominal for point in mine.points] == pytest.approx([1 / 1.2, 1 / 1.4])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus,samples_per_s\n1,400\n", "got none named devices"),
        ("devices,samples_per_s\n", "must hold 1 to 1,000 runs, got 0"),
        ("devices,samples_per_s\n" + 1001 * "1,4\n", "must hold 1 to 1,000 runs, got 1,001"),
        ("devices,samples_per_s\n1,fast\n", "line 2: samples_per_s: must be a number, got 'fast'"),
        ("devices,samples_per_s\n1,-4\n", "samples_per_s: must be > 0 and <= 1e+15, got -4"),
        ("devices,samples_per_s\n1,nan\n", "samples_per_s: must be > 0 and <= 1e+15, got nan"),
        (
            "devices,samples_per_s\n2000000,4\n",
            "devices: must be > 0 and <= 1.04858e+06, got 2000000",
        ),
        ("devices,samples_per_s\n,4\n", "devices: must be a whole number, got nothing"),
        ("devices,samples_per_s\n1.5,4\n", "line 2: devices: must be a whole number"),
        (
            "devices,step_time_s\n1,0.1\n",
            "line 2: must have samples_per_s, or step_time_s with batch",
        ),
        (
            f"{TWO}1,100\n",
            "line 2 and line 4 are the same setting with devices 1 but differ by a factor of 4",
        ),
        ("devices,samples_per_s\n1,100\n4,900\n", "2.25 times as fast among 4 as among 1"),
    ],
)
def test_bad_tables_are_one_clear_line(
    text: str, words: str, run: Run, table: Callable[[str], Path]
) -> None:
    assert words in complaint(run(f"predict --from-runs {table(text)} --devices 8"), 1)


def test_what_the_table_says_is_not_said_again(run: Run, table: Callable[[str], Path]) -> None:
    asked = f"predict --from-runs {table(TWO)}"
    assert complaint(run(f"{asked} --devices 2"), 2).endswith("got 2")
    said = complaint(run(f"{asked} --batch 4"), 2)
    assert "--batch: excludes --from-runs, got 4; the table says what ran" in said
