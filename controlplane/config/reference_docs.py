"""Makes `docs/reference/configuration.md` from the settings: `python -m controlplane.config.reference_docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from controlplane.config import schema
from controlplane.config.schema import format_path
from controlplane.config.settings import Settings

_INTRODUCTION = """\
# Configuration

<!-- Made by: python -m controlplane.config.reference_docs > docs/reference/configuration.md -->

Tidevoy reads one YAML file (`tidevoy serve --config FILE`) and then environment variables, which win. Without
both it runs on the defaults below. `tidevoy config check FILE` says whether a file can be used, and
`tidevoy config show` what is in force.

* A variable has the name of its setting in capitals behind `TIDEVOY_`, with two underscores between the
  levels: `TIDEVOY_PD__URLS` is `pd.urls`. A list is written with commas or as JSON; a mapping, and a list of
  mappings, as JSON. A variable with an empty value counts as not set. `TIDEVOY_URL` and `TIDEVOY_CONFIG` are
  the command line's.
* A key without a value means its default. Unknown keys and unknown `TIDEVOY_` variables are refused, but for
  those that Kubernetes sets for a Service named `tidevoy`.
* The YAML is that of version 1.2, where `off` and `no` are text. IPv6 addresses need quotes: `"[::]:6000"`.
  Relative paths count from the directory that the control plane is started in.
* Each setting that cannot be used is one line on standard error, and the exit code is 2:

  ```text
  tidevoy.yaml:7: health.sql.rise: 0 is too small; write a whole number from 1 to 100
  ```

"Takes effect" says what a change needs:

* **now**: a reload, by SIGHUP or `POST /v1/config/reload`. One that cannot be used changes nothing.
* **new envoys**: an Envoy gets it once, when it starts; until then it runs on with the old value.
* **restart**: the control plane has to be started again. Envoys go on serving meanwhile.
"""


def render() -> str:
    """The whole page, Markdown."""
    top = "\n## Top level\n\n" + "".join(_render_table(Settings))
    return _INTRODUCTION + top + "".join(_render_subsections(Settings, ()))


def _render_subsections(model: type[BaseModel], parent: schema.SettingPath) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = schema.section_model(field) or _item_section(field)
        if inner is not None:
            path = (*parent, name) if schema.section_model(field) else (*parent, name, "*")
            yield from _render_section(inner, path, field.description or "")
            yield from _render_subsections(inner, path)


def _render_section(model: type[BaseModel], path: schema.SettingPath, meaning: str) -> Iterator[str]:
    if all(schema.section_model(field) for field in model.model_fields.values()):
        return
    about = " ".join((model.__doc__ or "").split())
    yield f"\n## `{format_path(path)}`\n\n{f'{meaning} {about}' if len(path) > 1 else about}\n\n"
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
                field.description or "",
            )
            yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


def _item_section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that the items of a list, or the values of a mapping, are, if they are."""
    member = schema.item_field(field) or schema.mapping_value_field(field)
    return schema.section_model(member) if member is not None else None


def _format_default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    value: Any = field.default
    if value is None or value in ((), {}):
        return "(none)"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.stdout.write(render())
