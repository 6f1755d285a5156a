package egress

import (
	"context"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

func identifiers(t *testing.T, s string) konnectivity.Identifiers {
	t.Helper()
	id, err := konnectivity.ParseIdentifiers(s)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func FuzzParseIdentifiers(f *testing.F) {
	f.Add("host=edge1&ipv4=10.0.0.5&ipv6=fd00::5&cidr=10.88.1.0/24&default-route=true")
	f.Add("host=x\xff")
	f.Add("host=%ff")
	f.Fuzz(func(t *testing.T, s string) {
		id, err := konnectivity.ParseIdentifiers(s)
		if err != nil {
			return
		}
		tb := newTable(map[tunnel.NodeName]konnectivity.Identifiers{"n": id})
		for _, h := range id.Hosts {
			if len(tb.host(h)) == 0 {
				t.Errorf("%q is not found", h)
			}
		}
		for _, p := range id.Networks {
			if len(tb.narrowestNetwork(p.Addr().String())) == 0 {
				t.Errorf("%v is not found", p)
			}
		}
	})
}

// narrowestNetwork finds the same nodes as a search of all networks.
func TestLongestPrefix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		addr := rapid.Custom(func(t *rapid.T) netip.Addr {
			b := rapid.SliceOfN(rapid.ByteRange(0, 3), 4, 4).Draw(t, "bytes")
			if rapid.Bool().Draw(t, "IPv4") {
				return netip.AddrFrom4([4]byte(b))
			}
			return netip.AddrFrom16([16]byte{0: 0xfd, 12: b[0], 13: b[1], 14: b[2], 15: b[3]})
		})
		all := make(map[tunnel.NodeName]konnectivity.Identifiers)
		for _, n := range []tunnel.NodeName{"a", "b", "c"} {
			var id konnectivity.Identifiers
			for range rapid.IntRange(0, 4).Draw(t, "networks") {
				a := addr.Draw(t, "network")
				p, err := a.Prefix(rapid.IntRange(0, a.BitLen()).Draw(t, "bits"))
				if err != nil {
					t.Fatal(err)
				}
				id.Networks = append(id.Networks, p)
			}
			all[n] = id
		}
		to := addr.Draw(t, "to")
		best, want := -1, map[tunnel.NodeName]bool{}
		for n, id := range all {
			for _, p := range id.Networks {
				if !p.Contains(to) {
					continue
				}
				if p.Bits() > best {
					best, want = p.Bits(), map[tunnel.NodeName]bool{}
				}
				if p.Bits() == best {
					want[n] = true
				}
			}
		}
		got := map[tunnel.NodeName]bool{}
		for _, n := range newTable(all).narrowestNetwork(to.String()) {
			got[n] = true
		}
		if !maps.Equal(got, want) {
			t.Fatalf("%v is reached by %v, want %v", to, got, want)
		}
	})
}

