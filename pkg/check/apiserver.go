package check

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// DefaultManifest is where kubeadm keeps the static pod of kube-apiserver.
const DefaultManifest = "/etc/kubernetes/manifests/kube-apiserver.yaml"

// Flags of kube-apiserver that decide how it reaches nodes and verifies kubelets.
const (
	flagTypes    = "kubelet-preferred-address-types"
	flagKubelets = "kubelet-certificate-authority"
	flagSelector = "egress-selector-config-file"
)

// manifest is the file with the flags of kube-apiserver: the manifest of a pod, or the configuration of a k3s server.
type manifest struct {
	Spec struct {
		Containers []struct {
			Name          string
			Command, Args []string
			VolumeMounts  []struct{ Name, MountPath string }
		}
		Volumes []struct {
			Name     string
			HostPath struct{ Path string }
		}
	}
	// Keys in the configuration of a k3s server.
	Args     oneOrMore `json:"kube-apiserver-arg"`
	Selector string    `json:"egress-selector-mode"`
}

// oneOrMore is a text or a list of texts.
type oneOrMore []string

// UnmarshalJSON implements json.Unmarshaler.
func (o *oneOrMore) UnmarshalJSON(text []byte) error {
	var one string
	if string(text) == "null" {
		return nil
	}
	if json.Unmarshal(text, &one) == nil {
		*o = oneOrMore{one}
		return nil
	}
	return json.Unmarshal(text, (*[]string)(o))
}

// apiserver is what a manifest says about kube-apiserver.
type apiserver struct {
	file  string // the path of the manifest
	named bool   // the operator has named the file, which may be a copy from another machine
	k3s   bool
	mode  string            // egress-selector-mode of k3s
	flags map[string]string // the keys are flags without dashes
	// mounts maps folders of kube-apiserver's container to folders of its machine. k3s has none.
	mounts map[string]string
}

// parseManifest reads the flags of kube-apiserver.
func parseManifest(text []byte) (*apiserver, error) {
	var m manifest
	if err := yaml.Unmarshal(text, &m); err != nil {
		return nil, err
	}
	a := &apiserver{flags: make(map[string]string), mounts: make(map[string]string)}
	for _, c := range m.Spec.Containers {
		if c.Name != "kube-apiserver" {
			continue
		}
		a.read(slices.Concat(c.Command, c.Args))
		for _, mount := range c.VolumeMounts {
			for _, v := range m.Spec.Volumes {
				if v.Name == mount.Name && v.HostPath.Path != "" {
					a.mounts[path.Clean(mount.MountPath)] = v.HostPath.Path
				}
			}
		}
		return a, nil
	}
	if m.Args == nil && m.Selector == "" {
		return nil, errors.New("it has no container kube-apiserver, and no kube-apiserver-arg of k3s")
	}
	a.k3s, a.mode = true, m.Selector
	for _, arg := range m.Args {
		a.read([]string{"--" + strings.TrimPrefix(arg, "--")})
	}
	return a, nil
}

// read adds the flags in args to a.flags. A flag is one argument, --flag=value, or two: --flag and value.
func (a *apiserver) read(args []string) {
	for i, arg := range args {
		flag, isFlag := strings.CutPrefix(arg, "--")
		name, value, ok := strings.Cut(flag, "=")
		if !ok && i+1 < len(args) && !strings.HasPrefix(args[i+1], "--") {
			value = args[i+1]
		}
		if isFlag {
			a.flags[name] = value
		}
	}
}

// onMachine returns the path on the machine of a file that kube-apiserver's container has as file. "": the container
// does not have the file.
func (a *apiserver) onMachine(file string) string {
	if a.k3s {
		return file
	}
	for dir := path.Clean(file); ; dir = path.Dir(dir) {
		if host, ok := a.mounts[dir]; ok {
			return path.Join(host, strings.TrimPrefix(path.Clean(file), dir))
		}
		if dir == path.Dir(dir) {
			return ""
		}
	}
}

// absent returns the result for a file that a flag names, and that this check cannot read. err is nil if the pod of
// kube-apiserver does not mount the file.
func (a *apiserver) absent(flag, file string, err error) Result {
	switch {
	case err == nil:
		return Fail("add a volume with hostPath and a mount of it to "+a.file,
			"the pod of kube-apiserver does not mount %s, which --%s names", file, flag)
	case errors.Is(err, fs.ErrPermission):
		return Warn("run this as root", "--%s: %v", flag, err)
	case a.named:
		return Warn("if this is the machine of kube-apiserver, create the file", "--%s: %v", flag, err)
	}
	return Fail("create the file, or correct --"+flag+" in "+a.file, "--%s: %v", flag, err)
}

