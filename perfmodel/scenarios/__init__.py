"""What would change if a field of the machine, the workload or the strategy were another."""

from perfmodel.scenarios.compare import (
    UNMEASURED,
    compare_scenarios,
    contrast_of_draws,
    predictor_of,
    with_assumed,
    with_saved,
)
from perfmodel.scenarios.fields import FIELDS, changed, scenarios_of
from perfmodel.scenarios.hardware_fields import in_cluster, usable_links
from perfmodel.scenarios.scenario import Scenario

__all__ = (
    "FIELDS",
    "UNMEASURED",
    "Scenario",
    "changed",
    "compare_scenarios",
    "contrast_of_draws",
    "in_cluster",
    "predictor_of",
    "scenarios_of",
    "usable_links",
    "with_assumed",
    "with_saved",
)
