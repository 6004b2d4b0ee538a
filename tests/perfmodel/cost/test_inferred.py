"""What a machine inferred from runs answers: draws, intervals, stalls and other links agree with one another."""

from dataclasses import astuple, replace

import numpy as np
import pytest

from calibrate.layout_fit import infer
from perfmodel.cost.inferred import InferredModel, on_links, open_inferred, with_nodes_of
from perfmodel.cost.jobs import SHEETS, Jobs, jobs_from, stall_time_s, step_time_priors
from perfmodel.cost.layout_time import step_time_s
from perfmodel.cost.memory import ASSUMED_MEMORY
from perfmodel.documents.profile import InferredDocument
from perfmodel.errors import CalibrationUnavailable, UsageError
from perfmodel.layout import parse_layout
from perfmodel.machine import UNCERTAINTY_OF_FILE, Cluster, Tier
from perfmodel.statistics import DEVIATE_90, normal_cdf
from perfmodel.workload.transformer import TRANSFORMERS
from tests.existing import existing
from tests.perfmodel.cost.large_samples import measured, some_jobs
from tests.perfmodel.profiles import Machine, profile

STALL_S = 0.5


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    """On several nodes, which may stall, and on one."""
    jobs = some_jobs(most=64)
    far = np.flatnonzero(jobs.several_nodes & (jobs.pp > 1))
    return jobs.take(np.concatenate([far[::2], np.flatnonzero(~jobs.several_nodes)[::4]]))


@pytest.fixture(scope="module")
def model(jobs: Jobs) -> InferredModel:
    """Every fourth run on several nodes was disturbed."""
    late = jobs.several_nodes & (np.arange(len(jobs)) % 4 == 0)
    step_s = measured(jobs) + np.where(late, stall_time_s(jobs, STALL_S), 0.0)
    return InferredModel(machine=infer(jobs, step_s, step_time_priors(SHEETS["A100"])))


def test_draws_have_the_quantiles_of_the_prediction(model: InferredModel, jobs: Jobs) -> None:
    """Of a normal and a disturbed state: the interval by bisection, draws of a step, and joint draws."""
    found = model.predict(jobs)
    assert np.ptp(model.stall_probability(jobs)) > 0.1
    alone = model.step_draws(jobs, num_draws=20_000)
    # Joint draws take the fitted parameters as they were drawn, which a normal distribution stands for.
    together = np.exp(model.joint_logs(jobs, num_draws=20_000)).T
    for draws_s, within in ((alone, 0.01), (together, 0.07)):
        assert np.quantile(draws_s, 0.05, axis=1) == pytest.approx(found.lower_s, rel=within)
        assert np.quantile(draws_s, 0.95, axis=1) == pytest.approx(found.upper_s, rel=within)


def test_a_step_looks_like_the_state_that_it_is_near(model: InferredModel, jobs: Jobs) -> None:
    far = jobs.take(jobs.several_nodes)
    normal_s = model.predict(far, stalls=False).number_s
    late_s = normal_s + stall_time_s(far, existing(model.machine.degraded).stall_s)
    assert not model.looks_disturbed(far, normal_s).any()
    assert model.looks_disturbed(far, late_s).all()
    # On one node nothing stalls, whatever a step takes.
    near = jobs.take(~jobs.several_nodes)
    assert not model.looks_disturbed(near, 2 * measured(near)).any()


def test_memory_is_assumed_where_no_run_printed_its_peak(model: InferredModel) -> None:
    assert model.memory is ASSUMED_MEMORY


def test_without_a_disturbed_run_nothing_stalls(model: InferredModel, jobs: Jobs) -> None:
    quiet = InferredModel(machine=replace(model.machine, degraded=None))
    assert not quiet.stall_probability(jobs).any()
    assert quiet.predict(jobs).upper_s == pytest.approx(model.predict(jobs, stalls=False).upper_s)
    # Joint draws lie around the fit, whatever the median of the parameters' draws.
    logs = np.log(quiet.closed_form_s(jobs))
    assert np.abs(np.median(logs - logs[0], axis=0)).max() > 0.01
    found = np.median(quiet.joint_logs(jobs, num_draws=20_000), axis=0)
    assert found == pytest.approx(logs[0] + quiet.discrepancy.at(jobs)[0], abs=0.003)


