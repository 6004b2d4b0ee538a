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


def _point(name: str, path: str) -> Names:
    """Quantities of one predicted step of data-parallel training."""
    return {
        f"{name}devices": f"{path}setting/world_size",
        f"{name}micro_batch": f"{path}setting/micro_batch",
        f"{name}step_s": f"{path}step_s",
        f"{name}samples_per_s": f"{path}samples_per_s",
        f"{name}speedup": f"{path}speedup",
        f"{name}efficiency": f"{path}scaling_efficiency",
        f"{name}exposed_comm_s": f"{path}exposed_comm_s",
        f"{name}parts_s": f"{path}breakdown_s",
        f"{name}straggler_s": f"{path}straggler_s",
        f"{name}evidence": f"{path}evidence",
    }


def _layout(name: str, path: str) -> Names:
    """Quantities of one predicted step of a layout."""
    return {
        f"{name}layout": f"{path}layout",
        f"{name}evidence": f"{path}evidence/step",
        f"{name}step_s": f"{path}step_s",
        **{
            f"{name}{key}": f"{path}large_model/{key}"
            for key in ("tokens_per_s", "mfu", "parts_s", "simulated_step_s", "formula_step_s")
        },
        f"{name}memory_bytes.*": f"{path}memory/*/needed_bytes",
        f"{name}activation_bytes.*": f"{path}memory/*/parts_bytes/activations",
        f"{name}optimizer_bytes.*": f"{path}memory/*/parts_bytes/optimizer",
        f"{name}fit_probability": f"{path}fit_probability",
    }


_TRACED: Final = {
    "operators": "workload/num_operators",
    "forward_flop": "workload/forward_flop",
    "backward_flop": "workload/backward_flop",
    "parameters": "workload/parameters/+/num_elements",
    "ready_shares": "workload/parameters/+/ready_fraction",
    "saved_bytes": "trace/saved",
    "unique_operators": "trace/operators/#",
}
_RANKED: Final = (
    "devices micro_batch global_batch step_s elapsed_s cost energy_kwh power_kw "
    "probability deadline_probability expected_stops checkpoint_interval_s evidence"
)

