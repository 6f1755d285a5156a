package check

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit/testca"
)

// Clouds that kube-apiserver may use.
var (
	byNames = conf.Cloud{HTTPS: conf.HTTPS{Ports: map[string]string{"10250": "127.0.0.1:10250"}}}
	ends    = conf.Cloud{HTTPS: conf.HTTPS{Ports: byNames.HTTPS.Ports, ClientCA: "ca"}}
	byGRPC  = conf.Cloud{Egress: conf.Egress{GRPC: []string{"unix:///run/tunnel/grpc.sock"}}}
	byHTTP  = conf.Cloud{Egress: conf.Egress{HTTPConnect: []string{"tls://0.0.0.0:8090", "unix:///run/c.sock"}}}
)

// pod is a manifest with flags, whose container has the folder dir of the machine as /etc/x, and /run/tunnel.
func pod(dir string, flags ...string) string {
	var b strings.Builder
	b.WriteString("apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - {name: other, command: [x, --y=z]}\n" +
		"  - name: kube-apiserver\n    command:\n    - kube-apiserver\n    - --v\n    - \"2\"\n")
	for _, f := range flags {
		b.WriteString("    - " + f + "\n")
	}
	b.WriteString("    volumeMounts:\n    - {name: x, mountPath: /etc/x}\n    - {name: run, mountPath: /sockets/}\n" +
		"  volumes:\n  - {name: x, hostPath: {path: " + dir + "}}\n  - {name: run, hostPath: {path: /run/tunnel}}\n")
	return b.String()
}

// k3sConfig is a config.yaml of k3s.
func k3sConfig(mode string, args ...string) string {
	text := "disable: [traefik]\nkube-apiserver-arg:\n"
	if mode != "" {
		text = "egress-selector-mode: " + mode + "\n" + text
	}
	return text + "- " + strings.Join(args, "\n- ") + "\n"
}

// selectorFile is the text of a file for --egress-selector-config-file.
func selectorFile(name, protocol, transport string) string {
	return "apiVersion: apiserver.k8s.io/v1beta1\nkind: EgressSelectorConfiguration\negressSelections:\n" +
		"- name: " + name + "\n  connection:\n    proxyProtocol: " + protocol + "\n    transport: {" + transport + "}\n"
}