def test_joint_draws_lie_around_the_fit_where_parameters_lie_askew() -> None:
    """Few A100 runs tell nothing of tensor parallelism beside a pipeline across nodes: some draws take minutes."""
    known = open_inferred(InferredDocument.named("dgx-a100").machine)
    llama = TRANSFORMERS["llama3-8b"]
    layout = parse_layout("dp=4 tp=8 pp=2 zero=1 accumulation=16 sequence_parallel=yes")
    job = jobs_from([(llama.shape, layout)], sequence=llama.sequence, devices_per_node=8)
    drawn_s, fitted_s = (
        np.exp(known.joint_logs(job, num_draws=5_000)[:, 0]),
        known.closed_form_s(job),
    )
    assert fitted_s.max() > 50 * fitted_s[0, 0]
    assert np.median(drawn_s) > fitted_s.min()
    assert drawn_s.min() >= known.peak_s(job)[0]
    # Products in FP8 take half as long.
    fp8 = replace(job, matmul_ratio=np.array([2.0]))
    fast_s = 0.5 * known.peak_s(fp8)
    unsure = InferredModel(machine=replace(known.machine, interval_widening=100.0))
    for lower_s in (
        unsure.predict(fp8, normal_s=1.5 * fast_s).lower_s,
        np.exp(unsure.joint_logs(fp8, num_draws=5_000).min(axis=0)),
    ):
        assert lower_s == pytest.approx(fast_s)


def test_links_of_a_file_stand_in_for_those_between_nodes(model: InferredModel) -> None:
    """The narrowest of two tiers, and the way through all three; inside a node the runs stay right."""
    cluster = Cluster(
        name="racks",
        tiers=(
            Tier(name="node", of="device", count=8, link_bytes_per_s=4e11, latency_s=1e-6),
            Tier(name="rack", of="node", count=4, link_bytes_per_s=2e10, latency_s=5e-6, links=8),
            Tier(name="hall", of="rack", count=4, link_bytes_per_s=1e10, latency_s=7e-6, links=16),
        ),
    )
    machine = model.machine
    assert on_links(machine, cluster, num_devices=8) == machine
    changed = on_links(machine, cluster, num_devices=128)
    assert changed.degraded is None
    rate = min(level.bytes_per_s for level in cluster.levels(16, stride=8))
    for before, after in zip(machine.fitted_parameters, changed.fitted_parameters, strict=True):
        if before.name == "node_bytes_per_s":
            assert (after.value, after.determined) == (rate, True)
            assert after.draws[0] == pytest.approx(rate)
            spread = np.log(np.array(after.draws) / rate).std() / UNCERTAINTY_OF_FILE
            known = np.log(np.array(before.draws) / before.value).std() / before.log_sigma
            assert spread == pytest.approx(known)
        elif before.name == "p2p_latency_s":
            assert np.subtract(after.draws, before.draws) == pytest.approx(13e-6)
            assert after.value - before.value == pytest.approx(13e-6)
        else:
            assert after == before


def test_a_device_is_one_of_a_data_sheet(model: InferredModel) -> None:
    assert open_inferred(replace(model.machine, device_name="A100")).sheet is SHEETS["A100"]
    with pytest.raises(CalibrationUnavailable, match="profile: device"):
        open_inferred(replace(model.machine, device_name="none"))


