{{/* The folder of the machine with what the edge knows of Services; empty: it serves none. */}}
{{- define "tunnel.edge.servicesDir" -}}
{{- with .Values.edge.config.services }}{{ dir (get . "state" | default "/var/lib/tunnel/services.db") }}{{ end }}
{{- end }}

{{/* The folder of the edge's admin socket that needs a volume of its own; empty: none. */}}
{{- define "tunnel.edge.adminDir" -}}
{{- with dig "admin" "socket" "" .Values.edge.config }}
{{- $dir := dir . }}
{{- $mounted := eq $dir (include "tunnel.edge.servicesDir" $) }}
{{- range $.Values.edge.extraVolumeMounts }}{{ if eq (clean .mountPath) $dir }}{{ $mounted = true }}{{ end }}{{ end }}
{{- if not $mounted }}{{ $dir }}{{ end }}
{{- end }}
{{- end }}
