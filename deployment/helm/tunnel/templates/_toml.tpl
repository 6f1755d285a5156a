{{/*
TOML from values. toToml of Helm writes the integers of values as floats in some versions, which the configuration
refuses.
*/}}

{{- define "tunnel.toml.key" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . }}{{ . }}{{ else }}{{ toJson . }}{{ end }}
{{- end }}

{{- define "tunnel.toml.value" -}}
{{- if kindIs "bool" . }}{{ . }}
{{- else if typeIs "string" . }}{{ toJson . }}
{{- else if kindIs "slice" . }}{{ print "[" }}
  {{- range $i, $v := . }}{{ if $i }}, {{ end }}{{ include "tunnel.toml.value" $v }}{{ end }}{{ print "]" }}
{{- else if kindIs "map" . }}{{ $m := . }}{{ print "{" }}
  {{- range $i, $k := keys $m | sortAlpha }}{{ if $i }}, {{ end }}
    {{- include "tunnel.toml.key" $k }} = {{ include "tunnel.toml.value" (index $m $k) }}
  {{- end }}{{ print "}" }}
{{- else if kindIs "float64" . }}{{ int64 . }}
{{- else }}{{ . }}
{{- end }}
{{- end }}

{{/* A table and its sub-tables. Takes path and table. Leaves out empty values, which mean the same as absent keys. */}}
{{- define "tunnel.toml.table" -}}
{{- $path := .path }}
{{- $table := .table }}
{{- $lines := list }}
{{- $tables := list }}
{{- range $k := keys $table | sortAlpha }}
  {{- $v := index $table $k }}
  {{- if kindIs "map" $v }}
    {{- $tables = append $tables $k }}
  {{- else if not (or (kindIs "invalid" $v) (eq (toString $v) "") (and (kindIs "slice" $v) (empty $v))) }}
    {{- $lines = append $lines (printf "%s = %s" (include "tunnel.toml.key" $k) (include "tunnel.toml.value" $v)) }}
  {{- end }}
{{- end }}
{{- if $lines }}
{{- printf "\n[%s]\n%s\n" $path (join "\n" $lines) }}
{{- end }}
{{- range $k := $tables }}
{{- $sub := printf "%s.%s" $path (include "tunnel.toml.key" $k) }}
{{- include "tunnel.toml.table" (dict "path" $sub "table" (index $table $k)) }}
{{- end }}
{{- end }}

{{- define "tunnel.cloud.toml" -}}
# Made by Helm from cloud.config and cloud.extraToml.
{{ include "tunnel.toml.table" (dict "path" "mode.cloud" "table" .Values.cloud.config) }}
{{- with .Values.cloud.extraToml }}{{ printf "\n%s" . }}{{ end }}
{{- end }}

{{- define "tunnel.edge.toml" -}}
# Made by Helm from edge.config and edge.extraToml.
{{ include "tunnel.toml.table" (dict "path" "mode.edge" "table" .Values.edge.config) }}
{{- with .Values.edge.extraToml }}{{ printf "\n%s" . }}{{ end }}
{{- end }}
