"""Logs of nccl-tests as text, of any rates."""

from collections.abc import Mapping

from perfmodel.units import KIB, MIB

SIZES = (KIB, 32 * KIB, MIB, 16 * MIB, 128 * MIB, 1024 * MIB)
H100 = "NVIDIA H100 80GB HBM3"
#: Eight H100 with NVSwitch but without sums in the switch, as published. [us]
HEALTHY_US = dict(zip(SIZES, (30.0, 41.0, 47.0, 150.0, 700.0, 5200.0), strict=True))


def nccl_log(
    time_us: Mapping[int, float] = HEALTHY_US,
    *,
    nodes: int = 1,
    per_node: int = 8,
    device: str = H100,
    collective: str = "all_reduce",
) -> str:
    """The text of one all-reduce, or of a collective whose program the log names."""
    ranks = nodes * per_node
    named = f"# Collective test starting: {collective.replace('_to_', 'to')}_perf"
    lines = ["# nccl-tests version 2.17.0", named, "# nThread 1 nGpus 1"]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid {rank + 10} on node{rank // per_node} device {rank % per_node} "
        f"[0x0{rank % per_node}] {device}"
        for rank in range(ranks)
    ]
    lines += [
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)",
    ]
    factor = (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks
    for size, us in time_us.items():
        rate = size / us / 1e3
        lines.append(
            f"{size:12} {size // 4:12} float sum -1 {us:.2f} {rate:.2f} {rate * factor:.2f} 0"
        )
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.0", ""])
