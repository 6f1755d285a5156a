package relay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/pkg/services"
)

// The tables with the rules. Nobody else writes to them. Redirects of DNS have a table of their own, which is gone at
// once when the edge stops.
const (
	tableName    = services.RulesTable
	tableNameDNS = services.RulesTableDNS
)

// linux is the kernel of this machine. All but original is for one goroutine.
type linux struct {
	dns       bool             // the table is that of DNS; set once
	listeners []netip.AddrPort // of the table that program has written; nil: none
}

func newKernel() (kernel, error) { return &linux{}, nil }

func newDNSKernel() kernel { return &linux{dns: true} }

// withRights says what to do about missing rights.
func withRights(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w: [mode.edge.services] needs the node's network and the capability CAP_NET_ADMIN", err)
	}
	return err
}

// withVersion says what to do about a kernel that cannot have the table.
func withVersion(err error) error {
	for _, lacks := range []error{unix.ENOENT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT} {
		if errors.Is(err, lacks) {
			return fmt.Errorf("%w: [mode.edge.services] needs Linux 5.2 or newer with the modules nf_tables, nft_nat and "+
				"nft_chain_nat", err)
		}
	}
	return err
}

// RemoveRules removes the rules that an edge with Services has left when it was killed. It is for an edge without: the
// rules lead nowhere. Without rights, without such rules, or while the edge that has made them runs, it does nothing.
func RemoveRules(log *slog.Logger) {
	(&linux{}).removeLeft(log)
	RemoveDNSRules(log)
}

// RemoveDNSRules is RemoveRules for an edge that serves Services, but answers no names.
func RemoveDNSRules(log *slog.Logger) { (&linux{dns: true}).removeLeft(log) }

func (k *linux) removeLeft(log *slog.Logger) {
	c, err := nftables.New()
	if err != nil {
		return
	}
	if owner, lives := k.owner(c); lives {
		log.Info("another edge of this machine serves Services: its rules stay", "table", k.table().Name, "listener", owner)
		return
	}
	c.DelTable(k.table())
	if c.Flush() == nil {
		log.Info("rules that an edge with [mode.edge.services] has left are removed", "table", k.table().Name)
	}
}

// owner returns where the process listens that has made the table, if it runs. The names of the chains have its port.
func (k *linux) owner(c *nftables.Conn) (at netip.AddrPort, lives bool) {
	chains, err := c.ListChainsOfTableFamily(k.table().Family)
	if err != nil {
		return at, false
	}
	for _, chain := range chains {
		id, ok := strings.CutPrefix(chain.Name, prefixPrerouting)
		port, err := strconv.ParseUint(id, 10, 16)
		if !ok || err != nil || chain.Table.Name != k.table().Name {
			continue
		}
		at = netip.AddrPortFrom(addr4, uint16(port))
		ln, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		if errors.Is(err, unix.EADDRINUSE) {
			return at, true
		}
		if err == nil {
			ln.Close()
		}
	}
	return at, false
}

// open implements kernel. It adds the addresses to loopback: packets to them are for this machine, wherever they come
// from, which needs no route and no forwarding. Rules of the type redirect would need no address, but fail where a
// packet comes in by a link that has none.
func (*linux) open() ([]netip.Addr, error) {
	link, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("finding loopback: %w", err)
	}
	if err = addAddress(link, addr4); err != nil {
		return nil, fmt.Errorf("adding %s to loopback: %w", addr4, withRights(err))
	}
	err = addAddress(link, addr6)
	switch {
	case err == nil:
		return []netip.Addr{addr4, addr6}, nil
	case slices.ContainsFunc([]error{unix.EACCES, unix.EPERM, unix.EOPNOTSUPP, unix.EAFNOSUPPORT},
		func(e error) bool { return errors.Is(err, e) }):
		return []netip.Addr{addr4}, nil // this machine has no IPv6; the rights sufficed for IPv4
	}
	return nil, fmt.Errorf("adding %s to loopback: %w", addr6, err)
}

// addAddress adds an address to a link that may have it. The kernel never chooses the address as the source of other
// connections: of IPv4 because of its scope, of IPv6 because it is deprecated.
func addAddress(link netlink.Link, addr netip.Addr) error {
	a := &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}}
	if addr.Is4() {
		a.Scope = unix.RT_SCOPE_LINK
	} else {
		a.Flags, a.ValidLft = unix.IFA_F_NODAD, math.MaxInt32 // PreferedLft is 0
	}
	err := netlink.AddrAdd(link, a)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// family is what differs between IPv4 and IPv6.
type family struct {
	protocol byte
	own      netip.Addr           // the relay's
	prefix   string               // of the map's name
	key      nftables.SetDatatype // address, protocol, port
	offset   uint32               // of the destination in the IP header: RFC 791, RFC 8200
	size     uint32               // of an address
}