#: Quantities of each kind of answer.
QUANTITIES: Final[Mapping[str, Names]] = {
    "none": {},
    "prediction": {**_point("points.*.", "points/*/"), "evidence": "points/-1/evidence"},
    "layout": _layout("", "points/0/"),
    "layouts": {
        "feasible": "num_feasible",
        "fitting": "num_fitting",
        "ranked.*.layout": "ranked/*/layout",
        "ranked.*.step_s": "ranked/*/step_s",
        "ranked.*.tokens_per_s": "ranked/*/tokens_per_s",
        "ranked.*.memory_bytes": "ranked/*/needed_bytes",
        "ranked.*.fit_probability": "ranked/*/fit_probability",
        "ranked.*.slower_probability": "ranked/*/slower_probability",
    },
    "plan": {
        "candidates": "num_candidates",
        "feasible": "num_feasible",
        "ranked.*.name": "ranked/*/option",
        **{f"ranked.*.{name}": f"ranked/*/{name}" for name in _RANKED.split()},
    },
    "cost": {
        "items": "items",
        "options.*.name": "options/*/cost/name",
        "options.*.yearly": "options/*/yearly",
        "options.*.per_useful_device_hour": "options/*/per_useful_device_hour",
        "options.*.buying_pays": "options/*/buying_pays",
    },
    "goodput": {
        "elapsed_s": "elapsed_s",
        "elapsed_mean_s": "elapsed_mean_s",
        "useful_share": "effective_fraction",
        "stops": "unplanned_stops",
        "stops_mean": "stops_mean",
        "spent_mean_s": "spent_mean_s",
        "interval_s.used": "job/checkpoint_interval_s",
        "interval_s.exact": "best_interval_s",
        "checkpoint_s": "job/checkpoint_write_s",
        "deadline_probability": "deadline_probability",
    },
    "batch": {
        "critical_batch": "critical_batch",
        "batches.*.batch": "outlooks/*/batch",
        "batches.*.samples": "outlooks/*/samples",
        "batches.*.steps": "outlooks/*/steps",
        "batches.*.samples_per_s": "outlooks/*/samples_per_s",
        "batches.*.target_speedup": "outlooks/*/target_speedup",
        "batches.*.learning_rate_factor": "outlooks/*/learning_rate_factor",
        "batches.*.time_to_target_s": "outlooks/*/time_to_target_s",
    },
    "whatif": {
        **_point("last.", "scenarios/-1/point/"),
        "scenarios": "scenarios/#",
        "steps.*.step_s": "scenarios/*/point/step_s",
        "lost_s": "scenarios/-1/lost_s",
        "throughput_ratio": "scenarios/-1/contrast/throughput_ratio",
        "step_difference_s": "scenarios/-1/contrast/step_difference_s",
        "probability_faster": "scenarios/-1/contrast/probability_faster",
    },
    "whatif_layout": {
        **_layout("last.", "scenarios/-1/point/"),
        "steps.*.step_s": "scenarios/*/point/step_s",
        "throughput_ratio": "scenarios/-1/contrast/throughput_ratio",
        "probability_faster": "scenarios/-1/contrast/probability_faster",
    },
    "explanation": {
        "devices": "setting/world_size",
        "step_s.nominal": "step_s",
        "ideal_step_s": "baseline_step_s",
        "losses.*.cause": "losses/*/cause",
        "losses.*.lost_s": "losses/*/lost_s",
        "changes.*.gain_s": "changes/*/gain_s",
        "changes.*.gain_speedup": "changes/*/gain_speedup",
    },
    "memory": {
        "memory_bytes": "needed_bytes",
        "memory_spread_bytes": "spread_bytes",
        "parts_bytes": "parts_bytes",
        "fit_probability": "fit_probability",
        "verdict": "verdict",
        "largest_micro_batch": "largest_micro_batch",
        "techniques.*.memory_bytes": "techniques/*/needed_bytes",
        "techniques.*.time_ratio": "techniques/*/time_ratio",
    },
    "devices": {
        "devices": "devices/#",
        "names.*": "devices/*/id",
        "bytes_per_s.*": "devices/*/bandwidth?/bytes_per_s",
    },
    "links": {"links": "links/#", "bytes_per_s.*": "links/*/rate/bytes_per_s"},
    "difference": {
        "differences": "differences/#",
        "changes": "differences/+/is_change",
        "z.sum": "differences/+/z",
        "old.sum": "differences/+/old",
        "new.sum": "differences/+/new",
        "error.sum": "differences/+/error",
        "steps.*.old_step_s": "predictions/*/old_step_s",
        "steps.*.ratio": "predictions/*/ratio",
        "steps.*.is_moved": "predictions/*/is_moved",
    },
    "terms": {
        "confidence": "confidence",
        "clauses.*.reference": "clause/*/reference",
        "clauses.*.reference_error": "clause/*/reference_error",
        "clauses.*.at_least": "clause/*/at_least?",
        "clauses.*.at_most": "clause/*/at_most?",
    },
    "judgement": {
        "clauses.*.delivered": "judged/*/delivered",
        "clauses.*.delivered_error": "judged/*/delivered_error",
        "clauses.*.probability_kept": "judged/*/probability_kept",
        "clauses.*.verdict": "judged/*/verdict",
    },
    "page": {
        "step_s": "step_s",
        "throughput": "throughput",
        "speedup": "speedup",
        "efficiency": "efficiency",
        "exposed_comm_s": "exposed_comm_s",
        "parts_s": "breakdown_s",
        "curve.*.value": "curve/*/value",
        "memory_bytes": "memory/needed_bytes",
        "fit_probability": "memory/fit_probability",
        "throughput_ratio": "contrast/throughput_ratio",
    },
    "trace": _TRACED,
    "profile": {
        "run": "machine/repeatability/run",
        "round": "machine/repeatability/round",
        "ddp_terms.*": "machine/ddp/values/*",
        "workloads.*.name": "machine/workloads/*/workload/name",
        "measured_step_s.*": "machine/steps/*/step_s",
        "peak_flop_per_s": "machine/operators/peak_flop_per_s",
        "peak_bytes_per_s": "machine/operators/peak_bytes_per_s",
        "replay_log_error": "machine/operators/replay_log_error",
        "curve_log_error": "machine/operators/curve_log_error",
        "operator_least_s.sum": "machine/operators/families/+/least_s",
    },
    "inferred": {
        "spreads": "machine/spreads",
        "parameters.*.value": "machine/fitted_parameters/*/value",
        "widening": "machine/interval_widening",
    },
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
