{{/* What all templates share. Each gets a dict with root (the chart's context) and component, and where there is HTTPS
     tls, the Secret with the pod's certificate, and trusted, the Secret with the authority that the pod trusts. */}}

{{- define "kvferry.labels" -}}
app.kubernetes.io/name: kvferry
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvferry.metadata" -}}
name: {{ .root.Release.Name }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "kvferry.labels" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* A string or number in quotes. Helm's numbers print as 1e+06 from a million on. */}}
{{- define "kvferry.word" -}}
{{ kindIs "string" . | ternary . (toJson .) | quote }}
{{- end }}

{{- define "kvferry.keySecret" -}}
{{ .Values.clusterKey.existingSecret | default (printf "%s-cluster-key" .Release.Name) }}
{{- end }}

{{- define "kvferry.controllerAddress" -}}
tcp://{{ .Release.Name }}-controller:{{ .Values.controller.port }}
{{- end }}

{{/* The part of a container that all containers have; env: the component's own variables. */}}
{{- define "kvferry.container" -}}
name: {{ .component }}
{{ include "kvferry.image" .root }}
env:
  {{- if .isServer }}
  - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  {{- end }}
  {{- range $name, $value := merge (dict) (.env | default dict) .root.Values.env }}
  - {name: {{ $name }}, value: {{ include "kvferry.word" $value }}}
  {{- end }}
  - {name: KVFERRY_CLUSTER_KEY_FILE, value: /etc/kvferry/own.key}
  {{- if .trusted }}
  - {name: SSL_CERT_FILE, value: /etc/kvferry-ca/ca.crt}
  {{- end }}
{{- end }}

{{- define "kvferry.image" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
{{- end }}

{{/* live: another path of the liveness probe. Kubernetes' probes by HTTPS check no certificate. */}}
{{- define "kvferry.probes" -}}
{{- $scheme := empty .tls | ternary "" ", scheme: HTTPS" }}
readinessProbe: {httpGet: {path: {{ .path }}, port: {{ .port }}{{ $scheme }}}, periodSeconds: 5}
livenessProbe: {httpGet: {path: {{ .live | default .path }}, port: {{ .port }}{{ $scheme }}}, periodSeconds: 10, failureThreshold: 6}
{{- end }}

{{/* The Secret with the key of a component's pods, and the file of the pod in it. */}}
{{- define "kvferry.secretOfKey" -}}
{{- if or .root.Values.clusterKey.shared (eq .component "controller") -}}
{{ include "kvferry.keySecret" .root }}
{{- else -}}
{{ .root.Release.Name }}-{{ .component }}-keys
{{- end }}
{{- end }}
{{- define "kvferry.fileOfKey" -}}
{{- if or .root.Values.clusterKey.shared (eq .component "controller") -}}
cluster.key
{{- else if .isServer -}}
$(POD_NAME).key
{{- else -}}
{{ .root.Release.Name }}-{{ .component }}.key
{{- end }}
{{- end }}

{{/* The volumes of a container with its key and, beside it, a link to the list of members, which follows changes; and
     for HTTPS those with its certificate and with the authority that it trusts. */}}
{{- define "kvferry.keyMounts" -}}
- {name: key, mountPath: /etc/kvferry, readOnly: true}
- {name: members, mountPath: /etc/kvferry-members, readOnly: true}
{{- if .tls }}
- {name: tls, mountPath: /etc/kvferry-tls, readOnly: true}
{{- end }}
{{- if .trusted }}
- {name: controller-ca, mountPath: /etc/kvferry-ca, readOnly: true}
{{- end }}
{{- end }}

{{/* The part of a pod that all pods have. The key is copied, because kvferry refuses a key file that a group can read,
     and Kubernetes lets the group of a pod that does not run as root read the pod's Secrets. The init container sees
     only the file of its pod. If the Secret lacks this file, Kubernetes mounts an empty folder until the pod is
     deleted. */}}
{{- define "kvferry.pod" -}}
{{- with .podSpec }}
{{ toYaml . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .root.Values.user }}
  runAsGroup: {{ int64 .root.Values.user }}
  fsGroup: {{ int64 .root.Values.user }}
  seccompProfile: {type: RuntimeDefault}
initContainers:
  - name: key
    {{- include "kvferry.image" .root | nindent 4 }}
    {{- if .isServer }}
    env:
      - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    {{- end }}
    command:
      - /bin/sh
      - -c
      - >-
        [ -f /secret/own.key ] || { echo "this pod has no key yet: make one (launch/cluster keys), then delete this pod"
        >&2; exit 1; }; install -m 0400 /secret/own.key /etc/kvferry/own.key &&
        ln -sf /etc/kvferry-members/kvferry.members /etc/kvferry/kvferry.members
    volumeMounts:
      - {name: secret, mountPath: /secret/own.key, subPathExpr: {{ include "kvferry.fileOfKey" . }}, readOnly: true}
      - {name: key, mountPath: /etc/kvferry}
volumes:
  - {name: secret, secret: {secretName: {{ include "kvferry.secretOfKey" . }}, defaultMode: 0400}}
  - name: members
    secret: {secretName: {{ .root.Release.Name }}-members, defaultMode: 0444, optional: {{ .root.Values.clusterKey.shared }}}
  - {name: key, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
  {{- with .tls }}
  - {name: tls, secret: {secretName: {{ . }}, defaultMode: 0400}}
  {{- end }}
  {{- with .trusted }}
  - {name: controller-ca, secret: {secretName: {{ . }}, defaultMode: 0444, items: [{key: ca.crt, path: ca.crt}]}}
  {{- end }}
{{- end }}
