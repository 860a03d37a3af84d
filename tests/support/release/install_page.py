"""The commands of an installation page (docs/install)."""

from __future__ import annotations

import re
from pathlib import Path

_PAGES = Path(__file__).parents[3] / "docs/install"


def page_blocks(page: str, heading: str) -> list[str]:
    """Return the blocks of shell commands below a heading of a page, such as `pip.md`."""
    text = (_PAGES / page).read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    blocks: list[str] = re.findall(r"^ *```sh\n(.*?)^ *```$", section, re.M | re.S)
    assert blocks, f"{page}: {heading}"
    return blocks


def page_lines(page: str, heading: str) -> list[str]:
    """Return the lines of the only block below a heading of a page, where each line is a command."""
    (block,) = page_blocks(page, heading)
    return block.splitlines()
