{{/* The pod of the cloud: spec.template of its Deployment or DaemonSet. */}}
{{- define "tunnel.cloud.pod" -}}
{{- $cloud := .Values.cloud }}
{{- $nodes := include "tunnel.nodesMap" . }}
metadata:
  labels:
    {{- include "tunnel.podLabels" (dict "root" . "component" "cloud") | nindent 4 }}
  annotations:
    checksum/config: {{ include "tunnel.cloud.toml" . | sha256sum }}
spec:
  serviceAccountName: tunnel-cloud
  {{- include "tunnel.pullSecrets" . | nindent 2 }}
  enableServiceLinks: {{ eq $cloud.namesLeadTo "service" }}
  {{- with $cloud.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: 40
  securityContext:
    {{- if $cloud.controlPlane.enabled }}
    runAsNonRoot: false
    runAsUser: 0
    runAsGroup: 0
    {{- else }}
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    {{- end }}
    fsGroup: 65532
    seccompProfile: {type: RuntimeDefault}
  {{- if $cloud.controlPlane.enabled }}
  nodeSelector:
    {{- merge (dict "node-role.kubernetes.io/control-plane" "") $cloud.nodeSelector | toYaml | nindent 4 }}
  {{- else }}
  {{- with $cloud.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  affinity:
    {{- include "tunnel.notOnEdges" . | nindent 4 }}
    {{- if gt (int $cloud.replicas) 1 }}
    {{- include "tunnel.apart" "cloud" | nindent 4 }}
    {{- end }}
  {{- if gt (int $cloud.replicas) 1 }}
  topologySpreadConstraints:
  {{- include "tunnel.spread" (dict "component" "cloud" "key" "kubernetes.io/hostname"
      "unsatisfiable" "DoNotSchedule") | nindent 2 }}
  {{- include "tunnel.spread" (dict "component" "cloud" "key" "topology.kubernetes.io/zone"
      "unsatisfiable" "ScheduleAnyway") | nindent 2 }}
  {{- end }}
  {{- end }}
  {{- $tolerations := $cloud.tolerations }}
  {{- if $cloud.controlPlane.enabled }}{{/* Kubernetes gives the pods of a DaemonSet such tolerations without a time. */}}
    {{- $tolerations = list }}
    {{- range $cloud.tolerations }}
      {{- if not (hasKey . "tolerationSeconds") }}{{- $tolerations = append $tolerations . }}{{- end }}
    {{- end }}
  {{- end }}
  {{- with $tolerations }}
  tolerations: {{- toYaml . | nindent 2 }}
  {{- end }}
  containers:
  - name: tunnel
    {{- include "tunnel.image" . | nindent 4 }}
    args:
    - cloud
    - -c
    - /etc/tunnel/config/cloud.toml
    {{- include "tunnel.logFlags" $cloud | nindent 4 }}
    env:
    {{- include "tunnel.env" $cloud | nindent 4 }}
    ports:
    {{- with $cloud.config.stream.server.grpcport }}
    - {name: grpc, containerPort: {{ . }}}
    {{- end }}
    - {name: health, containerPort: {{ $cloud.config.stream.server.logport }}}
    livenessProbe:
      httpGet: {path: /healthz, port: health}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    readinessProbe:
      httpGet: {path: /readyz, port: health}
      periodSeconds: 2
      timeoutSeconds: 5
    resources: {{- toYaml $cloud.resources | nindent 6 }}
    securityContext:
      {{- include "tunnel.restricted" . | nindent 6 }}
    volumeMounts:
    - {name: config, mountPath: /etc/tunnel/config, readOnly: true}
    - {name: secret, mountPath: /etc/tunnel/secret, readOnly: true}
    {{- with include "tunnel.cloud.adminDir" . }}
    - {name: admin, mountPath: {{ . }}}
    {{- end }}
    {{- if $nodes }}
    - {name: nodes, mountPath: /etc/tunnel/nodes, readOnly: true}
    {{- end }}
    {{- if $cloud.kubeletSecret }}
    - {name: kubelet, mountPath: /etc/tunnel/kubelet, readOnly: true}
    {{- end }}
    {{- if $cloud.controlPlane.enabled }}
    - {name: sockets, mountPath: /run/tunnel}
    {{- end }}
    {{- with $cloud.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
  - name: config
    configMap: {name: tunnel-cloud}
  - name: secret
    projected:
      defaultMode: 0440
      sources:
      {{- if eq .Values.certificates.source "cert-manager" }}
      - secret: {name: tunnel-cloud-tls}
      - secret: {name: tunnel-tokens}
      {{- else }}
      - secret: {name: tunnel-cloud}
      {{- end }}
  {{- if include "tunnel.cloud.adminDir" . }}
  - name: admin
    emptyDir: {}
  {{- end }}
  {{- if $nodes }}
  - name: nodes
    configMap: {name: {{ $nodes }}, optional: true}
  {{- end }}
  {{- if $cloud.kubeletSecret }}
  - name: kubelet
    secret: {secretName: {{ $cloud.kubeletSecret }}, defaultMode: 0440}
  {{- end }}
  {{- if $cloud.controlPlane.enabled }}
  - name: sockets
    hostPath: {path: {{ $cloud.controlPlane.socketDir }}, type: DirectoryOrCreate}
  {{- end }}
  {{- with $cloud.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The folder of the admin socket that needs a volume of its own; empty: none. */}}
{{- define "tunnel.cloud.adminDir" -}}
{{- with dig "admin" "socket" "" .Values.cloud.config }}
{{- $dir := dir . }}
{{- $mounts := $.Values.cloud.extraVolumeMounts | default list }}
{{- if $.Values.cloud.controlPlane.enabled }}{{ $mounts = append $mounts (dict "mountPath" "/run/tunnel") }}{{ end }}
{{- $mounted := false }}
{{- range $mounts }}{{ if eq (clean .mountPath) $dir }}{{ $mounted = true }}{{ end }}{{ end }}
{{- if not $mounted }}{{ $dir }}{{ end }}
{{- end }}
{{- end }}

{{/* Replicas of one revision on different machines, or in different zones. Takes key and unsatisfiable. */}}
{{- define "tunnel.spread" -}}
- maxSkew: 1
  topologyKey: {{ .key }}
  whenUnsatisfiable: {{ .unsatisfiable }}
  labelSelector:
    matchLabels: {app.kubernetes.io/name: tunnel, app.kubernetes.io/component: {{ .component }}}
  matchLabelKeys: [pod-template-hash]
  nodeTaintsPolicy: Honor
{{- end }}
