package test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/server/egressselector"

	"tunnel.example/tunnel/conf"
)

// accountDir is where Kubernetes mounts the token of a pod's ServiceAccount.
const accountDir = "/var/run/secrets/kubernetes.io/serviceaccount"

// A configured pod is a pod template with the TOML of its ConfigMap.
type configured struct {
	pod  corev1.PodTemplateSpec
	toml string
}

// configuredPods returns the pods of an overlay that run tunnel cloud or tunnel edge.
func configuredPods(t *testing.T, objects []object) (all []configured) {
	t.Helper()
	for _, pod := range templates(t, objects) {
		component := pod.Labels["app.kubernetes.io/component"]
		if component != "cloud" && component != "edge" {
			continue
		}
		file := component + ".toml"
		want := []string{component, "-c", "/etc/tunnel/config/" + file}
		if got := pod.Spec.Containers[0].Args; !slices.Equal(got, want) {
			t.Errorf("args are %q, want %q", got, want)
		}
		all = append(all, configured{pod, find(t, objects, "ConfigMap", "tunnel-"+component).text("data", file)})
	}
	return all
}

// files returns the files that the volumes of a pod give to its first container.
func files(t *testing.T, pod corev1.PodSpec) (all []string) {
	t.Helper()
	of := map[string][]string{ // by the name of the Secret or ConfigMap
		"secret tunnel-cloud":     {"ca.crt", "tls.crt", "tls.key", "nodes-ca.crt", "nodes-ca.key", "tokens"}, // tunnel init
		"secret tunnel-cloud-tls": {"ca.crt", "tls.crt", "tls.key"},                                           // cert-manager
		"secret tunnel-tokens":    {"tokens"},
		"secret tunnel-kubelet":   {"tls.crt", "tls.key"}, // kubectl create secret tls
		"configmap tunnel-cloud":  {"cloud.toml"},
		"configmap tunnel-edge":   {"edge.toml"},
		"configmap tunnel-ca":     {"ca.crt"},
		"configmap tunnel-nodes":  {"hosts"},
	}
	for _, mount := range pod.Containers[0].VolumeMounts {
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == mount.Name })
		if i < 0 {
			t.Fatalf("there is no volume %s", mount.Name)
		}
		var sources, names []string
		switch v := pod.Volumes[i]; {
		case v.Secret != nil:
			sources = append(sources, "secret "+v.Secret.SecretName)
		case v.ConfigMap != nil:
			sources = append(sources, "configmap "+v.ConfigMap.Name)
		case v.Projected != nil:
			for _, s := range v.Projected.Sources {
				if s.Secret != nil {
					sources = append(sources, "secret "+s.Secret.Name)
				} else {
					names = append(names, s.ServiceAccountToken.Path)
				}
			}
		}
		for _, s := range sources {
			if of[s] == nil {
				t.Errorf("the files of %s are not known here", s)
			}
			names = append(names, of[s]...)
		}
		for _, n := range names {
			all = append(all, path.Join(mount.MountPath, n))
		}
	}
	if a := pod.AutomountServiceAccountToken; a == nil || *a {
		all = append(all, path.Join(accountDir, "ca.crt"))
	}
	return all
}

