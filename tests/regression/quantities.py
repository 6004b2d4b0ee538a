"""Named quantities of every answer: the only place that knows keys and attributes of the product.

A rename of a key or of a Python function changes this file alone; names of quantities and the
recorded table stay.
"""

import dataclasses
import datetime as dt
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

Value: TypeAlias = float | str | bool | None
#: Name of a quantity, path of its value. ``*``: every item; ``#``: their number; ``+``: their sum;
#: behind a key ``?``: it may be left out.
Names: TypeAlias = Mapping[str, str]


def _each(names: str, under: str = "", path: str = "") -> dict[str, str]:
    """Quantities below a path, by words: the key of each, or ``name=its/path`` where it is called otherwise."""
    words = (word.partition("=") for word in names.split())
    return {f"{under}{name}": f"{path}{own or name}" for name, _, own in words}


#: Of one predicted step of data-parallel training.
_POINT: Final = (
    "devices=setting/world_size micro_batch=setting/micro_batch step_s samples_per_s speedup "
    "efficiency=scaling_efficiency exposed_comm_s parts_s=breakdown_s straggler_s evidence"
)
#: Of one predicted step of a layout.
_LAYOUT: Final = (
    "layout evidence=evidence/step step_s tokens_per_s=large_model/tokens_per_s mfu=large_model/mfu "
    "parts_s=large_model/parts_s simulated_step_s=large_model/simulated_step_s "
    "formula_step_s=large_model/formula_step_s memory_bytes.*=memory/*/needed_bytes "
    "activation_bytes.*=memory/*/parts_bytes/activations "
    "optimizer_bytes.*=memory/*/parts_bytes/optimizer fit_probability"
)
_CONTRAST: Final = "throughput_ratio step_difference_s probability_faster"

#: Quantities of each kind of answer.
QUANTITIES: Final[Mapping[str, Names]] = {
    "none": {},
    "prediction": {
        **_each(_POINT, "points.*.", "points/*/"),
        "evidence": "points/-1/evidence",
    },
    "growth": _each("samples_per_s efficiency", "series.*.*.", "series/*/points/*/"),
    "layout": _each(_LAYOUT, "", "points/0/"),
    "layouts": _each("feasible=num_feasible fitting=num_fitting")
    | _each(
        "layout step_s tokens_per_s memory_bytes=needed_bytes fit_probability slower_probability",
        "ranked.*.",
        "ranked/*/",
    ),
    "plan": _each("candidates=num_candidates feasible=num_feasible")
    | _each(
        "name=option devices micro_batch global_batch step_s elapsed_s cost energy_kwh power_kw "
        "probability deadline_probability expected_stops checkpoint_interval_s evidence",
        "ranked.*.",
        "ranked/*/",
    ),
    "cost": {"items": "items"}
    | _each("name=cost/name yearly per_useful_device_hour buying_pays", "options.*.", "options/*/"),
    "goodput": _each(
        "elapsed_s elapsed_mean_s useful_share=effective_fraction stops=unplanned_stops stops_mean "
        "spent_mean_s interval_s.used=job/checkpoint_interval_s interval_s.exact=best_interval_s "
        "checkpoint_s=job/checkpoint_write_s deadline_probability"
    ),
    "batch": {"critical_batch": "critical_batch"}
    | _each(
        "batch samples steps samples_per_s target_speedup learning_rate_factor time_to_target_s",
        "batches.*.",
        "outlooks/*/",
    ),
    "whatif": _each(_POINT, "last.", "scenarios/-1/point/")
    | _each("scenarios=# steps.*.step_s=*/point/step_s lost_s=-1/lost_s", "", "scenarios/")
    | _each(_CONTRAST, "", "scenarios/-1/contrast/"),
    "whatif_layout": _each(_LAYOUT, "last.", "scenarios/-1/point/")
    | _each("steps.*.step_s=*/point/step_s", "", "scenarios/")
    | _each("throughput_ratio probability_faster", "", "scenarios/-1/contrast/"),
    "explanation": _each(
        "devices=setting/world_size step_s.nominal=step_s ideal_step_s=baseline_step_s "
        "losses.*.cause=losses/*/cause losses.*.lost_s=losses/*/lost_s "
        "changes.*.gain_s=changes/*/gain_s changes.*.gain_speedup=changes/*/gain_speedup"
    ),
    "memory": _each(
        "memory_bytes=needed_bytes memory_spread_bytes=spread_bytes parts_bytes fit_probability "
        "verdict largest_micro_batch techniques.*.memory_bytes=techniques/*/needed_bytes "
        "techniques.*.time_ratio=techniques/*/time_ratio"
    ),
    "devices": _each(
        "devices=# names.*=*/id bytes_per_s.*=*/bandwidth?/bytes_per_s", "", "devices/"
    ),
    "links": _each("links=# bytes_per_s.*=*/rate/bytes_per_s", "", "links/"),
    "difference": _each(
        "differences=# changes=+/is_change z.sum=+/z old.sum=+/old new.sum=+/new error.sum=+/error",
        "",
        "differences/",
    )
    | _each("old_step_s ratio is_moved", "steps.*.", "predictions/*/"),
    "terms": {"confidence": "confidence"}
    | _each(
        "reference reference_error at_least=at_least? at_most=at_most?", "clauses.*.", "clause/*/"
    ),
    "judgement": _each(
        "delivered delivered_error probability_kept verdict", "clauses.*.", "judged/*/"
    ),
    "page": _each(
        "step_s throughput speedup efficiency exposed_comm_s parts_s=breakdown_s "
        "curve.*.value=curve/*/value memory_bytes=memory/needed_bytes "
        "fit_probability=memory/fit_probability throughput_ratio=contrast/throughput_ratio"
    ),
    "trace": _each(
        "operators=workload/num_operators forward_flop=workload/forward_flop "
        "backward_flop=workload/backward_flop parameters=workload/parameters/+/num_elements "
        "ready_shares=workload/parameters/+/ready_fraction saved_bytes=trace/saved "
        "unique_operators=trace/operators/#"
    ),
    "profile": _each(
        "run=repeatability/run round=repeatability/round ddp_terms.*=ddp/values/* "
        "workloads.*.name=workloads/*/workload/name measured_step_s.*=steps/*/step_s "
        "peak_flop_per_s=operators/peak_flop_per_s peak_bytes_per_s=operators/peak_bytes_per_s "
        "replay_log_error=operators/replay_log_error curve_log_error=operators/curve_log_error "
        "operator_least_s.sum=operators/families/+/least_s",
        "",
        "machine/",
    ),
    "inferred": _each(
        "spreads parameters.*.value=fitted_parameters/*/value widening=interval_widening",
        "",
        "machine/",
    ),
}


