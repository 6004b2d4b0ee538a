"""The verdict on published convergence as a table and a sentence."""

from perfmodel.documents.convergence import ConvergenceVerdict
from perfmodel.report.grid import Grid, grid
from perfmodel.report.wording import percent


def convergence_grid(verdict: ConvergenceVerdict) -> Grid:
    """Errors by how much of each series was fitted, with baselines beside them."""
    return grid(
        "Samples to target, predicted over published",
        text=("Fitted",),
        numbers=(
            "Series",
            "Predicted",
            "MAPE",
            "By task",
            "Bias",
            "Worst",
            "Covered",
            "Constant",
            "Linear",
        ),
        rows=[
            (
                entry.split,
                str(entry.num_series),
                str(entry.num_predictions),
                percent(entry.mape),
                percent(entry.mape_of_benchmarks),
                percent(entry.bias, signed=True),
                percent(entry.worst),
                percent(entry.coverage),
                percent(entry.mape_constant),
                percent(entry.mape_linear),
            )
            for entry in verdict.summaries
        ],
        caption="Constant, linear: MAPE of baselines. Covered: by the 90 % interval.",
    )


def convergence_lines(verdict: ConvergenceVerdict) -> list[str]:
    """What was judged, and whether it held."""
    word = "PASSED" if verdict.passed else "FAILED"
    return [
        (
            f"{word} on {verdict.judged_split}: MAPE at most {percent(verdict.mape_at_most)}, "
            f"coverage at least {percent(verdict.coverage_at_least)}"
        )
    ]
