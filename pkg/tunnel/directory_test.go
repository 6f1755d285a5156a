package tunnel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// link is a transport whose conns carry the name of its session.
type link struct {
	Link
	name    string
	refusal error                   // what Dial returns; nil: a conn
	last    atomic.Pointer[Request] // the last request that Dial got
}

type namedConn struct {
	net.Conn
	name string
}

func (l *link) Dial(_ context.Context, r Request) (net.Conn, error) {
	l.last.Store(&r)
	if l.refusal != nil {
		return nil, l.refusal
	}
	return namedConn{name: l.name}, nil
}

func session(node NodeName, id string) *Session {
	l := &link{name: id}
	return &Session{ID: id, Node: node, Link: l, Dialer: l}
}

// When a replaced session ends, its successor stays attached.
func TestDetachIsByIdentity(t *testing.T) {
	var d Directory
	old, new := session("n1", "old"), session("n1", "new")
	if r := d.Attach(old); r != nil {
		t.Errorf("the first replaces %v", r)
	}
	if r := d.Attach(new); r != old {
		t.Errorf("the second replaces %v, want the first", r)
	}
	if d.Detach(old) || d.Lookup("n1") != new {
		t.Error("the end of the old session detaches the new one")
	}
	if !d.Detach(new) || d.Holds("n1") || d.Detach(new) {
		t.Error("the end of the new session does not detach it exactly once")
	}
}

func TestAttachUnless(t *testing.T) {
	var d Directory
	first, second := session("n1", "first"), session("n1", "second")
	isFirst := func(s *Session) bool { return s == first }
	if !d.AttachUnless(first, isFirst) || d.Lookup("n1") != first {
		t.Error("the first is not attached")
	}
	if d.AttachUnless(second, isFirst) || d.Lookup("n1") != first {
		t.Error("the first is replaced, although it must be kept")
	}
	if !d.AttachUnless(second, func(*Session) bool { return false }) || d.Lookup("n1") != second {
		t.Error("the second does not replace the first")
	}
}

func TestConnected(t *testing.T) {
	var d Directory
	if n := d.Connected(); len(n) != 0 {
		t.Errorf("an empty directory holds %q", n)
	}
	for _, n := range []NodeName{"n2", "n10", "n1"} {
		d.Attach(session(n, string(n)))
	}
	if n := d.Connected(); !slices.Equal(n, []NodeName{"n1", "n10", "n2"}) {
		t.Errorf("connected are %q", n)
	}
}

// After any sequence of attach and detach, the directory holds exactly the newest live
// session of each node.
func TestDirectoryProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var d Directory
		want := map[NodeName]*Session{}
		var all []*Session
		nodes := rapid.SampledFrom([]NodeName{"n1", "n2", "n3"})
		t.Repeat(map[string]func(*rapid.T){
			"attach": func(t *rapid.T) {
				s := session(nodes.Draw(t, "node"), fmt.Sprint(len(all)))
				all = append(all, s)
				if replaced := d.Attach(s); replaced != want[s.Node] {
					t.Errorf("replaced %v, want %v", replaced, want[s.Node])
				}
				want[s.Node] = s
			},
			"attach again": func(t *rapid.T) {
				if len(all) == 0 {
					t.Skip("no session yet")
				}
				s := rapid.SampledFrom(all).Draw(t, "session")
				d.Attach(s)
				want[s.Node] = s
			},
			"detach": func(t *rapid.T) {
				if len(all) == 0 {
					t.Skip("no session yet")
				}
				s := rapid.SampledFrom(all).Draw(t, "session")
				live := want[s.Node] == s
				if d.Detach(s) != live {
					t.Errorf("detached: %t, want %t", !live, live)
				}
				if live {
					delete(want, s.Node)
				}
			},
			"": func(t *rapid.T) {
				var names []NodeName
				for _, s := range d.Sessions() {
					names = append(names, s.Node)
					if want[s.Node] != s || d.Lookup(s.Node) != s || !d.Holds(s.Node) {
						t.Errorf("holds session %s of %s", s.ID, s.Node)
					}
				}
				if len(names) != len(want) || d.Len() != len(want) || !slices.IsSorted(names) {
					t.Errorf("holds %v, want %d nodes in order", names, len(want))
				}
			},
		})
	})
}

func TestDirectoryDial(t *testing.T) {
	var d Directory
	dial := func(node NodeName) (string, error) {
		c, err := d.Dial(t.Context(), Request{Node: node, Addr: "a:1"})
		if err != nil {
			return "", err
		}
		return c.(namedConn).name, nil
	}
	for _, node := range []NodeName{"", "n1"} {
		if _, err := dial(node); CodeOf(err) != NoSuchNode {
			t.Errorf("dialling %q in an empty directory: %v, want no-such-node", node, err)
		}
	}
	busy, idle := session("n1", "busy"), session("n2", "idle")
	busy.Conns.Store(2)
	idle.Conns.Store(1)
	d.Attach(busy)
	d.Attach(idle)
	if got, err := dial("n1"); got != "busy" || err != nil {
		t.Errorf("dialling n1 goes through %q, %v", got, err)
	}
	if _, err := dial("n3"); CodeOf(err) != NoSuchNode || err.Error() != "no-such-node: node n3 is not connected" {
		t.Errorf("dialling a node that is not connected: %v", err)
	}
	if _, err := dial("n2"); err != nil {
		t.Error(err)
	}
	if r := idle.Link.(*link).last.Load(); r.Node != "n2" || r.Addr != "a:1" {
		t.Errorf("the session is asked for %+v", r)
	}
}

