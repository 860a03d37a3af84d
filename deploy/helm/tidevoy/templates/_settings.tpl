{{/* Settings of Tidevoy, from config and from what the chart decides. */}}

{{/* The settings of the control planes, in YAML. */}}
{{- define "tidevoy.settings" -}}
{{- $settings := deepCopy .Values.config -}}
{{- $bind := .Values.bindAddress -}}
{{- $sql := merge (dict "listen" (include "tidevoy.address" (list $bind .Values.envoy.sqlPort))) ($settings.sql | default dict) -}}
{{- $_ := set $settings "sql" $sql -}}
{{- $xds := merge (dict "listen" (include "tidevoy.address" (list $bind .Values.controlPlane.xdsPort))) ($settings.xds | default dict) -}}
{{- if include "tidevoy.xdsTls" . }}
{{- $_ := set $xds "tls" (dict
      "cert" "/run/tidevoy/xds/tls.crt"
      "key" "/run/tidevoy/xds/tls.key"
      "client_ca" "/run/tidevoy/xds/ca.crt"
      "verify_node_id" .Values.certificates.verifyEnvoyIds) }}
{{- end }}
{{- $_ := set $settings "xds" $xds -}}
{{- $apiHost := ternary $bind "127.0.0.1" .Values.api.exposed -}}
{{- $api := merge (dict "listen" (include "tidevoy.address" (list $apiHost .Values.api.port))) ($settings.api | default dict) -}}
{{- if include "tidevoy.apiTls" . }}
{{- $tls := dict "cert" "/run/tidevoy/api/tls.crt" "key" "/run/tidevoy/api/tls.key" }}
{{- if .Values.api.tls.clientCa.secretName }}
{{- $_ := set $tls "client_ca" (printf "/run/tidevoy/api-client-ca/%s" .Values.api.tls.clientCa.key) }}
{{- end }}
{{- $_ := set $api "tls" $tls }}
{{- end }}
{{- if and .Values.api.exposed (not .Values.api.tokens.secretName) }}
{{- /* Without authentication, the server accepts only names that it knows. */}}
{{- $_ := set $api "host_names" (concat ($api.host_names | default list) (include "tidevoy.apiHosts" . | fromJsonArray)) }}
{{- end }}
{{- $_ := set $settings "api" $api -}}
{{- $_ := set $settings "envoy_health" (dict "listen" (include "tidevoy.address" (list $bind .Values.envoy.healthPort))) -}}
{{- $replicas := merge (dict "enabled" (not (empty (dig "pd" "urls" list $settings)))) ($settings.replicas | default dict) -}}
{{- $_ := set $settings "replicas" $replicas -}}
{{- $_ := set $settings "state_dir" "/var/lib/tidevoy" -}}
{{ toYaml $settings }}
{{- end }}

{{/* Some of the settings, in YAML: those at the paths in the list. Argument: list of settings and paths. */}}
{{- define "tidevoy.pickSettings" -}}
{{- $settings := index . 0 -}}
{{- $picked := dict -}}
{{- range $path := index . 1 }}
{{- $value := $settings }}
{{- range $key := splitList "." $path }}
{{- if and (kindIs "map" $value) (hasKey $value $key) }}{{ $value = get $value $key }}{{ else }}{{ $value = "" }}{{ end }}
{{- end }}
{{- if not (kindIs "invalid" $value) }}
{{- if ne (toString $value) "" }}{{ $_ := set $picked $path $value }}{{ end }}
{{- end }}
{{- end }}
{{- toYaml $picked }}
{{- end }}

{{/* The settings that a reload does not apply. A test compares the list with the settings. */}}
{{- define "tidevoy.restartSettings" -}}
{{- $paths := list "allow_unauthenticated" "api.allow_cleartext_tokens" "api.limits.connections" "api.listen"
      "api.tls.cert" "api.tls.client_ca" "api.tls.key" "api.trusted_proxies" "balance.prometheus.ca"
      "health.status.client_tls.ca" "health.status.client_tls.cert" "health.status.client_tls.key"
      "health.status.tls" "log.format" "pd.keyspace" "pd.tls.ca" "pd.tls.cert" "pd.tls.key" "pd.urls"
      "replicas.advertise" "replicas.enabled" "replicas.lease_ttl" "replicas.name" "replicas.prefix" "state_dir"
      "xds.listen" "xds.tls.cert" "xds.tls.client_ca" "xds.tls.key" -}}
{{- include "tidevoy.pickSettings" (list (include "tidevoy.settings" . | fromYaml) $paths) -}}
{{- end }}

{{/* The settings in the bootstrap of an Envoy, in YAML. */}}
{{- define "tidevoy.envoySettings" -}}
{{- $settings := include "tidevoy.settings" . | fromYaml -}}
{{- $picked := pick $settings "overload" "envoy_health" -}}
{{- with pick ($settings.balance | default dict) "report_interval" "module_counts" }}
{{- $_ := set $picked "balance" . }}
{{- end }}
{{- if .Values.envoy.group }}
{{- $_ := set $picked "groups" $settings.groups }}
{{- end }}
{{- toYaml $picked -}}
{{- end }}

{{/* The ports of SQL clients, as a list of {name, port, number}: `port` is that of the Service. JSON. */}}
{{- define "tidevoy.sqlPorts" -}}
{{- $ports := list (dict "name" "sql" "port" (int .Values.envoy.service.port) "number" (int .Values.envoy.sqlPort)) -}}
{{- if not .Values.envoy.group }}
{{- range .Values.config.groups }}
{{- $number := regexFind "[0-9]+$" .listen }}
{{- $ports = append $ports (dict "name" (printf "sql-%s" $number) "port" (int $number) "number" (int $number)) }}
{{- end }}
{{- end }}
{{- dict "ports" $ports | toJson -}}
{{- end }}

{{/* Seconds that an Envoy needs to end, with a reserve. */}}
{{- define "tidevoy.minGracePeriod" -}}
{{- $end := .Values.config.end | default dict -}}
{{- $wait := $end.wait | default 0 | float64 -}}
{{- $timeout := 30.0 -}}
{{- if hasKey $end "timeout" }}{{ if not (kindIs "invalid" $end.timeout) }}{{ $timeout = float64 $end.timeout }}{{ end }}{{ end -}}
{{- addf $wait $timeout 15 | ceil | int64 -}}
{{- end }}

{{- define "tidevoy.gracePeriod" -}}
{{- if kindIs "invalid" .Values.envoy.terminationGracePeriodSeconds -}}
{{ include "tidevoy.minGracePeriod" . }}
{{- else -}}
{{ int64 .Values.envoy.terminationGracePeriodSeconds }}
{{- end -}}
{{- end }}

{{/* Bytes of a Kubernetes quantity such as 3Gi, as text without a decimal point. Nothing if it has another form. */}}
{{- define "tidevoy.bytes" -}}
{{- $text := toString . -}}
{{- if regexMatch "^[0-9]+(\\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$" $text -}}
{{- $number := regexFind "^[0-9.]+" $text | float64 -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf $number (get $units (regexFind "[A-Za-z]*$" $text)) | floor | int64 -}}
{{- end -}}
{{- end }}

{{/* Memory that an Envoy may need: heap, what sessions take above the limit, and memory outside of the heap. */}}
{{- define "tidevoy.minEnvoyMemory" -}}
{{- $heap := dig "overload" "max_heap_bytes" 2147483648 .Values.config | float64 -}}
{{- addf (mulf $heap 1.25) 134217728 | ceil | int64 -}}
{{- end }}
