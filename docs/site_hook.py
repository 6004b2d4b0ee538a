"""Takes the files that the pages name outside ``docs`` into the site, below ``project/``.

On disk a page links to ``../DESIGN.md``. A site cannot lead out of its root, so the link becomes
``project/DESIGN.md``; links of those pages back into ``docs`` are turned the other way.
"""

import re
from typing import Any, Final

from mkdocs.structure.files import File, Files

#: Pages and sources outside ``docs`` that pages link to.
_OUTSIDE: Final = (
    "README.md",
    "DESIGN.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE",
    "perfmodel/model.py",
    "perfmodel/diagnosis/odds.py",
)


def on_files(files: Files, config: Any) -> Files:
    """The files of ``docs`` and those outside."""
    for path in _OUTSIDE:
        files.append(File.generated(config, f"project/{path}", abs_src_path=path))
    return files


def on_page_markdown(markdown: str, page: Any, **_rest: Any) -> str:
    """The page with its links as they are inside the site."""
    if page.file.src_uri.startswith("project/"):
        return re.sub(r"\]\(docs/", "](../", markdown)
    depth = page.file.src_uri.count("/")
    return markdown.replace(f"]({'../' * (depth + 1)}", f"]({'../' * depth}project/")
