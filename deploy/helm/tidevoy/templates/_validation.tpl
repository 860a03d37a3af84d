{{/* Combinations of values that cannot work. All problems are reported at once. */}}

{{- define "tidevoy.validate" -}}
{{- $problems := list -}}
{{- $values := .Values -}}
{{- $config := .Values.config -}}
{{- $hasPd := not (empty (dig "pd" "urls" list $config)) -}}
{{- $hasTokens := not (empty $values.api.tokens.secretName) -}}

{{- if not (or $values.controlPlane.enabled $values.envoy.enabled) }}
{{- $problems = append $problems "controlPlane.enabled and envoy.enabled are both false: enable one of them." }}
{{- end }}

{{- if not $values.certificates.source }}
{{- $problems = append $problems "certificates.source is not set: choose certManager, or secrets (README.md of the chart shows how to create them), or none." }}
{{- end }}
{{- if and (eq $values.certificates.source "none") $values.controlPlane.enabled (not $config.allow_unauthenticated) }}
{{- $problems = append $problems "certificates.source is none, so everybody who reaches the xDS port gets Envoys' configuration: choose certManager or secrets, or set config.allow_unauthenticated: true if the network keeps others out." }}
{{- end }}
{{- if and $values.certificates.envoy.volume (ne $values.certificates.source "secrets") (ne $values.certificates.source "certManager") }}
{{- $problems = append $problems "certificates.envoy.volume is set, but certificates.source is none: choose certManager or secrets." }}
{{- end }}
{{- if and $values.certificates.verifyEnvoyIds (not $values.certificates.envoy.volume) $values.envoy.enabled }}
{{- $problems = append $problems "certificates.verifyEnvoyIds is true, but all Envoys share a Secret, whose certificate cannot contain the names of Pods: set certificates.envoy.volume, or certificates.verifyEnvoyIds: false." }}
{{- end }}

{{- if $values.controlPlane.enabled }}
{{- if and (gt (int $values.controlPlane.replicas) 1) (not $hasPd) }}
{{- $problems = append $problems (printf "config.pd.urls is empty, and %d control planes share their state in PD: set config.pd.urls to the client URLs of PD, such as [http://basic-pd.tidb:2379], or controlPlane.replicas: 1." (int $values.controlPlane.replicas)) }}
{{- end }}
{{- if not (or $hasPd $values.controlPlane.persistence.enabled) }}
{{- $problems = append $problems "controlPlane.persistence.enabled is false and config.pd.urls is empty: operators' requests, such as drains, would be lost with the Pod." }}
{{- end }}
{{- if $values.api.exposed }}
{{- if not (or $hasTokens $config.allow_unauthenticated) }}
{{- $problems = append $problems "api.exposed is true, but there are no tokens: set api.tokens.secretName (README.md of the chart), or config.allow_unauthenticated: true if the network keeps others out." }}
{{- end }}
{{- if and (not $values.api.tls.enabled) (not $config.allow_unauthenticated) (not (dig "api" "allow_cleartext_tokens" false $config)) }}
{{- $problems = append $problems "api.exposed is true without TLS, so tokens would be sent in clear text: set api.tls.enabled: true, or config.api.allow_cleartext_tokens: true if a proxy in front terminates TLS." }}
{{- end }}
{{- if and $values.api.tls.clientCa.secretName (not $hasTokens) }}
{{- $problems = append $problems "api.tls.clientCa is set without api.tokens.secretName: then the kubelet's probes, which have no certificate, would fail. Set tokens too." }}
{{- end }}
{{- if and $values.api.tls.clientCa.secretName (not $values.api.tls.enabled) }}
{{- $problems = append $problems "api.tls.clientCa is set, but api.tls.enabled is false." }}
{{- end }}
{{- if and $values.api.tls.enabled (eq $values.certificates.source "none") (not $values.certificates.api.secretName) }}
{{- $problems = append $problems "api.tls.enabled is true and certificates.source is none: set certificates.api.secretName, or api.tls.enabled: false." }}
{{- end }}
{{- else }}
{{- if $hasTokens }}
{{- $problems = append $problems "api.tokens.secretName is set, but api.exposed is false: then nobody needs a token. Set api.exposed: true." }}
{{- end }}
{{- if $values.monitoring.serviceMonitor.enabled }}
{{- $problems = append $problems "monitoring.serviceMonitor.enabled is true, but the metrics are on the REST port, which listens on loopback: set api.exposed: true." }}
{{- end }}
{{- end }}
{{- else }}
{{- if $values.monitoring.serviceMonitor.enabled }}
{{- $problems = append $problems "monitoring.serviceMonitor.enabled is true, but controlPlane.enabled is false: Envoys send their metrics to the control planes. Enable it in the release of the control planes." }}
{{- end }}
{{- if and $values.envoy.enabled (empty $values.envoy.controlPlanes) }}
{{- $problems = append $problems "controlPlane.enabled is false: set envoy.controlPlanes to the xDS addresses of the control planes, such as [tidevoy-control-plane.tidb.svc.cluster.local:18000]." }}
{{- end }}
{{- if and (eq $values.certificates.source "certManager") (empty $values.certificates.certManager.issuerRef) }}
{{- $problems = append $problems "certificates.certManager.issuerRef is empty and controlPlane.enabled is false: name the issuer of the control planes' certificates." }}
{{- end }}
{{- end }}

