"""`/v1/rules`: rules for statements are listed, set, checked, and sent to Envoys."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.config.statements import StatementSettings
from controlplane.version import VERSION
from sandbox.ports import Ports
from tests.support.controlplane.api_server import (
    ApiServer,
    problem_kind,
    run_api_server,
    settings,
    stored_events,
)
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.controlplane.rule_engine import replace_rule_engine, require_rule_engine
from tests.support.waiting import wait_until

BLOCK = {"name": "no-sleep", "pattern": r"sleep\(", "block": {}}
LIMIT = {"name": "reports", "user": ["report"], "limit": {"concurrent": 3}}
OF_SETTINGS = {"name": "old-table", "rewrite": {"tables": {"orders": "orders_v2"}}}


@pytest.fixture
async def server(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    require_rule_engine()
    async with run_api_server(settings(tmp_path, ports, statements={"rules": [OF_SETTINGS]})) as server:
        yield server


def names(answer: Any) -> list[str]:
    return [rule["name"] for rule in answer.raise_for_status().json()["rules"]]


async def set_rules(server: ApiServer, *rules: dict[str, Any]) -> Any:
    return await server.http.put("/v1/rules", json={"rules": rules})


async def reload_rules(server: ApiServer, *rules: dict[str, Any]) -> Any:
    """Reload the settings with these rules."""
    statements = StatementSettings.model_validate({"rules": rules})
    server.next_settings = server.next_settings.model_copy(update={"statements": statements})
    return await server.http.post("/v1/config/reload")


async def test_rules_are_listed_in_the_order_in_which_they_apply(server: ApiServer) -> None:
    assert names(await server.http.get("/v1/rules")) == ["old-table"]
    answer = await set_rules(server, BLOCK, LIMIT | {"dry_run": True})
    assert names(answer) == ["no-sleep", "reports", "old-table"]
    first, second, third = answer.json()["rules"]
    assert first == {
        "name": "no-sleep",
        "source": "api",
        "action": "block",
        "enabled": True,
        "dry_run": False,
        "hits": 0,
        "dry_run_hits": 0,
        "rule": BLOCK,
    }
    assert (second["action"], second["dry_run"], third["source"]) == ("limit", True, "settings")
    added = await server.http.post(
        "/v1/rules", json={"rule": {"name": "log", "log": True}, "before": "reports"}
    )
    assert names(added) == ["no-sleep", "log", "reports", "old-table"]
    assert names(await server.http.delete("/v1/rules/no-sleep")) == ["log", "reports", "old-table"]
    replaced = await server.http.post("/v1/rules", json={"rule": OF_SETTINGS | {"enabled": False}})
    assert names(replaced) == ["log", "reports", "old-table"]
    assert [rule["enabled"] for rule in replaced.json()["rules"]] == [True, True, False]
    events = [event for event in await stored_events(server.http) if event["kind"] == "intent.rules"]
    assert [event["message"].partition(": ")[2] for event in events] == [
        "added no-sleep, reports",
        "added log",
        "removed no-sleep",
        "added old-table",
    ]


async def test_wrong_rules_change_nothing(server: ApiServer) -> None:
    await set_rules(server, LIMIT)
    for rules, field, problem in (
        ([LIMIT | {"limit": {}}], "rules.0.limit", "allows everything"),
        ([LIMIT, BLOCK | {"pattern": "a(b"}], "rules.1.pattern", "unclosed group at character 2"),
        ([BLOCK, BLOCK], "rules.1.name", "another rule"),
        ([BLOCK | {"colour": 1}], "rules.0.colour", "Extra inputs"),
    ):
        answer = await set_rules(server, *rules)
        assert (answer.status_code, problem_kind(answer)) == (422, "invalid-request")
        (error,) = answer.json()["errors"]
        assert (error["field"], problem in error["problem"]) == (field, True), error
    answer = await server.http.post("/v1/rules", json={"rule": BLOCK | {"pattern": "x*"}})
    (error,) = answer.json()["errors"]
    assert (error["field"], "every statement" in error["problem"]) == ("rule.pattern", True)
    for body, kind in (
        ({"rule": LIMIT}, "rule-exists"),
        ({"rule": BLOCK, "before": "nobody"}, "unknown-rule"),
        ({"rule": BLOCK, "before": "old-table"}, "unknown-rule"),
    ):
        assert problem_kind(await server.http.post("/v1/rules", json=body)) == kind
    for name in ("nobody", "old-table"):
        assert problem_kind(await server.http.delete(f"/v1/rules/{name}")) == "unknown-rule"
    large = [LIMIT | {"name": f"r{index}", "user": ["u" * 32] * 999} for index in range(10)]
    assert "move some to the settings" in (await set_rules(server, *large)).json()["detail"]
    assert names(await server.http.get("/v1/rules")) == ["reports", "old-table"]


async def test_patterns_of_all_rules_together_are_limited(server: ApiServer) -> None:
    """Each rule can be used, but no Envoy would use the list."""
    large = [{"name": f"large-{index}", "pattern": f"{index}\\w{{45}}", "log": True} for index in range(80)]
    first, second = large[:40], large[40:]

    def refused_field(answer: Any) -> str:
        (error,) = answer.json()["errors"]
        assert "the patterns of all rules together are too large" in error["problem"]
        return str(error["field"])

    (await set_rules(server, *first)).raise_for_status()
    assert refused_field(await set_rules(server, *large)) == "rules"
    assert refused_field(await reload_rules(server, *second)) == "statements.rules"
    assert names(await server.http.get("/v1/rules")) == [*(rule["name"] for rule in first), "old-table"]

    # Rules that replace those of the settings count instead of them, and disabled ones do not count.
    disabled = [rule | {"enabled": False} for rule in first]
    (await set_rules(server, *disabled)).raise_for_status()
    (await reload_rules(server, *first)).raise_for_status()
    assert len(names(await set_rules(server, *disabled, *second))) == 80
    assert refused_field(await set_rules(server, *second)) == "rules"
    assert len(names(await set_rules(server))) == 40
    assert refused_field(await set_rules(server, *second)) == "rules"


async def test_rules_can_be_removed_without_the_engine(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await set_rules(server, BLOCK, LIMIT)
    replace_rule_engine(monkeypatch, None)
    assert names(await server.http.delete("/v1/rules/reports")) == ["no-sleep", "old-table"]
    added = await server.http.post("/v1/rules", json={"rule": LIMIT})
    assert names(added) == ["no-sleep", "reports", "old-table"]


async def test_check_shows_what_would_happen(server: ApiServer) -> None:
    async def check(statement: str, **fields: Any) -> Any:
        answer = await server.http.post("/v1/rules/check", json={"statement": statement, **fields})
        return answer.raise_for_status().json()

    await set_rules(server, BLOCK, LIMIT)
    blocked = await check("SELECT SLEEP/**/(9)")
    assert blocked["hits"] == [{"rule": "no-sleep", "dry_run": False}]
    assert (blocked["error"]["code"], blocked["error"]["state"]) == (1148, "42000")
    (statement,) = blocked["statements"]
    assert (statement["text"], statement["normalized"]) == ("SELECT SLEEP (9)", "select `sleep` ( ? )")
    assert len(statement["digest"]) == 64
    limited = await check(
        "select 1", user="report", client="10.0.0.1", database="d", group="g", command="execute"
    )
    assert (limited["limits"], limited["text"], limited["error"]) == (["reports"], None, None)
    assert (await check("select * from orders"))["text"] == "select * from `orders_v2`"
    others = await check("select sleep(1)", rules=[{"name": "log", "log": True}])
    assert (others["hits"], others["must_log"]) == ([{"rule": "log", "dry_run": False}], True)
    wrong = await server.http.post(
        "/v1/rules/check", json={"statement": "x", "rules": [BLOCK | {"pattern": "("}]}
    )
    assert wrong.json()["errors"][0]["field"] == "rules.0.pattern"


async def test_envoys_get_the_rules(server: ApiServer) -> None:
    envoy = FakeEnvoy(server.xds_port, module=VERSION)
    async with envoy:
        await wait_until(lambda: bool(envoy.live_configs))
        assert envoy.live_configs[-1]["rules"] == [OF_SETTINGS]
        await set_rules(server, BLOCK)
        await wait_until(lambda: envoy.live_configs[-1]["rules"] == [BLOCK, OF_SETTINGS])
        await reload_rules(server)
        await wait_until(lambda: envoy.live_configs[-1]["rules"] == [BLOCK])
        await set_rules(server)
        await wait_until(lambda: "rules" not in envoy.live_configs[-1])


async def test_rules_survive_a_restart(tmp_path: Path, ports: Ports) -> None:
    require_rule_engine()
    for expected in ([], ["reports"]):
        async with run_api_server(settings(tmp_path, ports)) as server:
            assert names(await server.http.get("/v1/rules")) == expected
            await set_rules(server, LIMIT)


async def test_without_the_engine_patterns_are_refused(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_rule_engine(monkeypatch, None)
    assert "install Tidevoy's wheel" in (await set_rules(server, BLOCK)).json()["detail"]
    assert names(await set_rules(server, LIMIT)) == ["reports", "old-table"]
    answer = await server.http.post("/v1/rules/check", json={"statement": "select 1"})
    assert (answer.status_code, problem_kind(answer)) == (503, "unavailable")


async def test_command_line(server: ApiServer, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"

    async def run(*arguments: str, code: int = 0) -> str:
        result = await run_tidevoy(server.url, "rules", *arguments)
        assert result.exit_code == code, result
        return f"{result.stdout}{result.stderr}"

    file.write_text("- {name: no-sleep, pattern: 'sleep\\(', block: {}}\n- {name: all, log: true}\n")
    listed = [line.split() for line in (await run("set", str(file))).splitlines()]
    assert [line[:5] for line in listed[1:]] == [
        ["no-sleep", "api", "block", "on", "0"],
        ["all", "api", "log", "on", "0"],
        ["old-table", "settings", "rewrite", "on", "0"],
    ]
    file.write_text("name: reports\nuser: report\nlimit: {concurrent: 3}\ndry_run: true\n")
    assert "reports    api       limit    dry run  0     user report" in await run(
        "add", str(file), "--before", "all"
    )
    assert "no-sleep" not in await run("remove", "no-sleep")
    shown = json.loads(await run("list", "--json"))
    assert [rule["name"] for rule in shown["rules"]] == ["reports", "all", "old-table"]
    checked = await run("check", "select * from orders", "--user", "report")
    assert "rules       reports (dry run), all, old-table" in checked
    assert "node gets   select * from `orders_v2`" in checked
    file.write_text("statements: {rules: [{name: x, block: {message: no, code: 1105}}]}\n")
    assert "ERROR 1105 (HY000): no" in await run("check", "select 1", "--file", str(file), code=1)
    file.write_text("name: x\npattern: a(b\nlog: true\n")
    assert "rule.pattern: unclosed group at character 2" in await run("add", str(file), code=2)
    file.write_text("[]")
    assert "adds one" in await run("add", str(file), code=2)
    assert "no rules" in await run("set", "/dev/null", code=2)
    assert "cannot be read" in await run("set", str(tmp_path / "missing"), code=1)
    assert "named nobody" in await run("remove", "nobody", code=1)
