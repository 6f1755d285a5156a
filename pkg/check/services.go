package check

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/services"
)

// relayed has what the checks of [mode.edge.services] have found so far.
type relayed struct {
	conf.EdgeServices
	daemon *daemon
	known  *knownServices // the edge's answer to GET /v1/services; nil: the edge has not answered
	there  bool           // the kernel has the rules of the edge

	// Tests replace these.
	rules    func() (redirects, error)
	links    func() ([]net.Addr, error) // returns the addresses of this machine's network interfaces
	writable func(path string) error
	proxy    string // the URL at which kube-proxy answers health checks
	dial     func(ctx context.Context, network, address string) (net.Conn, error)
}

// redirects says whether the kernel has the rules by which an edge serves Services.
type redirects struct {
	there  bool
	before []string // chains of other programs that translate addresses before the edge's: FAMILY TABLE CHAIN
}

// knownServices is a part of what the edge answers to GET /v1/services.
type knownServices struct {
	// Stale is the time since which the edge's state of Services may lag behind the cloud's. nil: it does not lag.
	// Zero time: the edge has never had the cloud's state.
	Stale *time.Time `json:"stale_since"`
	Why   string     `json:"stale_because"`
	Ports []struct {
		Address string `json:"address"`
		Port    uint16 `json:"port"`
	} `json:"ports"`
}

// relayedServices returns the checks of [mode.edge.services]. d asks the running edge.
func relayedServices(c conf.EdgeServices, d *daemon) []Check {
	s := &relayed{
		EdgeServices: c, daemon: d, rules: redirected, links: net.InterfaceAddrs, writable: writable,
		proxy: "http://127.0.0.1:10256/healthz", dial: new(net.Dialer).DialContext,
	}
	const group = "services"
	return []Check{
		{group, "rules", s.redirect},
		{group, "other rules", s.first},
		{group, "state", s.file},
		{group, "cloud", s.cloud},
		{group, "kube-proxy", s.kubeProxy},
		{group, "route", s.route},
	}
}

// redirect looks for the rules and the addresses that the edge adds to the kernel.
func (s *relayed) redirect(ctx context.Context) Result {
	found, err := s.rules()
	switch {
	case errors.Is(err, errors.ErrUnsupported) && runtime.GOOS != "linux":
		return Skipped("this system is not Linux")
	case errors.Is(err, fs.ErrPermission):
		return Fail("run this as root, in the network of the node", "listing the rules of nftables: %v", err)
	case err != nil:
		return Fail("modprobe nf_tables; or take a kernel with nftables (CONFIG_NF_TABLES)",
			"the kernel has no nftables, so the edge serves no Services: %v", err)
	}
	if !found.there {
		text := fmt.Sprintf("the table inet %s is not there, so the edge serves no Services", services.RulesTable)
		st := s.daemon.status(ctx)
		if st == nil && !s.daemon.unknown(ctx) {
			return Fail("start the edge, which writes it", "%s", text)
		}
		why := lineOf(st, "services")
		do := "do what the line says (docs/services.md)"
		if why == "" || strings.Contains(why, "CAP_NET_ADMIN") {
			do = "give the edge the node's network and CAP_NET_ADMIN, and start it again: the drop-in " +
				"tunnel-edge-services.conf, or the overlay edge-services (docs/services.md)"
		}
		return Fail(do, "%s%s", text, why)
	}
	s.there = true
	addrs, err := s.links()
	if err != nil {
		return Fail("run this as root", "%v", err)
	}
	isRelay := func(a net.Addr) bool { return strings.HasPrefix(a.String(), services.RelayAddress+"/") }
	if !slices.ContainsFunc(addrs, isRelay) {
		return Fail("start the edge again, which adds the address; look for the program that removes it",
			"no link has the address %s, to which the rules lead: Services of other nodes are not reached",
			services.RelayAddress)
	}
	if s.Full {
		return OK("the rules for Services are there")
	}
	return OK("connections to Services of other nodes lead to the edge")
}

// lineOf returns the text behind the colon in the line of /readyz for name; "" if there is no such text.
func lineOf(st *api.Status, name string) string {
	if st != nil {
		for _, c := range st.Checks {
			if c.Name == name && c.Text != "" {
				return ": " + c.Text
			}
		}
	}
	return ""
}

// first looks for rules of other programs that take connections to Services before the edge's rules do.
func (s *relayed) first(context.Context) Result {
	if !s.there {
		return Skipped("rules come first")
	}
	found, err := s.rules()
	if err != nil {
		return Fail("run this again", "listing the rules of nftables: %v", err)
	}
	if found.before != nil {
		return Warn("look whether it takes connections to Services: nft list chain "+found.before[0]+"; if it does, give it "+
			"a later priority", "rules of another program come before those of the edge: %s", strings.Join(found.before, ", "))
	}
	return OK("no rules of another program come before those of the edge")
}

