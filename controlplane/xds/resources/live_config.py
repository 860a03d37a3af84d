"""The live configuration of Tidevoy's module: settings, switches, and the state of each node.

It is the configuration of a listener filter of the module, sent by extension config discovery (ECDS). The
module reads it on Envoy's main thread and passes it to the workers as a whole
(docs/internals/decisions/0014-node-state-by-ecds.md). Endpoints (EDS) tell Envoy which nodes get new
sessions; the live configuration tells the module from which nodes existing sessions migrate.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from envoy.config.core.v3 import extension_pb2

from controlplane.config.capture import CaptureSettings
from controlplane.config.settings import Settings
from controlplane.config.statements import StatementSettings
from controlplane.model.capture import Capture
from controlplane.model.limits import LimitPlan
from controlplane.model.module_switches import NO_OVERRIDES, SwitchOverrides
from controlplane.model.plan import NodePlan, Plan
from controlplane.model.rules import effective_rules
from controlplane.version import VERSION
from controlplane.xds.protobuf_encoding import serialise
from controlplane.xds.resources import dynamic_module
from controlplane.xds.resources.profile import LIVE_SETTINGS_FEATURE, MODULE_FEATURES, STATEMENTS_FEATURE

_BITS_TO_WHITESPACE = str.maketrans("01", " \t")


def render_nodes(plan: Plan, nodes: Iterable[NodePlan]) -> str:
    """Return these nodes as the items of a JSON array."""
    # The text of each node is cached, because most nodes do not change from one plan to the next.
    return ",".join(_node_info_of(node, plan) for node in nodes)


def render_live_config(
    plan: Plan,
    nodes: str,
    settings: Settings,
    group: str,
    overrides: SwitchOverrides = NO_OVERRIDES,
    features: Collection[str] = MODULE_FEATURES,
    capturing_envoy: str = "",
) -> str:
    """Return the live configuration of a group as JSON. `nodes`: its nodes, from `render_nodes`.

    `overrides` and `features` are those of the Envoys that get it, and of their modules. Earlier modules of
    this release reject a configuration with keys that they do not know. `capturing_envoy`: the Envoy that
    gets it, if it captures traffic.
    """
    sql = settings.sql
    limits: dict[str, Any] = {
        "group": group,
        "login_timeout": sql.login_timeout,
        "idle_timeout": sql.idle_timeout,
    }
    switches = asdict(overrides.apply_to(settings.module.switches))
    limits |= {part: False for part, is_on in switches.items() if not is_on}
    rules = ""
    if LIVE_SETTINGS_FEATURE in features:
        limits |= _new_keys(plan, settings, overrides)
    if STATEMENTS_FEATURE in features:
        limits |= _statement_keys(settings.statements)
        rules = _rules(plan, settings)
    if capturing_envoy and plan.capture is not None and settings.capture.directory is not None:
        limits["capture"] = _capture(plan.capture, settings.capture, capturing_envoy)
    published = f'{json.dumps(limits)[:-1]}{rules}, "nodes": [{nodes}]}}'
    return f'{{"version": {json.dumps(VERSION)}, "published": {published}}}'


def _new_keys(plan: Plan, settings: Settings, overrides: SwitchOverrides) -> dict[str, Any]:
    """Return the keys that only modules know that apply settings while they run."""
    sql, end = settings.sql, settings.end
    keys: dict[str, Any] = {
        "wait_for_node": sql.wait_for_node,
        "max_waiting_logins": sql.max_waiting_logins,
        "end_wait": end.wait,
        "end_timeout": end.timeout,
        "ready": overrides.is_ready,
        "drain": overrides.is_drain_requested,
        # Sorted, because a saved or shared plan is, too.
        "limits": [_limit_of(plan.limits[name]) for name in sorted(plan.limits)],
        "settings": dynamic_module.live_settings(settings),
    }
    if sql.login_log.path is not None:
        keys["login_log"] = sql.login_log.model_dump(mode="json")
    return keys


def _statement_keys(statements: StatementSettings) -> dict[str, Any]:
    """Return the keys that only modules know that observe statements, but for the rules."""
    keys: dict[str, Any] = {"max_held_bytes": statements.max_held_bytes}
    if statements.is_on:
        keys["statements"] = {"max_rows": statements.max_rows, "interval": statements.interval}
    if statements.log.path is not None:
        keys["statement_log"] = statements.log.model_dump(mode="json")
    return keys


def _capture(capture: Capture, settings: CaptureSettings, envoy: str) -> dict[str, Any]:
    return {
        "name": capture.name,
        "directory": str(settings.directory),
        "until": capture.until,
        "users": list(capture.users),
        "groups": list(capture.groups),
        "max_bytes": settings.max_bytes,
        "envoy": envoy,
    }


def _rules(plan: Plan, settings: Settings) -> str:
    """Return the rules for statements as a further key; empty if there are none."""
    texts = [rule.text for _, rule in effective_rules(plan.rules, settings.statements.rule_list)]
    return f', "rules": [{",".join(texts)}]' if texts else ""


def build_extension_config(name: str, text: str) -> bytes:
    """Return the serialised `core.v3.TypedExtensionConfig` of this name."""
    return serialise(
        extension_pb2.TypedExtensionConfig(name=name, typed_config=dynamic_module.pack_live_config(text))
    )


def with_random_padding(text: str) -> str:
    """Append 64 random white space characters to a JSON text, so that its bytes are unique."""
    return text + f"{secrets.randbits(64):064b}".translate(_BITS_TO_WHITESPACE)


def _limit_of(limit: LimitPlan) -> dict[str, Any]:
    """Return the limit and its quotas as the module reads them. Unlimited values are left out."""
    rule = limit.rule
    fields: dict[str, Any] = {"rule": rule.name, "user": rule.user, "network": rule.network}
    if rule.max_connections:
        fields |= {
            "limit": rule.max_connections,
            "quotas": dict(sorted(limit.quotas.items())),
            "unlisted": limit.unlisted,
        }
    if rule.max_new_per_second:
        rate = rule.max_new_per_second / limit.envoys
        fields |= {"rate_limit": rule.max_new_per_second, "rate": rate}
    return {key: value for key, value in fields.items() if value is not None}


def _node_info_of(node: NodePlan, plan: Plan) -> str:
    assert node.endpoint is not None
    address, rebalance = node.node.address, plan.rebalance
    return _node_info(
        node.endpoint,
        address,
        node.state.value,
        node.version,
        node.terminate_sessions,
        _format_round(rebalance.round, rebalance.outgoing.get(address)),
        _format_round(rebalance.round, rebalance.incoming.get(address)),
    )


def _format_round(round_number: int, sessions: Mapping[str, int] | None) -> str:
    """Format how many sessions each Envoy process moves in a round: `ROUND:INSTANCE=COUNT,...`, or empty."""
    if not sessions:
        return ""
    return f"{round_number}:" + ",".join(f"{envoy}={count}" for envoy, count in sorted(sessions.items()))


@lru_cache(maxsize=32_768)
def _node_info(
    endpoint: str,
    address: str,
    state: str,
    version: str,
    terminate_sessions: bool,
    outgoing: str,
    incoming: str,
) -> str:
    info: dict[str, Any] = {"endpoint": endpoint, "address": address, "state": state}
    optional = {"version": version, "close": terminate_sessions, "moves": outgoing, "wants": incoming}
    return json.dumps(info | {key: value for key, value in optional.items() if value}, separators=(",", ":"))