func TestChoose(t *testing.T) {
	type (
		names = []tunnel.NodeName
		codes = map[tunnel.NodeName]tunnel.Code
		only  = []Strategy
	)
	all := map[tunnel.NodeName]konnectivity.Identifiers{
		"a": identifiers(t, "host=a&ipv4=10.0.0.1&cidr=10.88.1.0/24"),
		"b": identifiers(t, "host=b&ipv4=10.0.0.2&cidr=10.88.0.0/16"),
		"c": identifiers(t, "host=c&default-route=true"),
		"d": identifiers(t, "ipv4=10.0.0.4"),
		"e": identifiers(t, "cidr=10.0.0.4/32"),
		"f": identifiers(t, "ipv4=10.0.0.9&cidr=10.99.0.0/16"),
		"g": identifiers(t, "ipv4=10.0.0.9&cidr=10.99.1.0/24"),
		"h": identifiers(t, "ipv4=10.66.0.1"),
		"i": identifiers(t, "ipv4=10.66.0.2&cidr=10.66.0.0/24"),
		"j": {Hosts: []string{"j"}, Refused: []string{"J.Example.com.", "a"}},
	}
	for name, tc := range map[string]struct {
		kubernetes bool
		strategies []Strategy
		addr       string
		gone       []tunnel.NodeName
		refuse     map[tunnel.NodeName]tunnel.Code
		want       []tunnel.NodeName // nodes that are dialled, in order
		fails      bool
	}{
		"by name":                          {addr: "a:80", want: names{"a"}},
		"by name, other case":              {addr: "A:80", want: names{"a"}},
		"by address":                       {addr: "10.0.0.2:80", want: names{"b"}},
		"by narrowest network":             {addr: "10.88.1.9:80", want: names{"a"}},
		"by wider network":                 {addr: "10.88.2.9:80", want: names{"b"}},
		"by default route":                 {addr: "192.168.0.1:80", want: names{"c"}},
		"by default route, v6":             {addr: "[fd00::1]:80", want: names{"c"}},
		"any":                              {addr: "192.168.0.1:80", gone: names{"c"}, want: names{""}},
		"away: asked of the next strategy": {addr: "a:80", gone: names{"a"}, want: names{"c"}},
		"draining: asked of the next":      {addr: "10.0.0.4:80", refuse: codes{"d": tunnel.Draining}, want: names{"d", "e"}},
		"draining: nobody guesses": {addr: "a:80", refuse: codes{"a": tunnel.Draining}, want: names{"a"},
			fails: true},
		"full: nobody guesses": {addr: "10.0.0.2:80", refuse: codes{"b": tunnel.Overloaded},
			want: names{"b", "b waits"}, fails: true},
		"full: the next is asked first": {addr: "10.0.0.4:80", refuse: codes{"d": tunnel.Overloaded},
			want: names{"d", "e"}},
		"all full: the first one waits": {addr: "10.0.0.4:80",
			refuse: codes{"d": tunnel.Overloaded, "e": tunnel.Overloaded}, want: names{"d", "e", "d waits"}, fails: true},
		"full: any, which it is not": {addr: "192.168.0.1:80", refuse: codes{"c": tunnel.Overloaded},
			want: names{"c", ""}},
		"gone meanwhile":                 {addr: "a:80", refuse: codes{"a": tunnel.Gone}, want: names{"a", "c"}},
		"denied: that is the answer":     {addr: "a:80", refuse: codes{"a": tunnel.Denied}, want: names{"a"}, fails: true},
		"refused: that is the answer":    {addr: "a:80", refuse: codes{"a": tunnel.Refused}, want: names{"a"}, fails: true},
		"Node away: nobody else":         {kubernetes: true, addr: "a:80", gone: names{"a"}, fails: true},
		"Node away, in another spelling": {kubernetes: true, addr: "[::ffff:10.0.0.1]:80", gone: names{"a"}, fails: true},
		"its pod: nobody else":           {kubernetes: true, addr: "10.88.1.9:80", gone: names{"a"}, fails: true},
		"Node gone meanwhile": {kubernetes: true, addr: "a:80", refuse: codes{"a": tunnel.Gone},
			want: names{"a"}, fails: true},
		"Node gone before": {kubernetes: true, addr: "a:80", refuse: codes{"a": tunnel.NoSuchNode},
			want: names{"a"}, fails: true},
		"Node draining": {kubernetes: true, addr: "10.66.0.2:80", refuse: codes{"i": tunnel.Draining},
			want: names{"i"}, fails: true},
		"no Node's: any":             {kubernetes: true, addr: "10.96.0.1:443", gone: names{"c"}, want: names{""}},
		"two Nodes claim it":         {kubernetes: true, addr: "10.0.0.9:80", fails: true},
		"two Nodes' pods overlap":    {kubernetes: true, addr: "10.99.1.9:80", fails: true},
		"a Node, and another's pods": {kubernetes: true, addr: "10.66.0.1:80", fails: true},
		"the same, by network alone": {kubernetes: true, strategies: only{CIDR, Default}, addr: "10.66.0.1:80",
			fails: true},
		"the same, by address alone": {kubernetes: true, strategies: only{DestHost}, addr: "10.66.0.1:80",
			want: names{"h"}},
		"a Node in its own pods' network": {kubernetes: true, addr: "10.66.0.2:80", want: names{"i"}},
		"by name, with a dot":             {kubernetes: true, addr: "A.:80", want: names{"a"}},
		"by address, with a dot":          {kubernetes: true, addr: "10.66.0.2.:80", want: names{"i"}},
		"its pod, with a dot":             {kubernetes: true, addr: "10.66.0.3.:80", want: names{"i"}},
		"a name that does not count":      {kubernetes: true, addr: "j.example.com:80", fails: true},
		"the same, with a dot":            {kubernetes: true, addr: "j.example.com.:80", fails: true},
		"the same, and names are not used": {kubernetes: true, strategies: only{CIDR, Default}, addr: "j.example.com:80",
			want: names{""}},
		"another's name, away":       {kubernetes: true, addr: "a:80", gone: names{"a"}, fails: true},
		"other pods of that network": {kubernetes: true, addr: "10.66.0.3:80", want: names{"i"}},
		"two say so: either":         {addr: "10.99.1.9:80", want: names{"g"}},
		"Node away, and only any is asked": {kubernetes: true, strategies: only{Default}, addr: "a:80", gone: names{"a"},
			want: names{""}},
		"strategies as configured": {strategies: only{CIDR}, addr: "a:80", fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			n := &nodes{reach: maps.Clone(all), refuse: map[tunnel.NodeName]error{},
				target: testkit.Serve(t, func(*net.TCPConn) {})}
			for _, g := range tc.gone {
				delete(n.reach, g)
			}
			for node, code := range tc.refuse {
				n.refuse[node] = tunnel.Refusef(code, "so it is")
			}
			c, err := newChooser(Config{Strategies: tc.strategies, Identifiers: n, Kubernetes: tc.kubernetes}, n, n)
			if err != nil {
				t.Fatal(err)
			}
			c.table.Store(newTable(all))
			conn, err := c.dial(t.Context(), tc.addr, &opening{caller: "test"}, wait)
			if (err != nil) != tc.fails || !slices.Equal(n.dialled, tc.want) {
				t.Errorf("dialled %q, want %q; %v", n.dialled, tc.want, err)
			}
			if err == nil {
				conn.Close()
			}
		})
	}
	if _, err := newChooser(Config{Strategies: only{"desthost"}}, nil, nil); err == nil {
		t.Error("a misspelt strategy is accepted")
	}
}