func familyOf(addr netip.Addr) family {
	if addr.Is4() {
		return family{unix.NFPROTO_IPV4, addr4, "services4-",
			nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetProto, nftables.TypeInetService), 16, 4}
	}
	return family{unix.NFPROTO_IPV6, addr6, "services6-",
		nftables.MustConcatSetType(nftables.TypeIP6Addr, nftables.TypeInetProto, nftables.TypeInetService), 24, 16}
}

func (k *linux) table() *nftables.Table {
	name := tableName
	if k.dns {
		name = tableNameDNS
	}
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: name}
}

// id tells the chains and sets of this process from those of another one: the next process makes the table anew while
// this one stops.
func (k *linux) id() string { return strconv.Itoa(int(k.listeners[0].Port())) }

// prefixPrerouting is what the names of chains for packets that come in begin with. The id of the process follows.
const prefixPrerouting = "prerouting-"

// chains are those of packets that come in, and of this machine's own packets. Their priority is before that of
// kube-proxy, in any of its modes: of the chains that translate a connection's address, the first one counts. DNS comes
// first, since the cluster's DNS may be a Service that the relay serves.
func (k *linux) chains() []*nftables.Chain {
	first := nftables.ChainPriorityRef(*nftables.ChainPriorityNATDest - 10)
	if k.dns {
		first = nftables.ChainPriorityRef(*first - 1)
	}
	return []*nftables.Chain{
		{Name: prefixPrerouting + k.id(), Table: k.table(), Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPrerouting, Priority: first},
		{Name: "output-" + k.id(), Table: k.table(), Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookOutput, Priority: first},
	}
}

// set is the map of a family: from addresses to ports of the relay.
func (k *linux) set(f family) *nftables.Set {
	return &nftables.Set{Table: k.table(), Name: f.prefix + k.id(), KeyType: f.key, Concatenation: true,
		IsMap: true, DataType: nftables.TypeInetService}
}

// commentMarked is of the rule that leaves connections of Unredirected alone.
const commentMarked = "from the edge itself"

// leaveMarked is: meta mark & 0x1000 != 0 return.
func leaveMarked() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: unix.NFT_REG_1},
		&expr.Bitwise{SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(mark), Xor: binaryutil.NativeEndian.PutUint32(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: unix.NFT_REG_1, Data: binaryutil.NativeEndian.PutUint32(0)},
		&expr.Verdict{Kind: expr.VerdictReturn},
	}
}

// comment is of the rules that redirect to a listener.
func comment(listener netip.AddrPort) string { return "to the relay at " + listener.String() }

// perChange is how many addresses one transaction of the kernel has at most. What a socket sends at once is bounded.
const perChange = 2000

// program implements kernel.
func (k *linux) program(listeners []netip.AddrPort, all redirects) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("opening nftables: %w", withRights(err))
	}
	before := k.listeners
	k.listeners = listeners
	c.AddTable(k.table()) // so that there is one to delete
	c.DelTable(k.table())
	c.AddTable(k.table())
	both := k.chains()
	for _, chain := range both {
		c.AddChain(chain)
		c.AddRule(&nftables.Rule{Table: k.table(), Chain: chain, Exprs: leaveMarked(),
			UserData: userdata.AppendString(nil, userdata.TypeComment, commentMarked)})
	}
	for _, listener := range listeners {
		f := familyOf(listener.Addr())
		set := k.set(f)
		if err = c.AddSet(set, nil); err != nil {
			return err
		}
		for _, chain := range both {
			c.AddRule(&nftables.Rule{Table: k.table(), Chain: chain, Exprs: redirect(set, f),
				UserData: userdata.AppendString(nil, userdata.TypeComment, comment(listener))})
		}
	}
	if err = k.flush(c); err != nil {
		k.listeners = before // the table is still the one of before
		return withVersion(err)
	}
	return k.change(all, nil)
}

func (k *linux) flush(c *nftables.Conn) error {
	if err := c.Flush(); err != nil {
		return fmt.Errorf("writing nftables' table %s: %w", k.table().Name, withRights(err))
	}
	return nil
}

// redirect is, for IPv4: dnat ip to 169.254.77.1 : ip daddr . meta l4proto . th dport map @services4, with a counter of
// what is in the map.
func redirect(set *nftables.Set, f family) []expr.Any {
	const first = unix.NFT_REG32_00 // of the registers of four bytes
	words := f.size / 4
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: unix.NFT_REG_1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: []byte{f.protocol}},
		&expr.Payload{DestRegister: first, Base: expr.PayloadBaseNetworkHeader, Offset: f.offset, Len: f.size},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: first + words},
		&expr.Payload{DestRegister: first + words + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: first, DestRegister: unix.NFT_REG_2, IsDestRegSet: true,
			SetName: set.Name, SetID: set.ID},
		&expr.Counter{},
		&expr.Immediate{Register: unix.NFT_REG_1, Data: f.own.AsSlice()},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.protocol),
			RegAddrMin: unix.NFT_REG_1, RegProtoMin: unix.NFT_REG_2},
	}
}

