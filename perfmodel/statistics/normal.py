"""The normal distribution, as far as intervals need it; light to import."""

import math
from statistics import NormalDist
from typing import Final

#: Standard deviations to either side that hold the middle 90 %.
DEVIATE_90: Final = NormalDist().inv_cdf(0.95)
#: Standard error of the median of many values over that of their mean.
MEDIAN_OVER_MEAN: Final = math.sqrt(math.pi / 2)
