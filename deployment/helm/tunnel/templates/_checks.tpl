{{/* Contradictions in the values. Each message says what to write. */}}
{{- define "tunnel.checks" -}}
{{- $wrong := list }}
{{- if not (or .Values.cloud.enabled .Values.edge.enabled) }}
  {{- $wrong = append $wrong (print
      "cloud.enabled and edge.enabled are both false, so there is nothing to install: set one of them to "
      "true") }}
{{- end }}
{{- if .Values.cloud.enabled }}
  {{- $wrong = concat $wrong (include "tunnel.checks.cloud" . | fromJsonArray) }}
  {{- $wrong = concat $wrong (include "tunnel.checks.doors" . | fromJsonArray) }}
{{- end }}
{{- if .Values.edge.enabled }}
  {{- $wrong = concat $wrong (include "tunnel.checks.edge" . | fromJsonArray) }}
{{- end }}
{{- $account := printf "%s/tunnel-edge" .Release.Namespace }}
{{- if and .Values.cloud.enabled .Values.edge.enabled
    (eq .Values.edge.config.stream.client.tokenfile "/etc/tunnel/token/token")
    (not (contains "mode.cloud.join" .Values.cloud.extraToml))
    (not (has $account (dig "join" "serviceaccounts" (list) .Values.cloud.config))) }}
  {{- $wrong = append $wrong (printf (print
      "this release installs cloud and edges, and the cloud would refuse the edges: write %s into "
      "cloud.config.join.serviceaccounts")
      $account) }}
{{- end }}
{{- if $wrong }}
  {{- fail (join "\n" $wrong) }}
{{- end }}
{{- end }}

{{- define "tunnel.checks.cloud" -}}
{{- $wrong := list }}
{{- $cloud := .Values.cloud }}
{{- $dns := dig "stream" "dns" (dict) $cloud.config }}
{{- if and (dig "admin" "nodeselector" "" $cloud.config) (not (or (dig "join" "serviceaccounts" (list) $cloud.config)
    (eq (dig "join" "signer" "" $cloud.config) "kubernetes") (dig "egress" "kubernetes" false $cloud.config)
    (get $dns "configmap") (regexMatch "mode[.]cloud[.](join|egress|stream[.]dns)" $cloud.extraToml))) }}
  {{- $wrong = append $wrong (print
      "cloud.config.admin.nodeselector selects Nodes, and this cloud reads none: write nodeselector: \"\"") }}
{{- end }}
{{- $peers := dig "stream" "peers" (dict) $cloud.config }}
{{- $hasPeers := or (get $peers "service") (get $peers "addresses") }}
{{- $server := $cloud.config.stream.server }}
{{- if not (or $server.grpcport (include "tunnel.openPort" $server.listen)) }}
  {{- $wrong = append $wrong (print
      "cloud.config.stream.server has no port that edges reach: write grpcport or listen, such as grpcport: 9000 or "
      "listen: \":8443\"") }}
{{- end }}
{{- if and (ne .Values.certificates.source "existing") (not .Values.certificates.address) }}
  {{- $wrong = append $wrong (print
      "certificates.address is missing: write the address that edges dial, such as tunnel.example.com:9000") }}
{{- end }}
{{- if and .Values.certificates.tokens (ne .Values.certificates.source "cert-manager") }}
  {{- $wrong = append $wrong (print
      "certificates.tokens is for source: cert-manager; otherwise the lines are in tokens of the Secret tunnel-cloud: "
      "write them there, and remove certificates.tokens") }}
{{- end }}
{{- if and (gt (int $cloud.replicas) 1) (not $hasPeers) }}
  {{- $wrong = append $wrong (printf (print
      "cloud.replicas is %d, but the replicas cannot find each other: write cloud.config.stream.peers with "
      "service: tunnel-cloud-peers:9000, ca and servername (ci/ha.yaml), or replicas: 1")
      (int $cloud.replicas)) }}
{{- end }}
{{- if and $cloud.controlPlane.enabled (not $hasPeers) }}
  {{- $wrong = append $wrong (print
      "cloud.controlPlane.enabled runs a replica on each control-plane machine, but the replicas cannot "
      "find each other: write cloud.config.stream.peers (ci/egress-grpc.yaml)") }}
{{- end }}
{{- if and $cloud.controlPlane.enabled (gt (int $cloud.replicas) 1) }}
  {{- $wrong = append $wrong (print
      "cloud.replicas does not count with cloud.controlPlane.enabled, which runs a replica on each "
      "control-plane machine: remove one of them") }}
{{- end }}
{{- if and $hasPeers (not (and (get $peers "ca") (get $peers "servername"))) }}
  {{- $wrong = append $wrong (print
      "cloud.config.stream.peers needs ca and servername, or anybody could be a replica: write ca: "
      "/etc/tunnel/secret/ca.crt and servername: tunnel-cloud") }}
{{- end }}
{{- $peersPort := regexFind "[0-9]+$" (toString (get $peers "service")) }}
{{- if and $peersPort (not (has $peersPort (list (toString $server.grpcport) (include "tunnel.openPort" $server.listen)))) }}
  {{- $wrong = append $wrong (printf (print
      "cloud.config.stream.peers.service has port %s, and replicas listen on another: write the port of grpcport or of "
      "listen in cloud.config.stream.server") $peersPort) }}
{{- end }}
{{- if and (eq $cloud.namesLeadTo "service") (get $dns "service") }}
  {{- $wrong = append $wrong (print
      "cloud.config.stream.dns.service lists the pods, and with cloud.namesLeadTo: service no name leads to a pod: "
      "remove one of them") }}
{{- end }}
{{- if and .Values.coredns.enabled (not (get $dns "configmap")) }}
  {{- $wrong = append $wrong (print
      "coredns.enabled needs the ConfigMap with the names of nodes: write "
      "cloud.config.stream.dns.configmap: tunnel-nodes, or coredns.enabled: false") }}
{{- end }}
{{- range $key := list "hosts" "service" "nodeselector" }}
  {{- if and (get $dns $key) (not (get $dns "configmap")) }}
    {{- $wrong = append $wrong (printf (print
        "cloud.config.stream.dns.%s has no effect without configmap: write configmap: tunnel-nodes beside "
        "it, or remove it")
        $key) }}
  {{- end }}
{{- end }}
{{- toJson $wrong }}
{{- end }}

