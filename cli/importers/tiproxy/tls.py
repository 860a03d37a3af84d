"""TiProxy's four TLS sections as settings. What each key does is that of `lib/util/security`. No I/O.

`server-tls` is TLS to clients, `sql-tls` to TiDB, `cluster-tls` to PD and status ports, `server-http-tls`
that of the API.
"""

from __future__ import annotations

from cli.importers.draft import SettingsDraft
from cli.importers.envoy_files import envoy_file
from cli.importers.tiproxy.file import TiProxyKey, TiProxyKeys

_VERSIONS = {"1.0": "TLSv1.2", "1.1": "TLSv1.2", "1.2": "TLSv1.2", "1.3": "TLSv1.3"}


def has_cluster_tls(keys: TiProxyKeys) -> bool:
    """Return whether TiProxy uses TLS to PD: with a CA, or if it skips the verification."""
    section = _TlsSection(keys, "cluster-tls")
    return section.text("ca") != "" or section.flag("skip-ca")


def convert_tls(draft: SettingsDraft, keys: TiProxyKeys) -> None:
    """Convert all keys below `security` that have settings."""
    conversion = _TlsConversion(draft, keys)
    conversion.convert_clients()
    conversion.convert_nodes()
    conversion.convert_cluster()
    conversion.convert_api()


class _TlsSection:
    def __init__(self, keys: TiProxyKeys, name: str) -> None:
        self._keys, self._name = keys, name

    def key(self, name: str) -> TiProxyKey | None:
        return self._keys.get(f"security.{self._name}.{name}")

    def text(self, name: str) -> str:
        found = self.key(name)
        return "" if found is None else str(found.value)

    def flag(self, name: str) -> bool:
        found = self.key(name)
        return found is not None and bool(found.value)


