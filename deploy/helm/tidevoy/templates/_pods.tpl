{{/* Parts of Pods that control planes and Envoys share. */}}

{{/* Argument: dict with user. */}}
{{- define "tidevoy.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "tidevoy.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Uids of the users in the images. */}}
{{- define "tidevoy.controlPlaneUser" -}}10001{{- end }}
{{- define "tidevoy.envoyUser" -}}101{{- end }}

{{/* Where Pods run. Argument: dict with root, component, values, isRevisioned. */}}
{{- define "tidevoy.scheduling" -}}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
{{- else if .isSpread }}
topologySpreadConstraints:
{{- $root := . }}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tidevoy.selectorLabels" (list $root.root $root.component) | nindent 8 }}
    {{- if $root.revisionLabel }}
    matchLabelKeys: [{{ $root.revisionLabel }}]
    {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Volumes of existing Secrets. Argument: the mapping of names to Secrets. */}}
{{- define "tidevoy.secretVolumes" -}}
{{- range $name, $secret := . }}
- name: secret-{{ $name }}
  secret:
    secretName: {{ $secret }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- define "tidevoy.secretMounts" -}}
{{- range $name, $secret := . }}
- name: secret-{{ $name }}
  mountPath: /run/tidevoy/secrets/{{ $name }}
  readOnly: true
{{- end }}
{{- end }}
