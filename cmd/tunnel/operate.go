package main

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/inventory"
	"tunnel.example/tunnel/pkg/page"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

// newInventory sets inventory if there is a file for it, or an admin socket or a status page that shows it.
func (w *cloudWiring) newInventory() {
	if w.conf.Inventory == "" && w.conf.AdminSocket == "" && w.conf.Page == "" {
		return
	}
	path := w.conf.Inventory
	if w.conf.InventoryMap() != "" {
		path = ""
	}
	w.inventory = inventory.New(path, w.log)
	w.directory.Watcher = w.inventory
}

// inventoryKey is the key of the ConfigMap that holds the inventory.
const inventoryKey = "nodes.json.gz"

// shareInventory has the inventory keep its nodes in a ConfigMap, if the configuration says so.
func (w *cloudWiring) shareInventory() {
	if name := w.conf.InventoryMap(); name != "" {
		w.inventory.Map = w.cluster.client.BinaryConfigMap(w.conf.Namespace, name, inventoryKey)
		w.inventory.Self = processName()
	}
}

// newAPI sets api. The admin socket serves it, and the other replicas ask it.
func (w *cloudWiring) newAPI() {
	w.api = api.New(api.Config{
		Mode: w.mode, Software: software(), Replica: processName(), Checks: w.allChecks, Counters: w.counters,
		Sessions: w.directory.Sessions, Coming: w.directory.Missing, Dialer: w.reach, Inventory: w.inventory,
		Expected: w.cluster.expected(),
		Peers:    w.peers, Tap: w.tap, Refusals: w.refusals, Listeners: w.allListeners, Certificates: w.held,
		AskToRenew: stream.AskToRenew, Forgotten: w.forgotten, Log: w.log,
	})
}

// forgotten is told of each node that an operator has had forgotten.
func (w *cloudWiring) forgotten(node tunnel.NodeName) {
	if w.services != nil {
		w.services.Left(node)
	}
}

// addPage adds the status page, if the configuration has one.
func (w *cloudWiring) addPage() {
	if w.conf.Page != "" {
		p := page.New(w.conf.Page, w.api, w.log)
		p.Sockets = w.sockets
		w.add(p, nil, w.conf.Page)
	}
}

// newAPI sets api, which the admin socket serves.
func (w *edgeWiring) newAPI() {
	var renewNow func(context.Context) error
	if w.renewal != nil {
		renewNow = w.renewal.Now
	}
	w.api = api.New(api.Config{
		Mode: w.mode, Software: software(), Replica: processName(), Node: string(w.conf.Node), Checks: w.allChecks,
		Counters: w.counters, Sessions: w.client.Sessions, Listeners: w.allListeners, Certificates: w.held,
		RenewNow: renewNow, Log: w.log,
	})
}

// allChecks returns the checks of /readyz.
func (d *daemon) allChecks() []admin.Check { return d.checks }

// allListeners returns the listeners of the start-up line.
func (d *daemon) allListeners() []string { return d.listeners }

// allListeners returns the listeners of the start-up line, with the ports that are open now.
func (w *cloudWiring) allListeners() []string {
	tcp, udp := w.doors.tcp.Name()+" ", w.doors.udp.Name()+" "
	all := slices.DeleteFunc(slices.Clone(w.listeners), func(l string) bool {
		return strings.HasPrefix(l, tcp) || strings.HasPrefix(l, udp)
	})
	for _, addr := range w.doors.tcp.Addrs() {
		all = append(all, tcp+addr.String())
	}
	for _, addr := range w.doors.udp.Addrs() {
		all = append(all, udp+addr.String())
	}
	return all
}

// processName returns the name of this process for people: its pod or its machine.
func processName() string {
	env := environment()
	return cmp.Or(env.PodName, env.HostName)
}

// expected returns a function that lists the nodes that should have an edge. It returns nil if the cloud reads no nodes
// from Kubernetes.
func (k cluster) expected() func() ([]tunnel.NodeName, bool) {
	if k.edges == nil {
		return nil
	}
	return k.edges.Names
}

// remembering returns an issuer that tells the inventory of each certificate.
func (w *cloudWiring) remembering(issuer stream.Issuer) stream.Issuer {
	if issuer == nil || w.inventory == nil {
		return issuer
	}
	return rememberingIssuer{issuer, w.inventory}
}

// rememberingIssuer tells the inventory of the certificates that an Issuer makes.
type rememberingIssuer struct {
	issuer stream.Issuer
	nodes  *inventory.Inventory
}

// First implements stream.Issuer.
func (r rememberingIssuer) First(
	ctx context.Context, c auth.Credential, request []byte,
) (node tunnel.NodeName, chain []byte, err error) {
	node, chain, err = r.issuer.First(ctx, c, request)
	if err == nil {
		r.note(node, chain)
	}
	return node, chain, err
}

// Again implements stream.Issuer.
func (r rememberingIssuer) Again(ctx context.Context, c auth.Credential, request []byte) (chain []byte, err error) {
	chain, err = r.issuer.Again(ctx, c, request)
	if err == nil {
		r.note(tunnel.NodeName(c.Node), chain)
	}
	return chain, err
}

func (r rememberingIssuer) note(node tunnel.NodeName, chain []byte) {
	if certs, err := auth.ParseCertificates(chain); err == nil && len(certs) > 0 {
		r.nodes.Issued(node, certs[0])
	}
}
