"""The normal distribution, as far as intervals need it; light to import."""

from statistics import NormalDist
from typing import Final

#: Standard deviations to either side that hold the middle 90 %.
DEVIATE_90: Final = NormalDist().inv_cdf(0.95)
