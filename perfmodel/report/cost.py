"""Money as tables and sentences."""

from perfmodel.documents.cost import CostDocument, CostOption
from perfmodel.report.grid import Grid, grid
from perfmodel.report.wording import percent


def cost_grid(document: CostDocument) -> Grid:
    """One way of paying per row, the cheapest first."""
    budget = document.budget
    return grid(
        f"{budget.buy.devices} devices at {percent(budget.utilisation)} utilisation",
        text=("Option",),
        numbers=(
            f"{budget.currency}\nper year",
            f"{budget.currency} per useful\ndevice-hour",
            "Buying pays at\nutilisation",
        ),
        rows=[
            (
                option.cost.name,
                f"{option.yearly:,.0f}",
                f"{option.per_useful_device_hour:.3f}",
                _crossover(option),
            )
            for option in document.options
        ],
    )


def cost_lines(document: CostDocument) -> list[str]:
    """What buying is made of, where the prices come from, and which are stale."""
    budget, items = document.budget, document.items
    parts = {
        "depreciation": items.depreciation,
        "energy": items.idle_energy + items.working_energy * budget.utilisation,
        "staff": items.staff,
        "upkeep": items.upkeep,
    }
    listed = ", ".join(f"{name} {value:,.0f}" for name, value in parts.items())
    return [
        f"Buying: {items.capital:,.0f} {budget.currency} at the start; per year {listed}",
        *(
            f"price: {name}: {price.value:,.10g} {price.currency} {price.unit.value}, {price.date}, "
            f"{price.region}, term {price.term}, {price.source}"
            for name, price in budget.prices().items()
        ),
        *(f"warning: {warning}" for warning in document.warnings),
    ]


def _crossover(option: CostOption) -> str:
    if option.cost.name == "buy":
        return "-"
    pays = option.buying_pays
    if pays is None:
        return "never"
    if pays.at_least > 0:
        return f"from {percent(pays.at_least)}"
    return "always" if pays.at_most >= 1 else f"up to {percent(pays.at_most)}"
