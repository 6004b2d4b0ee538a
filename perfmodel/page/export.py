"""The page as one file for somebody who has no perfmodel: a grid of answers instead of a server."""

import base64
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final
from urllib.parse import unquote

from pydantic import ValidationError

from perfmodel.documents import first_problem
from perfmodel.documents.page import (
    QUESTION,
    Catalogue,
    CatalogueProfile,
    LayoutQuestion,
    StepQuestion,
)
from perfmodel.errors import PerfModelError, UsageError
from perfmodel.layout import parse_layout
from perfmodel.page.answers import Answers

SCRIPTS: Final = (
    "format.js", "draw.js", "curve.js", "timeline.js", "panels.js", "controls.js", "main.js"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A document and the policy that its server sends with it."""

    html: str
    policy: str


def page(data: str, *, is_served: bool) -> Page:
    """The page around JSON of a catalogue and what was answered already.

    If no server answers questions, the file may reach nothing at all.
    """
    style, parts = _text("page.css"), "".join(map(_text, SCRIPTS))
    script = f'(() => {{\n"use strict";\n{parts}}})();\n'
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_source(style)}",
            f"script-src {_source(script)}",
            "img-src data:",
            "connect-src 'self'" if is_served else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    html = _text("page.html")
    # in this order: data may hold anything, and nothing is searched for after it
    for mark, text in (
        ("@POLICY@", policy),
        ("@STYLE@", style),
        ("@SCRIPT@", script),
        ("@DATA@", data.replace("<", "\\u003c")),
    ):
        before, _, after = html.partition(mark)
        html = f"{before}{text}{after}"
    return Page(html=html, policy=f"{policy}; frame-ancestors 'none'")


def _text(name: str) -> str:
    return (resources.files("perfmodel.page") / "static" / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """What a policy calls this very text."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


#: Values of each slider that moves in the file, beside the chosen one.
_DEVICES: Final = tuple(2**power for power in range(11))
_BANDWIDTHS: Final = ("0.25x", "", "4x", "16x", "64x")
BANDWIDTH: Final = "network.bandwidth"
_MOST_BATCHES: Final = 5
_DIGITS: Final = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Which values each slider of the file can take."""

    devices: tuple[int, ...]
    batches: tuple[int, ...]
    bandwidths: tuple[str, ...]
    """Texts of ``--set network.bandwidth``; empty: as measured."""


def export_html(answers: Answers, question: StepQuestion | LayoutQuestion) -> str:
    """One file with answers for every combination of devices, batch and bandwidth of a grid.

    All else stays as in the question. What is not feasible is in the file as its reason; a question
    that cannot be answered at all raises.
    """
    question = question.model_copy(update={"logged": None})  # one number, not a grid of them
    answers.answer(question)
    [profile] = [p for p in answers.catalogue.profiles if p.name == question.profile]
    grid = export_grid(profile, question)
    curves: list[Any] = []
    found: dict[str, Any] = {}
    for key, asked in _questions(grid, question):
        try:
            answer, detail = answers.answer(asked), answers.detail(asked)
        except PerfModelError as error:
            found[key] = {"error": str(error)}
            continue
        told, curve = (
            _rounded(each)
            for each in (answer.model_dump(mode="json"), detail.model_dump(mode="json")["curve"])
        )
        if curve not in curves:  # most answers share one
            curves.append(curve)
        found[key] = {**told, "curve_at": curves.index(curve)}
    workloads = tuple(w for w in profile.workloads if w.name == question.workload)
    only = profile.model_copy(update={"workloads": workloads})
    catalogue = answers.catalogue.model_copy(update={"profiles": (only,), "prices": ()})
    data = {
        "catalogue": catalogue.model_dump(mode="json"),
        "question": question.model_dump(mode="json"),
        "grid": dataclasses.asdict(grid),
        "curves": curves,
        "answers": found,
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return page(text, is_served=False).html


def export_grid(profile: CatalogueProfile, question: StepQuestion | LayoutQuestion) -> Grid:
    """What can be moved in the file; it always holds the question itself."""
    if isinstance(question, LayoutQuestion):
        layout = parse_layout(question.layout)
        each = layout.world_size // layout.dp
        counts = {layout.world_size, *(n * each for n in _DEVICES if n * each <= _DEVICES[-1])}
        batch = question.batch or layout.global_batch
        return Grid(devices=tuple(sorted(counts)), batches=(batch,), bandwidths=("",))
    [entry] = [w for w in profile.workloads if w.name == question.workload]
    middle = entry.batches[len(entry.batches) // 2]
    if question.scaling == "strong":
        chosen = question.batch or entry.batches[-1]
        batches = {chosen, 2 * chosen, 4 * chosen}
    else:
        chosen = question.batch or middle
        near = sorted(entry.batches, key=lambda batch: abs(batch - chosen))
        batches = {chosen, *near[: _MOST_BATCHES - 1]}
    bandwidths = [*_BANDWIDTHS] if profile.bandwidth_bytes_per_s else [""]
    typed = question.changes.get(BANDWIDTH, "")
    if typed and not typed.endswith("x"):  # a rate, which no slider reaches
        bandwidths = [typed]
    elif typed not in bandwidths:
        bandwidths.append(typed)
    counts = {question.devices, *(_DEVICES if profile.bandwidth_bytes_per_s else (1,))}
    return Grid(
        devices=tuple(sorted(counts)),
        batches=tuple(sorted(batches)),
        bandwidths=tuple(bandwidths),
    )


def _questions(
    grid: Grid, question: StepQuestion | LayoutQuestion
) -> Iterator[tuple[str, StepQuestion | LayoutQuestion]]:
    """Every question of the grid under the key by which the page finds its answer."""
    for bandwidth, batch, devices in itertools.product(grid.bandwidths, grid.batches, grid.devices):
        key = f"{devices}|{batch}|{bandwidth}"
        if isinstance(question, LayoutQuestion):
            layout = parse_layout(question.layout)
            dp = devices * layout.dp // layout.world_size
            text = str(dataclasses.replace(layout, dp=dp)) or "dp=1"
            yield key, question.model_copy(update={"layout": text, "batch": batch})
        else:
            changes = {name: v for name, v in question.changes.items() if name != BANDWIDTH}
            if bandwidth:
                changes[BANDWIDTH] = bandwidth
            update = {"devices": devices, "batch": batch, "changes": changes}
            yield key, question.model_copy(update=update)


def _rounded(value: Any) -> Any:
    """Six digits: twice as many as the page shows."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return value


def start(catalogue: Catalogue) -> StepQuestion | LayoutQuestion:
    """Eight devices of the first machine and workload, or one layout of eight."""
    profile = catalogue.profiles[0]
    entry = profile.workloads[0]
    if profile.kind == "layout":
        return LayoutQuestion(
            kind="layout", profile=profile.name, workload=entry.name, layout="dp=8", batch=64
        )
    devices, cluster = 1 if profile.bandwidth_bytes_per_s is None else 8, None
    if devices == 1 and catalogue.clusters:  # nothing else is known of links
        cluster = catalogue.clusters[0].name
        devices = min(8, catalogue.clusters[0].devices)
    batch = entry.batches[len(entry.batches) // 2]
    return StepQuestion(
        kind="step",
        profile=profile.name,
        workload=entry.name,
        devices=devices,
        batch=batch,
        cluster=cluster,
    )


def question_of(text: str) -> StepQuestion | LayoutQuestion:
    """A question as JSON, or as it stands behind ``#`` in the address of the page."""
    try:
        return QUESTION.validate_json(unquote(text.removeprefix("#")))
    except ValidationError as error:
        raise UsageError(f"--ask: {first_problem(error)}") from error