// The front door is not ready between the moment when the source is known and the first table.
func TestReadyWithTheFirstTable(t *testing.T) {
	n := &nodes{reach: map[tunnel.NodeName]konnectivity.Identifiers{}, unknown: true}
	door, err := New(Config{Identifiers: n}, n, n, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	door.setUp(true)
	if err := door.Ready(); err != nil {
		t.Errorf("the front door waits for a source that cannot be read: %v", err)
	}
	n.unknown = false
	if door.Ready() == nil {
		t.Error("the front door is ready, but its dials know nothing")
	}
	door.chooser.refresh()
	if err := door.Ready(); err != nil {
		t.Error(err)
	}
}

// The next dial uses strategies that have changed. A strategy that is not known changes nothing.
func TestStrategiesChange(t *testing.T) {
	n := &nodes{reach: map[tunnel.NodeName]konnectivity.Identifiers{"edge1": {Hosts: []string{"edge1"}}},
		refuse: map[tunnel.NodeName]error{}, target: testkit.Serve(t, func(*net.TCPConn) {})}
	c, err := newChooser(Config{Strategies: []Strategy{DestHost}, Identifiers: n}, n, n)
	if err != nil {
		t.Fatal(err)
	}
	c.table.Store(newTable(n.reach))
	reaches := func(why string, want bool) {
		t.Helper()
		conn, err := c.dial(t.Context(), "edge1:80", &opening{caller: "test"}, wait)
		if (err == nil) != want {
			t.Errorf("%s: %v", why, err)
		}
		if err == nil {
			conn.Close()
		}
	}
	reaches("by its host", true)
	if err = c.setRules([]Strategy{CIDR}, nil); err != nil {
		t.Fatal(err)
	}
	reaches("by its network alone", false)
	if err = c.setRules([]Strategy{"nonsense"}, nil); err == nil {
		t.Error("a strategy that is not known is accepted")
	}
	reaches("after a change that failed", false)
	if err = c.setRules(nil, nil); err != nil {
		t.Fatal(err)
	}
	reaches("by all strategies", true)
}

// Different spellings of one name or address are one entry, which every spelling finds.
func TestSpellings(t *testing.T) {
	network := netip.MustParsePrefix("10.88.1.0/24")
	tb := newTable(map[tunnel.NodeName]konnectivity.Identifiers{"edge1": {
		Hosts:    []string{"edge1", "Edge1", "10.0.0.1", "::ffff:10.0.0.1", "FE80::1%eth0", "edge1."},
		Networks: []netip.Prefix{network, network},
	}})
	for _, host := range []string{
		"EDGE1", "edge1.", "10.0.0.1", "10.0.0.1.", "::ffff:10.0.0.1", "fe80::1", "fe80:0::1%eth1",
	} {
		if got := tb.host(host); !slices.Equal(got, []tunnel.NodeName{"edge1"}) {
			t.Errorf("%s belongs to %q", host, got)
		}
	}
	for _, addr := range []string{"10.88.1.9", "::ffff:10.88.1.9"} {
		if got := tb.narrowestNetwork(addr); !slices.Equal(got, []tunnel.NodeName{"edge1"}) {
			t.Errorf("%s belongs to %q", addr, got)
		}
	}
}

// The error of a failed dial names the owner of the address, not only the answer of another node.
func TestAwayIsNamed(t *testing.T) {
	all := map[tunnel.NodeName]konnectivity.Identifiers{
		"a":  identifiers(t, "host=a&ipv4=10.0.0.1&cidr=10.88.1.0/24"),
		"b":  identifiers(t, "host=b&ipv4=10.0.0.2&cidr=10.88.2.0/24"),
		"b2": identifiers(t, "cidr=10.88.2.0/24"),
		"c":  {Refused: []string{"c.example.com", "lb.example.com"}},
		"c2": {Refused: []string{"lb.example.com"}},
	}
	for addr, want := range map[string]string{
		"10.0.0.1:80":  "no-such-node: No agent available: a is not connected; through another node: so it is",
		"a:80":         "no-such-node: No agent available: a is not connected; through another node: so it is",
		"10.88.1.7:80": "no-such-node: No agent available: a is not connected; through another node: so it is",
		"10.0.0.9:80":  "denied: so it is", // no node declares it
		"10.0.0.2:80":  "no-such-node: No agent available: b is not connected",
		"10.88.2.7:80": "denied: nodes b and b2 both claim 10.88.2.7 (status.addresses or podCIDRs of their Nodes), " +
			"so the dial is refused: correct one of them, or dial the node by its name",
		"c.example.com:80": "denied: node c claims c.example.com, which does not count: " +
			"it is not the Node's name; have kube-apiserver prefer InternalIP (--kubelet-preferred-address-types)",
		"lb.example.com:80": "denied: nodes c and c2 both claim lb.example.com, which does not count: " +
			"it is not the Node's name; have kube-apiserver prefer InternalIP (--kubelet-preferred-address-types)",
	} {
		n := &nodes{reach: map[tunnel.NodeName]konnectivity.Identifiers{},
			refuse: map[tunnel.NodeName]error{"": tunnel.Refusef(tunnel.Denied, "so it is")}}
		// With Kubernetes no other node is tried.
		c, err := newChooser(Config{Identifiers: n, Kubernetes: !strings.Contains(want, "so it is")}, n, n)
		if err != nil {
			t.Fatal(err)
		}
		c.table.Store(newTable(all))
		_, err = c.dial(t.Context(), addr, &opening{caller: "test"}, wait)
		if err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", addr, err, want)
		}
	}
	// The identifiers are not known yet.
	u := &nodes{unknown: true, reach: all}
	unknown, err := newChooser(Config{Identifiers: u, Kubernetes: true}, u, u)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unknown.dial(t.Context(), "10.0.0.9:80", &opening{caller: "test"}, wait); err == nil ||
		err.Error() != "no-such-node: No agent available: the cluster's Nodes have not been read yet" || u.dialled != nil {
		t.Errorf("dialled %q; %v", u.dialled, err)
	}
	// The owner is connected, and full. Fallbacks are not tried.
	n := &nodes{reach: all, refuse: map[tunnel.NodeName]error{"a": tunnel.Refusef(tunnel.Overloaded, "node a is full"),
		"": tunnel.Refusef(tunnel.Denied, "so it is")}}
	c, err := newChooser(Config{Identifiers: n}, n, n)
	if err != nil {
		t.Fatal(err)
	}
	c.table.Store(newTable(all))
	_, err = c.dial(t.Context(), "10.0.0.1:80", &opening{caller: "test"}, wait)
	if err == nil || err.Error() != "overloaded: node a is full" {
		t.Error(err)
	}
	// The owner has left after the table was made.
	n = &nodes{reach: all, refuse: map[tunnel.NodeName]error{"a": tunnel.Refusef(tunnel.NoSuchNode, "gone"),
		"": tunnel.Refusef(tunnel.NoSuchNode, "gone")}}
	if c, err = newChooser(Config{Identifiers: n}, n, n); err != nil {
		t.Fatal(err)
	}
	c.table.Store(newTable(all))
	if _, err = c.dial(t.Context(), "a:80", &opening{caller: "test"}, wait); err == nil ||
		err.Error() != "no-such-node: No agent available: a is not connected" {
		t.Error(err)
	}
}

