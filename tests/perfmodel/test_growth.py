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


def predicted(one: Series, *at: int, **how: Any) -> tuple[Any, Any, Any]:
    return growth.predict_growth(one, np.array(at, float), **how)


def test_two_devices_that_lose_much_predict_a_ring() -> None:
    one = series(1.0, 1.5, devices=(1, 2))
    low, middle, high = predicted(one, 8, inside=(0.04, 10.0), slope=growth.BETWEEN_NODES)
    # The prior is vague: the loss of 50 % at two is 87.5 % at eight (2 x 7/8).
    assert middle == pytest.approx(1 + 0.5 * 2 * 7 / 8, rel=1e-3)
    assert low < middle < high


def test_more_counts_narrow_the_interval() -> None:
    one = series(1.0, 1.04, 1.06, devices=(1, 2, 4))
    widths = []
    for known in (1, 2, 3):
        low, _, high = growth.extrapolate(one.fewest(known), (), np.array([8.0]))
        widths.append(float(high[0] - low[0]))
    assert widths[0] > widths[1] > widths[2]


def test_one_device_alone_keeps_the_prior_and_is_wide() -> None:
    """What another count shows is no matter where it is not known."""
    one = series(1.0, 1.05, 9.0, devices=(1, 2, 8))
    alone, seen = (
        predicted(one.fewest(known), 2, 8, inside=(0.04, 0.2), slope=growth.BETWEEN_NODES)
        for known in (1, 2)
    )
    assert alone[1] == pytest.approx([1.04, 1 + 0.04 * 2 * 7 / 8])
    assert alone[2][1] - alone[1][1] > 1.3 * (seen[2][1] - seen[1][1])


def test_other_models_on_the_same_machine_tell_what_a_doubling_of_nodes_costs() -> None:
    """5 % on this machine, 20 % on others; sizes of the same model tell nothing, nor do few series."""
    here, own = many("m{}", *[0.05] * 5), many("a model [{}]", *[2.0] * 9)
    there = [replace(each, machine="other") for each in many("n{}", *[0.2] * 9)]
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
    [alone] = growth.extrapolate(replace(one, batch=0.02).fewest(1), others, np.array([2.0]))[1]
    assert alone == pytest.approx(1 + found[0.02][0])
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


def test_from_one_node_on_a_loss_is_waits_and_bytes_until_more_counts_tell() -> None:
    one = series(1.0, 1.06, devices=(8, 16))
    low, middle, high = predicted(one, 64, inside=growth.INSIDE, slope=(0.0, 10.0))
    # The prior is vague: half of 6 % returns with each of three doublings, half as a ring of 8 nodes sends (2 x 7/8).
    assert middle == pytest.approx(1 + 0.03 * 3 + 0.03 * 2 * 7 / 8, rel=1e-3)
    for third, last in ((1.12, 1.18), (1.09, 1.06 + 0.06 * 0.75)):
        more = series(1.0, 1.06, third, devices=(8, 16, 32))
        found = predicted(more, 64, inside=growth.INSIDE, slope=(0.0, 10.0), noise=1e-4)
        assert found[1] == pytest.approx(last, rel=1e-3)
    assert low < middle < high
    alone = predicted(one.fewest(1), 16, 64, inside=growth.INSIDE, slope=(0.02, 0.01))
    assert alone[1] == pytest.approx([1.02, 1.06])


@pytest.mark.parametrize("steps", [(1.2, 1.25), (1.02, 1.2), (1.1, 1.0), (0.95, 0.9)])
def test_no_step_is_faster_among_more_nodes(steps: tuple[float, float]) -> None:
    """However two counts bend what waits and bytes both explain: neither is a gain."""
    one = series(1.0, *steps, devices=(8, 16, 32))
    found = growth.extrapolate(one, (), np.exp2(np.arange(6.0, 15.0)))[1]
    assert np.all(np.diff(found) >= 0)
    assert found[0] >= steps[1]


