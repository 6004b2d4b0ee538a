"""Plans for the synthetic machines."""

import datetime as dt
from pathlib import Path

from perfmodel.documents.plan import PlanFile, read_plan
from tests.perfmodel.profiles import Machine, as_file, profile

TODAY = dt.date(2026, 11, 21)
REST = 'currency = "EUR", date = 2026-11-01, region = "Mars", term = "none", source = "made up"'
PLAN = f"""
[work]
workload = "heavy"
samples = 8e8
scaling = "weak"

[limits]
deadline = 2026-12-21
budget = 5000
power_kw = 20

[failures]
mtbf_device_hours = 2000
checkpoint_s = 30
detection_s = 60
restart_s = 240

[[option]]
name = "slow"
profile = "slow.json"
counts = {{ first = 1, last = 16 }}
batches = [4, 16]
price = {{ value = 0.5, unit = "per device-hour", {REST} }}
power_per_device_w = 500
pue = 1.2

[[option]]
name = "fast"
profile = "fast.json"
counts = [1, 2, 4, 8, 16, 32]
batches = [16]
price = {{ value = 2.5, unit = "per device-hour", {REST} }}
energy_price = {{ value = 0.2, unit = "per kWh", {REST} }}
setup_price = {{ value = 100, unit = "once", {REST} }}
power_per_device_w = 1000
"""
#: Of a large model: layouts that are searched, and a layout that is told.
LARGE = f"""
[work]
model = "gpt-1.3b"
tokens = 1e10
sequence_length = 1024
scaling = "strong"

[limits]
deadline = 2027-12-21

[[option]]
name = "free"
profile = "inferred.json"
counts = [4, 8, 16]
batches = [64]
device_memory = "80GiB"
price = {{ value = 2.0, unit = "per device-hour", {REST} }}

[[option]]
name = "fixed"
profile = "inferred.json"
counts = [4, 8, 16]
batches = [64]
device_memory = "80GiB"
layout = "tp=2 micro_batch=2"
price = {{ value = 2.0, unit = "per device-hour", {REST} }}
"""


def written(folder: Path, text: str = PLAN) -> Path:
    """A plan file with its two machines beside it."""
    common = {"noise": (0.95, 1.0, 1.0, 1.1), "residual": 0.04, "relative_error": 0.03}
    as_file(profile(Machine(**common))).write(folder / "slow.json")  # type: ignore[arg-type]
    as_file(profile(Machine(time_scale=0.25, **common))).write(folder / "fast.json")  # type: ignore[arg-type]
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def plan_of(folder: Path, text: str = PLAN) -> PlanFile:
    """The same as a document."""
    return read_plan(written(folder, text), today=TODAY)
