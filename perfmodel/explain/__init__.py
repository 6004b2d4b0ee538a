"""Why n devices are not n times as fast, and what to try."""

from perfmodel.explain.explanation import Explanation, Loss, explain
from perfmodel.explain.remedies import Change, ChangeKind
from perfmodel.explain.removals import LossCause

__all__ = ("Change", "ChangeKind", "Explanation", "Loss", "LossCause", "explain")
