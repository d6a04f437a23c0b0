# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook: a page that stands for a file elsewhere in the repository, and links between the two.

The pages are read in the repository and on the site, and their links must work in both places.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Page below docs/ -> the file whose text it shows; in the repository the page holds a link to that file alone.
SHOWN = {
    "contract.md": "vllm_omni/hf_numerics/README.md",
    "contributing/index.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
_PAGES = {"README.md": "index.md", **{source: page for page, source in SHOWN.items()}}
# Relative targets only: no scheme, no bare anchor.
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def resolve(target: str, page: str) -> str:
    """The link target as the site needs it.

    Args:
        target: as written in the repository, relative to the file that the link stands in.
        page: path below ``docs/`` of the page that shows the link.
    """
    folder = posixpath.dirname(SHOWN.get(page, f"docs/{page}"))
    in_repository = posixpath.normpath(posixpath.join(folder, target))
    on_site = _PAGES.get(in_repository, in_repository.removeprefix("docs/"))
    return posixpath.relpath(on_site, posixpath.dirname(page) or ".")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the shown file in the page's place and make its links the site's."""
    name = page.file.src_uri
    if name in SHOWN:
        markdown = (ROOT / SHOWN[name]).read_text(encoding="utf-8")
    return _LINK.sub(lambda link: resolve(link[1], name), markdown)
