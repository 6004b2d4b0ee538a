"""The archive of a campaign: packed where a device was borrowed, read at home.

Who reads one trusts nobody: sizes, names and kinds of members are checked before anything is written.
"""

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from perfmodel.documents.base import write_atomically
from perfmodel.documents.verdicts import CampaignDocument
from perfmodel.errors import InvalidDocument, PerfModelError, why
from perfmodel.files import MOST_BYTES, MOST_LOG_BYTES, Unreadable, read_bytes
from perfmodel.units import Bytes, format_bytes

ARCHIVE: Final = "campaign.tar.gz"
CAMPAIGN: Final = "campaign.json"
MOST_PACKED_BYTES: Final[Bytes] = 12_000_000
#: What an archive holds. Raw operators of judged models are the first to stay behind.
_PACKED: Final = (
    CAMPAIGN,
    *("smoke.json", "*.txt", "*/clocks.csv"),
    *("*/plan.json", "*/observations.jsonl", "*/profile.json", "*/validation.json"),
    *("*/models-*.json", "*/in-place/plan.json", "*/in-place/observations.jsonl"),
)
_MOST_MEMBERS: Final = 200
_MOST_PARTS: Final = 4


def pack(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Write the archive of a campaign into its folder; return it, and the names of what was too large."""
    path, left_out = folder / ARCHIVE, list[str]()
    files = sorted({file for pattern in _PACKED for file in folder.glob(pattern)})
    try:
        while True:
            content = _packed(folder, files)
            if len(content) <= MOST_PACKED_BYTES or not files:
                write_atomically(path, content)
                return path, tuple(left_out)
            # What judges comes last.
            first = max(files, key=lambda file: ("in-place" in file.parts, file.stat().st_size))
            files.remove(first)
            left_out.append(str(first.relative_to(folder)))
    except OSError as error:
        raise PerfModelError(f"{path}: cannot be written: {why(error)}") from error


def _packed(folder: Path, files: Sequence[Path]) -> bytes:
    """Content of the archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for file in files:
            archive.add(file, arcname=str(file.relative_to(folder)), recursive=False)
    return content.getvalue()


def unpack(path: Path, into: Path) -> CampaignDocument:
    """Write the members of an archive into an empty folder; return what the campaign says of itself.

    Raises
    ------
    InvalidDocument
        If the archive is missing, cut short, too large, of another version, or holds what none of ours does.
    """
    try:
        content = read_bytes(path, most=MOST_LOG_BYTES)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for number, member in enumerate(archive):
                _refuse_strange(member, number)
                file = archive.extractfile(member)
                assert file is not None  # it is a regular file
                target = into.joinpath(*PurePosixPath(member.name).parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as written:
                    written.write(file.read())
    except FileExistsError as error:
        raise InvalidDocument(f"{path}: must hold every member once, got one twice") from error
    except (OSError, ValueError) as error:
        raise InvalidDocument(f"{path}: campaign cannot be read: {why(error)}") from error
    except (tarfile.TarError, EOFError) as error:
        raise InvalidDocument(
            f"{path}: must be a whole archive of perfmodel calibrate --campaign, got {error}; copy it again"
        ) from error
    if not (into / CAMPAIGN).exists():
        raise InvalidDocument(
            f"{path}: must hold {CAMPAIGN}, got none; perfmodel calibrate --campaign writes one"
        )
    try:
        return CampaignDocument.read(into / CAMPAIGN)
    except InvalidDocument as error:
        # The folder is a temporary one, which no user knows.
        raise InvalidDocument(str(error).replace(f"{into}/", f"{path}: ")) from error


def _refuse_strange(member: tarfile.TarInfo, number: int) -> None:
    """Refuse links, devices, names that leave the folder, and whatever is too large."""
    name = PurePosixPath(member.name)
    if number >= _MOST_MEMBERS:
        raise Unreadable(f"it must have at most {_MOST_MEMBERS} members, got more")
    if not member.isreg() or member.issparse():
        raise Unreadable(f"every member must be a regular file, got {member.name!r:.60}")
    if not any(name.match(pattern) for pattern in _PACKED) or (
        name.is_absolute() or ".." in name.parts or len(name.parts) > _MOST_PARTS
    ):
        raise Unreadable(f"it must hold files of a campaign alone, got {member.name!r:.60}")
    if member.size > MOST_BYTES:
        raise Unreadable(f"a member must have at most {format_bytes(MOST_BYTES)}, got more")
