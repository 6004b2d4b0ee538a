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
    Catalogue,
    CatalogueEntry,
    CatalogueProfile,
    PageQuestion,
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


def export_html(answers: Answers, question: PageQuestion) -> str:
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


def export_grid(profile: CatalogueProfile, question: PageQuestion) -> Grid:
    """What can be moved in the file; it always holds the question itself."""
    layout = parse_layout(question.layout)
    each, has_links = layout.world_size // layout.dp, profile.kind == "inferred"
    bandwidths = [""]
    if profile.bandwidth_bytes_per_s:
        has_links, bandwidths = True, [*_BANDWIDTHS]
    typed = question.changes.get(BANDWIDTH, "")
    if typed and not typed.endswith("x"):  # a rate, which no slider reaches
        bandwidths = [typed]
    elif typed not in bandwidths:
        bandwidths.append(typed)
    counts = [n * each for n in (_DEVICES if has_links else (1,)) if n * each <= _DEVICES[-1]]
    [entry] = [w for w in profile.workloads if w.name == question.workload]
    return Grid(
        devices=tuple(sorted({layout.world_size, *counts})),
        batches=tuple(sorted(_batches(entry, question))),
        bandwidths=tuple(bandwidths),
    )


def _batches(entry: CatalogueEntry, question: PageQuestion) -> set[int]:
    """The batch of the question, and some near it that the workload allows."""
    if not entry.batches:
        return {question.batch or parse_layout(question.layout).global_batch}
    if question.scaling == "strong":
        chosen = question.batch or entry.batches[-1]
        return {chosen, 2 * chosen, 4 * chosen}
    chosen = question.batch or entry.batches[len(entry.batches) // 2]
    near = sorted(entry.batches, key=lambda batch: abs(batch - chosen))
    return {chosen, *near[: _MOST_BATCHES - 1]}


def _questions(grid: Grid, question: PageQuestion) -> Iterator[tuple[str, PageQuestion]]:
    """Every question of the grid under the key by which the page finds its answer."""
    layout = parse_layout(question.layout)
    others = {name: value for name, value in question.changes.items() if name != BANDWIDTH}
    for bandwidth, batch, devices in itertools.product(grid.bandwidths, grid.batches, grid.devices):
        moved = dataclasses.replace(layout, dp=devices * layout.dp // layout.world_size)
        changes = others | ({BANDWIDTH: bandwidth} if bandwidth else {})
        update = {"layout": str(moved) or "dp=1", "batch": batch, "changes": changes}
        yield f"{devices}|{batch}|{bandwidth}", question.model_copy(update=update)


def _rounded(value: Any) -> Any:
    """Six digits: twice as many as the page shows."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return value


def start(catalogue: Catalogue) -> PageQuestion:
    """Eight devices of the first machine and workload, or one where nothing is known of links."""
    profile = catalogue.profiles[0]
    entry = profile.workloads[0]
    devices, cluster, batch = 8, None, 64
    if profile.kind == "calibrated":
        batch = entry.batches[len(entry.batches) // 2]
        if profile.bandwidth_bytes_per_s is None:
            cluster = catalogue.clusters[0] if catalogue.clusters else None
            devices = min(8, cluster.devices) if cluster else 1
    return PageQuestion(
        profile=profile.name,
        workload=entry.name,
        layout=f"dp={devices}" if profile.kind == "calibrated" else f"dp={devices} zero=3",
        batch=batch,
        cluster=cluster.name if cluster else None,
    )


def question_of(text: str) -> PageQuestion:
    """A question as JSON, or as it stands behind ``#`` in the address of the page."""
    try:
        return PageQuestion.model_validate_json(unquote(text.removeprefix("#")))
    except ValidationError as error:
        raise UsageError(f"--ask: {first_problem(error, PageQuestion)}") from error