// The flags of kube-apiserver must fit the cloud.
func TestAPIServer(t *testing.T) {
	const (
		types, kubelets, selector = "address types", "kubelet ca", "egress selector"
		ca, config                = "--kubelet-certificate-authority=", "--egress-selector-config-file="
		socket                    = "uds: {udsName: /sockets/grpc.sock}"
	)
	dir := t.TempDir()
	files := map[string]string{
		"ca.crt": string(testca.New(t, "cluster").CertPEM()), "empty.crt": "",
		"grpc.yaml":   selectorFile("cluster", "GRPC", socket),
		"same.yaml":   selectorFile("cluster", "GRPC", "uds: {udsName: /run/tunnel/grpc.sock}"),
		"else.yaml":   selectorFile("cluster", "GRPC", "uds: {udsName: /sockets/other.sock}"),
		"http.yaml":   selectorFile("cluster", "HTTPConnect", socket),
		"port.yaml":   selectorFile("cluster", "HTTPConnect", "tcp: {url: \"https://tunnel-cloud:8090\"}"),
		"far.yaml":    selectorFile("cluster", "HTTPConnect", "tcp: {url: \"https://tunnel-cloud:443\"}"),
		"direct.yaml": selectorFile("cluster", "Direct", ""),
		"etcd.yaml":   selectorFile("etcd", "GRPC", socket),
		"pod.yaml":    "kind: Pod\n",
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	in := func(flag, file string) string { return flag + "/etc/x/" + file }
	for name, tt := range map[string]struct {
		cloud    conf.Cloud
		manifest string
		line     string
		state    State
		text, do string
	}{
		"names first": {
			byNames, pod(dir, "--kubelet-preferred-address-types=Hostname,InternalIP"), types,
			StateOK, "", "",
		},
		"two arguments": {
			byNames, pod(dir, "--kubelet-preferred-address-types", "Hostname"), types,
			StateOK, "", "",
		},
		"the default": {
			byNames, pod(dir), types,
			StateOK, "is not set", "",
		},
		"addresses first": {
			byNames, pod(dir, "--kubelet-preferred-address-types=InternalIP,Hostname"), types,
			StateFail, "by its InternalIP first", "=Hostname,InternalIP",
		},
		"addresses and egress": {
			ends, pod(dir, "--kubelet-preferred-address-types=InternalIP", in(config, "grpc.yaml")), types,
			StateOK, "", "",
		},
		"no names": {
			byGRPC, pod(dir), types,
			StateSkipped, "needs egress", "",
		},

		"no authority, passthrough": {
			byNames, pod(dir), kubelets,
			StateFail, "exec, attach and port-forward name no node", "clientca",
		},
		"no authority, terminated": {
			ends, pod(dir), kubelets,
			StateOK, "terminates", "",
		},
		"no authority, egress": {
			byGRPC, pod(dir), kubelets,
			StateOK, "any certificate", "",
		},
		"authority": {
			byNames, pod(dir, in(ca, "ca.crt")), kubelets,
			StateOK, dir + "/ca.crt: CA", "",
		},
		"authority, no file": {
			byNames, pod(dir, in(ca, "none.crt")), kubelets,
			StateFail, "no such file", "correct --kubelet-certificate-authority",
		},
		"authority, empty": {
			byNames, pod(dir, in(ca, "empty.crt")), kubelets,
			StateFail, "no certificate", "replace the file",
		},
		"authority, not mounted": {
			byNames, pod(dir, ca+"/etc/pki/ca.crt"), kubelets,
			StateFail, "does not mount /etc/pki/ca.crt", "volume",
		},

		"no egress": {
			byNames, pod(dir), selector,
			StateSkipped, "the cloud no [mode.cloud.egress]", "",
		},
		"egress without the flag": {
			byGRPC, pod(dir), selector,
			StateFail, "is not set", "set the flag",
		},
		"socket": {
			byGRPC, pod(dir, in(config, "grpc.yaml")), selector,
			StateOK, "leads to /sockets/grpc.sock", "",
		},
		"socket, not mounted": {
			byGRPC, pod(dir, in(config, "same.yaml")), selector,
			StateFail, "does not mount /run/tunnel/grpc.sock", "volume",
		},
		"another socket": {
			byGRPC, pod(dir, in(config, "else.yaml")), selector,
			StateFail, "which has unix:///run/tunnel/grpc.sock", "name the same",
		},
		"another protocol": {
			byGRPC, pod(dir, in(config, "http.yaml")), selector,
			StateFail, "proxyProtocol is HTTPConnect", "proxyProtocol",
		},
		"port": {
			byHTTP, pod(dir, in(config, "port.yaml")), selector,
			StateOK, "https://tunnel-cloud:8090", "",
		},
		"another port": {
			byHTTP, pod(dir, in(config, "far.yaml")), selector,
			StateWarn, "is no line of httpconnect", "name the same",
		},
		"direct": {
			byGRPC, pod(dir, in(config, "direct.yaml")), selector,
			StateFail, "no egressSelections with the name cluster", "correct the file",
		},
		"other targets": {
			byGRPC, pod(dir, in(config, "etcd.yaml")), selector,
			StateFail, "no egressSelections with the name cluster", "correct the file",
		},
		"no selectors": {
			byGRPC, pod(dir, in(config, "pod.yaml")), selector,
			StateFail, "is no EgressSelectorConfiguration", "correct the file",
		},
		"no file of selectors": {
			byGRPC, pod(dir, in(config, "none.yaml")), selector,
			StateFail, "no such file", "create the file",
		},
		"another proxy": {
			byNames, pod(dir, in(config, "grpc.yaml")), selector,
			StateWarn, "has no [mode.cloud.egress]", "write [mode.cloud.egress]",
		},

		"k3s, its own tunnel": {
			byNames, k3sConfig("", "kubelet-preferred-address-types=Hostname"), selector,
			StateFail, "its own tunnel", "egress-selector-mode: disabled",
		},
		"k3s, its tunnel is off": {
			byNames, k3sConfig("disabled", "v=2"), selector,
			StateSkipped, "", "",
		},
		"k3s, names": {
			byNames, k3sConfig("disabled", "kubelet-preferred-address-types=InternalIP"), types,
			StateFail, "InternalIP", "Hostname",
		},
		"k3s, authority": {
			byNames, k3sConfig("disabled", "v=2"), kubelets,
			StateOK, "k3s sets", "",
		},
		"k3s, egress": {
			byGRPC, k3sConfig("", "egress-selector-config-file="+dir+"/same.yaml"), selector,
			StateOK, "", "",
		},
	} {
		a, err := parseManifest([]byte(tt.manifest))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		a.file = "kube-apiserver.yaml"
		c := &cloud{CloudConfig: CloudConfig{Conf: &tt.cloud}}
		look := map[string]func(*apiserver) Result{
			types: c.addressTypes, kubelets: c.kubeletAuthority, selector: c.selector,
		}
		want(t, name, look[tt.line](a), tt.state, tt.text, tt.do)
	}
}

// A file without flags is a failure if the operator has named it. The other lines are then skipped.
func TestAPIServerFile(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"pod.yaml":  pod(dir, "--egress-selector-config-file=/etc/x/none.yaml"),
		"text.yaml": "a: [", "other.yaml": "kind: Pod\n",
		"null.yaml": "kube-apiserver-arg:\n", "one.yaml": "kube-apiserver-arg: v=2\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	lines := func(c conf.Cloud, name string) []Line {
		cloud := &cloud{CloudConfig: CloudConfig{Conf: &c}}
		if name != "" {
			cloud.Manifest = filepath.Join(dir, name)
		}
		return Run(t.Context(), cloud.apiserverChecks(), nil)
	}
	for name, text := range map[string]string{
		"none.yaml": "no such file", "text.yaml": "yaml", "other.yaml": "no container kube-apiserver",
		"null.yaml": "no container kube-apiserver",
	} {
		all := lines(byNames, name)
		want(t, name, all[0].Result, StateFail, text, "--apiserver")
		if len(all) != 4 || all[1].State != StateSkipped || all[3].State != StateSkipped {
			t.Errorf("%s: %+v", name, all)
		}
	}
	want(t, "one flag", lines(byNames, "one.yaml")[0].Result, StateOK, "has 1 flags", "")
	// The files that a copy names may be on another machine.
	want(t, "a copy", lines(byGRPC, "pod.yaml")[3].Result, StateWarn, "no such file", "if this is the machine")
	want(t, "no need", lines(conf.Cloud{}, "pod.yaml")[0].Result, StateSkipped, "has neither", "")
	if _, err := os.Stat(DefaultManifest); err != nil {
		want(t, "no manifest", lines(byNames, "")[0].Result, StateSkipped, "there is no "+DefaultManifest, "")
	}
}
