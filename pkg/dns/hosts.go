package dns

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"tunnel.example/tunnel/pkg/tunnel"
)

// marker ends every line that the Writer has written. Resolvers take it for a comment
// (hosts(5); CoreDNS cuts a line at '#').
const marker = "# tunnel"

// Entry is one line of the Writer: a name and one of its addresses.
type Entry struct {
	Addr netip.Addr // has no zone, and is not IPv4 mapped into IPv6
	Node tunnel.NodeName
}

// compare orders entries by name, then by address, so that adding or removing a node changes
// adjacent lines only.
func (e Entry) compare(f Entry) int {
	return cmp.Or(cmp.Compare(e.Node, f.Node), e.Addr.Compare(f.Addr))
}

// line returns the entry as a line of the file, with its newline.
func (e Entry) line() string { return e.Addr.String() + "    " + string(e.Node) + " " + marker + "\n" }

// Hosts is a parsed hosts file (hosts(5)): the lines of the Writer, and all other lines.
type Hosts struct {
	Foreign string  // all lines of other writers, unchanged and in order
	Own     []Entry // the lines of the Writer, sorted and without duplicates
}

// ParseHosts parses a hosts file. It never fails: a line that is not as the Writer writes it
// is foreign.
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

// parseOwn parses a line that the Writer has written. White space may have changed since. It
// returns false if the line is foreign.
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

// String returns the file: the foreign lines unchanged, then the Writer's lines. Own must be
// sorted.
func (h Hosts) String() string {
	var b strings.Builder
	b.WriteString(h.Foreign)
	if len(h.Own) > 0 && h.Foreign != "" && !strings.HasSuffix(h.Foreign, "\n") {
		b.WriteByte('\n') // otherwise our first line would be appended to the last foreign line
	}
	for _, e := range h.Own {
		b.WriteString(e.line())
	}
	return b.String()
}

// readNames returns the names and addresses that a resolver finds in a hosts file, whoever has
// written the lines. Names are in lower case and without a final dot.
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