// change implements kernel. Up to perChange addresses are one transaction.
func (k *linux) change(add, gone redirects) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("opening nftables: %w", withRights(err))
	}
	for _, part := range []struct {
		all   redirects
		write func(*nftables.Set, []nftables.SetElement) error
	}{{gone, c.SetDeleteElements}, {add, c.SetAddElements}} {
		for some := range slices.Chunk(part.all.sorted(), perChange) {
			if err := k.writeElements(part.all, some, part.write); err != nil {
				return err
			}
			if len(some) == perChange {
				if err := k.flush(c); err != nil {
					return err
				}
			}
		}
	}
	return k.flush(c)
}

// clear implements kernel. Each set is a transaction of its own: the one of a family may be missing.
func (k *linux) clear() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("opening nftables: %w", withRights(err))
	}
	var errs []error
	for _, listener := range k.listeners {
		c.FlushSet(k.set(familyOf(listener.Addr())))
		if err := k.flush(c); err != nil && !errors.Is(err, unix.ENOENT) { // the next process has made the table anew
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// perMessage is how many addresses one message has at most: the length of an attribute has 16 bits.
const perMessage = 500

// writeElements adds messages for some of the addresses of all to a transaction. It leaves out those of a family
// without listener.
func (k *linux) writeElements(
	all redirects, some []address, write func(*nftables.Set, []nftables.SetElement) error,
) error {
	for _, listener := range k.listeners {
		var elements []nftables.SetElement
		for _, at := range some {
			if at.Addr().Is4() == listener.Addr().Is4() {
				to := binary.BigEndian.AppendUint16(nil, all[at])
				elements = append(elements, nftables.SetElement{Key: key(at), Val: to})
			}
		}
		for some := range slices.Chunk(elements, perMessage) {
			if err := write(k.set(familyOf(listener.Addr())), some); err != nil {
				return err
			}
		}
	}
	return nil
}

// key is an address of a map: each part fills whole registers of four bytes.
func key(at address) []byte {
	protocol := byte(unix.IPPROTO_TCP)
	if at.protocol == protocolUDP {
		protocol = unix.IPPROTO_UDP
	}
	b := append(at.Addr().AsSlice(), protocol, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, at.Port())
	return append(b, 0, 0)
}

// intact implements kernel.
func (k *linux) intact() bool {
	c, err := nftables.New()
	if err != nil || k.listeners == nil {
		return false
	}
	want := []string{commentMarked}
	for _, listener := range k.listeners {
		want = append(want, comment(listener))
	}
	for _, chain := range k.chains() {
		rules, err := c.GetRules(k.table(), chain)
		if err != nil {
			return false // there is no table
		}
		has := make([]string, len(rules))
		for i, rule := range rules {
			has[i], _ = userdata.GetString(rule.UserData, userdata.TypeComment)
		}
		if !slices.Equal(has, want) {
			return false
		}
	}
	return true
}

// remove implements kernel. The process after this one may have made another table of this name. Then there is no chain
// of this process, and the kernel does nothing of the transaction.
func (k *linux) remove() error {
	if k.listeners == nil {
		return nil
	}
	c, err := nftables.New()
	if err != nil {
		return err
	}
	for _, chain := range k.chains() {
		c.DelChain(chain)
	}
	c.DelTable(k.table())
	if err := k.flush(c); !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// original implements kernel: SO_ORIGINAL_DST of linux/netfilter_ipv4.h, and IP6T_SO_ORIGINAL_DST.
func (*linux) original(c net.Conn) (at netip.AddrPort, err error) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return at, errors.New("it is no TCP connection")
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return at, err
	}
	is4 := hostOf(c.LocalAddr()).Is4()
	control := raw.Control(func(fd uintptr) {
		const originalDestination = 80
		if is4 {
			// A sockaddr_in, in a struct that is long enough.
			var sa *unix.IPv6Mreq
			if sa, err = unix.GetsockoptIPv6Mreq(int(fd), unix.IPPROTO_IP, originalDestination); err == nil {
				b := sa.Multiaddr
				at = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:4]))
			}
			return
		}
		// A sockaddr_in6, in a struct that begins with one.
		var sa *unix.IPv6MTUInfo
		if sa, err = unix.GetsockoptIPv6MTUInfo(int(fd), unix.IPPROTO_IPV6, originalDestination); err == nil {
			port := binary.NativeEndian.AppendUint16(nil, sa.Addr.Port)
			at = netip.AddrPortFrom(netip.AddrFrom16(sa.Addr.Addr), binary.BigEndian.Uint16(port))
		}
	})
	return at, errors.Join(control, err)
}