// apiserverChecks returns the checks of kube-apiserver's flags.
func (c *cloud) apiserverChecks() []Check {
	const group = "kube-apiserver"
	file := cmp.Or(c.Manifest, DefaultManifest)
	var a *apiserver
	found := func(look func(*apiserver) Result) func(context.Context) Result {
		return func(context.Context) Result {
			if a == nil {
				return Skipped("the flags are not known")
			}
			return look(a)
		}
	}
	read := func(context.Context) (r Result) {
		a, r = readManifest(file, c.Manifest != "")
		return r
	}
	if !c.byNames() && !c.Conf.Egress.Listens() {
		none := Skipped("the cloud has neither [mode.cloud.https.addr] nor [mode.cloud.egress]")
		return []Check{Found(group, "flags", none)}
	}
	if _, err := os.Stat(file); c.Manifest == "" && errors.Is(err, fs.ErrNotExist) {
		none := Skipped("there is no %s: run this beside kube-apiserver, or name a copy with --apiserver FILE", file)
		return []Check{Found(group, "flags", none)}
	}
	return []Check{
		{group, "flags", read},
		{group, "address types", found(c.addressTypes)},
		{group, "kubelet ca", found(c.kubeletAuthority)},
		{group, "egress selector", found(c.selector)},
	}
}

// readManifest reads the flags of kube-apiserver from a file. If it returns nil, the Result says why.
func readManifest(file string, named bool) (*apiserver, Result) {
	text, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return nil, Warn("run this as root", "%v", err)
	case err != nil:
		return nil, Fail("correct --apiserver", "%v", err)
	}
	a, err := parseManifest(text)
	if err != nil {
		return nil, Fail("name the manifest of kube-apiserver, or config.yaml of k3s, with --apiserver FILE",
			"%s: %v", file, err)
	}
	a.file, a.named = file, named
	return a, OK("%s has %d flags", file, len(a.flags))
}

// byNames reports whether the cloud has ports for callers that find nodes by their names.
func (c *cloud) byNames() bool { return len(c.Conf.HTTPS.Ports) > 0 }

// toEgress reports whether kube-apiserver's flags name an egress selector: it may reach the cluster through a proxy.
func (a *apiserver) toEgress() bool { return a.flags[flagSelector] != "" }

// ownTunnel reports whether kube-apiserver uses the tunnel that is a part of k3s.
func (a *apiserver) ownTunnel() bool { return a.k3s && !a.toEgress() && a.mode != "disabled" }

// addressTypes checks whether kube-apiserver dials nodes by their names or by their addresses.
func (c *cloud) addressTypes(a *apiserver) Result {
	types := strings.Split(a.flags[flagTypes], ",")
	text := fmt.Sprintf("--%s=%s", flagTypes, a.flags[flagTypes])
	if a.flags[flagTypes] == "" { // the default of the flag
		types, text = []string{"Hostname"}, "--"+flagTypes+" is not set, and Hostname comes first then"
	}
	switch {
	case a.toEgress():
		return OK("%s: through a proxy, names and addresses lead to nodes", text)
	case !c.byNames():
		return Skipped("the cloud has no [mode.cloud.https.addr]: kube-apiserver needs egress")
	case types[0] != "Hostname":
		return Fail("write --"+flagTypes+"=Hostname,InternalIP,ExternalIP into "+a.file+" (docs/dns.md)",
			"%s: kube-apiserver dials a node by its %s first, and only its name leads to the cloud", text, types[0])
	}
	return OK("%s: kube-apiserver dials nodes by their names", text)
}

// kubeletAuthority checks whether kube-apiserver verifies the certificates of kubelets. Only then does kube-apiserver
// name the node in its TLS handshake (SNI).
func (c *cloud) kubeletAuthority(a *apiserver) Result {
	file, set := a.flags[flagKubelets]
	switch {
	case !set && a.k3s:
		return OK("k3s sets --%s", flagKubelets)
	case !set && (a.toEgress() || !c.byNames()):
		return OK("--%s is not set: kube-apiserver accepts any certificate of a kubelet", flagKubelets)
	case !set && c.Conf.HTTPS.Terminates():
		return OK("--%s is not set: the cloud terminates connections that name no node", flagKubelets)
	case !set:
		return Fail("set the flag in "+a.file+", or clientca, cert and key in [mode.cloud.https] (docs/kubeadm.md)",
			"--%s is not set: exec, attach and port-forward name no node, so the cloud closes them", flagKubelets)
	}
	there := a.onMachine(file)
	if there == "" {
		return a.absent(flagKubelets, file, nil)
	}
	if _, err := os.Stat(there); err != nil {
		return a.absent(flagKubelets, file, err)
	}
	return bundle(there, "get the CA that signs the kubelets' certificates")
}

