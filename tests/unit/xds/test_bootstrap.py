"""Tests of the bootstrap configuration of an Envoy."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from controlplane.config.settings import Settings
from controlplane.observe.envoy_reports.counters import FAMILIES
from controlplane.version import VERSION
from controlplane.xds.bootstrap.bootstrap import ControlPlaneTls, render_bootstrap

MODULE_METADATA = {"tidevoy.module": VERSION, "tidevoy.module.features": "live-settings statements capture"}


def test_bootstrap_has_control_planes_tls_and_limits() -> None:
    settings = Settings.model_validate({"overload": {"max_connections": 77, "max_heap_bytes": 100_000_000}})
    tls = ControlPlaneTls("/ca.pem", "plane.test", "/cert.pem", "/key.pem")
    text = render_bootstrap(
        settings,
        control_planes=["plane-0.test:18000", "[fd00::1]:18001"],
        node_id="a: \"b\" 'c' #d",
        admin="127.0.0.1:0",
        tls=tls,
        delta=True,
    )
    parsed = yaml.safe_load(text)
    assert parsed["node"] == {"id": "a: \"b\" 'c' #d", "cluster": "tidevoy"}
    assert parsed["admin"]["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 0}
    ads = parsed["dynamic_resources"]["ads_config"]
    assert (ads["api_type"], ads["set_node_on_first_message_only"]) == ("DELTA_GRPC", True)
    (cluster,) = parsed["static_resources"]["clusters"]
    assert cluster["type"] == "STRICT_DNS"
    planes = [endpoint["endpoint"]["address"]["socket_address"] for endpoint in _endpoints(cluster)]
    assert planes == [
        {"address": "plane-0.test", "port_value": 18000},
        {"address": "fd00::1", "port_value": 18001},
    ]
    assert cluster["transport_socket"]["typed_config"]["sni"] == "plane.test"
    heap, connections = parsed["overload_manager"]["resource_monitors"]
    assert heap["typed_config"]["max_heap_size_bytes"] == 100_000_000
    assert connections["typed_config"]["max_active_downstream_connections"] == 77


def test_health_port_is_that_of_the_settings_or_of_the_envoy() -> None:
    def health_listeners(health: str | None = None, module: str | None = None, **settings: Any) -> Any:
        text = render_bootstrap(
            Settings.model_validate({"envoy_health": settings}),
            control_planes=["10.0.0.1:18000"],
            node_id="e",
            module=module,
            health=health,
        )
        return yaml.safe_load(text)["static_resources"].get("listeners", [])

    def address(listener: Any) -> tuple[str, int]:
        socket = listener["address"]["socket_address"]
        return socket["address"], socket["port_value"]

    assert health_listeners() == []
    (listener,) = health_listeners(listen="10.0.0.1:8080")
    assert address(listener) == ("10.0.0.1", 8080)
    assert "transport_socket" not in listener["filter_chains"][0]
    (listener,) = health_listeners("127.0.0.1:8081", listen="10.0.0.1:8080")
    assert address(listener) == ("127.0.0.1", 8081)
    (listener,) = health_listeners(listen="10.0.0.1:8080", tls={"cert": "/c.pem", "key": "/k.pem"})
    tls = listener["filter_chains"][0]["transport_socket"]["typed_config"]["common_tls_context"]
    assert tls["tls_certificates"] == [
        {"certificate_chain": {"filename": "/c.pem"}, "private_key": {"filename": "/k.pem"}}
    ]


def test_control_planes_may_have_different_certificates() -> None:
    def socket(*planes: str, name: str | None = None) -> Any:
        tls = ControlPlaneTls("/ca.pem", name)
        text = render_bootstrap(Settings(), control_planes=planes, node_id="e", tls=tls)
        return yaml.safe_load(text)["static_resources"]["clusters"][0]["transport_socket"]["typed_config"]

    def names(socket_config: Any) -> list[tuple[str, str]]:
        matchers = socket_config["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"]
        return [(matcher["san_type"], matcher["matcher"]["exact"]) for matcher in matchers]

    several = socket("cp-0.test:18000", "10.0.0.1:18000", "cp-0.test:18001")
    assert names(several) == [("DNS", "cp-0.test"), ("IP_ADDRESS", "10.0.0.1")]
    assert several["auto_host_sni"] is True
    shared = socket("cp-0.test:18000", "10.0.0.1:18000", name="plane.test")
    assert names(shared) == [("DNS", "plane.test")]
    assert (shared["sni"], "auto_host_sni" in shared) == ("plane.test", False)
    alone = socket("cp-0.test:18000")
    assert names(alone) == [("DNS", "cp-0.test")]
    assert (alone["sni"], "auto_host_sni" in alone) == ("cp-0.test", False)


def test_minimal_bootstrap_has_no_optional_parts() -> None:
    parsed = yaml.safe_load(render_bootstrap(Settings(), control_planes=["10.0.0.1:18000"], node_id=None))
    assert parsed["node"] == {"cluster": "tidevoy"}
    assert parsed["dynamic_resources"]["ads_config"]["api_type"] == "GRPC"
    (cluster,) = parsed["static_resources"]["clusters"]
    assert cluster["type"] == "STATIC"
    assert "transport_socket" not in cluster
    assert parsed["admin"]["address"]["socket_address"]["port_value"] == 9901
    assert not parsed.keys() & {"bootstrap_extensions", "stats_sinks", "stats_flush_interval"}


def test_bootstrap_has_zone_and_group() -> None:
    text = render_bootstrap(
        Settings(), control_planes=["10.0.0.1:18000"], node_id="e", group="olap", zone="a: 1", module="/m.so"
    )
    parsed = yaml.safe_load(text)
    metadata = {**MODULE_METADATA, "tidevoy.group": "olap"}
    locality = {"zone": "a: 1"}
    assert parsed["node"] == {"id": "e", "cluster": "tidevoy", "locality": locality, "metadata": metadata}
    alone = yaml.safe_load(
        render_bootstrap(Settings(), control_planes=["10.0.0.1:1"], node_id="e", group="olap")
    )
    assert alone["node"]["metadata"] == {"tidevoy.group": "olap"}
    assert "bootstrap_extensions" not in alone


def test_bootstrap_with_module_loads_it_and_pushes_stats() -> None:
    text = render_bootstrap(
        Settings(), control_planes=["10.0.0.1:18000"], node_id="e", module='/opt/a "b".so'
    )
    parsed = yaml.safe_load(text)
    assert parsed["node"] == {"id": "e", "cluster": "tidevoy", "metadata": MODULE_METADATA}
    (extension,) = parsed["bootstrap_extensions"]
    dynamic_modules = "envoy.extensions.bootstrap.dynamic_modules.v3.DynamicModuleBootstrapExtension"
    assert extension == {
        "name": "tidevoy",
        "typed_config": {
            "@type": f"type.googleapis.com/{dynamic_modules}",
            "dynamic_module_config": {
                "name": "tidevoy",
                "do_not_close": True,
                "metrics_namespace": "tidevoy",
                "module": {"local": {"filename": '/opt/a "b".so'}},
            },
            "extension_name": "telemetry",
            "extension_config": {
                "@type": "type.googleapis.com/google.protobuf.Struct",
                "value": {"version": VERSION},
            },
        },
    }
    (sink,) = parsed["stats_sinks"]
    assert sink == {
        "name": "envoy.stat_sinks.metrics_service",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.config.metrics.v3.MetricsServiceConfig",
            "transport_api_version": "V3",
            "emit_tags_as_labels": True,
            "batch_size": 2000,
            "grpc_service": {"envoy_grpc": {"cluster_name": "tidevoy_control_plane"}},
        },
    }
    assert parsed["stats_flush_interval"] == "1s"


@pytest.mark.parametrize(("interval", "flush"), [(0.1, "1s"), (2.5, "2.5s"), (60.0, "60s")])
def test_stats_flush_interval_follows_report_interval(interval: float, flush: str) -> None:
    settings = Settings.model_validate({"balance": {"report_interval": interval}})
    text = render_bootstrap(settings, control_planes=["10.0.0.1:18000"], node_id="e", module="/opt/it.so")
    assert yaml.safe_load(text)["stats_flush_interval"] == flush


def test_module_counts_setting_limits_reported_stats() -> None:
    settings = Settings.model_validate({"balance": {"module_counts": "sessions"}})
    text = render_bootstrap(settings, control_planes=["10.0.0.1:18000"], node_id="e", module="/opt/it.so")
    patterns = yaml.safe_load(text)["stats_config"]["stats_matcher"]["exclusion_list"]["patterns"]
    excluded_prefixes = tuple(pattern["prefix"] for pattern in patterns)
    reported = {name for name in FAMILIES if not f"tidevoy.{name}".startswith(excluded_prefixes)}
    assert reported == {"sessions", "sessions_pinned", "migrations"}
    assert not any(
        f"tidevoy.{name}".startswith(excluded_prefixes) for name in ("module_info", "config_refusals")
    )


def test_rejects_relative_module_path() -> None:
    with pytest.raises(ValueError, match="relative path"):
        render_bootstrap(Settings(), control_planes=["10.0.0.1:18000"], node_id=None, module="libtidevoy.so")


@pytest.mark.parametrize("planes", [[], ["nowhere"], ["host:99999"], ["a b:1"]])
def test_rejects_missing_or_invalid_addresses(planes: list[str]) -> None:
    with pytest.raises(ValueError, match=r"address|port|host"):
        render_bootstrap(Settings(), control_planes=planes, node_id="x")


def _endpoints(cluster: Any) -> Any:
    return cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
