package dns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"tunnel.example/tunnel/pkg/tunnel"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func TestParseHosts(t *testing.T) {
	const ours = "10.0.0.1    edge1 # tunnel\n"
	for _, c := range []struct {
		name, text, foreign string
		own                 []Entry
	}{
		{"empty", "", "", nil},
		{"ours", ours, "", []Entry{{addr("10.0.0.1"), "edge1"}}},
		{"ours, sorted and without duplicates", "fd00::1    b # tunnel\n" + ours + ours, "",
			[]Entry{{addr("fd00::1"), "b"}, {addr("10.0.0.1"), "edge1"}}},
		{"white space changed by an editor", "10.0.0.1\tedge1   # tunnel \r\n", "", []Entry{{addr("10.0.0.1"), "edge1"}}},
		{"no newline at the end", strings.TrimSpace(ours), "", []Entry{{addr("10.0.0.1"), "edge1"}}},
		{
			"foreign between ours",
			ours + "# by hand\n10.0.0.9 db\n" + "10.0.0.2    edge2 # tunnel\n", "# by hand\n10.0.0.9 db\n",
			[]Entry{{addr("10.0.0.1"), "edge1"}, {addr("10.0.0.2"), "edge2"}},
		},
		{"an alias was added: no longer ours", "10.0.0.1 edge1 alias # tunnel\n", "10.0.0.1 edge1 alias # tunnel\n", nil},
		{"no name", "10.0.0.1 # tunnel\n", "10.0.0.1 # tunnel\n", nil},
		{"a name that we would not write", "10.0.0.1 Edge_1 # tunnel\n", "10.0.0.1 Edge_1 # tunnel\n", nil},
		{"an address that we would not write", "fe80::1%eth0 edge1 # tunnel\n::ffff:10.0.0.1 edge1 # tunnel\n",
			"fe80::1%eth0 edge1 # tunnel\n::ffff:10.0.0.1 edge1 # tunnel\n", nil},
		{"a comment only looks like the marker", "10.0.0.1 edge1 # tunnels\n10.0.0.1 edge1 # tunnel of love\n",
			"10.0.0.1 edge1 # tunnels\n10.0.0.1 edge1 # tunnel of love\n", nil},
		{"as SuperEdge wrote it", "10.0.0.1    edge1\n", "10.0.0.1    edge1\n", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := ParseHosts(c.text)
			if h.Foreign != c.foreign || !slices.Equal(h.Own, c.own) {
				t.Errorf("got foreign %q, own %v", h.Foreign, h.Own)
			}
		})
	}
}

func TestHostsKeepsLinesApart(t *testing.T) {
	h := Hosts{Foreign: "10.0.0.9 db", Own: []Entry{{addr("10.0.0.1"), "edge1"}}}
	if got, want := h.String(), "10.0.0.9 db\n10.0.0.1    edge1 # tunnel\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	h.Own = nil
	if got := h.String(); got != "10.0.0.9 db" {
		t.Errorf("without lines of ours, not one byte of the others' may change: %q", got)
	}
}

// FuzzHosts checks properties of any file. Foreign lines stay, in their order. Parsing and printing
// a printed file changes nothing. A resolver reads our lines as we meant them.
func FuzzHosts(f *testing.F) {
	f.Add("")
	f.Add("10.0.0.1    edge1 # tunnel\n10.0.0.9 db # x\n\n#\nfd00::1 a b c")
	f.Add("10.0.0.1    edge1 # tunnel\r\n\r# tunnel\n")
	f.Fuzz(func(t *testing.T, text string) {
		h := ParseHosts(text)
		var foreign strings.Builder
		for line := range strings.Lines(text) {
			if _, own := parseOwn(line); !own {
				foreign.WriteString(line)
			}
		}
		if foreign.String() != h.Foreign {
			t.Fatalf("foreign lines changed: %q became %q", foreign.String(), h.Foreign)
		}
		out := h.String()
		if !strings.HasPrefix(out, h.Foreign) {
			t.Fatalf("foreign bytes changed: %q became %q", h.Foreign, out)
		}
		again := ParseHosts(out)
		if !slices.Equal(again.Own, h.Own) || again.String() != out {
			t.Fatalf("%q parsed and printed again is %q", out, again.String())
		}
		names := readNames(strings.TrimPrefix(out, h.Foreign))
		for _, e := range h.Own {
			if !slices.Contains(names[string(e.Node)], e.Addr) {
				t.Fatalf("a resolver does not find %v in %q", e, out)
			}
		}
	})
}

// everyone is a Names that lets every name be published.
type everyone struct{ known bool }

func (e everyone) May(tunnel.NodeName) (may, known bool) { return true, e.known }
func (everyone) Changed() <-chan struct{}                { return nil }

// fixed is a Truth that does not change.
type fixed struct {
	records []Record
	replica []netip.Addr // the addresses for which Hears returns true
}

func (f fixed) Lookup(n tunnel.NodeName) []netip.Addr {
	for _, r := range f.records {
		if r.Node == n {
			return r.Addrs
		}
	}
	return nil
}

func (f fixed) Records() []Record { return f.records }
func (f fixed) Hears(a netip.Addr) bool {
	return slices.Contains(f.replica, a)
}
func (f fixed) Changed() <-chan struct{} { return nil }

var (
	drawAddr = rapid.SampledFrom([]netip.Addr{addr("10.0.0.1"), addr("10.0.0.2"), addr("10.0.0.3"), addr("fd00::1")})
	drawNode = rapid.Custom(func(t *rapid.T) tunnel.NodeName {
		return tunnel.NodeName(fmt.Sprint("edge", rapid.IntRange(1, 6).Draw(t, "n")))
	})
	drawEntry = rapid.Custom(func(t *rapid.T) Entry { return Entry{drawAddr.Draw(t, "addr"), drawNode.Draw(t, "node")} })
	drawFile  = rapid.Custom(func(t *rapid.T) string {
		foreign := rapid.SampledFrom([]string{
			"# by hand\n", "\n", "10.9.9.9 db\n", "10.9.9.9 edge6\n", "junk\n", "10.0.0.1 edge1 x # tunnel\n",
		})
		var b strings.Builder
		for range rapid.IntRange(0, 12).Draw(t, "lines") {
			if rapid.Bool().Draw(t, "own") {
				b.WriteString(drawEntry.Draw(t, "entry").line())
			} else {
				b.WriteString(foreign.Draw(t, "foreign"))
			}
		}
		return b.String()
	})
	drawRecords = rapid.Custom(func(t *rapid.T) []Record {
		held := make(map[tunnel.NodeName]netip.Addr)
		for range rapid.IntRange(0, 6).Draw(t, "held") {
			held[drawNode.Draw(t, "node")] = drawAddr.Draw(t, "addr")
		}
		return recordsOf(held)
	})
)

func recordsOf(held map[tunnel.NodeName]netip.Addr) []Record {
	var all []Record
	for n, a := range held {
		all = append(all, Record{n, []netip.Addr{a}})
	}
	slices.SortFunc(all, func(a, b Record) int { return strings.Compare(string(a.Node), string(b.Node)) })
	return all
}