// TestConfigurations: tunnel accepts every cloud.toml and edge.toml, without a warning. Each has an admin socket. Every
// file that they name is mounted, and the folder of each socket.
func TestConfigurations(t *testing.T) {
	for _, overlay := range overlays(t) {
		t.Run(overlay, func(t *testing.T) {
			pods := configuredPods(t, kustomized(t, overlay))
			if len(pods) != 1 {
				t.Fatalf("%d pods run tunnel, want one", len(pods))
			}
			c := pods[0]
			dir := t.TempDir()
			for _, file := range files(t, c.pod.Spec) {
				write(t, filepath.Join(dir, file), "x")
			}
			// The paths of the pod become paths of this machine.
			text := regexp.MustCompile(`"(/(?:etc/tunnel|var/run)/)`).ReplaceAllString(c.toml, `"`+dir+"$1")
			file := filepath.Join(dir, "tunnel.toml")
			write(t, file, text)
			checked, err := conf.Check(file, environment(t, c.pod.Spec.Containers[0], *c.pod.Spec.EnableServiceLinks))
			if err != nil {
				t.Fatalf("%v\n%s", err, text)
			}
			for _, w := range checked.Warnings {
				t.Error(w)
			}
			isEdge := strings.HasPrefix(overlay, "edge-")
			if isEdge != (checked.Edge != nil) || isEdge == (checked.Cloud != nil) {
				t.Error("the file configures the wrong mode")
			}
			sockets := regexp.MustCompile(`unix://([^"]+)`).FindAllStringSubmatch(c.toml, -1)
			admin := regexp.MustCompile(`(?m)^socket = "([^"]+)"$`).FindAllStringSubmatch(c.toml, -1)
			if len(admin) != 1 {
				t.Errorf("%d admin sockets, want one", len(admin))
			}
			for _, socket := range append(sockets, admin...) {
				mounted := func(m corev1.VolumeMount) bool { return m.MountPath == path.Dir(socket[1]) && !m.ReadOnly }
				if !slices.ContainsFunc(c.pod.Spec.Containers[0].VolumeMounts, mounted) {
					t.Errorf("the folder of %s is not mounted", socket[1])
				}
			}
		})
	}
}

// environment returns the environment that Kubernetes gives to a container. links: also the addresses of Services.
func environment(t *testing.T, c corev1.Container, links bool) conf.Env {
	t.Helper()
	fields := map[string]string{
		"spec.nodeName": "edge1", "metadata.name": "tunnel-1", "metadata.namespace": "tunnel-system",
		"status.podIPs": "10.244.0.7,fd00::7",
	}
	env := make(map[string]string)
	for _, e := range c.Env {
		// The kubelet knows the clusterIP of the Service tunnel-cloud-callers.
		if e.Value == "$(TUNNEL_CLOUD_CALLERS_SERVICE_HOST)" && links {
			env[e.Name] = "10.96.0.7"
			continue
		}
		if e.ValueFrom == nil || fields[e.ValueFrom.FieldRef.FieldPath] == "" {
			t.Fatalf("%s is not from the downward API", e.Name)
		}
		env[e.Name] = fields[e.ValueFrom.FieldRef.FieldPath]
	}
	return conf.Env{
		NodeName: env["NODE_NAME"], PodIP: env["POD_IP"], PodName: env["POD_NAME"], PodNamespace: env["POD_NAMESPACE"],
	}
}