// file checks whether the edge can keep its state of Services in a file.
func (s *relayed) file(ctx context.Context) Result {
	const elsewhere = "mount the disk for writing, or name another file: state in [mode.edge.services]"
	st := s.daemon.status(ctx)
	_, err := os.Stat(s.State)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err = s.writable(existing(filepath.Dir(s.State))); err != nil {
			return Fail(elsewhere, "the edge cannot make %s: %v", s.State, err)
		}
		if st != nil {
			return Fail("start the edge again, which makes the file", "the edge runs, and there is no %s", s.State)
		}
		return OK("there is no %s yet; the edge makes it", s.State)
	case err != nil:
		return Fail("run this as root", "%v", err)
	}
	if err = s.writable(s.State); err != nil {
		return Fail(elsewhere, "%s cannot be written: %v", s.State, err)
	}
	taken, err := isLocked(s.State)
	switch {
	case err != nil:
		return Fail("run this as root", "%v", err)
	case taken && st == nil && !s.daemon.unknown(ctx):
		return Fail("fuser -v "+s.State+" names it: stop the other edge of this machine, or give each its own state in "+
			"[mode.edge.services]", "the edge does not run, and another process has %s", s.State)
	case !taken && st != nil:
		return Warn("start the edge again: it may have an older configuration",
			"the edge runs, and does not have %s", s.State)
	}
	return OK("%s can be written, and no other program has it", s.State)
}

// existing returns folder if it exists, else the nearest parent folder that exists.
func existing(folder string) string {
	for {
		above := filepath.Dir(folder)
		if _, err := os.Stat(folder); !errors.Is(err, fs.ErrNotExist) || above == folder {
			return folder
		}
		folder = above
	}
}

// cloud asks the edge whether the cloud sends Services, and whether the edge's state is up to date.
func (s *relayed) cloud(ctx context.Context) Result {
	if s.daemon.status(ctx) == nil {
		return Skipped("the edge does not answer")
	}
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	known := new(knownServices)
	if err := api.NewClient(s.daemon.socket).Call(ctx, http.MethodGet, "/v1/services", nil, known); err != nil {
		return Fail("start the edge again, so that it has this configuration", "%v", err)
	}
	s.known = known
	const do = "do what the text says; without a session, begin with the first line that fails"
	why := cmp.Or(known.Why, "the edge has not asked yet")
	switch {
	case known.Stale == nil:
		return OK("the cloud sends Services: the edge knows %d ports", len(known.Ports))
	case known.Stale.IsZero():
		return Fail(do, "the cloud has never sent this edge any Services: %s", why)
	}
	return Warn(do, "the edge works with what the cloud has sent until %s: %s", when(*known.Stale), why)
}

// kubeProxy asks for kube-proxy's health. In mode relay, kube-proxy must run: it serves the Services that the edge does
// not relay. In mode full, kube-proxy must not run. Any answer shows that it runs: while its Node is being deleted,
// kube-proxy answers 503.
func (s *relayed) kubeProxy(ctx context.Context) Result {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	var answer *http.Response
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, s.proxy, nil)
	if err == nil {
		answer, err = (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(q)
	}
	if s.Full {
		if err == nil {
			answer.Body.Close()
			return Fail("keep kube-proxy from this node, and run kube-proxy --cleanup there; or write mode = \"relay\" "+
				"(docs/services.md)", "mode = \"full\" takes the place of kube-proxy, but it answers at %s", s.proxy)
		}
		return OK("kube-proxy does not run on this node")
	}
	if err != nil {
		return Warn("start kube-proxy, or the program in its place; if its health is at another address, all is well",
			"nothing answers as kube-proxy does, which serves all other Services: %v", err)
	}
	answer.Body.Close()
	return OK("kube-proxy answers at %s", s.proxy)
}

// route checks, for IPv4 and IPv6, whether the node has a route to the address of a Service. For packets of this
// machine's processes, the kernel looks for a route before it applies the edge's rules.
func (s *relayed) route(ctx context.Context) Result {
	if s.known == nil {
		return Skipped("the edge does not say which Services it knows")
	}
	tried := make(map[bool]string) // the tried address; the key is true for IPv6
	for _, p := range s.known.Ports {
		is6 := strings.Contains(p.Address, ":")
		if tried[is6] != "" {
			continue
		}
		tried[is6] = p.Address
		c, err := s.dial(ctx, "udp", net.JoinHostPort(p.Address, strconv.Itoa(int(p.Port)))) // sends nothing
		if err != nil {
			return Warn("ip route add NETWORK dev LINK, with the cluster's network of Services and the link of the pods "+
				"(docs/services.md)",
				"processes of this node cannot connect to Services while no route leads there; pods can: %v", err)
		}
		c.Close()
	}
	if len(tried) == 0 {
		return Skipped("the edge knows no Service")
	}
	return OK("the node has a route to Services")
}
