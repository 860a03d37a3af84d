"""Turns a configuration file of TiProxy into settings of Tidevoy. No I/O."""

from __future__ import annotations

from cli.importers.draft import SettingsDraft
from cli.importers.report import ImportResult
from cli.importers.tiproxy.defaults import DIFFERENCES
from cli.importers.tiproxy.file import TiProxyKey, TiProxyKeys, parse_tiproxy
from cli.importers.tiproxy.groups import GroupConversion, listen_address
from cli.importers.tiproxy.tls import convert_tls, has_cluster_tls
from controlplane import address as addresses
from controlplane.errors import ConfigError

_DEFAULT_PD = "127.0.0.1:2379"
_LOG_LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "warning": "warning"}
_NO_PROXY = "127.0.0.1/32"
_SECONDS = {
    "proxy.graceful-wait-before-shutdown": "end.wait",
    "proxy.graceful-close-conn-timeout": "end.timeout",
}
_KEEPALIVE = {
    f"proxy.{section}.{name}": f"backend.keepalive_{setting}"
    for section in ("backend-healthy-keepalive", "backend-keepalive")
    for name, setting in (("idle", "idle"), ("intvl", "interval"), ("cnt", "probes"))
}
_REBALANCE_RATES = tuple(
    f"balance.{factor}.migrations-per-second"
    for factor in ("health", "memory", "cpu", "location", "conn-count")
)


def import_tiproxy(text: str, name: str, cluster: str | None = None) -> ImportResult:
    """Convert the file `name` with the content `text`. `cluster`: which backend cluster, if it has several.

    Raises ConfigError if the file is invalid.
    """
    return _TiProxyConversion(parse_tiproxy(text, name), name, cluster).run()


