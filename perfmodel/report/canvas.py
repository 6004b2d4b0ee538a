"""What all figures share: colours that survive colour-blindness and print, axes, files."""

import io
from collections.abc import Iterable
from typing import Final, Literal

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from perfmodel.report.wording import duration_unit
from perfmodel.units import Seconds, parse_duration

#: Okabe and Ito, "Color Universal Design", 2008, without yellow (too pale on paper).
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS: Final = ("o", "s", "^", "v", "D", "P", "X")
LINES: Final = ("-", "--", "-.", ":")
GREY: Final = "#767676"
#: What a prediction may be off by and still be called right, in plots.
BAND_FRACTION: Final = 0.06


def new_figure(*, width_in: float = 6.4, height_in: float = 4.2) -> Figure:
    """Empty figure that belongs to nobody: pyplot never hears of it."""
    return Figure(figsize=(width_in, height_in), layout="constrained")


def finish(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Name the axes, with units, and draw a quiet grid."""
    axes.set_title(plain(title), fontsize="medium")
    axes.set_xlabel(plain(x))
    axes.set_ylabel(plain(y))
    axes.grid(visible=True, which="major", color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def log2_ticks(axes: Axes, *, values: Iterable[int]) -> None:
    """Doubling x axis that names the values at hand, at most a dozen of them."""
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: len(ticks) // 12 + 1]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def log10_ticks(axis: Axis) -> None:
    """Name 1, 2 and 5 of each decade as plain numbers, so that no range is left without a name."""
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure) -> None:
    """Draw one legend for all panels, each name once."""
    named: dict[str, Artist] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= {str(label): handle for label, handle in zip(labels, handles, strict=True)}
    if named:
        figure.legend(
            list(named.values()),
            list(named),
            loc="outside lower center",
            ncols=min(4, len(named)),
            fontsize="small",
            frameon=False,
        )


def time_unit(longest_s: Seconds) -> tuple[str, float]:
    """Symbol of the unit in which the longest time reads well, and its seconds."""
    unit = duration_unit(longest_s)
    return unit, parse_duration(f"1 {unit}")


def plain(text: str) -> str:
    """Text that matplotlib shows as it is: no dollar opens a formula, no underscore hides it."""
    shown = text.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def note_if_empty(axes: Axes, *, is_empty: bool) -> None:
    """Say that there is nothing to see, rather than show an empty frame."""
    if is_empty:
        axes.text(0.5, 0.5, "nothing measured", ha="center", transform=axes.transAxes, color=GREY)


def figure_bytes(figure: Figure, *, format: Literal["svg", "png"]) -> bytes:  # noqa: A002
    """Content of an image file; the same figure always gives the same bytes."""
    metadata = (
        {"Date": None, "Creator": None, "Format": None, "Type": None}
        if format == "svg"
        else {"Software": None}
    )
    file = io.BytesIO()
    # text stays text in SVG: small, searchable, and no glyph ids to clash
    with mpl.rc_context({"svg.hashsalt": "perfmodel", "svg.fonttype": "none"}):
        figure.savefig(file, format=format, dpi=150, metadata=metadata)
    return file.getvalue()
