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


def on_page_content(html: str, **_rest: Any) -> str:
    """Tables that the keyboard scrolls; a heading without a word is no heading."""
    html = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)
    html = html.replace("<table>", '<div class="scroll" tabindex="0"><table class="data">')
    return html.replace("</table>", "</table></div>")


def on_post_page(output: str, **_rest: Any) -> str:
    """The theme hides the switches of its colours; the keyboard must not find them."""
    return output.replace('<input class="md-option"', '<input class="md-option" tabindex="-1"')