class _TiProxyConversion:
    def __init__(self, keys: TiProxyKeys, name: str, cluster: str | None) -> None:
        self._keys, self._name, self._cluster = keys, name, cluster
        self._clusters = keys.clusters()
        self._draft = SettingsDraft()
        self._remarks: list[str] = []

    def run(self) -> ImportResult:
        self._convert_discovery()
        GroupConversion(self._draft, self._keys).convert()
        convert_tls(self._draft, self._keys)
        self._convert_api()
        self._convert_proxy_protocol()
        self._convert_operations()
        self._convert_balance()
        self._convert_log()
        self._convert_numbers()
        self._add_remaining_rows()
        self._add_differences()
        return self._draft.finish(f"`tidevoy import-tiproxy {self._name}`", self._remarks)

    def _convert_discovery(self) -> None:
        single = self._keys.take("proxy.pd-addrs")
        if self._clusters:
            if single is not None:
                self._draft.needless(single.source, "TiProxy ignores it, because there are backend-clusters")
            self._convert_clusters()
        elif single is None:
            self._draft.set_implied("pd.urls", self._pd_urls(_DEFAULT_PD), "default of proxy.pd-addrs")
        elif not single.value.strip():
            self._draft.needless(single.source, "it is empty: TiProxy's backends are not from PD")
            self._draft.todo("list the TiDB servers in `nodes`, because pd-addrs is empty")
        else:
            self._draft.map(single.source, "pd.urls", self._pd_urls(single.value), single.note)

    def _convert_clusters(self) -> None:
        """Convert one of the clusters: one Tidevoy serves one TiDB cluster."""
        names = [str(each["name"].value).strip() if "name" in each else "" for each in self._clusters]
        if self._cluster is not None and self._cluster not in names:
            known = ", ".join(names)
            raise ConfigError(
                self._name, "proxy.backend-clusters", f"there is no cluster {self._cluster}", f"use {known}"
            )
        chosen = names.index(self._cluster) if self._cluster is not None else 0
        if len(self._clusters) > 1:
            others = ", ".join(name for index, name in enumerate(names) if index != chosen)
            self._remarks.append(f"These are the settings for the cluster {names[chosen]}.")
            self._draft.todo(
                "one control plane serves one TiDB cluster"
                " (docs/internals/decisions/0021-one-tidb-cluster.md)."
                f" For {others}, run `tidevoy import-tiproxy --cluster NAME`, and start a control plane"
                " and Envoys of their own, with other ports, another state_dir, and other ids of Envoys"
            )
        for index, each in enumerate(self._clusters):
            for name, key in each.items():
                if index != chosen:
                    self._keys.mark_taken(key)
                    self._draft.no_equivalent(
                        key.source,
                        "one Tidevoy serves one cluster: import this one with"
                        f" `--cluster {names[index] or index}`",
                    )
                elif name == "pd-addrs":
                    self._keys.mark_taken(key)
                    self._draft.map(key.source, "pd.urls", self._pd_urls(key.value))

    def _pd_urls(self, text: str) -> list[str]:
        scheme = "https" if has_cluster_tls(self._keys) else "http"
        parts = [part.strip() for part in text.split(",")]
        return [part if "://" in part else f"{scheme}://{part}" for part in parts if part]

    def _convert_api(self) -> None:
        if (key := self._keys.take("api.addr")) is None:
            return
        listen = listen_address(key.value)
        is_safe = bool(self._draft.value_of("api.clients")) and self._draft.value_of("api.tls.cert")
        if addresses.is_loopback(listen) or is_safe:
            self._draft.map(key.source, "api.listen", listen, key.note)
            return
        self._draft.map(
            key.source,
            "api.listen",
            f"127.0.0.1:{listen.rpartition(':')[2]}",
            key.note,
            todo=f"to reach the REST API, the console and /metrics from other machines, set api.tls and"
            f" api.tokens (docs/operate/security.md), and then listen: {listen}",
        )

    def _convert_proxy_protocol(self) -> None:
        if (key := self._keys.take("proxy.proxy-protocol")) is None:
            return
        if not key.value:
            self._draft.map(key.source, "sql.proxy_protocol", "off", key.note)
            return
        self._draft.map(key.source, "sql.proxy_protocol", "optional", key.note)
        self._draft.set_implied(
            "sql.trusted_proxies",
            [_NO_PROXY],
            key.source.comment,
            todo="list the networks of the load balancers that send PROXY headers. Each connection from them"
            " must begin with a header; all others must have none. This value stands for no proxy",
        )
        self._draft.set_implied("backend.proxy_protocol", "v2", key.source.comment)

    def _convert_operations(self) -> None:
        timeout = self._keys.get("proxy.failover-timeout")
        seconds = 60 if timeout is None else timeout.value
        if (key := self._keys.take("proxy.fail-backend-list")) is not None:
            self._draft.no_equivalent(key.source, key.note)
            for backend in key.value:
                is_address = _is_address(backend)
                node = backend if is_address else "ADDRESS"
                command = f"`tidevoy drain {node} --deadline {seconds}s --on-deadline close`"
                where = "" if is_address else f", with the address of {backend} in `tidevoy nodes`"
                self._draft.todo(f"take {backend} out of service: {command}{where}")
        if (key := self._keys.take("labels.zone")) is not None:
            self._draft.map_elsewhere(key.source, "tidevoy bootstrap --zone", str(key.value), key.note)
            self._draft.todo(
                f"start the Envoys that replace this TiProxy with `tidevoy bootstrap --zone {key.value}`, or"
                f" with `tidevoy serve --with-envoy --envoy-zone {key.value}`"
            )
        if (key := self._keys.take("ha.virtual-ip")) is not None:
            self._draft.no_equivalent(key.source, key.note)
            self._draft.todo("keep the virtual address with keepalived instead (docs/operate/virtual-ip.md)")

    def _convert_balance(self) -> None:
        if key := self._keys.take("balance.policy"):
            self._draft.map(key.source, "balance.policy", key.value or "resource", key.note)
        if key := self._keys.take("balance.conn-count.count-ratio-threshold"):
            ratio = key.value or 1.2
            threshold = round((ratio - 1) / (ratio + 1), 3) if ratio > 1 else 0.0
            self._draft.map(key.source, "rebalance.threshold", threshold, key.note)
        rates = [each for key in _REBALANCE_RATES if (each := self._keys.take(key)) is not None]
        highest = max((each.value for each in rates), default=0)
        for key in rates:
            self._map_rate(key, "rebalance.max_per_second", highest)
        if key := self._keys.take("balance.status.migrations-per-second"):
            self._map_rate(key, "migration.max_per_second", max(key.value, highest))

    def _map_rate(self, key: TiProxyKey, setting: str, rate: float) -> None:
        if not key.value:
            self._draft.needless(key.source, "0 means that TiProxy computes the rate, as Tidevoy does")
            return
        todo = ""
        if setting == "rebalance.max_per_second":
            todo = "multiply it by the number of TiProxy instances: Tidevoy's limit is for all Envoys"
        self._draft.map(key.source, setting, rate, key.note, todo=todo, shown=f"{key.value:g}")

    def _convert_log(self) -> None:
        if key := self._keys.take("log.level"):
            level = _LOG_LEVELS.get(key.value.lower(), "error")
            self._draft.map(key.source, "log.level", level, key.note)
        if key := self._keys.take("log.encoder"):
            log_format = key.value if key.value in ("json", "console") else "auto"
            self._draft.map(key.source, "log.format", log_format, key.note)

    def _convert_numbers(self) -> None:
        if key := self._keys.take("proxy.max-connections"):
            self._draft.map(key.source, "sql.max_connections", key.value, key.note)
        for name, setting in _SECONDS.items():
            if key := self._keys.take(name):
                self._draft.map(key.source, setting, max(key.value, 0), key.note)
        for name, setting in _KEEPALIVE.items():
            if key := self._keys.take(name):
                self._convert_keepalive(key, setting)

    def _convert_keepalive(self, key: TiProxyKey, setting: str) -> None:
        if key.value <= 0:
            self._draft.needless(key.source, "0 means the default of the system")
        else:
            self._draft.map(key.source, setting, max(round(key.value), 1), key.note)

    def _add_remaining_rows(self) -> None:
        unknown = "unknown to this importer; check its spelling, because TiProxy ignores it too"
        # TiProxy's TOML library reads keys in any case.
        unused = "the key occurs again in another case, and that one counts"
        for key in self._keys.not_taken():
            self._draft.add_unset(key.source, key.rule, unknown=unknown, unused=unused)

    def _add_differences(self) -> None:
        for difference in DIFFERENCES:
            is_of_clusters = difference.key == "proxy.pd-addrs" and bool(self._clusters)
            if difference.key not in self._keys and not is_of_clusters:
                self._draft.differs(difference)


def _is_address(text: str) -> bool:
    try:
        addresses.split(text)
    except ValueError:
        return False
    return True
