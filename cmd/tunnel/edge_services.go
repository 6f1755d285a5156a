package main

import (
	"context"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"time"

	mdns "github.com/miekg/dns"

	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/dns"
	"tunnel.example/tunnel/pkg/services/relay"
	"tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

// addServices makes the relay of Services, if the configuration asks for it. It must run before the client is made,
// since the cloud asks the client for conns to endpoints of this node. The caller adds services to the daemon.
func (w *edgeWiring) addServices() (err error) {
	s := w.conf.Services
	if !s.On {
		return nil
	}
	cfg := relay.Config{
		Node: w.conf.Node, File: s.State, Direct: s.Direct, Full: s.Full, Spread: s.Spread,
		Watch: w.watchServices, Reach: w.reachService, InContainer: w.egress.InContainer, IsOwn: w.policy.IsOwn,
		Domain: s.Domain, Left: w.sockets.Left(), AwaitsRouted: w.conf.CNI.On && w.conf.CNI.Routes,
		Datagrams: udp.EdgeConfig{Flows: w.conf.Limits.Flows, Counters: w.udp}, Counters: w.counters, Log: w.log,
	}
	if s.DNS {
		w.names = w.newNames()
		cfg.DNS = w.names
	}
	if w.services, err = relay.New(cfg); err != nil {
		return err
	}
	w.handedOver = w.services.HandedOver()
	// The rules of mode full must not lead a conn of another node on to a Service whose external IP is the endpoint's
	// address: two such Services would send it round in a circle.
	policy := w.policy.Also(w.services.Home).WithControl(relay.Unredirected)
	edge := relay.NewEdge(w.services, policy)
	w.dialers = append(w.dialers, edge)
	return w.newNear(edge)
}

// newNear makes the shortcut to the edges of this site, if the configuration asks for it.
func (w *edgeWiring) newNear(edge *relay.Edge) error {
	s := w.conf.Services
	if !s.Near.IsValid() {
		return nil
	}
	if w.proof.pair == nil {
		return errors.New("mode.edge.services near: needs nodecert in [mode.edge.stream.client]")
	}
	verify := w.verifyTold
	if s.NearCA != "" {
		pool, err := w.files.Pool("mode.edge.services nearca", s.NearCA)
		if err != nil {
			return err
		}
		verify = func(chain []*x509.Certificate) (tunnel.NodeName, error) { return auth.VerifyNode(chain, pool.Pool()) }
	}
	w.near = relay.NewNear(edge, relay.NearConfig{
		Listen: s.Near, Certificate: w.proof.pair.Certificate, Sockets: w.sockets, Verify: verify,
	})
	return nil
}

// verifyTold returns the node of a certificate chain that a CA has signed which the cloud has told.
func (w *edgeWiring) verifyTold(chain []*x509.Certificate) (tunnel.NodeName, error) {
	pool, known := w.told.NodeRoots()
	if !known {
		return "", errNodeCAsUnknown
	}
	return auth.VerifyNode(chain, pool)
}

var errNodeCAsUnknown = errors.New("the cloud tells the CAs of nodes with each new certificate, and has told none " +
	"yet: run tunnel cert renew; if the cloud is of an older version, set nearca in [mode.edge.services]")

// learnTime is the time in which the edges of a site renew their certificates, so that they do not all ask at once.
const learnTime = 10 * time.Second

// learnNodeCAs makes the edge renew its certificate soon, if it needs the CAs of nodes and the cloud has not told them.
func (w *edgeWiring) learnNodeCAs() {
	if w.near == nil || w.conf.Services.NearCA != "" {
		return
	}
	if _, known := w.told.NodeRoots(); !known {
		w.log.Info("the edge renews its certificate, because the cloud then tells the CAs of nodes")
		w.renewal.Soon(learnTime)
	}
}

// resolvConf is the file that names the DNS servers of this machine.
const resolvConf = "/etc/resolv.conf"

// newNames makes the server for the queries of pods. As with the cluster's own DNS, whoever reaches it may ask. It runs
// only after services is set.
func (w *edgeWiring) newNames() *dns.Responder {
	servers := dns.NewResolvConf(resolvConf, func(a netip.Addr) bool { return w.services.ServesDNS(a) })
	return dns.NewResponder(dns.ResponderConfig{
		Zone:      func(q mdns.Question) *mdns.Msg { return w.services.Resolve(q) },
		Upstreams: servers.Servers,
		Dial:      (&net.Dialer{Control: relay.Unredirected}).DialContext,
		AllowFrom: auth.Sources{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
		Counters:  w.counters, Log: w.log,
		PerAddress: true, // the pods of a node have one IPv6 /64
	})
}

// watchServices opens a stream of what the cloud tells of Services. It waits for a session.
func (w *edgeWiring) watchServices(ctx context.Context) (relay.Stream, error) {
	cc, err := w.client.Calls(ctx)
	if err != nil {
		return nil, err
	}
	return servicesv1.NewServicesClient(cc).Watch(ctx)
}

// reachService opens a conn to an endpoint through the cloud.
func (w *edgeWiring) reachService(ctx context.Context, target string) (net.Conn, error) {
	return w.client.Reach(ctx, target)
}

// handleServices adds the paths for tunnel services. An edge without [mode.edge.services] says so there.
func (w *edgeWiring) handleServices(all map[string]http.Handler) {
	if w.services == nil {
		all["/v1/services/"] = http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
			api.Refuse(rw, http.StatusNotFound, "", errors.New("this edge keeps no Services: write "+
				"[mode.edge.services] into its configuration, and start it again (docs/services.md)"))
		})
		all["/v1/services"] = all["/v1/services/"]
		return
	}
	for pattern, h := range w.services.Handlers() {
		all[pattern] = h
	}
}
