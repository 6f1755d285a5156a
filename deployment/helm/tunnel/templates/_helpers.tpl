{{/* Labels of an object. Takes root and component. */}}
{{- define "tunnel.labels" -}}
app.kubernetes.io/name: tunnel
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: tunnel
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "_" | trimSuffix "." }}
{{- end }}

{{/* Labels of a pod. Takes root and component. */}}
{{- define "tunnel.podLabels" -}}
app.kubernetes.io/name: tunnel
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: tunnel
app.kubernetes.io/version: {{ include "tunnel.version" .root | quote }}
{{- end }}

{{/* The tag without a digest, which a label cannot hold. */}}
{{- define "tunnel.version" -}}
{{ include "tunnel.tag" . | regexFind "^[^@]*" | trunc 63 | trimSuffix "-" | trimSuffix "." | trimSuffix "_" }}
{{- end }}

{{- define "tunnel.tag" -}}
{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Image and pull policy of a container of tunnel. */}}
{{- define "tunnel.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (include "tunnel.tag" .) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "tunnel.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The security context of every container. */}}
{{- define "tunnel.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Not on edge nodes: nothing can dial a pod on a node behind NAT. */}}
{{- define "tunnel.notOnEdges" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
    - matchExpressions:
      - {key: node-role.kubernetes.io/edge, operator: DoesNotExist}
{{- end }}

{{/* Rather on another machine than the pods of the same component. Takes the component. */}}
{{- define "tunnel.apart" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
  - weight: 100
    podAffinityTerm:
      topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels: {app.kubernetes.io/name: tunnel, app.kubernetes.io/component: {{ . }}}
{{- end }}

{{/* The environment of a container. Takes cloud or edge. */}}
{{- define "tunnel.env" -}}
- {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
{{- if eq (get . "namesLeadTo") "service" }}
- {name: POD_IP, value: $(TUNNEL_CLOUD_CALLERS_SERVICE_HOST)}
{{- else }}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIPs}}}
{{- end }}
{{- end }}

{{/* The flags for logging. Takes cloud or edge. */}}
{{- define "tunnel.logFlags" -}}
{{- if ne .logLevel "info" }}
- --log-level={{ .logLevel }}
{{- end }}
{{- if ne .logFormat "text" }}
- --log-format={{ .logFormat }}
{{- end }}
{{- end }}

{{/* The name of the ConfigMap for the names of nodes; empty: none. */}}
{{- define "tunnel.nodesMap" -}}
{{ dig "stream" "dns" "configmap" "" .Values.cloud.config }}
{{- end }}

{{/* The port at the end of an address. */}}
{{- define "tunnel.port" -}}
{{ regexFind "[0-9]+$" . }}
{{- end }}

{{/* The port of listen or websocket, which are addresses; empty: there is none, or only the pod itself reaches it. */}}
{{- define "tunnel.openPort" -}}
{{- $address := . | default "" }}
{{- if not (regexMatch "^(127\\.|localhost:|\\[::1\\]:)" $address) }}{{ include "tunnel.port" $address }}{{ end }}
{{- end }}

{{/* The ports of pods that edges reach, as JSON: name, port. */}}
{{- define "tunnel.edgePorts" -}}
{{- $server := .Values.cloud.config.stream.server }}
{{- $ports := list }}
{{- with $server.grpcport }}
  {{- $ports = append $ports (dict "name" "grpc" "port" .) }}
{{- end }}
{{- range $key := list "listen" "websocket" }}
  {{- with include "tunnel.openPort" (get $server $key) }}
    {{- $ports = append $ports (dict "name" $key "port" .) }}
  {{- end }}
{{- end }}
{{- toJson $ports }}
{{- end }}

{{/* The ports of front doors that callers in the cluster reach, as JSON: name, port, to, protocol. */}}
{{- define "tunnel.callers" -}}
{{- $config := .Values.cloud.config }}
{{- $ports := list }}
{{- range $port, $target := dig "https" "addr" (dict) $config }}
  {{- if $target }}
    {{- $name := ternary "kubelet" (printf "https-%s" $port) (eq $port "10250") }}
    {{- $ports = append $ports (dict "name" $name "port" $port "to" $port) }}
  {{- end }}
{{- end }}
{{- with dig "stream" "dns" "listen" "" $config }}
  {{- $to := include "tunnel.port" . }}
  {{- $ports = append $ports (dict "name" "dns" "port" "53" "to" $to "protocol" "UDP") }}
  {{- $ports = append $ports (dict "name" "dns-tcp" "port" "53" "to" $to "protocol" "TCP") }}
{{- end }}
{{- range concat (dig "egress" "httpconnect" (list) $config) (dig "egress" "grpc" (list) $config) }}
  {{- if hasPrefix "tls://" . }}
    {{- $port := include "tunnel.port" . }}
    {{- $ports = append $ports (dict "name" (printf "egress-%s" $port) "port" $port "to" $port) }}
  {{- end }}
{{- end }}
{{- range $listen, $target := dig "tcp" (dict) $config }}
  {{- if and $target (not (regexMatch "^(127\\.|localhost:|\\[::1\\]:)" $listen)) }}
    {{- $port := include "tunnel.port" $listen }}
    {{- $ports = append $ports (dict "name" (printf "tcp-%s" $port) "port" $port "to" $port) }}
  {{- end }}
{{- end }}
{{- range $listen, $target := dig "udp" (dict) $config }}
  {{- if and $target (not (regexMatch "^(127\\.|localhost:|\\[::1\\]:)" $listen)) }}
    {{- $port := include "tunnel.port" $listen }}
    {{- $ports = append $ports (dict "name" (printf "udp-%s" $port) "port" $port "to" $port "protocol" "UDP") }}
  {{- end }}
{{- end }}
{{- toJson $ports }}
{{- end }}

{{/* The binding of a ClusterRole to the cloud. Takes root and feature. */}}
{{- define "tunnel.clusterBinding" -}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: tunnel-cloud-{{ .feature }}
  labels: {{- include "tunnel.labels" (dict "root" .root "component" "cloud") | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: tunnel-cloud-{{ .feature }}}
subjects: [{kind: ServiceAccount, name: tunnel-cloud, namespace: {{ .root.Release.Namespace }}}]
{{- end }}