// Without a node name, Dial takes a random node: an idle node does not attract more conns.
func TestDirectoryDialAny(t *testing.T) {
	const dials, nodes = 3000, 3
	var d Directory
	for i := range nodes {
		s := session(NodeName(fmt.Sprint("n", i)), fmt.Sprint("n", i))
		s.Conns.Store(int64(10 * i)) // n0 is idle
		d.Attach(s)
	}
	share := func(among Selector) map[string]int {
		got := make(map[string]int)
		for range dials {
			c, err := d.Dial(t.Context(), Request{Addr: "a:1", Among: among})
			if err != nil {
				t.Fatal(err)
			}
			got[c.(namedConn).name]++
		}
		return got
	}
	for name, n := range share(nil) {
		if n < dials/nodes*8/10 || n > dials/nodes*12/10 {
			t.Errorf("%s has %d of %d", name, n, dials)
		}
	}
	if got := share(Selector{"n1", "x*"}); !maps.Equal(got, map[string]int{"n1": dials}) {
		t.Errorf("among n1 and x*: %v", got)
	}
	d.Lookup("n1").Leaving.Store(true)
	if got := share(Selector{"n1", "n2"}); !maps.Equal(got, map[string]int{"n2": dials}) {
		t.Errorf("while n1 leaves: %v", got)
	}
	_, err := d.Dial(t.Context(), Request{Among: Selector{"gw-*", "y"}})
	if CodeOf(err) != NoSuchNode || err.Error() != "no-such-node: no node of gw-*, y is connected" {
		t.Error(err)
	}
}

// If a node cannot serve now, Dial tries the next one, so an idle node that refuses does not
// attract conns. An answer of the target is final: Dial then tries no other node.
func TestDirectoryDialTriesNextNode(t *testing.T) {
	for _, tt := range []struct {
		code Code
		next bool
	}{{Draining, true}, {Overloaded, true}, {Gone, true}, {Refused, false}, {Denied, false}, {Timeout, false}} {
		d := Directory{Counters: new(Counters)}
		first, second := session("n1", "first"), session("n2", "second")
		first.Link.(*link).refusal = Refusef(tt.code, "")
		second.Leaving.Store(true) // so that it comes second
		d.Attach(first)
		d.Attach(second)
		c, err := d.Dial(t.Context(), Request{Addr: "a:1"})
		if tried := err == nil && c.(namedConn).name == "second"; tried != tt.next {
			t.Errorf("the first node refuses with %v: the second is tried: %t, want %t (%v)", tt.code, tried, tt.next, err)
		}
		d.Detach(second)
		if _, err := d.Dial(t.Context(), Request{Addr: "a:1"}); CodeOf(err) != tt.code {
			t.Errorf("the only node refuses with %v, the caller gets %v", tt.code, err)
		}
		if n := d.Counters.Refusals(NoSuchNode); n != 0 {
			t.Errorf("%d dials to nodes that are not connected are counted", n)
		}
		_, err = d.Dial(t.Context(), Request{Node: "n9"})
		if CodeOf(err) != NoSuchNode || d.Counters.Refusals(NoSuchNode) != 1 {
			t.Errorf("a node that is not connected: %v, counted %d times", err, d.Counters.Refusals(NoSuchNode))
		}
	}
}

// A request for any node waits for a limit only if every node is at a limit, and only at one node.
func TestDirectoryDialWaitsOnlyIfAllAreFull(t *testing.T) {
	var d Directory
	full, free := session("n1", "full"), session("n2", "free")
	d.Attach(full)
	d.Attach(free)
	full.Link.(*link).refusal = Refusef(Overloaded, "")
	waits := func(r Request) (n int, err error) {
		for _, s := range []*Session{full, free} {
			s.Link.(*link).last.Store(&Request{NoWait: true})
		}
		_, err = d.Dial(t.Context(), r)
		for _, s := range []*Session{full, free} {
			if !s.Link.(*link).last.Load().NoWait {
				n++
			}
		}
		return n, err
	}
	for range 20 {
		if n, err := waits(Request{Addr: "a:1"}); err != nil || n != 0 {
			t.Errorf("one of two is full: %v, and it waited at %d", err, n)
		}
	}
	free.Link.(*link).refusal = Refusef(Overloaded, "")
	if n, err := waits(Request{Addr: "a:1"}); CodeOf(err) != Overloaded || n != 1 {
		t.Errorf("both are full: %v, and it waited at %d", err, n)
	}
	if n, err := waits(Request{Addr: "a:1", NoWait: true}); CodeOf(err) != Overloaded || n != 0 {
		t.Errorf("the caller knows more nodes: %v, and it waited at %d", err, n)
	}
}