{{- define "tunnel.checks.doors" -}}
{{- $wrong := list }}
{{- $cloud := .Values.cloud }}
{{- $https := dig "https" (dict) $cloud.config }}
{{- $tcp := dig "tcp" (dict) $cloud.config }}
{{- $udp := dig "udp" (dict) $cloud.config }}
{{- $egress := dig "egress" (dict) $cloud.config }}
{{- $sockets := concat (dig "grpc" (list) $egress) (dig "httpconnect" (list) $egress) }}
{{- $open := or $tcp $udp $sockets (dig "services" "namespaces" (list) $cloud.config)
    (dig "admin" "forwards" "" $cloud.config)
    (regexMatch "mode[.]cloud[.](https|tcp|udp|egress|services|admin)" $cloud.extraToml) }}
{{- range $port, $target := dig "addr" (dict) $https }}
  {{- if $target }}{{- $open = true }}{{- end }}
{{- end }}
{{- if not $open }}
  {{- $wrong = append $wrong (print
      "cloud.config has no front door, so no caller could reach a node: write https.addr, tcp, udp or egress, "
      "as the files in the folder ci do") }}
{{- end }}
{{- $tls := false }}
{{- $unix := false }}
{{- range $sockets }}
  {{- if hasPrefix "tls://" . }}{{- $tls = true }}{{- end }}
  {{- if hasPrefix "unix://" . }}
    {{- $unix = true }}
    {{- if not (hasPrefix "unix:///run/tunnel/" .) }}
      {{- $wrong = append $wrong (printf (print
          "cloud.config.egress has %s, which is outside the folder of sockets: write "
          "unix:///run/tunnel/NAME.sock")
          .) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- range $key := list "cert" "key" "clientca" "clientnames" }}
  {{- if and $tls (not (get $egress $key)) }}
    {{- $wrong = append $wrong (printf (print
        "cloud.config.egress.%s is missing: a tls:// address needs cert, key, clientca and clientnames, or "
        "anybody could reach every node (ci/egress-httpconnect.yaml)")
        $key) }}
  {{- end }}
{{- end }}
{{- if and $unix (not $cloud.controlPlane.enabled) }}
  {{- $wrong = append $wrong (print
      "cloud.config.egress has a unix socket, which kube-apiserver finds only on its own machine: set "
      "cloud.controlPlane.enabled: true, or write a tls:// address in httpconnect") }}
{{- end }}
{{- if and $cloud.controlPlane.enabled (not $unix) }}
  {{- $wrong = append $wrong (print
      "cloud.controlPlane.enabled is for unix sockets, and cloud.config.egress has none: write grpc: "
      "[\"unix:///run/tunnel/egress-grpc.sock\"], or enabled: false") }}
{{- end }}
{{- if and (eq (toString (get $https "tls")) "terminate") (not (get $https "clientca")) }}
  {{- $wrong = append $wrong (print
      "cloud.config.https.tls is terminate without clientca, so anybody could call the kubelets: write the "
      "CA that signs the callers' certificates") }}
{{- end }}
{{- if and (get $https "clientca") (not (get $https "cert")) }}
  {{- $wrong = append $wrong (print
      "cloud.config.https.clientca needs a certificate to terminate connections with: write cert and key") }}
{{- end }}
{{- if and $cloud.kubeletSecret (not (dig "kubelet" "cert" "" $https)) }}
  {{- $wrong = append $wrong (print
      "cloud.kubeletSecret has no effect without cloud.config.https.kubelet: write cert: "
      "/etc/tunnel/kubelet/tls.crt and key: /etc/tunnel/kubelet/tls.key there (ci/ha-terminate.yaml)") }}
{{- end }}
{{- range $table, $verb := dict "tcp" "connect" "udp" "send" }}
  {{- $allowed := dig (printf "%sallow" $table) (dict) $cloud.config }}
  {{- range $listen, $target := dig $table (dict) $cloud.config }}
    {{- if and $target (not (get $allowed $listen)) (not (regexMatch "^(127\\.|localhost:|\\[::1\\]:)" $listen)) }}
      {{- $wrong = append $wrong (printf (print
          "cloud.config.%s has %s, and nobody may %s: write who may %s in cloud.config.%sallow, "
          "such as %q: [10.0.0.0/8]")
          $table $listen $verb $verb $table $listen) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- toJson $wrong }}
{{- end }}

