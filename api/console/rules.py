"""The Rules page: the rules for statements, and how often they applied."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.console import pages, table
from api.console.errors import ConsoleRoute
from api.dependencies import EngineDep
from controlplane.model.views import RuleView

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_MAX_RULES = 200  # on the page; the search finds the others


@router.get("/console/rules")
async def show_rules(request: Request, engine: EngineDep) -> Response:
    """Show the rules in the order in which they apply. `text` filters by text."""
    text = table.read_search_text(request.query_params)
    rules = engine.cluster.rules()
    matching = [view for view in rules if _matches(view, text)]
    values = {"rules": matching[:_MAX_RULES], "match_count": len(matching), "total": len(rules), "text": text}
    link = table.search_link("/console/rules", text=text)
    return pages.live_page(request, "rules.html", "rules", link, values)


def _matches(view: RuleView, text: str) -> bool:
    return table.contains_text(text, (view.rule.text, view.source.value, view.action.value))