// Any goroutine may call any method at any time. The race detector checks this.
func TestDirectoryConcurrentUse(t *testing.T) {
	var d Directory
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			node := NodeName(fmt.Sprintf("n%d", i%3))
			for range 200 {
				s := session(node, "x")
				d.Attach(s)
				d.Dial(context.Background(), Request{})
				d.Sessions()
				d.Detach(s)
			}
		})
	}
	wg.Wait()
	if d.Len() != 0 {
		t.Errorf("%d sessions are left", d.Len())
	}
}

// Codes have the names that the documents use, and CodeOf finds them in wrapped errors.
func TestCodes(t *testing.T) {
	want := []string{
		"denied", "refused", "unreachable", "timeout", "no-such-node", "overloaded", "draining", "gone", "wrong-session",
		"internal",
	}
	var got []string
	for _, c := range Codes() {
		got = append(got, c.String())
		if back := CodeOf(fmt.Errorf("dialling: %w", Refusef(c, "x"))); back != c {
			t.Errorf("%s comes back as %s", c, back)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("codes are %q, want %q", got, want)
	}
	if c := CodeOf(errors.New("x")); c != Internal {
		t.Errorf("an error without a code is %s", c)
	}
	for c, want := range map[Code]string{0: "code-0", 11: "code-11", 255: "code-255"} {
		if c.String() != want {
			t.Errorf("%d is called %q, want %q", uint8(c), c, want)
		}
	}
	for want, r := range map[string]*Refusal{
		"denied": {Code: Denied}, "denied: 50% sure": Refusef(Denied, "%d%% sure", 50),
	} {
		if r.Error() != want {
			t.Errorf("%q, want %q", r, want)
		}
	}
}

func TestCounters(t *testing.T) {
	var c Counters
	for _, code := range append(Codes(), 0, 11, 255) { // the last three are counted as internal
		c.Refuse(code)
	}
	for _, code := range Codes() {
		want := uint64(1)
		if code == Internal {
			want = 4
		}
		if n := c.Refusals(code); n != want {
			t.Errorf("%s counted %d times, want %d", code, n, want)
		}
	}
	if c.Refusals(255) != 0 {
		t.Error("an unknown code has a count")
	}
}

func TestDirectoryChanged(t *testing.T) {
	d := new(Directory)
	a, b := &Session{Node: "edge1"}, &Session{Node: "edge1"}
	c := d.Changed()
	if c != d.Changed() || IsClosed(c) {
		t.Fatal("nothing has happened yet")
	}
	d.Attach(a)
	if !IsClosed(c) {
		t.Error("a node connected, and the channel is not closed")
	}
	c = d.Changed()
	d.Attach(b)
	if !IsClosed(c) {
		t.Error("a node has another session, and the channel is not closed")
	}
	c = d.Changed()
	d.Detach(a)
	if IsClosed(c) {
		t.Error("the end of a session that was replaced changes nothing")
	}
	d.Detach(b)
	if !IsClosed(c) {
		t.Error("a node disconnected, and the channel is not closed")
	}
}

// A dial to an expected node waits for its session. Other dials fail at once.
func TestExpect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const wait = 10 * time.Second
		var d Directory
		d.Expect([]NodeName{"n1", "n2", "n3", "moved"}, time.Now().Add(wait))
		d.Unexpect("moved")
		d.Unexpect("other")
		start := time.Now()
		dial := func(r Request) (took time.Duration, err error) {
			_, err = d.Dial(t.Context(), r)
			return time.Since(start), err
		}
		if took, err := dial(Request{Node: "other"}); CodeOf(err) != NoSuchNode || took != 0 {
			t.Errorf("a dial to another node: %v after %s", err, took)
		}
		if took, err := dial(Request{Among: Selector{"x*"}}); CodeOf(err) != NoSuchNode || took != 0 {
			t.Errorf("a dial to any of other nodes: %v after %s", err, took)
		}
		if !d.Holds("n1") || d.Missing() != 3 {
			t.Error("an expected node does not count")
		}
		if took, err := dial(Request{Node: "moved"}); CodeOf(err) != NoSuchNode || took != 0 || d.Holds("moved") {
			t.Errorf("a dial to a node that is at another replica: %v after %s", err, took)
		}
		time.AfterFunc(time.Second, func() { d.Attach(session("new", "s2")) })
		time.AfterFunc(2*time.Second, func() { d.Attach(session("n1", "s1")) })
		if took, err := dial(Request{}); err != nil || took != time.Second {
			t.Errorf("a dial to any node: %v after %s", err, took)
		}
		if took, err := dial(Request{Node: "n1"}); err != nil || took != 2*time.Second {
			t.Errorf("a dial to an expected node: %v after %s", err, took)
		}
		if took, err := dial(Request{Node: "n3"}); CodeOf(err) != NoSuchNode || took != wait {
			t.Errorf("a dial to an expected node that does not come: %v after %s", err, took)
		}
		if d.Holds("n3") {
			t.Error("a node is expected too long")
		}
	})
}
