"""What NCCL says of its choices, in the words of old and new versions."""

from pathlib import Path

from calibrate.smoke import choices, logged

LOG = """\
node-1:397:397 [0] NCCL INFO AllGather: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008
node-1:397:397 [0] NCCL INFO 4096 Bytes -> Algo 0 proto 0 time 12.5
NCCL INFO AllReduce: 8388608 Bytes -> Algo Ring proto LL128 channel{Lo..Hi}={0..15}
NCCL INFO AllReduce: 268435456 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}
NCCL INFO AllReduce: 1024 Bytes -> Algo 99 proto 7 time 1
NCCL INFO Bytes -> Algo
"""


def test_algorithm_and_protocol_of_each_size_are_read() -> None:
    assert choices(LOG) == {
        37756928: "RING SIMPLE",
        4096: "TREE LL",
        8388608: "RING LL128",
        268435456: "NVLS SIMPLE",
        1024: "99 7",
    }


def test_who_logs_already_is_left_alone(tmp_path: Path) -> None:
    path, own = tmp_path / "nccl.txt", {"NCCL_DEBUG": "WARN"}
    logged(own, path)
    assert own == {"NCCL_DEBUG": "WARN"}
    environ: dict[str, str] = {}
    logged(environ, path)
    assert environ["NCCL_DEBUG_FILE"] == str(path)
    assert "TUNING" in environ["NCCL_DEBUG_SUBSYS"]