def test_without_stalls_an_interval_is_what_parameters_and_formula_leave(
    model: InferredModel, jobs: Jobs
) -> None:
    """1.64 standard deviations to either side of the closed form with its deviation, both sources together."""
    quiet, known = model.predict(jobs, stalls=False), model.uncertainty(jobs)
    shift, variance = model.discrepancy.at(jobs)
    factor = model.uncertainty_factor(jobs)
    assert quiet.number_s == pytest.approx(step_time_s(jobs, model.nominal) * np.exp(shift))
    assert quiet.mean_s == pytest.approx(quiet.number_s)
    fitted = np.log(model.closed_form_s(jobs)).var(axis=0)
    spread = np.sqrt(variance + fitted) * factor
    assert np.log(quiet.upper_s / quiet.number_s) == pytest.approx(DEVIATE_90 * spread, rel=1e-6)
    assert np.log(quiet.number_s / quiet.lower_s) == pytest.approx(DEVIATE_90 * spread, rel=1e-6)
    assert np.hypot(known.fitted, known.formula) == pytest.approx(spread)
    assert known.formula == pytest.approx(np.sqrt(variance) * factor)
    assert model.parts(jobs).total_s == pytest.approx(step_time_s(jobs, model.nominal))
    # Steps of a program stand in for the closed form.
    twice = model.predict(jobs, normal_s=2 * step_time_s(jobs, model.nominal), stalls=False)
    assert twice.number_s == pytest.approx(2 * quiet.number_s)
    found = model.predict(jobs)
    ends = found.lower_s[3], found.number_s[3], found.upper_s[3]
    assert astuple(found.of(3)) == ends


def test_the_number_to_name_errs_least_in_relative_terms(model: InferredModel, jobs: Jobs) -> None:
    """Each state weighs by its odds over its time: half of that weight lies below the number."""
    quiet, found = model.predict(jobs, stalls=False), model.predict(jobs)
    known = model.uncertainty(jobs)
    chance, ratio = known.stall_probability, known.degraded_ratio
    assert found.mean_s == pytest.approx(quiet.number_s * ratio**chance)
    late = chance / ratio / (chance / ratio + 1 - chance)
    spread = np.hypot(known.fitted, known.formula)
    deviate = np.log(found.number_s / quiet.number_s) / spread
    below = (1 - late) * normal_cdf(deviate) + late * normal_cdf(deviate - np.log(ratio) / spread)
    assert below == pytest.approx(0.5, abs=1e-6)
    stall_s = stall_time_s(jobs, model.machine.degraded.stall_s)  # type: ignore[union-attr]
    normal_s = step_time_s(jobs, model.nominal)
    assert ratio == pytest.approx((normal_s + stall_s) / normal_s)


def test_a_factor_may_narrow_where_runs_are_and_only_widen_far_away(
    model: InferredModel, jobs: Jobs
) -> None:
    far = replace(jobs, hidden=jobs.hidden * 2.0**30)
    for widening, at_runs, elsewhere in ((0.5, 0.5, 1.0), (1.5, 1.5, 1.5)):
        changed = InferredModel(machine=replace(model.machine, interval_widening=widening))
        assert changed.uncertainty_factor(jobs) == pytest.approx(at_runs)
        assert changed.uncertainty_factor(far) == pytest.approx(elsewhere)
    between = replace(jobs, sequence=jobs.sequence * 2)
    changed = InferredModel(machine=replace(model.machine, interval_widening=0.5))
    unknown = changed.discrepancy.unknown_share(between)
    expected = np.sqrt(0.25 * (1 - unknown) + unknown)
    assert changed.uncertainty_factor(between) == pytest.approx(expected)


def test_no_step_is_shorter_than_its_flop_at_the_peak(model: InferredModel, jobs: Jobs) -> None:
    """Unless the runs themselves were faster, as in FP8: then no step is shorter than expected."""
    machine = replace(model.machine, interval_widening=100.0, device_name="A100")
    unsure = InferredModel(machine=machine)
    peak_s = jobs.model_flop / (312e12 * jobs.devices)
    for share in (0.1, 4.0):
        normal_s = peak_s / share
        expected_s = unsure.predict(jobs, stalls=False, normal_s=normal_s).number_s
        shortest_s = np.minimum(peak_s, expected_s)
        assert (peak_s < expected_s).all() == (share < 1)
        assert unsure.predict(jobs, normal_s=normal_s).lower_s == pytest.approx(shortest_s)
        widest_s = unsure.predict(jobs, stalls=False, normal_s=normal_s).upper_s
        known = unsure.uncertainty(jobs)
        deviate = DEVIATE_90 * np.hypot(known.fitted, known.formula)
        assert np.log(widest_s / expected_s) == pytest.approx(deviate, rel=1e-6)
        drawn_s = unsure.step_draws(jobs, num_draws=1_000, normal_s=normal_s)
        assert drawn_s.min(axis=1) == pytest.approx(shortest_s)


