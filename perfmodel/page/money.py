"""What the work costs at a price per device-hour."""

from perfmodel.documents.page import Spending, Spent
from perfmodel.documents.prediction import Interval
from perfmodel.units import HOUR_S


def spent(spending: Spending | None, throughput: Interval, *, devices: int) -> Spent | None:
    """Hours, device-hours and money for all the work at a steady rate; None if no price is given.

    Parameters
    ----------
    throughput
        Samples or tokens of all devices. [1/s]
    """
    if spending is None:
        return None
    hours = spending.work / throughput / HOUR_S
    device_hours = hours * devices
    return Spent(
        hours=hours,
        device_hours=device_hours,
        cost=device_hours * spending.per_device_hour,
        currency=spending.currency,
    )
