{{/* Names and labels. Names leave room for the suffixes that Kubernetes appends to the names of Pods and revisions. */}}

{{- define "tidevoy.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 30 | trimSuffix "-" }}
{{- end }}

{{- define "tidevoy.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 36 | trimSuffix "-" }}
{{- else if contains (include "tidevoy.name" .) .Release.Name }}
{{- .Release.Name | trunc 36 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "tidevoy.name" .) | trunc 36 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "tidevoy.controlPlaneName" -}}
{{ include "tidevoy.fullname" . }}-control-plane
{{- end }}

{{- define "tidevoy.envoyName" -}}
{{ include "tidevoy.fullname" . }}-envoy
{{- end }}

{{- define "tidevoy.apiName" -}}
{{ include "tidevoy.fullname" . }}-api
{{- end }}

{{- define "tidevoy.sqlName" -}}
{{ include "tidevoy.fullname" . }}-sql
{{- end }}

{{/* Labels that select Pods. They never change. Argument: list of root and component. */}}
{{- define "tidevoy.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "tidevoy.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of objects other than Pods. Argument: list of root and component. */}}
{{- define "tidevoy.labels" -}}
{{- $root := index . 0 -}}
{{ include "tidevoy.selectorLabels" . }}
app.kubernetes.io/part-of: tidevoy
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* An image. Argument: dict with root, repository, tag, digest. */}}
{{- define "tidevoy.image" -}}
{{- $name := printf "%s:%s" .repository (default .root.Chart.AppVersion .tag) -}}
{{- with .root.Values.image.registry }}{{ $name = printf "%s/%s" (trimSuffix "/" .) $name }}{{ end -}}
{{- with .digest }}{{ $name = printf "%s@%s" $name . }}{{ end -}}
{{- $name -}}
{{- end }}

{{- define "tidevoy.controlPlaneImage" -}}
{{- $image := .Values.controlPlane.image -}}
{{- include "tidevoy.image" (dict "root" . "repository" $image.repository "tag" $image.tag "digest" $image.digest) -}}
{{- end }}

{{- define "tidevoy.envoyImage" -}}
{{- $image := .Values.envoy.image -}}
{{- include "tidevoy.image" (dict "root" . "repository" $image.repository "tag" $image.tag "digest" $image.digest) -}}
{{- end }}

{{/* The image that makes the bootstrap of Envoys: the control plane's, in the version of the Envoys. */}}
{{- define "tidevoy.bootstrapImage" -}}
{{- $repository := .Values.controlPlane.image.repository -}}
{{- $image := .Values.envoy.image -}}
{{- include "tidevoy.image" (dict "root" . "repository" $repository "tag" $image.tag "digest" $image.bootstrapDigest) -}}
{{- end }}

{{/* host:port, with brackets around an IPv6 address. Argument: list of host and port. */}}
{{- define "tidevoy.address" -}}
{{- $host := index . 0 -}}
{{- if contains ":" $host }}[{{ $host }}]{{ else }}{{ $host }}{{ end }}:{{ int (index . 1) }}
{{- end }}

{{/* Domain of the Services in the namespace of the release. */}}
{{- define "tidevoy.serviceDomain" -}}
{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end }}

{{/* The name by which Envoys know all control planes. */}}
{{- define "tidevoy.xdsHost" -}}
{{ include "tidevoy.controlPlaneName" . }}.{{ include "tidevoy.serviceDomain" . }}
{{- end }}

{{/* The xDS addresses to which Envoys connect, separated by commas. */}}
{{- define "tidevoy.controlPlaneAddresses" -}}
{{- if .Values.controlPlane.enabled -}}
{{ include "tidevoy.xdsHost" . }}:{{ int .Values.controlPlane.xdsPort }}
{{- else -}}
{{ join "," .Values.envoy.controlPlanes }}
{{- end -}}
{{- end }}

{{/* Secrets with certificates. */}}
{{- define "tidevoy.controlPlaneSecret" -}}
{{ .Values.certificates.controlPlane.secretName | default (printf "%s-control-plane-tls" (include "tidevoy.fullname" .)) }}
{{- end }}

{{- define "tidevoy.envoySecret" -}}
{{ .Values.certificates.envoy.secretName | default (printf "%s-envoy-tls" (include "tidevoy.fullname" .)) }}
{{- end }}

{{- define "tidevoy.apiSecret" -}}
{{ .Values.certificates.api.secretName | default (printf "%s-api-tls" (include "tidevoy.fullname" .)) }}
{{- end }}

{{/* Whether xDS uses TLS, and whether REST does: "true" or nothing. */}}
{{- define "tidevoy.xdsTls" -}}
{{- if ne .Values.certificates.source "none" }}true{{ end }}
{{- end }}

{{- define "tidevoy.apiTls" -}}
{{- if and .Values.api.exposed .Values.api.tls.enabled }}true{{ end }}
{{- end }}

{{/* How a process of the Pod reaches the REST port. */}}
{{- define "tidevoy.localApiHost" -}}
{{- if and .Values.api.exposed (eq .Values.bindAddress "::") }}[::1]{{ else }}127.0.0.1{{ end }}
{{- end }}

{{/* Names of the Service of REST, as a list in JSON. */}}
{{- define "tidevoy.apiHosts" -}}
{{- $name := include "tidevoy.apiName" . -}}
{{- $namespace := .Release.Namespace -}}
{{- list (printf "%s.%s" $name (include "tidevoy.serviceDomain" .)) (printf "%s.%s.svc" $name $namespace)
      (printf "%s.%s" $name $namespace) | toJson -}}
{{- end }}

{{- define "tidevoy.apiScheme" -}}
{{- if include "tidevoy.apiTls" . }}https{{ else }}http{{ end }}
{{- end }}
