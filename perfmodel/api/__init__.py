"""What ``import perfmodel as pm`` offers: the use cases of the command line as functions.

Every function takes and returns the documents that the command line reads and writes, so that a
number in a notebook and one in a terminal come from the same lines.
"""

from perfmodel.api.answers import (
    diagnose,
    explain,
    memory,
    predict,
    read_prediction,
    read_profile,
    record,
    trace,
    whatif,
    with_nodes_of,
)
from perfmodel.api.decisions import (
    acceptance_terms,
    judge,
    plan_options,
    predict_large_model,
    search,
    write_run,
)
from perfmodel.engine.job import FailureCause, Job
from perfmodel.files import unsealed
from perfmodel.plan.goodput import compare_costs, goodput
from perfmodel.plan.profile_diff import compare_profiles

__all__ = (
    "FailureCause", "Job", "acceptance_terms", "compare_costs", "compare_profiles", "diagnose",
    "explain", "goodput", "judge", "memory", "plan_options", "predict", "predict_large_model",
    "read_prediction", "read_profile", "record", "search", "trace", "unsealed", "whatif",
    "with_nodes_of", "write_run",
)  # fmt: skip
