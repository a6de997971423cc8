{{/* What all templates share. Each gets a dict with root (the chart's context) and component. */}}

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
  - {name: KVFERRY_CLUSTER_KEY_FILE, value: /etc/kvferry/cluster.key}
{{- end }}

{{- define "kvferry.image" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
{{- end }}

{{- define "kvferry.probes" -}}
readinessProbe: {httpGet: {path: {{ .path }}, port: {{ .port }}}, periodSeconds: 5}
livenessProbe: {httpGet: {path: {{ .path }}, port: {{ .port }}}, periodSeconds: 10, failureThreshold: 6}
{{- end }}

{{/* The part of a pod that all pods have. The key is copied, because kvferry refuses one that a group can read, and
     Kubernetes lets a group read each Secret of a pod that does not run as root. */}}
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
  - name: cluster-key
    {{- include "kvferry.image" .root | nindent 4 }}
    command: [install, -m, "0400", /secret/cluster.key, /etc/kvferry/cluster.key]
    volumeMounts:
      - {name: secret, mountPath: /secret, readOnly: true}
      - {name: cluster-key, mountPath: /etc/kvferry}
volumes:
  - {name: secret, secret: {secretName: {{ include "kvferry.keySecret" .root }}, defaultMode: 0400}}
  - {name: cluster-key, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
{{- end }}
