"""Update the tables in `docs/reference/configuration.md`: `python -m controlplane.config.reference_docs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from controlplane.config import schema
from controlplane.config.schema import format_path
from controlplane.config.settings import Settings

PAGE = Path("docs/reference/configuration.md")
_FIRST_HEADING = "## Top level\n"


def render(page: str) -> str:
    """Return the page in Markdown, with new tables below its introduction."""
    introduction = page.partition(_FIRST_HEADING)[0]
    tables = [*_render_table(Settings), *_render_subsections(Settings, ())]
    return f"{introduction}{_FIRST_HEADING}\n{''.join(tables)}"


def _render_subsections(model: type[BaseModel], parent: schema.SettingPath) -> Iterator[str]:
    for name, field in model.model_fields.items():
        element = schema.element_field(field)
        path = (*parent, name) if element is None else (*parent, name, "*")
        if inner := schema.section_model(element or field):
            yield from _render_section(inner, path, field.description or "")
            yield from _render_subsections(inner, path)


def _render_section(model: type[BaseModel], path: schema.SettingPath, meaning: str) -> Iterator[str]:
    if all(schema.section_model(field) for field in model.model_fields.values()):
        return
    description = " ".join((model.__doc__ or "").split())
    yield f"\n## `{format_path(path)}`\n\n{f'{meaning} {description}' if len(path) > 1 else description}\n\n"
    yield from _render_table(model)


def _render_table(model: type[BaseModel]) -> Iterator[str]:
    yield "| key | default | takes | takes effect | meaning |\n|---|---|---|---|---|\n"
    for name, field in model.model_fields.items():
        if schema.section_model(field) is None:
            cells = (
                f"`{name}`",
                _format_default(field),
                schema.describe_expected(field),
                schema.takes_effect(field),
                " ".join((field.description or "").split()),
            )
            yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


def _format_default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    value: Any = field.default
    if value is None or value in ((), {}):
        return "(none)"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
