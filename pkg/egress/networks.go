package egress

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"google.golang.org/protobuf/encoding/protowire"

	"tunnel/pkg/konnectivity"
	"tunnel/pkg/tunnel"
)

// In a cluster an edge may dial the pods of its own node without being configured for it. It
// takes two to permit that: the cloud tells the edge which networks Kubernetes has given its
// pods, and the edge looks whether such an address is on this machine. So neither can a
// cloud reach the network around the edge, nor does every container on it lie open.

// typeNetworks tells an edge the networks of its pods. The data is the protobuf
// message { repeated string cidr = 1; }.
const typeNetworks = "networks"

// mostNetworks is how many an edge looks at: a Node has one of each family.
const mostNetworks = 16

func encodeNetworks(all []netip.Prefix) []byte {
	var b []byte
	for _, p := range all {
		b = protowire.AppendString(protowire.AppendTag(b, 1, protowire.BytesType), p.String())
	}
	return b
}

var errNotNetworks = errors.New("networks: not a protobuf")

func decodeNetworks(b []byte) ([]netip.Prefix, error) {
	var all []netip.Prefix
	for len(b) > 0 {
		n, t, size := protowire.ConsumeTag(b)
		if size < 0 {
			return nil, errNotNetworks
		}
		b = b[size:]
		var cidr []byte
		if t == protowire.BytesType {
			cidr, size = protowire.ConsumeBytes(b)
		} else {
			size = protowire.ConsumeFieldValue(n, t, b)
		}
		if size < 0 {
			return nil, errNotNetworks
		}
		b = b[size:]
		if n != 1 || t != protowire.BytesType && t != protowire.VarintType {
			continue
		}
		p, err := netip.ParsePrefix(string(cidr))
		if err != nil {
			return nil, fmt.Errorf("networks: %w", err)
		}
		if len(all) == mostNetworks {
			return nil, fmt.Errorf("networks: more than %d", mostNetworks)
		}
		all = append(all, p)
	}
	return all, nil
}

// Sessions are those of the nodes that are connected here.
type Sessions interface {
	Sessions() []*tunnel.Session
	Changed() <-chan struct{}
}

// tell tells every edge the networks of its pods, and again when they have changed, until
// ctx is done. They are what Kubernetes says, never what an edge has claimed: it would dial
// what somebody else wrote into its identifiers. An edge that has none is told so once,
// since it remembers what it was told in a session before.
func (f *FrontDoor) tell(ctx context.Context) error {
	told := make(map[*tunnel.Session][]netip.Prefix)
	for {
		came, changed := f.sessions.Changed(), f.chooser.source.Changed()
		if f.chooser.source.Known() {
			f.guard("edges are not told of their pods", func() error { told = f.tellNow(told); return nil }) //nolint:errcheck // the next change tries again
		}
		select {
		case <-came:
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// tellNow tells those who have not been told what is so now, and returns what all have been.
func (f *FrontDoor) tellNow(told map[*tunnel.Session][]netip.Prefix) map[*tunnel.Session][]netip.Prefix {
	var all map[tunnel.NodeName]konnectivity.Identifiers
	if f.cfg.Kubernetes {
		all = f.chooser.source.Identifiers()
	}
	live := make(map[*tunnel.Session][]netip.Prefix)
	for _, s := range f.sessions.Sessions() {
		now := all[s.Node].Networks
		if before, ok := told[s]; !ok || !slices.Equal(before, now) {
			s.Send(&tunnel.Message{Category: name, Type: typeNetworks, Data: encodeNetworks(now)}) //nolint:errcheck // it ends only with the session
		}
		live[s] = now
	}
	return live
}

// pods is what an edge knows of the networks of its pods.
type pods struct {
	told    atomic.Pointer[[]netip.Prefix]
	routes  func() ([]route, error)
	devices devices
}

// hear takes what the cloud says.
func (p *pods) hear(_ context.Context, _ *tunnel.Session, m *tunnel.Message) error {
	all, err := decodeNetworks(m.Data)
	if err != nil {
		return err
	}
	p.told.Store(&all)
	return nil
}

// has reports whether a is the address of a pod of this node.
func (p *pods) has(a netip.Addr) bool {
	told := p.told.Load()
	if told == nil || !slices.ContainsFunc(*told, func(n netip.Prefix) bool { return n.Contains(a) }) {
		return false
	}
	routes, err := p.routes()
	return err == nil && onThisMachine(a, routes, p.devices.leadInside)
}

// route is a line of the kernel's routing table.
type route struct {
	to     netip.Prefix
	direct bool // there is no gateway, or it is an address of this machine
	device string
}

// onThisMachine reports whether packets to a stay on this machine: the narrowest route goes
// straight to a device that leads to containers and not out of the machine otherwise.
func onThisMachine(a netip.Addr, routes []route, inside func(device string) bool) bool {
	best := -1
	for i, r := range routes {
		if r.to.Contains(a) && (best < 0 || r.to.Bits() > routes[best].to.Bits()) {
			best = i
		}
	}
	if best < 0 || !routes[best].direct {
		return false
	}
	out := slices.ContainsFunc(routes, func(r route) bool { return r.to.Bits() == 0 && r.device == routes[best].device })
	return !out && inside(routes[best].device)
}

// readRoutes reads the kernel's routing tables (proc(5), net/route; net/ipv6_route).
func readRoutes() ([]route, error) {
	own := make(map[netip.Addr]bool)
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok {
				own[ip.Unmap()] = true
			}
		}
	}
	var all []route
	for file, parse := range map[string]func([]string) (route, netip.Addr, bool){"/proc/net/route": parseRoute4, "/proc/net/ipv6_route": parseRoute6} {
		f, err := os.Open(file)
		if err != nil {
			continue // without IPv6, say
		}
		routes := parseRoutes(f, parse, own)
		f.Close()
		all = append(all, routes...)
	}
	if all == nil {
		return nil, errors.New("no routing table can be read")
	}
	return all, nil
}

// devices knows what the network devices of this machine are.
type devices struct {
	sysfs  string                     // where they are listed
	driver func(device string) string // "": nothing is known
}

func theDevices() devices { return devices{sysfs: "/sys/class/net", driver: driverOf} }

// leadInside reports whether a device leads to containers alone: one end of a pair, or a
// bridge of such. Everything else may be a wire with another name: a VLAN, a bond, a VPN, the
// bridge of virtual machines.
func (d devices) leadInside(device string) bool {
	isPair := func(device string) bool {
		driver := d.driver(device)
		return driver == "veth" || driver == "netkit"
	}
	if isPair(device) {
		return true
	}
	if d.driver(device) != "bridge" {
		return false
	}
	ports, err := os.ReadDir(filepath.Join(d.sysfs, device, "brif"))
	return err == nil && !slices.ContainsFunc(ports, func(p os.DirEntry) bool { return !isPair(p.Name()) })
}

func parseRoutes(in io.Reader, parse func([]string) (route, netip.Addr, bool), own map[netip.Addr]bool) []route {
	var all []route
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		if r, gateway, ok := parse(strings.Fields(lines.Text())); ok {
			r.direct = gateway.IsUnspecified() || own[gateway]
			all = append(all, r)
		}
	}
	return all
}