def test_another_width_widens_by_its_distance(model: InferredModel, jobs: Jobs) -> None:
    """Two doublings from the nearest width add 20 % to what else is uncertain; the width of the runs adds nothing."""
    far = replace(jobs, hidden=4 * jobs.hidden, feed_forward=4 * jobs.feed_forward)
    for each, more in ((jobs, 0.0), (far, 0.2)):
        _, variance = model.discrepancy.at(each)
        factor = model.uncertainty_factor(each)
        expected = factor * np.sqrt(variance + more**2)
        assert model.uncertainty(each).formula == pytest.approx(expected)


@pytest.mark.parametrize("widening", [0.6, 1.5])
def test_one_layout_over_another_is_as_uncertain_as_the_other_over_the_one(
    model: InferredModel, jobs: Jobs, widening: float
) -> None:
    found = InferredModel(machine=replace(model.machine, interval_widening=widening))
    ahead = found.ratio_uncertainty(jobs)
    for other in (1, len(jobs) - 1):
        back = found.ratio_uncertainty(jobs.take(np.array([other, 0])))
        assert 0 < back[1] == pytest.approx(ahead[other])
    assert ahead[0] == pytest.approx(0.0, abs=1e-7)


def test_a_machine_of_one_node_is_joined_like_another(model: InferredModel) -> None:
    """Four devices, each with the rate between nodes that runs show; inside the bus rate of what was measured."""
    own = profile(Machine(world_size=4))
    four = tuple(replace(each, world_size=4) for each in own.collectives)
    machine = replace(
        own,
        collectives=(*own.collectives, *four),
        undetermined=("the network between nodes is unknown", "growth is structural"),
    )
    found = with_nodes_of(machine, model.machine, name="dgx")
    fitted = {known.name: known for known in model.machine.fitted_parameters}
    rate, slower = fitted["node_bytes_per_s"], fitted["straggler_share"]
    assert found.cluster is not None
    node, fabric = found.cluster.tiers
    largest = four[0].points[-1]
    assert (node.count, node.latency_s, node.links) == (4, 0.0, 1)
    assert node.link_bytes_per_s == pytest.approx(2 * 3 / 4 * largest.at / largest.time_s)
    assert (fabric.count, fabric.links) == (16_384 // 4, 4)
    assert (fabric.link_bytes_per_s, fabric.log_error) == (rate.value, rate.log_sigma)
    assert fabric.latency_s == 14e-6
    assert found.cluster.straggler_share == slower.value
    assert found.cluster.straggler_log_error == slower.log_sigma
    assert found.undetermined == ("growth is structural",)
    # Where no group of a whole node was measured, links inside are no slower than those between.
    bare = existing(with_nodes_of(own, model.machine, name="dgx").cluster)
    assert bare.tiers[0].link_bytes_per_s == pytest.approx(2 * 3 / 4 * rate.value)
    for refused in (replace(machine, num_nodes=2), replace(machine, ranks_per_node=1)):
        with pytest.raises(UsageError, match="--nodes-like: must come with a machine of one node"):
            with_nodes_of(refused, model.machine, name="dgx")


def test_clusters_that_say_nothing_of_such_a_job_are_refused(model: InferredModel) -> None:
    node = Tier(name="node", of="device", count=8, link_bytes_per_s=4e11, latency_s=1e-6)
    fabric = Tier(name="rack", of="node", count=2, link_bytes_per_s=2e10, latency_s=5e-6)
    whole = Cluster(name="two", tiers=(node, fabric))
    for cluster, devices, said in (
        (Cluster(name="one", tiers=(node,)), 8, "must have a tier called node and one between"),
        (whole, 17, "must be of at most 16 devices"),
    ):
        with pytest.raises(UsageError, match=said):
            on_links(model.machine, cluster, num_devices=devices)
    assert on_links(model.machine, whole, num_devices=16).degraded is None
