"""The commands of an installation page (docs/install)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

DEFAULT_PORTS = {"sql": 6000, "api": 3080, "xds": 18000, "admin_a": 9901, "admin_b": 9902}
"""The ports in the commands of the pages."""

_PAGES = Path(__file__).parents[3] / "docs/install"


def page_blocks(page: str, heading: str | None = None) -> list[str]:
    """Return the blocks of shell commands on a page, such as `pip.md`, or below one of its headings."""
    text = (_PAGES / page).read_text()
    if heading is not None:
        (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    blocks: list[str] = re.findall(r"^ *```sh\n(.*?)^ *```$", text, re.M | re.S)
    assert blocks, f"{page}: {heading}"
    return blocks


def page_lines(page: str, heading: str) -> list[str]:
    """Return the lines of the only block below a heading of a page, where each line is a command."""
    (block,) = page_blocks(page, heading)
    return block.splitlines()


def replace_ports(text: str, ports: Mapping[str, int]) -> str:
    """Return commands of a page with other ports. `ports` has the names of DEFAULT_PORTS."""
    for name, port in ports.items():
        text = re.sub(rf"\b{DEFAULT_PORTS[name]}\b", str(port), text)
    return text