class _TlsConversion:
    def __init__(self, draft: SettingsDraft, keys: TiProxyKeys) -> None:
        self._draft, self._keys = draft, keys

    def convert_clients(self) -> None:
        section = _TlsSection(self._keys, "server-tls")
        has_cert = section.text("cert") != "" or section.text("key") != ""
        if not has_cert:
            if section.flag("auto-certs"):
                self._draft.todo(
                    "TiProxy generates a certificate for its clients (auto-certs): create one, and set"
                    " tls.client.mode: optional, tls.client.cert and tls.client.key"
                )
            for name in ("cert", "key", "ca", "min-tls-version", "cert-allowed-cn", "skip-ca"):
                self._needless(section, name, "without a certificate, TLS to clients is off")
            return
        self._draft.set_implied("tls.client.mode", "optional", "security.server-tls")
        self._needless(section, "auto-certs", "TiProxy ignores it, because there is a certificate")
        self._map_file(section, "cert", "tls.client.cert")
        self._map_file(section, "key", "tls.client.key")
        self._map_version(section, "tls.client.min_version")
        if section.flag("skip-ca") and not section.flag("cert-allowed-cn"):
            self._needless(section, "ca", "with skip-ca, clients need no certificate")
        else:
            self._map_file(section, "ca", "tls.client.client_ca")
            self._needless(section, "skip-ca", "it has no effect here")
        if not section.text("ca"):
            self._needless(section, "cert-allowed-cn", "without a CA, clients need no certificate")
        elif section.flag("cert-allowed-cn"):
            self._draft.todo(
                "Tidevoy accepts all client certificates of security.server-tls.ca, not only those of"
                " cert-allowed-cn: use a CA that issues certificates only to these clients"
            )

    def convert_nodes(self) -> None:
        section = _TlsSection(self._keys, "sql-tls")
        required = [
            key
            for name in ("security.require-backend-tls", "proxy.require-backend-tls")
            if (key := self._keys.get(name)) is not None
        ]
        is_required = any(key.value for key in required)
        has_ca, skips_ca = section.text("ca") != "", section.flag("skip-ca")
        for key in required:
            self._keys.mark_taken(key)
            if key.value:
                todo = "" if has_ca or skips_ca else "set tls.backend.ca: TiProxy did not verify the nodes"
                self._draft.map(key.source, "tls.backend.mode", "required", key.note, todo=todo)
            else:
                self._draft.needless(key.source, "false is the default")
        if not has_ca and not skips_ca:
            for name in ("ca", "skip-ca", "cert", "key", "min-tls-version"):
                self._needless(section, name, "without ca and skip-ca, TiProxy uses no TLS to TiDB")
            return
        if not is_required:
            self._draft.set_implied("tls.backend.mode", "preferred", "security.sql-tls")
        self._map_version(section, "tls.backend.min_version")
        if not has_ca:
            self._map(section, "skip-ca", "tls.backend.verify", "none")
            for name in ("ca", "cert", "key"):
                self._needless(section, name, "TiProxy ignores it without a CA")
            return
        self._needless(section, "skip-ca", "TiProxy ignores it, because there is a CA")
        self._map_file(section, "ca", "tls.backend.ca")
        self._draft.set_implied("tls.backend.verify", "ca", "TiProxy does not check names")
        self._map_file(section, "cert", "tls.backend.cert")
        self._map_file(section, "key", "tls.backend.key")

    def convert_cluster(self) -> None:
        section = _TlsSection(self._keys, "cluster-tls")
        targets = ("pd.tls", "health.status.client_tls")
        if not has_cluster_tls(self._keys):
            for name in ("ca", "skip-ca", "cert", "key"):
                self._needless(section, name, "without ca and skip-ca, TiProxy uses no TLS to PD")
            return
        self._draft.set_implied("health.status.tls", True, "security.cluster-tls")
        if not section.text("ca"):
            self._draft.todo(
                "security.cluster-tls skips the verification of certificates, which Tidevoy does not: set"
                " pd.tls.ca and health.status.client_tls.ca"
            )
            for name in ("ca", "cert", "key"):
                self._needless(section, name, "TiProxy ignores it without a CA")
            return
        self._needless(section, "skip-ca", "TiProxy ignores it, because there is a CA")
        for name in ("ca", "cert", "key"):
            if (key := section.key(name)) is not None and key.value:
                for target in targets:
                    self._map(section, name, f"{target}.{name}", str(key.value))

    def convert_api(self) -> None:
        section = _TlsSection(self._keys, "server-http-tls")
        if not section.text("cert") and not section.text("key"):
            if section.flag("auto-certs"):
                self._draft.todo(
                    "TiProxy generates a certificate for its API (auto-certs): create one, and set"
                    " api.tls.cert and api.tls.key"
                )
            for name in ("cert", "key", "ca", "cert-allowed-cn", "skip-ca"):
                self._needless(section, name, "without a certificate, TLS of the API is off")
            return
        for name in ("cert", "key"):
            if (key := section.key(name)) is not None and key.value:
                self._map(section, name, f"api.tls.{name}", str(key.value))
        self._needless(section, "auto-certs", "TiProxy ignores it, because there is a certificate")
        ca, names = section.key("ca"), section.key("cert-allowed-cn")
        if ca is None or not ca.value:
            self._needless(section, "ca", "it is empty")
            self._needless(section, "cert-allowed-cn", "without a CA, callers need no certificate")
            return
        if names is None or not names.value:
            self._keys.mark_taken(ca)
            self._draft.no_equivalent(ca.source, ca.note)
            self._draft.todo(
                "to authenticate callers of the REST API by certificates, set api.tls.client_ca, and list"
                " their names in api.clients"
            )
            return
        self._map(section, "ca", "api.tls.client_ca", str(ca.value))
        self._keys.mark_taken(names)
        for name in dict.fromkeys(name.strip() for name in names.value):
            self._draft.append(names.source, "api.clients", {"name": name, "role": "operator"}, names.note)

    def _needless(self, section: _TlsSection, name: str, why: str) -> None:
        key = section.key(name)
        if key is not None and not self._keys.is_taken(key):
            self._keys.mark_taken(key)
            self._draft.needless(key.source, why)

    def _map(self, section: _TlsSection, name: str, setting: str, value: str, todo: str = "") -> None:
        if (key := section.key(name)) is not None:
            self._keys.mark_taken(key)
            self._draft.map(key.source, setting, value, key.note, todo=todo)

    def _map_file(self, section: _TlsSection, name: str, setting: str) -> None:
        """Map a file on the machines of the Envoys, whose path must be absolute."""
        path = section.text(name)
        if not path:
            self._needless(section, name, "it is empty")
            return
        absolute, todo = envoy_file(path)
        self._map(section, name, setting, absolute, todo)

    def _map_version(self, section: _TlsSection, setting: str) -> None:
        version = _VERSIONS.get(section.text("min-tls-version"))
        if version is None:
            self._needless(section, "min-tls-version", "it names no version of TLS, so the default applies")
        else:
            self._map(section, "min-tls-version", setting, version)