def read_answer(text: str) -> Any:
    """The document in a text: JSON, or TOML."""
    return json.loads(text) if text.lstrip().startswith(("{", "[")) else tomllib.loads(text)


def quantities(answer: Any, kind: str) -> dict[str, Value]:
    """All named quantities of one answer."""
    found: dict[str, Value] = {}
    for name, path in QUANTITIES[kind].items():
        for keys, value in _walk(answer, path.split("/"), ()):
            filled = name
            for key in keys:
                filled = filled.replace("*", key, 1)
            found.update(_expanded(filled, value))
    return found


def _walk(
    value: Any, path: list[str], keys: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that a path names, with the keys of its stars."""
    if not path or value is None:
        yield keys, value
        return
    part, rest = path[0], path[1:]
    if part == "*":
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from _walk(each, rest, (*keys, str(key)))
    elif part == "#":
        yield keys, len(value)
    elif part == "+":
        total = sum(v or 0 for _, v in _walk(value, ["*", *rest], ()))
        yield keys, total
    elif isinstance(value, list):
        yield from _walk(value[int(part)], rest, keys)
    else:
        found = value.get(part[:-1]) if part.endswith("?") else value[part]
        yield from _walk(found, rest, keys)


def _expanded(name: str, value: Any) -> dict[str, Value]:
    """A value under its name; an interval or a mapping as one quantity per key."""
    if isinstance(value, dict):
        return {
            k: v for key, each in value.items() for k, v in _expanded(f"{name}.{key}", each).items()
        }
    return {name: value}


def call(name: str, arguments: dict[str, Any]) -> Any:
    """What a public function returns, as plain data."""
    return _plain(CALLS[name](**arguments))


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _api(name: str) -> Callable[..., Any]:
    def run(**arguments: Any) -> Any:
        import perfmodel as pm  # noqa: PLC0415 - the code under test, late

        if "today" in arguments:
            arguments["today"] = dt.date.fromisoformat(arguments["today"])
        scenarios = arguments.pop("scenarios", ())
        places = [arguments.pop(key) for key in ("profile", "workload") if key in arguments]
        return getattr(pm, name)(*places, *scenarios, **arguments)

    return run


def _page(profile: str, question: dict[str, Any], **more: Any) -> Any:
    from perfmodel.page import PageQuestion, read_machines  # noqa: PLC0415
    from perfmodel.page.answers import Answers  # noqa: PLC0415

    workloads = [*more.get("workloads", ())]
    clusters = [Path(path) for path in more.get("clusters", ())]
    machines = read_machines([Path(profile)], workloads, validation=None, clusters=clusters)
    [name] = machines
    answers, asked = Answers(machines), PageQuestion.model_validate({"profile": name, **question})
    return {**_plain(answers.detail(asked)), **_plain(answers.answer(asked))}


def _goodput(**job: Any) -> Any:
    import perfmodel as pm  # noqa: PLC0415 - the code under test, late

    cause = pm.FailureCause(name="any", mtbf_device_s=job.pop("mtbf_device_s"))
    return pm.goodput(pm.Job(**job, causes=(cause,)), replicas=50)


#: Functions that a case may call by name.
CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: _api(name) for name in ("predict", "explain", "whatif", "plan_options")},
    "costs": _api("compare_costs"),
    "large_model": _api("predict_large_model"),
    "terms": _api("acceptance_terms"),
    "goodput": _goodput,
    "page": _page,
}
