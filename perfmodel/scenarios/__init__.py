"""What would change if a field of the machine, the workload or the strategy were another."""

from perfmodel.scenarios.compare import compare_scenarios, with_saved
from perfmodel.scenarios.fields import FIELDS, changed, scenarios_of
from perfmodel.scenarios.scenario import Scenario

__all__ = ("FIELDS", "Scenario", "changed", "compare_scenarios", "scenarios_of", "with_saved")
