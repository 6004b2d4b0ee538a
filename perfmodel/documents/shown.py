"""What an answer looks like in a notebook. The report, which knows, builds on documents: it is loaded by name."""

import importlib
from typing import Any


class Shown:
    """Prints as on the command line; a notebook shows the tables."""

    def __str__(self) -> str:
        return str(_notebook().text(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: print it, or see its fields>"

    def _repr_html_(self) -> str:
        return str(_notebook().html(self))


class ShownAsFrame(Shown):
    """The same; its points are rows of a data frame and a curve."""

    def to_frame(self) -> Any:
        """A ``pandas.DataFrame`` with a row per point, SI units in its headings; needs pandas."""
        return _notebook().frame(self)

    def plot(self) -> Any:
        """A ``matplotlib`` figure: speed-up and efficiency over devices."""
        return _notebook().figure(self)


def _notebook() -> Any:
    return importlib.import_module("perfmodel.report.notebook")