// selectorConfig holds the parts of an EgressSelectorConfiguration that selector checks.
type selectorConfig struct {
	Kind             string
	EgressSelections []selection
}

// selection says how kube-apiserver reaches one group of targets. Name names the group, such as "cluster".
type selection struct {
	Name       string
	Connection struct {
		ProxyProtocol string
		Transport     struct {
			TCP struct{ URL string }
			UDS struct{ UDSName string }
		}
	}
}

// proxyOfCluster returns the entry of an EgressSelectorConfiguration that sends kube-apiserver's connections into the
// cluster through a proxy.
func proxyOfCluster(file string) (*selection, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var config selectorConfig
	if err = yaml.Unmarshal(text, &config); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if config.Kind != "EgressSelectorConfiguration" {
		return nil, fmt.Errorf("%s: it is no EgressSelectorConfiguration", file)
	}
	for i, s := range config.EgressSelections {
		if s.Name == "cluster" && s.Connection.ProxyProtocol != "Direct" {
			return &config.EgressSelections[i], nil
		}
	}
	return nil, fmt.Errorf("%s: it has no egressSelections with the name cluster and a proxy", file)
}

// selector checks whether kube-apiserver's egress selector leads to this cloud.
func (c *cloud) selector(a *apiserver) Result {
	const page = " (docs/egress.md)"
	egress := c.Conf.Egress
	switch {
	case a.ownTunnel() && c.byNames() && !egress.Configured():
		return Fail("write egress-selector-mode: disabled into "+a.file+" (docs/k3s.md)",
			"k3s leads kube-apiserver through its own tunnel, so names do not count")
	case !a.toEgress() && !egress.Listens():
		return Skipped("kube-apiserver has no --%s, and the cloud no [mode.cloud.egress]", flagSelector)
	case !a.toEgress():
		return Fail("write the file of docs/egress.md, and set the flag in "+a.file,
			"--%s is not set: kube-apiserver does not use [mode.cloud.egress]", flagSelector)
	}
	file := a.flags[flagSelector]
	there := a.onMachine(file)
	if there == "" {
		return a.absent(flagSelector, file, nil)
	}
	if _, err := os.Stat(there); err != nil {
		return a.absent(flagSelector, file, err)
	}
	proxy, err := proxyOfCluster(there)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return Warn("run this as root", "%v", err)
	case err != nil:
		return Fail("correct the file"+page, "%v", err)
	case !egress.Configured():
		return Warn("write [mode.cloud.egress], or remove the flag if another proxy is not meant"+page,
			"%s leads kube-apiserver to a proxy, and the cloud has no [mode.cloud.egress]", there)
	}
	own, other, protocol := egress.GRPC, egress.HTTPConnect, "grpc"
	if proxy.Connection.ProxyProtocol != "GRPC" {
		own, other, protocol = other, own, "httpconnect"
	}
	at := proxy.Connection.Transport
	target := cmp.Or(at.UDS.UDSName, at.TCP.URL)
	named := "target " + target
	if at.UDS.UDSName != "" {
		named = "socket " + target
	}
	switch {
	case at.UDS.UDSName != "" && a.onMachine(target) == "":
		return a.absent(flagSelector, target, nil)
	case a.leadsTo(proxy, own):
		return OK("%s leads to %s, a line of %s in [mode.cloud.egress]", there, target, protocol)
	case a.leadsTo(proxy, other):
		return Fail("set proxyProtocol to that of the line"+page,
			"%s: proxyProtocol is %s, and the %s is a line of the other protocol in [mode.cloud.egress]", there,
			proxy.Connection.ProxyProtocol, named)
	}
	result := Fail("name the same in the file and in "+protocol+" of [mode.cloud.egress]"+page,
		"%s: the %s is no line of %s in [mode.cloud.egress], which has %s", there, named, protocol,
		cmp.Or(strings.Join(own, ", "), "none"))
	if at.UDS.UDSName == "" { // only a warning: the URL may lead to a Service or a balancer with another port
		result.State = StateWarn
	}
	return result
}

// leadsTo reports whether kube-apiserver's proxy is one of our listeners. Of a URL, leadsTo compares only the port:
// the host may be a Service or a balancer.
func (a *apiserver) leadsTo(proxy *selection, listeners []string) bool {
	at := proxy.Connection.Transport
	return slices.ContainsFunc(listeners, func(l string) bool {
		if socket, ok := strings.CutPrefix(l, "unix://"); ok {
			name := at.UDS.UDSName
			return name != "" && (name == socket || a.onMachine(name) == socket)
		}
		_, port, err := net.SplitHostPort(strings.TrimPrefix(l, "tls://"))
		target, bad := url.Parse(at.TCP.URL)
		return err == nil && bad == nil && port != "" && target.Scheme == "https" && cmp.Or(target.Port(), "443") == port
	})
}
