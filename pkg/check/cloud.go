package check

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/setup"
	"tunnel.example/tunnel/pkg/tunnel"
)

// CloudConfig is what the checks of a cloud look at.
type CloudConfig struct {
	Conf *conf.Cloud
	// Listeners are the listeners of the configuration, in the form of api.Status: "MODULE ADDRESS".
	Listeners  []string
	Kubernetes *kube.Client // nil: the configuration does not need it
	// DNS is the host:port of the DNS server that kube-apiserver asks; "": the cloud's responder, if there is one.
	DNS string
	// Manifest is the file with kube-apiserver's flags; "": DefaultManifest, if this machine has that file.
	Manifest string
}

// cloud has what the checks of a cloud have found so far. The checks run one after the other.
type cloud struct {
	CloudConfig
	daemon daemon
	nodes  *api.NodeList           // the nodes that the running cloud knows; nil: the cloud has not answered
	lines  map[string][]netip.Addr // the names in the ConfigMap with their addresses; nil: not read
}

// Cloud returns the checks of a cloud.
func Cloud(cfg CloudConfig) []Check {
	c := &cloud{CloudConfig: cfg, daemon: daemon{mode: "cloud", socket: cfg.Conf.AdminSocket}}
	list := []Check{
		{"cloud", "daemon", c.daemon.running},
		{"cloud", "modules", c.daemon.modules},
		{"cloud", "nodes", c.connected},
	}
	for _, l := range cfg.Listeners {
		module, addr, _ := strings.Cut(l, " ")
		if _, rest, ok := strings.Cut(addr, "://"); ok {
			addr = rest // egress has unix:///path and tls://host:port
		}
		if strings.HasPrefix(addr, "/") {
			continue // a unix socket: the daemon replaces the file that a killed daemon has left
		}
		list = append(list, Check{"ports", l, func(ctx context.Context) Result { return c.port(ctx, module, addr) }})
	}
	for _, f := range certificates(cfg.Conf) {
		list = append(list, Check{"certificates", f.name, f.look})
	}
	has := cfg.Conf
	list = append(list, readable("certificates", has.Server.Key, has.Server.TokenFile, has.Join.CAKey, has.HTTPS.Key,
		has.HTTPS.Kubelet.Key, has.Peers.Key, has.Egress.Key)...)
	list = append(list,
		Check{"certificates", "trust", c.trust},
		Check{"certificates", "tokens", c.tokens},
	)
	return slices.Concat(list, c.kubernetes(), c.apiserverChecks())
}

// connected counts the nodes that have a session.
func (c *cloud) connected(ctx context.Context) Result {
	if c.daemon.status(ctx) == nil {
		return Skipped("the cloud does not answer")
	}
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	list, err := api.NewClient(c.daemon.socket).Nodes(ctx)
	if err != nil {
		return Fail("the cloud's log says more", "%v", err)
	}
	c.nodes = list
	var missing []string
	for _, n := range list.Nodes {
		if n.State == api.Missing {
			missing = append(missing, n.Name)
		}
	}
	here := len(list.Nodes) - len(missing)
	switch {
	case len(missing) > 0:
		const most = 5
		shown := strings.Join(missing[:min(most, len(missing))], ", ")
		if len(missing) > most {
			shown += ", …"
		}
		return Warn("tunnel ls --missing -o wide says why; run tunnel check on the node",
			"%d nodes are connected, and %d are missing: %s", here, len(missing), shown)
	case list.Incomplete != nil:
		return Warn("look at the other replicas", "%d nodes are connected; %s", here, strings.Join(list.Incomplete, "; "))
	}
	return OK("%d nodes are connected, and none is missing", here)
}

// certificateFile is a file with certificates that a cloud uses.
type certificateFile struct {
	name string // a key of the configuration
	look func(context.Context) Result
}

// certificates returns the files of a configuration, each once.
func certificates(c *conf.Cloud) (all []certificateFile) {
	seen := make(map[string]bool)
	add := func(key, file string, look func() Result) {
		if file != "" && !seen[file] {
			seen[file] = true
			all = append(all, certificateFile{key, func(context.Context) Result { return look() }})
		}
	}
	leaf := func(key, file, do string) {
		add(key, file, func() Result {
			certs, r := readCertificates(file)
			if certs == nil {
				return r
			}
			return validity(fmt.Sprintf("%s, %s,", file, names(certs[0])), certs[0], byHand, do)
		})
	}
	ca := func(key, file, do string) { add(key, file, func() Result { return bundle(file, do) }) }
	const replace = "replace cert and key: the cloud reads them again by itself (docs/certificates.md)"
	leaf("server cert", c.Server.Cert, replace)
	leaf("https cert", c.HTTPS.Cert, replace)
	leaf("kubelet cert", c.HTTPS.Kubelet.Cert, "have the cluster's CA sign another client certificate for kubelets")
	leaf("peers cert", c.Peers.Cert, replace)
	leaf("egress cert", c.Egress.Cert, replace)
	ca("join ca", c.Join.CA, "put another CA beside it into the file, before it ends (docs/certificates.md)")
	ca("join cloudca", c.Join.CloudCA, "docs/certificates.md says how to replace the cloud's CA")
	ca("https clientca", c.HTTPS.ClientCA, "get the CA of kube-apiserver's client certificate")
	ca("kubelet ca", c.HTTPS.Kubelet.CA, "get the CA that signs the kubelets' certificates")
	ca("peers ca", c.Peers.CA, "docs/certificates.md says how to replace the CA of the replicas")
	ca("egress clientca", c.Egress.ClientCA, "get the CA of kube-apiserver's client certificate")
	return all
}

// trust checks whether edges can join by a join token, and whether a CA could sign more than it is for.
func (c *cloud) trust(context.Context) Result {
	warnings, err := setup.CheckTrust(c.Conf)
	const do = "docs/certificates.md says who signs what"
	switch {
	case err != nil:
		return Fail(do, "%v", err)
	case warnings != nil:
		return Warn(do, "%s", strings.Join(warnings, "; "))
	case c.Conf.Join.Address != "":
		return OK("the certificate is good for %s, at which join tokens lead edges", c.Conf.Join.Address)
	}
	return OK("no CA of nodes can make replicas or callers")
}

// tokens counts the lines of the token file.
func (c *cloud) tokens(context.Context) Result {
	file := c.Conf.Server.TokenFile
	if file == "" {
		return Skipped("there is no tokenfile: nodes prove themselves in other ways")
	}
	text, _, err := tunnel.ReadFile(file, auth.MaxTokenFile)
	if err != nil {
		return Fail("run this as the user of the cloud; else create the file: tunnel token create", "%v", err)
	}
	lines, err := auth.List(string(text))
	if err != nil {
		return Fail("correct the line: tunnel token list shows the others", "%v", err)
	}
	expired := 0
	for _, l := range lines {
		if !l.Expires.IsZero() && time.Now().After(l.Expires) {
			expired++
		}
	}
	return OK("%s has %d lines, %d of them expired", file, len(lines), expired)
}
