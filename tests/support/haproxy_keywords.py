"""The keywords of HAProxy, as data for tests of the importer.

Those of the configuration manual of version 3.5 (2026/08/21, sections 3, 4.1, 5.1 and 5.2), and those that
`haproxy -dKcfg` of version 2.6.12 lists.
"""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(" ".join(name.split()) for name in text.split(";"))


GLOBAL_KEYWORDS = _split(
    """
    51degrees-allow-unmatched; 51degrees-cache-size; 51degrees-data-file; 51degrees-difference;
    51degrees-drift; 51degrees-property-name-list; 51degrees-property-separator;
    51degrees-use-performance-graph; 51degrees-use-predictive-graph; anonkey; busy-polling; ca-base; chroot;
    close-spread-time; cluster-secret; cpu-affinity; cpu-map; cpu-policy; cpu-set; crt-base; daemon;
    debug.counters; default-path; description; deviceatlas-json-file; deviceatlas-log-level;
    deviceatlas-properties-cookie; deviceatlas-separator; dns-accept-family; expose-deprecated-directives;
    expose-experimental-directives; external-check; fd-hard-limit; force-cfg-parser-pause; gid; grace;
    group; h1-accept-payload-with-any-method; h1-case-adjust; h1-case-adjust-file;
    h1-do-not-close-on-insecure-transfer-encoding; h2-workaround-bogus-websocket-clients; hard-stop-after;
    harden.reject-privileged-ports.quic; harden.reject-privileged-ports.tcp; httpclient.resolvers.disabled;
    httpclient.resolvers.id; httpclient.resolvers.prefer; httpclient.retries; httpclient.ssl.ca-file;
    httpclient.ssl.verify; httpclient.timeout.connect; insecure-fork-wanted; insecure-setuid-wanted;
    issuers-chain-path; jwt.decrypt_alg_list; jwt.decrypt_enc_list; key-base; limited-quic; localpeer; log;
    log-send-hostname; log-tag; lua-load; lua-load-per-thread; lua-prepend-path; max-spread-checks;
    max-threads-per-group; maxcompcpuusage; maxcomprate; maxconn; maxconnrate; maxpipes; maxsessrate;
    maxsslconn; maxsslrate; maxzlibmem; mworker-max-reloads; nbthread; no-memory-trimming; node; noepoll;
    noevports; nogetaddrinfo; nokqueue; noktls; nopoll; noreuseport; nosplice; numa-cpu-mapping;
    ocsp-update.disable; ocsp-update.httpproxy; ocsp-update.maxdelay; ocsp-update.mindelay;
    ocsp-update.mode; pidfile; pp2-never-send-local; prealloc-fd; presetenv; profiling.memory;
    profiling.tasks; quiet; resetenv; server-state-base; server-state-file; set-dumpable; set-var;
    set-var-fmt; setenv; spread-checks; ssl-default-bind-ciphers; ssl-default-bind-ciphersuites;
    ssl-default-bind-client-sigalgs; ssl-default-bind-curves; ssl-default-bind-options;
    ssl-default-bind-sigalgs; ssl-default-server-ciphers; ssl-default-server-ciphersuites;
    ssl-default-server-client-sigalgs; ssl-default-server-curves; ssl-default-server-options;
    ssl-default-server-sigalgs; ssl-dh-param-file; ssl-engine; ssl-load-extra-del-ext; ssl-load-extra-files;
    ssl-mode-async; ssl-propquery; ssl-provider; ssl-provider-path; ssl-security-level; ssl-server-verify;
    ssl-skip-self-issued-ca; stats; stats-file; strict-limits; thread-group; thread-groups;
    tune.applet.zero-copy-forwarding; tune.buffers.limit; tune.buffers.reserve; tune.bufsize;
    tune.bufsize.large; tune.bufsize.small; tune.cli.max-payload-size; tune.comp.maxlevel;
    tune.defaults.purge; tune.disable-fast-forward; tune.disable-zero-copy-forwarding;
    tune.epoll.mask-events; tune.events.max-events-at-once; tune.fail-alloc; tune.fd.edge-triggered;
    tune.fd.tables; tune.h1.be.glitches-threshold; tune.h1.fe.glitches-threshold;
    tune.h1.zero-copy-fwd-recv; tune.h1.zero-copy-fwd-send; tune.h2.be.glitches-threshold;
    tune.h2.be.initial-window-size; tune.h2.be.max-concurrent-streams; tune.h2.be.max-frames-at-once;
    tune.h2.be.rxbuf; tune.h2.fe.glitches-threshold; tune.h2.fe.initial-window-size;
    tune.h2.fe.max-concurrent-streams; tune.h2.fe.max-frames-at-once; tune.h2.fe.max-rst-at-once;
    tune.h2.fe.max-total-streams; tune.h2.fe.rxbuf; tune.h2.header-table-size; tune.h2.initial-window-size;
    tune.h2.max-concurrent-streams; tune.h2.max-frame-size; tune.h2.zero-copy-fwd-send; tune.http.cookielen;
    tune.http.logurilen; tune.http.maxhdr; tune.idle-pool.shared; tune.idletimer; tune.listener.multi-queue;
    tune.lua.bool-sample-conversion; tune.lua.burst-timeout; tune.lua.forced-yield; tune.lua.log.loggers;
    tune.lua.log.stderr; tune.lua.maxmem; tune.lua.openlibs; tune.lua.service-timeout;
    tune.lua.session-timeout; tune.lua.task-timeout; tune.max-checks-per-thread; tune.max-rules-at-once;
    tune.maxaccept; tune.maxpollevents; tune.maxrewrite; tune.memory.hot-size; tune.pattern.cache-size;
    tune.peers.max-updates-at-once; tune.pipesize; tune.pool-high-fd-ratio; tune.pool-low-fd-ratio;
    tune.pt.zero-copy-forwarding; tune.quic.be.cc.cubic-min-losses; tune.quic.be.cc.hystart;
    tune.quic.be.cc.max-frame-loss; tune.quic.be.cc.max-win-size; tune.quic.be.cc.reorder-ratio;
    tune.quic.be.max-idle-timeout; tune.quic.be.sec.glitches-threshold; tune.quic.be.stream.data-ratio;
    tune.quic.be.stream.max-concurrent; tune.quic.be.stream.rxbuf; tune.quic.be.tx.pacing;
    tune.quic.be.tx.udp-gso; tune.quic.fe.cc.cubic-min-losses; tune.quic.fe.cc.hystart;
    tune.quic.fe.cc.max-frame-loss; tune.quic.fe.cc.max-win-size; tune.quic.fe.cc.reorder-ratio;
    tune.quic.fe.max-idle-timeout; tune.quic.fe.sec.glitches-threshold; tune.quic.fe.sec.retry-threshold;
    tune.quic.fe.sock-per-conn; tune.quic.fe.stream.data-ratio; tune.quic.fe.stream.max-concurrent;
    tune.quic.fe.stream.max-total; tune.quic.fe.stream.rxbuf; tune.quic.fe.tx.pacing;
    tune.quic.fe.tx.udp-gso; tune.quic.listen; tune.quic.mem.tx-max; tune.quic.zero-copy-fwd-send;
    tune.rcvbuf.backend; tune.rcvbuf.client; tune.rcvbuf.frontend; tune.rcvbuf.server; tune.recv_enough;
    tune.renice.runtime; tune.renice.startup; tune.ring.queues; tune.runqueue-depth; tune.sched.low-latency;
    tune.sndbuf.backend; tune.sndbuf.client; tune.sndbuf.frontend; tune.sndbuf.server; tune.ssl.cachesize;
    tune.ssl.capture-buffer-size; tune.ssl.capture-cipherlist-size; tune.ssl.certificate-compression;
    tune.ssl.default-dh-param; tune.ssl.force-private-cache; tune.ssl.hard-maxrecord; tune.ssl.keylog;
    tune.ssl.keyupdate-rate-limit; tune.ssl.lifetime; tune.ssl.maxrecord; tune.ssl.ocsp-update.maxdelay;
    tune.ssl.ocsp-update.mindelay; tune.ssl.ssl-ctx-cache-size; tune.stick-counters;
    tune.streams-elasticity; tune.takeover-other-tg-connections; tune.vars.check-max-size;
    tune.vars.global-max-size; tune.vars.proc-max-size; tune.vars.reqres-max-size; tune.vars.sess-max-size;
    tune.vars.txn-max-size; tune.zlib.memlevel; tune.zlib.windowsize; uid; ulimit-n; unix-bind; unsetenv;
    user; warn-blocked-traffic-after; wurfl-cache-size; wurfl-data-file; wurfl-information-list;
    wurfl-information-list-separator; zero-warning
    """
)
PROXY_KEYWORDS = _split(
    """
    acl; backlog; balance; be-unpublished; bind; capture cookie; capture request header;
    capture response header; clitcpka-cnt; clitcpka-idle; clitcpka-intvl; clitimeout; compression;
    contimeout; cookie; crt; declare; declare capture; default-server; default_backend; description;
    disabled; email-alert from; email-alert level; email-alert mailers; email-alert myhostname;
    email-alert to; enabled; error-log-format; errorfile; errorfiles; errorloc; errorloc302; errorloc303;
    external-check; external-check command; external-check path; filter; filter-sequence; force-be-switch;
    force-persist; fullconn; guid; hash-balance-factor; hash-preserve-affinity; hash-type;
    http-after-response; http-check; http-check comment; http-check connect; http-check disable-on-404;
    http-check expect; http-check send; http-check send-state; http-check set-var; http-check unset-var;
    http-error; http-request; http-response; http-reuse; http-send-name-header; id; ignore-persist;
    load-server-state-from-file; log; log-format; log-format-sd; log-steps; log-tag; max-keep-alive-queue;
    max-session-srv-conns; maxconn; mode; monitor fail; monitor-uri; option abortonclose;
    option accept-invalid-http-request; option accept-invalid-http-response; option allbackups;
    option checkcache; option clitcpka; option contstats; option disable-h2-upgrade; option dontlog-normal;
    option dontlognull; option external-check; option forwarded; option forwardfor;
    option h1-case-adjust-bogus-client; option h1-case-adjust-bogus-server; option http-buffer-request;
    option http-drop-request-trailers; option http-drop-response-trailers; option http-ignore-probes;
    option http-keep-alive; option http-no-delay; option http-pretend-keepalive;
    option http-restrict-req-hdr-names; option http-server-close; option http-use-proxy-header;
    option httpchk; option httpclose; option httplog; option httpslog; option idle-close-on-response;
    option independent-streams; option ldap-check; option log-health-checks; option log-separate-errors;
    option logasap; option mysql-check; option nolinger; option originalto; option persist;
    option pgsql-check; option prefer-last-server; option redis-check; option redispatch; option smtpchk;
    option socket-stats; option splice-auto; option splice-request; option splice-response;
    option spop-check; option srvtcpka; option ssl-hello-chk; option tcp-check; option tcp-smart-accept;
    option tcp-smart-connect; option tcpka; option tcplog; option transparent; option use-small-buffers;
    persist rdp-cookie; quic-initial; rate-limit sessions; redirect; retries; retry-on; server;
    server-state-file-name; server-template; source; srvtcpka-cnt; srvtcpka-idle; srvtcpka-intvl;
    srvtimeout; stats admin; stats auth; stats enable; stats hide-version; stats http-request; stats realm;
    stats refresh; stats scope; stats show-desc; stats show-legends; stats show-node; stats show-version;
    stats uri; stick match; stick on; stick store-request; stick store-response; stick-table; tcp-check;
    tcp-check comment; tcp-check connect; tcp-check expect; tcp-check send; tcp-check send-binary;
    tcp-check send-binary-lf; tcp-check send-lf; tcp-check set-var; tcp-check unset-var;
    tcp-request connection; tcp-request content; tcp-request inspect-delay; tcp-request session;
    tcp-response content; tcp-response inspect-delay; timeout check; timeout client; timeout client-fin;
    timeout client-hs; timeout connect; timeout http-keep-alive; timeout http-request; timeout queue;
    timeout server; timeout server-fin; timeout tarpit; timeout tunnel; unique-id-format; unique-id-header;
    use-fcgi-app; use-server; use_backend
    """
)
BIND_OPTIONS = _split(
    """
    accept-netscaler-cip; accept-proxy; allow-0rtt; alpn; backlog; ca-file; ca-ignore-err; ca-sign-file;
    ca-sign-pass; ca-verify-file; cc; ciphers; ciphersuites; client-sigalgs; crl-file; crt; crt-ignore-err;
    crt-list; curves; default-crt; defer-accept; ecdhe; ech; expose-fd; force-sslv3; force-tlsv10;
    force-tlsv11; force-tlsv12; force-tlsv13; generate-certificates; gid; group; guid-prefix; id; idle-ping;
    interface; ktls; label; level; maxconn; mode; mss; name; namespace; nbconn; nice; no-alpn; no-ca-names;
    no-sslv3; no-strict-sni; no-tls-tickets; no-tlsv10; no-tlsv11; no-tlsv12; no-tlsv13; npn;
    prefer-client-ciphers; process; proto; quic-cc-algo; quic-force-retry; quic-socket; severity-output;
    shards; sigalgs; ssl; ssl-max-ver; ssl-min-ver; strict-sni; tcp-md5sig; tcp-ss; tcp-ut; tfo; thread;
    tls-ticket-keys; tls-tickets; transparent; uid; user; v4v6; v6only; verify
    """
)
SERVER_OPTIONS = _split(
    """
    addr; agent-addr; agent-check; agent-inter; agent-port; agent-send; allow-0rtt; alpn; backup; ca-file;
    cc; check; check-alpn; check-pool-conn-name; check-proto; check-reuse-pool; check-send-proxy; check-sni;
    check-sni-auto; check-ssl; check-via-socks4; ciphers; ciphersuites; client-sigalgs; cookie; crl-file;
    crt; curves; disabled; downinter; enabled; error-limit; fall; fastinter; force-sslv3; force-tlsv10;
    force-tlsv11; force-tlsv12; force-tlsv13; guid; hash-key; healthcheck; id; idle-ping; init-addr;
    init-state; inter; ktls; log-bufsize; log-proto; max-reuse; maxconn; maxqueue; minconn; namespace;
    no-agent-check; no-backup; no-check; no-check-reuse-pool; no-check-send-proxy; no-check-sni-auto;
    no-check-ssl; no-renegotiate; no-send-proxy; no-send-proxy-v2; no-send-proxy-v2-ssl;
    no-send-proxy-v2-ssl-cn; no-sni-auto; no-ssl; no-ssl-reuse; no-sslv3; no-tfo; no-tls-tickets; no-tlsv10;
    no-tlsv11; no-tlsv12; no-tlsv13; no-verifyhost; non-stick; npn; observe; on-error; on-marked-down;
    on-marked-up; pool-conn-name; pool-low-conn; pool-max-conn; pool-purge-delay; port; proto;
    proxy-v2-options; quic-cc-algo; redir; renegotiate; resolve-net; resolve-opts; resolve-prefer;
    resolvers; rise; send-proxy; send-proxy-v2; send-proxy-v2-ssl; send-proxy-v2-ssl-cn;
    set-proxy-v2-tlv-fmt; shard; sigalgs; slowstart; sni; sni-auto; socks4; source; ssl; ssl-max-ver;
    ssl-min-ver; ssl-reuse; stick; strict-maxconn; tcp-md5sig; tcp-ut; tfo; tls-tickets; track; usesrc;
    verify; verifyhost; weight; ws
    """
)
