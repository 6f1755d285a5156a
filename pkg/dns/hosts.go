package dns

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"tunnel/pkg/tunnel"
)

// marker ends every line that is ours. It is a comment to whoever reads the file
// (hosts(5); CoreDNS cuts a line at '#').
const marker = "# tunnel"

// Entry is one line of ours: a name and one of its addresses.
type Entry struct {
	Addr netip.Addr // never with a zone, never IPv4 mapped into IPv6
	Node tunnel.NodeName
}

// compare orders entries by name, then address: a node that comes or goes is one line
// of a diff.
func (e Entry) compare(f Entry) int {
	return cmp.Or(cmp.Compare(e.Node, f.Node), e.Addr.Compare(f.Addr))
}

// line returns the entry as it stands in the file, with its newline.
func (e Entry) line() string { return e.Addr.String() + "    " + string(e.Node) + " " + marker + "\n" }

// Hosts is a hosts file (hosts(5)) taken apart into what is ours and what is not.
type Hosts struct {
	Foreign string  // every other line, byte for byte and in order
	Own     []Entry // sorted, each once
}

// ParseHosts takes a hosts file apart. There is no bad one: a line that is not exactly
// as we write it is foreign.
func ParseHosts(text string) Hosts {
	var h Hosts
	var foreign strings.Builder
	for line := range strings.Lines(text) {
		if e, ok := parseOwn(line); ok {
			h.Own = append(h.Own, e)
			continue
		}
		foreign.WriteString(line)
	}
	h.Foreign = foreign.String()
	slices.SortFunc(h.Own, Entry.compare)
	h.Own = slices.Compact(h.Own)
	return h
}

// parseOwn reads a line that we wrote, whatever its white space has become since.
func parseOwn(line string) (Entry, bool) {
	line, ok := strings.CutSuffix(strings.TrimSpace(line), marker)
	if !ok {
		return Entry{}, false
	}
	fields := strings.Fields(line)
	if len(fields) != 2 {
		return Entry{}, false
	}
	addr, err := netip.ParseAddr(fields[0])
	if err != nil || addr.Zone() != "" || addr.Is4In6() {
		return Entry{}, false
	}
	node, err := tunnel.ParseNodeName(fields[1])
	if err != nil {
		return Entry{}, false
	}
	return Entry{addr, node}, true
}

// String puts the file together again: what is foreign as it was, then ours. Own must
// be sorted.
func (h Hosts) String() string {
	var b strings.Builder
	b.WriteString(h.Foreign)
	if len(h.Own) > 0 && h.Foreign != "" && !strings.HasSuffix(h.Foreign, "\n") {
		b.WriteByte('\n') // or our first line would become part of theirs
	}
	for _, e := range h.Own {
		b.WriteString(e.line())
	}
	return b.String()
}

// readNames returns what a resolver reads in a hosts file: names in lower case, without
// a final dot, and their addresses, whoever wrote them.
func readNames(text string) map[string][]netip.Addr {
	names := make(map[string][]netip.Addr)
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		addr, err := netip.ParseAddr(fields[0])
		if err != nil {
			continue
		}
		addr = addr.Unmap().WithZone("")
		for _, name := range fields[1:] {
			name = strings.ToLower(strings.TrimSuffix(name, "."))
			names[name] = append(names[name], addr)
		}
	}
	return names
}