func write(t *testing.T, file, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// san is the name in the certificate of the cloud that edges and replicas verify.
const san = "tunnel-cloud"

// settings are the keys of cloud.toml and edge.toml that name other objects, and ports.
type settings struct {
	Mode struct {
		Cloud struct {
			Stream struct {
				Server struct{ GRPCPort, LogPort int }
				DNS    struct{ Service, Listen string }
				Peers  struct{ Service, ServerName string }
			}
			Join   struct{ ServiceAccounts []string }
			HTTPS  struct{ Addr map[string]string }
			Egress struct{ HTTPConnect []string }
		}
		Edge struct {
			Stream struct{ Client struct{ DNS string } }
		}
	}
}

// TestNamesAgree: what one object says about another is so.
func TestNamesAgree(t *testing.T) {
	for _, overlay := range overlays(t) {
		t.Run(overlay, func(t *testing.T) {
			objects := kustomized(t, overlay)
			c := configuredPods(t, objects)[0]
			var s settings
			if _, err := toml.Decode(c.toml, &s); err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(overlay, "edge-") {
				edgeAgrees(t, objects, s)
				return
			}
			cloudAgrees(t, objects, s)
			portsAgree(t, objects, s, c.pod.Spec)
		})
	}
}

func edgeAgrees(t *testing.T, objects []object, s settings) {
	t.Helper()
	account := find(t, objects, "ServiceAccount", "tunnel-edge")
	if got := account.text("metadata", "namespace") + "/" + account.name(); got != "tunnel-edge/tunnel-edge" {
		t.Errorf("edges have the ServiceAccount %s, which no cloud accepts", got)
	}
	if got := s.Mode.Edge.Stream.Client.DNS; got != san {
		t.Errorf("edges verify the name %q, want %q", got, san)
	}
}

func cloudAgrees(t *testing.T, objects []object, s settings) {
	t.Helper()
	c := s.Mode.Cloud
	if got := c.Join.ServiceAccounts; !slices.Equal(got, []string{"tunnel-edge/tunnel-edge"}) {
		t.Errorf("the cloud accepts %q", got)
	}
	all := fmt.Sprint(objects) // with the args of tunnel init, or the dnsNames of the Certificate
	if !strings.Contains(all, "--san="+san+" ") && !strings.Contains(all, "dnsNames:["+san+" ") {
		t.Errorf("no certificate has the name %q", san)
	}
	if p := c.Stream.Peers; p.Service != "" {
		if p.ServerName != san {
			t.Errorf("replicas verify the name %q, want %q", p.ServerName, san)
		}
		name := strings.TrimSuffix(p.Service, fmt.Sprintf(":%d", c.Stream.Server.GRPCPort))
		headless := find(t, objects, "Service", name)
		if headless.text("spec", "clusterIP") != "None" || headless.at("spec", "publishNotReadyAddresses") != true {
			t.Errorf("%s is not a headless Service with publishNotReadyAddresses", name)
		}
	}
	if service := c.Stream.DNS.Service; service != "" {
		find(t, objects, "Service", service)
	}
}

// portsAgree checks that the Services lead to the ports that the cloud opens, and that edges reach one port only.
func portsAgree(t *testing.T, objects []object, s settings, pod corev1.PodSpec) {
	t.Helper()
	c := s.Mode.Cloud
	opened := []string{fmt.Sprintf("TCP %d", c.Stream.Server.LogPort)}
	for port := range c.HTTPS.Addr {
		opened = append(opened, "TCP "+port)
	}
	for _, listen := range c.Egress.HTTPConnect {
		opened = append(opened, "TCP "+portOf(listen))
	}
	if listen := c.Stream.DNS.Listen; listen != "" {
		opened = append(opened, "UDP "+portOf(listen), "TCP "+portOf(listen))
	}
	slices.Sort(opened)
	for service, want := range map[string][]string{
		"tunnel-cloud-callers": opened,
		"tunnel-cloud":         {fmt.Sprintf("TCP %d", c.Stream.Server.GRPCPort)},
	} {
		if got := servicePorts(t, find(t, objects, "Service", service), pod); !slices.Equal(got, want) {
			t.Errorf("%s leads to the ports %q, and the cloud opens %q", service, got, want)
		}
	}
}

// portOf returns the port at the end of an address.
func portOf(listen string) string { return listen[strings.LastIndex(listen, ":")+1:] }

// servicePorts returns the ports of the pods to which a Service leads, sorted: "TCP 9000".
func servicePorts(t *testing.T, o object, pod corev1.PodSpec) (all []string) {
	t.Helper()
	text, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	var service corev1.Service
	if err = json.Unmarshal(text, &service); err != nil {
		t.Fatal(err)
	}
	for _, p := range service.Spec.Ports {
		number := p.TargetPort.IntVal
		for _, c := range pod.Containers[0].Ports {
			if c.Name == p.TargetPort.StrVal {
				number = c.ContainerPort
			}
		}
		protocol := p.Protocol
		if protocol == "" {
			protocol = corev1.ProtocolTCP
		}
		all = append(all, fmt.Sprintf("%s %d", protocol, number))
	}
	slices.Sort(all)
	return all
}

// TestSchemaHasEveryKey: the chart accepts each key of cloud.toml and edge.toml, and no other key.
func TestSchemaHasEveryKey(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(chartDir, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var schema object
	if err = json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []string{"cloud", "edge"} {
		example, err := os.ReadFile("../../conf/" + mode + ".toml")
		if err != nil {
			t.Fatal(err)
		}
		var file object
		// A key that is switched off begins with "#" and no space.
		all := regexp.MustCompile(`(?m)^#(\S)`).ReplaceAllString(string(example), "$1")
		if _, err = toml.Decode(all, &file); err != nil {
			t.Fatal(err)
		}
		want, got := make(map[string]bool), make(map[string]bool)
		keysOf(file.at("mode", mode), "", want)
		keysOfSchema(schema.at("properties", mode, "properties", "config"), "", got)
		for key := range want {
			if !got[key] {
				t.Errorf("values.schema.json lacks %s.config.%s", mode, key)
			}
		}
		for key := range got {
			if !want[key] {
				t.Errorf("conf/%s.toml has no key %s, and values.schema.json has", mode, key)
			}
		}
		if len(want) < 15 {
			t.Errorf("only the keys %v are found", slices.Sorted(maps.Keys(want)))
		}
	}
}

// openTables are the tables whose keys the operator chooses.
var openTables = []string{"tcp", "tcpallow", "tcpproxyfrom", "tcpsendproxy", "udp", "udpallow", "https.addr"}

// keysOf adds the keys of a table of TOML.
func keysOf(v any, at string, all map[string]bool) {
	table, ok := v.(map[string]any)
	if !ok || slices.Contains(openTables, at) {
		all[at] = true
		return
	}
	for key, value := range table {
		keysOf(value, strings.TrimPrefix(at+"."+key, "."), all)
	}
}

// keysOfSchema adds the keys that a schema permits.
func keysOfSchema(v any, at string, all map[string]bool) {
	schema, ok := v.(map[string]any)
	properties, closed := schema["properties"].(map[string]any)
	if !ok || !closed {
		all[at] = true
		return
	}
	if schema["additionalProperties"] != false {
		all[at+" (open)"] = true
	}
	for key, value := range properties {
		keysOfSchema(value, strings.TrimPrefix(at+"."+key, "."), all)
	}
}

// TestEgressSelectors: kube-apiserver accepts the configuration files beside the overlays, and they lead to the
// address that the cloud listens on.
func TestEgressSelectors(t *testing.T) {
	for overlay, want := range map[string]string{
		"egress-grpc": "/run/tunnel/egress-grpc.sock", "egress-httpconnect": "https://tunnel-cloud:8090",
	} {
		text, err := os.ReadFile(filepath.Join(kustomizeDir, "overlays", overlay, "egress-selector.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		const pair = "pki/apiserver-kubelet-client"
		for _, name := range []string{"tunnel/ca.crt", pair + ".crt", pair + ".key"} {
			write(t, filepath.Join(dir, name), "x")
		}
		file := filepath.Join(dir, "egress-selector.yaml")
		write(t, file, strings.ReplaceAll(string(text), "/etc/kubernetes", dir))
		c, err := egressselector.ReadEgressSelectorConfiguration(file)
		if err != nil {
			t.Fatal(err)
		}
		if errs := egressselector.ValidateEgressSelectorConfiguration(c); len(errs) > 0 {
			t.Errorf("%s: %v", overlay, errs)
		}
		transport := c.EgressSelections[0].Connection.Transport
		got := ""
		if transport.UDS != nil {
			got = transport.UDS.UDSName
		} else {
			got = transport.TCP.URL
		}
		if c.EgressSelections[0].Name != "cluster" || got != want {
			t.Errorf("%s leads traffic for %s to %s, want cluster to %s", overlay, c.EgressSelections[0].Name, got, want)
		}
	}
}