// Flags of a route (linux/route.h).
const (
	routeUp     = 0x1
	routeReject = 0x200
)

// parseRoute4: Iface Destination Gateway Flags RefCnt Use Metric Mask …; addresses are
// hexadecimal as the machine holds them.
func parseRoute4(f []string) (route, netip.Addr, bool) {
	if len(f) < 8 {
		return route{}, netip.Addr{}, false
	}
	to, ok := addr4(f[1])
	gateway, ok2 := addr4(f[2])
	mask, ok3 := addr4(f[7])
	flags, err := strconv.ParseUint(f[3], 16, 32)
	if !ok || !ok2 || !ok3 || err != nil || flags&routeUp == 0 || flags&routeReject != 0 {
		return route{}, netip.Addr{}, false
	}
	bits, _ := net.IPMask(mask.AsSlice()).Size()
	return route{to: netip.PrefixFrom(to, bits), device: f[0]}, gateway, true
}

func addr4(s string) (netip.Addr, bool) {
	v, err := strconv.ParseUint(s, 16, 32)
	if err != nil {
		return netip.Addr{}, false
	}
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], uint32(v))
	return netip.AddrFrom4(b), true
}

// parseRoute6: destination, its length, source, its length, next hop, metric, references,
// use, flags, device; addresses are hexadecimal in network order.
func parseRoute6(f []string) (route, netip.Addr, bool) {
	if len(f) < 10 {
		return route{}, netip.Addr{}, false
	}
	to, ok := addr6(f[0])
	gateway, ok2 := addr6(f[4])
	bits, err := strconv.ParseUint(f[1], 16, 8)
	flags, err2 := strconv.ParseUint(f[8], 16, 32)
	if !ok || !ok2 || err != nil || err2 != nil || bits > 128 || flags&routeUp == 0 || flags&routeReject != 0 {
		return route{}, netip.Addr{}, false
	}
	return route{to: netip.PrefixFrom(to, int(bits)), device: f[9]}, gateway, true
}

func addr6(s string) (netip.Addr, bool) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 16 {
		return netip.Addr{}, false
	}
	return netip.AddrFrom16([16]byte(b)), true
}
