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
    hours = Interval(
        p5=spending.work / throughput.p95 / HOUR_S,
        p50=spending.work / throughput.p50 / HOUR_S,
        p95=spending.work / throughput.p5 / HOUR_S,
    )
    device_hours = _times(hours, devices)
    return Spent(
        hours=hours,
        device_hours=device_hours,
        cost=_times(device_hours, spending.per_device_hour),
        currency=spending.currency,
    )


def _times(quantity: Interval, factor: float) -> Interval:
    return Interval(p5=quantity.p5 * factor, p50=quantity.p50 * factor, p95=quantity.p95 * factor)
