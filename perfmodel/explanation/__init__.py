"""Why n devices are not n times as fast, and what to try."""

from perfmodel.explanation.losses import Explanation, Loss, explain
from perfmodel.explanation.remedies import Change, ChangeKind
from perfmodel.explanation.removals import LossCause

__all__ = ("Change", "ChangeKind", "Explanation", "Loss", "LossCause", "explain")