{{- if $values.envoy.enabled }}
{{- $grace := include "tidevoy.gracePeriod" . | int64 }}
{{- $minGrace := include "tidevoy.minGracePeriod" . | int64 }}
{{- if lt $grace $minGrace }}
{{- $problems = append $problems (printf "envoy.terminationGracePeriodSeconds is %d, but an Envoy needs config.end.wait + config.end.timeout + 15 s = %d s to end its sessions: set at least %d, or nothing." $grace $minGrace $minGrace) }}
{{- end }}
{{- $limit := dig "limits" "memory" "" $values.envoy.resources }}
{{- if $limit }}
{{- $bytes := include "tidevoy.bytes" $limit }}
{{- if not $bytes }}
{{- $problems = append $problems (printf "envoy.resources.limits.memory is %v: write a quantity such as 3Gi." $limit) }}
{{- else if lt (int64 $bytes) (include "tidevoy.minEnvoyMemory" . | int64) }}
{{- $problems = append $problems (printf "envoy.resources.limits.memory is %v, but an Envoy may need 1.25 * config.overload.max_heap_bytes + 128 MiB = %s bytes: raise the limit, or lower config.overload.max_heap_bytes. Otherwise the kernel kills Envoy before it stops accepting clients." $limit (include "tidevoy.minEnvoyMemory" .)) }}
{{- end }}
{{- end }}
{{- if and (eq $values.envoy.kind "DaemonSet") $values.envoy.autoscaling.enabled }}
{{- $problems = append $problems "envoy.autoscaling.enabled is true, but envoy.kind is DaemonSet: choose Deployment, or no autoscaling." }}
{{- end }}
{{- if $values.envoy.group }}
{{- $names := list }}
{{- range $config.groups }}{{ $names = append $names .name }}{{ end }}
{{- if not (has $values.envoy.group $names) }}
{{- $problems = append $problems (printf "envoy.group is %s, but config.groups has no group of this name." $values.envoy.group) }}
{{- end }}
{{- end }}
{{- end }}

{{- $ports := dict }}
{{- $named := list (list "envoy.sqlPort" $values.envoy.sqlPort) (list "envoy.healthPort" $values.envoy.healthPort)
      (list "controlPlane.xdsPort" $values.controlPlane.xdsPort) (list "api.port" $values.api.port) (list "the admin port of Envoy" 9901) }}
{{- range $index, $group := $config.groups }}
{{- $named = append $named (list (printf "config.groups[%d].listen" $index) (regexFind "[0-9]+$" $group.listen)) }}
{{- end }}
{{- range $named }}
{{- $number := index . 1 | int | toString }}
{{- if hasKey $ports $number }}
{{- $problems = append $problems (printf "%s and %s are both %s: choose different ports." (index . 0) (get $ports $number) $number) }}
{{- end }}
{{- $_ := set $ports $number (index . 0) }}
{{- end }}

{{- $declared := concat (keys $values.controlPlane.secrets) (keys $values.envoy.secrets) }}
{{- range regexFindAll "/run/tidevoy/secrets/[^/\"' \n]*" (toYaml $config) -1 | uniq }}
{{- $name := base . }}
{{- if not (has $name $declared) }}
{{- $problems = append $problems (printf "config names a file in %s, but neither controlPlane.secrets nor envoy.secrets has the key %s." . $name) }}
{{- end }}
{{- end }}

{{- if $problems }}
{{- fail (printf "\n\nThese values cannot work:\n\n* %s\n" (join "\n* " $problems)) }}
{{- end }}
{{- end }}
