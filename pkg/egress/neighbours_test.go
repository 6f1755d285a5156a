package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

func FuzzNeighbours(f *testing.F) {
	f.Add(encodeNeighbours([]Neighbour{neighbour("192.168.7.3 fd00:77::3", "10.88.2.0/24", "fd00:88:2::/64"), {}}))
	f.Add([]byte{0x0a, 0x03, 0x0a, 0x01, 'x'})
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := decodeNeighbours(b)
		if err != nil {
			return
		}
		again, err := decodeNeighbours(encodeNeighbours(all))
		if err != nil || !reflect.DeepEqual(all, again) || len(all) > maxNeighbours {
			t.Fatalf("%v became %v: %v", all, again, err)
		}
	})
}

// neighbour returns a Neighbour with these addresses, separated by blanks.
func neighbour(addresses string, networks ...string) Neighbour {
	n := Neighbour{Networks: prefixes(networks...)}
	for _, a := range strings.Fields(addresses) {
		n.Addresses = append(n.Addresses, netip.MustParseAddr(a))
	}
	return n
}

// Neighbours of a node are those with an address in a network in which the node itself has one.
func TestNeighbours(t *testing.T) {
	nodes := map[tunnel.NodeName]konnectivity.Identifiers{
		"a":      {Hosts: []string{"a", "192.168.7.2", "fd00:77::2"}, Networks: prefixes("10.88.1.0/24", "fd00:88:1::/64")},
		"b":      {Hosts: []string{"b", "192.168.7.3", "fd00:77::3"}, Networks: prefixes("10.88.2.0/24", "fd00:88:2::/64")},
		"c":      {Hosts: []string{"c", "192.168.8.3", "203.0.113.3"}, Networks: prefixes("10.88.3.0/24")},
		"nopods": {Hosts: []string{"192.168.7.4"}},
		"twin1":  {Hosts: []string{"192.168.7.5"}, Networks: prefixes("10.88.5.0/24")},
		"twin2":  {Hosts: []string{"192.168.7.5"}, Networks: prefixes("10.88.6.0/24")},
		"asks":   {Hosts: []string{"172.20.9.2"}},
		"victim": {Hosts: []string{"172.20.9.3"}, Networks: prefixes("10.99.2.0/24", "10.98.2.0/24")},
		"thief":  {Hosts: []string{"172.20.9.9"}, Networks: prefixes("10.99.0.0/16")},
	}
	b4 := neighbour("192.168.7.3", "10.88.2.0/24", "fd00:88:2::/64")
	for _, c := range []struct {
		name, node, links string
		want              []Neighbour
	}{
		{"one LAN", "a", "192.168.7.0/24", []Neighbour{b4}},
		{"both families", "a", "192.168.7.0/24 fd00:77::/64",
			[]Neighbour{neighbour("192.168.7.3 fd00:77::3", "10.88.2.0/24", "fd00:88:2::/64")}},
		{"a link twice", "a", "192.168.7.0/24 192.168.7.0/25", []Neighbour{b4}},
		{"a wider network", "a", "192.168.0.0/16", []Neighbour{b4, neighbour("192.168.8.3", "10.88.3.0/24")}},
		{"all networks", "a", "0.0.0.0/0 192.168.0.0/15 fd00:77::/47 ::/0", nil},
		{"a network of others", "a", "203.0.113.0/24", nil},
		{"an address alone", "a", "192.168.7.2/32", nil},
		{"no links", "a", "", nil},
		{"a network that another node claims", "asks", "172.20.9.0/24", []Neighbour{neighbour("172.20.9.3", "10.98.2.0/24")}},
		{"an unknown node", "x", "192.168.7.0/24", nil},
	} {
		got := newLANs(nodes).neighbours(tunnel.NodeName(c.node), prefixes(strings.Fields(c.links)...))
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestManyNeighbours(t *testing.T) {
	nodes := make(map[tunnel.NodeName]konnectivity.Identifiers)
	for i := range 2000 {
		nodes[tunnel.NodeName(fmt.Sprintf("n%04d", i))] = konnectivity.Identifiers{
			Hosts: []string{fmt.Sprintf("10.0.%d.%d", i/256, i%256)}, Networks: prefixes(fmt.Sprintf("fd00:%x::/64", i)),
		}
	}
	all := newLANs(nodes).neighbours("n1999", prefixes("10.0.0.0/16"))
	if len(all) != maxNeighbours || all[0].Addresses[0] != netip.MustParseAddr("10.0.0.0") {
		t.Fatalf("%d neighbours, first %v", len(all), all[0])
	}
	if again, err := decodeNeighbours(encodeNeighbours(all)); err != nil || len(again) != len(all) {
		t.Errorf("%d neighbours arrive, %v", len(again), err)
	}
	if _, err := decodeNeighbours(encodeNeighbours(append(all, Neighbour{}))); err == nil {
		t.Error("more neighbours than permitted are accepted")
	}
	// With both families, so many do not fit in a message. A longer one would end the session of each edge that asks.
	for i := range all {
		all[i].Addresses = append(all[i].Addresses, netip.MustParseAddr("2001:db8:1234:5678:9abc:def0:1234:5678"))
		all[i].Networks = append(all[i].Networks, prefixes("10.244.0.0/24")...)
	}
	data := encodeNeighbours(all)
	some, err := decodeNeighbours(data)
	if err != nil || len(some) < maxNeighbours/2 || len(data) > maxNeighbourBytes+100 {
		t.Errorf("%d neighbours in %d bytes, %v", len(some), len(data), err)
	}
}

// ended is a link whose session ends when done is closed.
type ended struct {
	link
	done chan struct{}
}

func (e ended) Done() <-chan struct{} { return e.done }

// The cloud answers an edge that asks, and tells each change once; nobody else is told.
func TestTellNeighbours(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := new(tunnel.Directory)
		n := &nodes{changed: make(chan struct{})}
		set := func(b ...string) {
			n.mu.Lock()
			n.reach = map[tunnel.NodeName]konnectivity.Identifiers{
				"a": {Hosts: []string{"192.168.7.2"}, Networks: prefixes("10.88.1.0/24")},
				"b": {Hosts: b, Networks: prefixes("10.88.2.0/24")},
			}
			before := n.changed
			n.changed = make(chan struct{})
			n.mu.Unlock()
			close(before)
		}
		set("192.168.7.3")
		door, err := New(Config{Identifiers: n, Kubernetes: true, Sessions: dir}, n, n, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1) // capacity 1: the send waits for nobody if the test has failed
		go func() { done <- door.announceNeighbours(ctx) }()
		asks, quiet := ended{newLink(), make(chan struct{})}, ended{newLink(), make(chan struct{})}
		a := &tunnel.Session{Node: "a", Link: asks}
		dir.Attach(a)
		dir.Attach(&tunnel.Session{Node: "b", Link: quiet})
		told := func(why string, want ...Neighbour) {
			t.Helper()
			m := <-asks.sent
			got, err := decodeNeighbours(m.Data)
			if err != nil || m.Category != "egress" || m.Type != "neighbours" || !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %+v %v, %v", why, m, got, err)
			}
		}
		links := func(all ...string) {
			t.Helper()
			in := &tunnel.Incoming{Message: &tunnel.Message{Data: encodeNetworks(prefixes(all...))}, From: a}
			if err := door.Routes()[typeLinks](ctx, in); err != nil {
				t.Fatal(err)
			}
		}
		links("192.168.7.0/24")
		told("it has asked", neighbour("192.168.7.3", "10.88.2.0/24"))
		set("192.168.7.9")
		told("the neighbour has another address", neighbour("192.168.7.9", "10.88.2.0/24"))
		set("10.0.0.9")
		told("the neighbour has moved")
		set("192.168.7.3")
		told("it is back", neighbour("192.168.7.3", "10.88.2.0/24"))
		links("192.168.7.2/32")
		told("the edge has another link")
		in := &tunnel.Incoming{Message: &tunnel.Message{Data: []byte{0x0a, 1, 'x'}}, From: a}
		if err := door.Routes()[typeLinks](ctx, in); err == nil {
			t.Error("nonsense is accepted")
		}
		links("192.168.7.0/24")
		told("it has its link again", neighbour("192.168.7.3", "10.88.2.0/24"))
		close(asks.done)
		set("192.168.7.4")
		time.Sleep(time.Second)
		synctest.Wait()
		if len(asks.sent)+len(quiet.sent) > 0 || len(door.askers.all()) > 0 {
			t.Error("an edge that has left, or has not asked, is told")
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// A cloud that does not ask Kubernetes tells no neighbours, and keeps nothing of an edge that asks.
func TestNeighboursWithoutKubernetes(t *testing.T) {
	n := &nodes{changed: make(chan struct{})}
	door, err := New(Config{Identifiers: n, Sessions: new(tunnel.Directory)}, n, n, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	in := networksMessage(encodeNetworks(prefixes("192.168.7.0/24")))
	in.From = &tunnel.Session{Node: "a", Link: ended{newLink(), make(chan struct{})}}
	if err := door.Routes()[typeLinks](t.Context(), in); err != nil || len(door.askers.all()) > 0 {
		t.Errorf("askers %v, %v", door.askers.all(), err)
	}
}

// An edge asks when a cloud has told its networks, and again when its links have changed.
func TestAsk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := NewEdge(new(auth.Policy), slog.New(slog.DiscardHandler))
		var links atomic.Pointer[[]netip.Prefix] // nil: they cannot be read
		set := func(all ...string) {
			now := prefixes(all...)
			links.Store(&now)
		}
		set("192.168.7.0/24")
		var heard []Neighbour
		e.TellNeighbours(func() ([]netip.Prefix, bool) {
			if now := links.Load(); now != nil {
				return *now, true
			}
			return nil, false
		}, func(all []Neighbour) { heard = all })
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1) // capacity 1: the send waits for nobody if the test has failed
		go func() { done <- e.Run(ctx) }()
		l := ended{newLink(), make(chan struct{})}
		s := &tunnel.Session{Link: l}
		networks := func() {
			t.Helper()
			in := networksMessage(encodeNetworks(prefixes("10.88.1.0/24")))
			in.From = s
			if err := e.Routes()[typeNetworks](ctx, in); err != nil {
				t.Fatal(err)
			}
		}
		asked := func(why string, want ...string) {
			t.Helper()
			m := <-l.sent
			if got, err := decodeNetworks(m.Data); err != nil || m.Category != "egress" || m.Type != "links" ||
				!reflect.DeepEqual(got, prefixes(want...)) {
				t.Errorf("%s: %+v %v, %v", why, m, got, err)
			}
		}
		links.Store(nil)
		networks()
		time.Sleep(2 * linksInterval)
		synctest.Wait()
		if len(l.sent) > 0 {
			t.Error("the edge asks although it does not know its links")
		}
		set("192.168.7.0/24")
		asked("the links can be read", "192.168.7.0/24")
		networks()
		time.Sleep(2 * linksInterval)
		synctest.Wait()
		if len(l.sent) > 0 {
			t.Error("the edge asks again without a change")
		}
		links.Store(nil)
		time.Sleep(2 * linksInterval)
		synctest.Wait()
		if len(l.sent) > 0 {
			t.Error("the edge asks for no neighbours because its links cannot be read")
		}
		set("192.168.7.0/24", "fd00:77::/64")
		asked("another address", "192.168.7.0/24", "fd00:77::/64")
		want := []Neighbour{neighbour("192.168.7.3", "10.88.2.0/24")}
		in := &tunnel.Incoming{Message: &tunnel.Message{Data: encodeNeighbours(want)}, From: s}
		if err := e.Routes()[typeNeighbours](ctx, in); err != nil || !reflect.DeepEqual(heard, want) {
			t.Errorf("heard is %v, %v", heard, err)
		}
		in.Data = []byte{0x0a, 3, 0x0a, 1, 'x'}
		if err := e.Routes()[typeNeighbours](ctx, in); err == nil || errors.Is(err, context.Canceled) || len(heard) != 1 {
			t.Errorf("nonsense: %v, heard %v", err, heard)
		}
		close(l.done)
		set()
		time.Sleep(2 * linksInterval)
		synctest.Wait()
		if len(l.sent) > 0 {
			t.Error("the edge asks by a session that has ended")
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// An edge that is not configured for it asks nothing.
func TestAskNot(t *testing.T) {
	e := NewEdge(new(auth.Policy), slog.New(slog.DiscardHandler))
	l := newLink()
	in := networksMessage(nil)
	in.From = &tunnel.Session{Link: l}
	if err := e.Routes()[typeNetworks](t.Context(), in); err != nil || len(l.sent) > 0 {
		t.Errorf("%d messages, %v", len(l.sent), err)
	}
	in.Data = encodeNeighbours([]Neighbour{neighbour("192.168.7.3", "10.88.2.0/24")})
	if err := e.Routes()[typeNeighbours](t.Context(), in); err != nil {
		t.Error(err)
	}
}
