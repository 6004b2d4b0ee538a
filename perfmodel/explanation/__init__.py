"""Why n devices are not n times as fast, and what to try."""

from perfmodel.explanation.losses import Explanation, Loss, explain
from perfmodel.explanation.remedies import Change, ChangeKind
from perfmodel.explanation.removals import LossCause
from perfmodel.explanation.standing import Standing, Verdict, standing

__all__ = (
    "Change",
    "ChangeKind",
    "Explanation",
    "Loss",
    "LossCause",
    "Standing",
    "Verdict",
    "explain",
    "standing",
)