def test_a_loss_that_would_be_a_gain_is_none_and_the_other_tells_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By least squares: bytes grow as 1 and 1.5, waits as 1 and 2. The interval takes both, as where both lose."""
    vague: dict[str, Any] = {"inside": growth.INSIDE, "slope": (0.0, 10.0), "noise": 1e-4}
    flat = series(1.0, 1.2, 1.2, devices=(8, 16, 32))
    bytes_of = np.array([1.0, 1.5])
    share = float(bytes_of @ [0.2, 0.2] / (bytes_of @ bytes_of))
    law = 1 + share * np.array([1.5, 2 * (1 - 1 / 64)])
    monkeypatch.setattr(growth, "_EXPONENTS", (0.0, 0.0))
    _, middle, high = predicted(flat, 512, **vague)
    assert middle == pytest.approx(1.2 * law[1] / law[0], rel=1e-3)
    _, of_both, highest = predicted(series(1.0, 1.2, 1.35, devices=(8, 16, 32)), 512, **vague)
    assert (high - middle) * law[0] / 1.2 == pytest.approx(highest - of_both, rel=1e-3)
    steep = series(1.0, 1.0, 1.2, devices=(8, 16, 32))
    share = float(np.array([1, 2]) @ [0.0, 0.2] / 5)
    law = 1 + share * np.array([2.0, 6.0])
    assert predicted(steep, 512, **vague)[1] == pytest.approx(1.2 * law[1] / law[0], rel=1e-3)


def test_losses_may_grow_faster_or_slower_than_the_law() -> None:
    """By 90 % of an exponent of 0.6 with others of a node, and of 0.3 with the doublings of nodes."""
    sure: dict[str, Any] = {"inside": (0.1, 1e-9), "slope": (0.1, 1e-9), "noise": 1e-9}
    inside = predicted(series(1, 1.1, devices=(1, 2)), 8, **sure)
    between = predicted(series(1, 1.1, devices=(8, 16)), 64, **sure)
    for (low, middle, high), steeper in (
        (inside, 7 ** (1.645 * 0.6)),
        (between, 3 ** (1.645 * 0.3)),
    ):
        lost = middle - 1
        assert low == pytest.approx(1 + lost / steeper, rel=1e-3)
        assert high == pytest.approx(1 + lost * steeper, rel=1e-3)


def test_no_device_is_faster_among_more_than_as_runs_scatter() -> None:
    found = predicted(series(1.0, devices=(1,)), 8, inside=(0.0, 0.9), slope=growth.BETWEEN_NODES)
    assert found[0] == pytest.approx(1 / 1.1)


def test_second_counts_that_gain_tell_scatter() -> None:
    gains = [
        series(1.0, step, 1.0, devices=(1, 2, 4), model=f"m{step}") for step in (0.92, 1.3, 0.94)
    ]
    assert growth.noise_of(gains[0], gains[1:]) == pytest.approx(np.sqrt((0.08**2 + 0.06**2) / 2))
    assert growth.noise_of(gains[1], ()) == growth.NOISE
    # Runs that were repeated tell it better, by the mean of those alike: three, two and three have 5 degrees.
    three, two = (-0.01, 0.0, 0.01), (-0.01, 0.01)
    repeated = replace(gains[0], scatter=(three, two, three))
    assert growth.noise_of(repeated, gains[1:]) == pytest.approx(np.sqrt(6e-4 / 5))
    few = replace(repeated, scatter=(three, two, two))
    assert growth.noise_of(few, ()) == pytest.approx(0.08)


def test_scatter_is_about_the_mean() -> None:
    """Of pairs, too, the estimate of the variance has no bias."""
    rng = np.random.default_rng(0)
    pairs = {float(n): np.exp(0.1 * rng.standard_normal(2)).tolist() for n in range(1, 2001)}
    one = Series.of(pairs, model="m", machine="box", per_node=8)
    assert growth.noise_of(one, ()) == pytest.approx(0.1, rel=0.05)


def test_series_of_the_same_model_tell_nothing() -> None:
    """However it is spelt, in whatever precision: its loss, its nodes and its scatter are those asked for."""
    one = series(1.0, devices=(1,), model="Llama 3.1 405b FP8")
    names = ("Llama3.1 405b BF16", "llama-3.1 405B [base]", "LLAMA 3.1 405b AMP/FP16")
    assert {series(1.0, devices=(1,), model=name).family for name in names} == {one.family}
    assert series(1.0, devices=(1,), model="Llama 3.1 70b FP8").family != one.family
    loud = ((-0.5, 0.5),) * 5
    same = [series(1.0, 2.0, 9.0, devices=(1, 2, 16), model=names[i % 3]) for i in range(5)]
    same = [replace(each, scatter=loud) for each in same]
    at = np.array([2.0, 16.0])
    assert np.array_equal(growth.extrapolate(one, same, at), growth.extrapolate(one, (), at))


def test_five_series_of_one_model_are_one_model() -> None:
    """Five batches do not make five models, nor do many series of one outvote the others."""
    one = series(1.0, devices=(1,))
    batches = [replace(each, model="m") for each in many("m{}", *[1.0] * 20, first=1)]
    assert growth.expected_loss(one, batches) == growth.INSIDE
    nodes = [replace(each, model="m") for each in many("m{}", *[1.0] * 20)]
    assert growth.between_prior(one, nodes) == growth.BETWEEN_NODES
    others = many("n{}", *[0.05] * 5)
    assert growth.between_prior(one, [*nodes, *others]) == pytest.approx((0.05, 0.005))
    inside = many("n{}", *[0.05] * 5, first=1)
    assert growth.expected_loss(one, [*batches, *inside])[0] < 0.15


def test_known_counts_that_contradict_the_law_widen_the_interval() -> None:
    """One device among two takes 50 % longer where 4 +- 5 % were expected: 8.5 standard deviations."""
    prior, noise, expected = 0.05, 0.02, 0.04
    for loss in (0.5, 0.05):
        one = series(1.0, 1 + loss, devices=(1, 2))
        _, middle, high = predicted(one, 2, inside=(expected, prior), slope=(0.0, 1e-9))
        variance = prior**2 + noise**2
        left = prior**2 * noise**2 / variance + noise**2
        half = 1.645 * np.sqrt(max(1, (loss - expected) ** 2 / variance) * left)
        found = 1 + expected + (loss - expected) * prior**2 / variance
        assert high - middle == pytest.approx((1 + loss) / found * half, rel=1e-3)


TWO = "devices,samples_per_s\n1,400\n2,760\n"


@pytest.fixture
def table(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "runs.csv"
        path.write_text(text)
        return path

    return write


def test_one_and_two_devices_predict_eight(run: Run, table: Callable[[str], Path]) -> None:
    asked = f"predict --throughput {table(TWO)} --devices 1,2,8"
    document = GrowthDocument.of_text(run(f"{asked} --json").stdout)
    [found] = document.series
    assert found.measured == (1, 2)
    [eight] = found.points
    one = series(1 / 400, 2 / 760, devices=(1, 2))
    low, middle, high = growth.extrapolate(one, (), np.array([8.0]))
    assert eight.samples_per_s.nominal == pytest.approx(8 / middle[0])
    assert (eight.samples_per_s.p5, eight.samples_per_s.p95) == pytest.approx(
        (8 / high[0], 8 / low[0])
    )
    assert eight.efficiency.nominal == pytest.approx(1 / 400 / middle[0])
    result = run(asked)
    assert "your runs 1, 2 8" in result.words
    assert "caveat" not in result.words


def test_the_network_is_unknown_where_nothing_tells_of_it(
    run: Run, table: Callable[[str], Path]
) -> None:
    """Not inside a node, nor where a count beyond a node was measured; of several series it is said which."""
    said = "the network is unknown"
    assert said not in run(f"predict --throughput {table(TWO)} --devices 4,8").words
    assert said in run(f"predict --throughput {table(TWO)} --devices 4,16").words
    assert said not in run(f"predict --throughput {table(TWO + '16,5000')} --devices 32").words
    both = "model,devices,samples_per_s\na,1,4\na,16,50\nb,1,5\n"
    document = GrowthDocument.of_text(
        run(f"predict --throughput {table(both)} --devices 32 --json").stdout
    )
    [caveat] = document.caveats
    assert caveat.endswith(f"{said} (b)")


def test_rates_of_one_device_each_do_not_grow(run: Run, table: Callable[[str], Path]) -> None:
    """Who enters them is told so, and the interval holds a rate that stays as it is."""
    text = "devices,samples_per_s\n1,400\n2,395\n4,390\n"
    asked = f"predict --throughput {table(text)} --devices 8,64"
    document = GrowthDocument.of_text(run(f"{asked} --json").stdout)
    for point in document.series[0].points:
        assert point.samples_per_s.holds(390)
    assert "caveat: samples_per_s is of all devices together;" in run(asked).words
    # 70 devices can hardly do more than 64.
    close = "devices,samples_per_s,devices_per_node\n64,6400,128\n70,6900,128\n"
    assert "caveat" not in run(f"predict --throughput {table(close)} --devices 128").words


def test_a_batch_of_all_devices_is_told(run: Run, table: Callable[[str], Path]) -> None:
    """Every count then has another batch, so that none helps another."""
    text = "devices,samples_per_s,batch\n1,400,32\n2,760,64\n4,1500,128\n"
    asked = f"predict --throughput {table(text)} --devices 8"
    assert (
        "caveat: each count has another batch (of one device): none helps another"
        in run(asked).words
    )
    swept = text.replace("64", "32") + "1,420,64\n"
    assert "caveat" not in run(f"predict --throughput {table(swept)} --devices 8").words


def test_a_series_is_told_from_the_others_by_what_differs(
    run: Run, table: Callable[[str], Path]
) -> None:
    rows = [
        f"{n},{n * rate},resnet,box,{precision},{batch},4"
        for n in (1, 2)
        for precision, batch, rate in (("fp32", 32, 300), ("bf16", 32, 700), ("bf16", 64, 800))
    ]
    heading = " devices, samples_per_s, model,machine,precision ,batch,devices_per_node"
    text = "\n".join([heading, *rows])
    asked = f"predict --throughput {table(text)} --devices 4"
    result = run(asked).words
    for name in ("resnet, fp32, batch 32", "resnet, bf16, batch 32", "resnet, bf16, batch 64"):
        assert f"{name} 1, 2" in result
    first = GrowthDocument.of_text(run(f"{asked} --json").stdout).series[0]
    assert (first.model, first.machine, first.precision) == ("resnet", "box", "fp32")
    assert (first.batch, first.devices_per_node) == (32, 4)


def test_a_step_with_its_batch_is_a_rate_and_runs_alike_are_one(
    table: Callable[[str], Path],
) -> None:
    text = "devices;step_time_s;batch;devices_per_node\n1;0.10;32;4\n1;0.12;32;4\n8;0.13;32;4\n"
    [one], notes = growth.read_series(table(text))
    assert list(one.step) == pytest.approx([0.11 / 32, 0.13 / 32])
    assert one.per_node == 4
    assert one.first_step_s == pytest.approx(0.11)
    assert one.scatter[0] == pytest.approx([np.log(0.10 / 0.12) / 2, np.log(0.12 / 0.10) / 2])
    assert notes == []
    [alone], _ = growth.read_series(table("devices,samples_per_s\n1,400\n"))
    assert list(alone.step) == [1 / 400]


def test_other_models_of_the_table_tell_what_more_nodes_cost(
    run: Run, table: Callable[[str], Path]
) -> None:
    rows = [f"m{i},{n},{n / (1.2 if n > 8 else 1)}" for i in range(6) for n in (8, 16)]
    text = "\n".join(["model,devices,samples_per_s", "mine,8,80", *rows])
    [mine, *_] = GrowthDocument.of_text(
        run(f"predict --throughput {table(text)} --devices 16,32 --json").stdout
    ).series
    assert [point.efficiency.nominal for point in mine.points] == pytest.approx([1 / 1.2, 1 / 1.4])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus,samples_per_s\n1,400\n", "must have the column devices"),
        ("devices,samples_per_s\n", "must hold 1 to 1,000 runs, got 0"),
        ("devices,samples_per_s\n" + 1001 * "1,4\n", "must hold 1 to 1,000 runs, got 1,001"),
        ("devices,samples_per_s\n1,fast\n", "line 2: samples_per_s: must be a number, got 'fast'"),
        (
            "devices,samples_per_s\n1,-4\n",
            "samples_per_s: must be > 0 and <= 1,000,000,000,000,000, got -4",
        ),
        (
            "devices,samples_per_s\n1,nan\n",
            "samples_per_s: must be > 0 and <= 1,000,000,000,000,000, got nan",
        ),
        (
            "devices,samples_per_s\n2000000,4\n",
            "devices: must be > 0 and <= 1,048,576, got 2000000",
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
        (
            "devices,samples_per_s,step_time_s,batch\n2,400,0.1,64\n",
            "line 2: samples_per_s must be devices x batch (of one device) / step_time_s = 1,280, got 400",
        ),
        ("devices,samples_per_s\n1,100\n4,900\n", "2.25 times as fast among 4 as among 1"),
    ],
)
def test_bad_tables_are_one_clear_line(
    text: str, words: str, run: Run, table: Callable[[str], Path]
) -> None:
    assert words in complaint(run(f"predict --throughput {table(text)} --devices 8"), 1)


def test_what_the_table_says_is_not_said_again(run: Run, table: Callable[[str], Path]) -> None:
    asked = f"predict --throughput {table(TWO)}"
    assert complaint(run(f"{asked} --devices 2"), 2).endswith("got 2")
    said = complaint(run(f"{asked} --batch 4"), 2)
    assert "--batch: excludes --throughput, got 4; the table says what ran" in said