// A dial to a Service goes to one of its endpoints. If the node of an endpoint is not connected, the next is tried.
func TestDialService(t *testing.T) {
	target := testkit.Serve(t, func(*net.TCPConn) {})
	byCloud := func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "tcp", target) }
	inVain := func(context.Context) (net.Conn, error) { return nil, tunnel.Refusef(tunnel.Timeout, "no answer") }
	at := func(addrs ...string) (all []Endpoint) {
		for _, a := range addrs {
			all = append(all, Endpoint{Addr: a})
		}
		return all
	}
	services := map[string][]Endpoint{
		"web.shop.svc:80":  at("10.88.1.5:8080"),
		"two.shop.svc:80":  at("10.88.3.5:8080", "10.88.2.5:8080"),
		"away.shop.svc:80": at("10.88.3.5:8080"),
		"many.shop.svc:80": slices.Repeat(at("10.88.3.5:8080"), 20),
		"far.shop.svc:80":  {{Addr: "10.244.0.5:8080", Dial: byCloud}},
		"dead.shop.svc:80": {{Addr: "10.244.0.5:8080", Dial: inVain}, {Addr: "10.88.2.5:8080"}},
		"full.shop.svc:80": at("10.88.1.5:8080", "10.88.2.5:8080"),
		"one.shop.svc:80":  at("10.88.1.5:8080"),
		"10.96.0.1:80":     at("10.88.3.5:8080"),
		// A user who may write EndpointSlices says that the pod is on no node.
		"bad.shop.svc:80": {{Addr: "10.88.2.5:8080", Dial: byCloud}},
	}
	for name, tc := range map[string]struct {
		addr   string
		refuse tunnel.Code // what edge1 answers; 0: it dials
		want   []tunnel.NodeName
		fails  string
	}{
		"an endpoint":               {addr: "web.shop.svc:80", want: []tunnel.NodeName{"edge1"}},
		"no Service":                {addr: "edge2:22", want: []tunnel.NodeName{"edge2"}},
		"the first node is away":    {addr: "two.shop.svc:80", want: []tunnel.NodeName{"edge2"}},
		"all nodes are away":        {addr: "away.shop.svc:80", fails: "edge3 is not connected"},
		"not all of many are tried": {addr: "many.shop.svc:80", fails: "edge3 is not connected"},
		"the cloud dials":           {addr: "far.shop.svc:80"},
		"the pod refuses: the answer": {addr: "web.shop.svc:80", refuse: tunnel.Refused,
			want: []tunnel.NodeName{"edge1"}, fails: "so it is"},
		"no endpoint": {addr: "none.shop.svc:80", fails: "is ready"},
	} {
		t.Run(name, func(t *testing.T) {
			all := map[tunnel.NodeName]konnectivity.Identifiers{
				"edge1": identifiers(t, "host=edge1&cidr=10.88.1.0/24"), "edge2": identifiers(t, "host=edge2&cidr=10.88.2.0/24"),
				"edge3": identifiers(t, "host=edge3&cidr=10.88.3.0/24"),
			}
			n := &nodes{reach: maps.Clone(all), refuse: map[tunnel.NodeName]error{}, target: target}
			delete(n.reach, "edge3")
			if tc.refuse != 0 {
				n.refuse["edge1"] = tunnel.Refusef(tc.refuse, "so it is")
			}
			find := func(addr string) ([]Endpoint, error) {
				if strings.HasPrefix(addr, "none.") {
					return nil, tunnel.Refusef(tunnel.Refused, "no endpoint of the Service is ready")
				}
				return services[addr], nil
			}
			c, err := newChooser(Config{Identifiers: n, Kubernetes: true, Services: find}, n, n)
			if err != nil {
				t.Fatal(err)
			}
			c.table.Store(newTable(all))
			o := &opening{addr: tc.addr, caller: "test"}
			conn, err := c.connect(t.Context(), o)
			if err == nil {
				conn.Close()
			}
			if !slices.Equal(n.dialled, tc.want) || (err != nil) != (tc.fails != "") ||
				err != nil && !strings.Contains(err.Error(), tc.fails) {
				t.Errorf("dialled %q, want %q; %v", n.dialled, tc.want, err)
			}
		})
	}
}
