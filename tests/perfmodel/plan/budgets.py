"""A budget whose sums can be done by hand."""

import datetime as dt
from pathlib import Path

TODAY = dt.date(2026, 11, 21)

REST = 'currency = "EUR", date = 2026-11-01, region = "Mars", term = "none", source = "made up"'
BUDGET = f"""
utilisation = 0.5

[buy]
devices = 10
device_price = {{ value = 20000, unit = "per device", {REST} }}
spare_fraction = 0.1
network_price = {{ value = 10000, unit = "once", {REST} }}
lifetime_years = 4
residual_fraction = 0.2
power_per_device_w = 1000
idle_power_fraction = 0.25
pue = 1.5
energy_price = {{ value = 0.2, unit = "per kWh", {REST} }}
staff_price = {{ value = 5000, unit = "per year", {REST} }}
upkeep_fraction = 0.05

[[rent]]
name = "on demand"
kind = "on-demand"
price = {{ value = 2.0, unit = "per device-hour", {REST} }}

[[rent]]
name = "spot"
kind = "spot"
price = {{ value = 0.8, unit = "per device-hour", {REST} }}
effective_fraction = 0.8

[[rent]]
name = "reserved"
kind = "reserved"
price = {{ value = 1.0, unit = "per device-hour", {REST} }}

[egress]
gigabytes_per_year = 1000
price = {{ value = 0.1, unit = "per GB", {REST} }}
"""


def written(folder: Path) -> Path:
    path = folder / "budget.toml"
    path.write_text(BUDGET, encoding="utf-8")
    return path