{{- define "tunnel.checks.edge" -}}
{{- $wrong := list }}
{{- $edge := .Values.edge }}
{{- $client := $edge.config.stream.client }}
{{- if not (or $client.servername $client.servers) }}
  {{- $wrong = append $wrong (print
      "edge.config.stream.client.servername is missing: write the address of the cloud, such as "
      "tunnel.example.com:9000, or several in servers") }}
{{- end }}
{{- if and $client.servername $client.servers }}
  {{- $wrong = append $wrong (print
      "edge.config.stream.client has servername and servers: remove servername, with its address in servers if "
      "edges may use it") }}
{{- end }}
{{- $elsewhere := false }}
{{- range dig "allow" (list) $edge.config }}
  {{- if not (regexMatch "^(self:|127\\.|\\[::1\\])" .) }}{{- $elsewhere = true }}{{- end }}
{{- end }}
{{- if and (not $edge.hostNetwork) (not $elsewhere) }}
  {{- $wrong = append $wrong (print
      "edge.hostNetwork is false, so self and 127.0.0.1 are the pod of the edge, not the node: write the "
      "networks that the cloud may dial in edge.config.allow, such as 192.168.0.0/16:10250") }}
{{- end }}
{{- if and $edge.config.cni (not $edge.hostNetwork) }}
  {{- $wrong = append $wrong (print
      "edge.config.cni prepares the network of the node, and edge.hostNetwork is false: write hostNetwork: true, or "
      "remove cni") }}
{{- end }}
{{- if and $edge.config.services (not $edge.hostNetwork) }}
  {{- $wrong = append $wrong (print
      "edge.config.services redirects connections of the node, and edge.hostNetwork is false: write hostNetwork: true, "
      "or remove services") }}
{{- end }}
{{- toJson $wrong }}
{{- end }}
