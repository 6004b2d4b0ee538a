"""The page as one text: markup, style and script in one file, with nothing to load from elsewhere."""

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final

SCRIPTS: Final = (
    "format.js", "draw.js", "curve.js", "timeline.js", "panels.js", "controls.js", "main.js"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A document and the policy that its server sends with it."""

    html: str
    policy: str


def page(data: str, *, is_served: bool) -> Page:
    """The page around its data.

    Parameters
    ----------
    data
        JSON: a catalogue, and what was answered already.
    is_served
        Whether a server answers questions; else the file may reach nothing at all.
    """
    style, script = _text("page.css"), _script()
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


def _script() -> str:
    parts = "".join(_text(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


def _text(name: str) -> str:
    return (resources.files("perfmodel.page") / "static" / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """What a policy calls this very text."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
