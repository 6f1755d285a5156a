package podnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/pkg/cni"
)

// linux is the kernel of this machine.
type linux struct{}

// bridge makes the bridge, its addresses and the settings of the kernel as conf says. In a container, and with
// systemd's ProtectKernelTunables, /proc/sys is read-only. Then the plugin writes the settings when the runtime
// executes it for the first pod. If there are pods already and settings are wrong, bridge returns a readOnlyError.
func (linux) bridge(conf *cni.Conf) error {
	bridge, err := cni.EnsureBridge(conf)
	if err == nil && slices.ContainsFunc(conf.Subnets, func(s netip.Prefix) bool { return s.Addr().Is6() }) {
		err = cni.KeepAdvertisements(conf.Bridge)
	}
	if bridge == nil || !errors.Is(err, unix.EROFS) {
		return withRights(err)
	}
	pods, _, countErr := ports(conf.Bridge)
	if countErr != nil {
		return countErr
	}
	if pods == 0 {
		return nil
	}
	return readOnlyError{err}
}

func (linux) attached() (int, error) { return cni.Attached() }

func (linux) release() error { return cni.ReleaseOtherBoots(cni.DefaultDataDir) }

// readOnlyError says that settings of the kernel are wrong, and that the edge cannot write them. The bridge and its
// addresses are right.
type readOnlyError struct{ error }

func (e readOnlyError) Unwrap() error { return e.error }

func (e readOnlyError) Error() string {
	return e.error.Error() + ": set it on the node; the next ADD of the plugin sets it, too"
}

// withRights adds advice to err if the edge lacks a right.
func withRights(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w: [mode.edge.cni] needs the node's network and the capability CAP_NET_ADMIN", err)
	}
	return err
}

// tableName and chainName name the rules. Nobody else writes to the table.
const (
	tableName = cni.RulesTable
	chainName = "postrouting"
)

// masquerade writes the rules by which packets of pods leave the node with the node's address. Packets between pods of
// the node, and to the networks of direct, keep the pod's address. The rules also cover networks that the node had
// before, since running pods keep their addresses. The kernel makes all changes at once, so no packet meets half of
// them.
func (linux) masquerade(bridge string, subnets, direct []netip.Prefix) error {
	had, err := gatewaysOn(bridge)
	if err != nil {
		return err
	}
	for _, subnet := range had {
		if !slices.Contains(subnets, subnet) {
			subnets = append(slices.Clip(subnets), subnet)
		}
	}
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("opening nftables: %w", withRights(err))
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: tableName}
	chain := &nftables.Chain{Name: chainName, Table: table, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource}
	var rules []*nftables.Rule
	add := func(exprs []expr.Any, about ...any) {
		rules = append(rules, &nftables.Rule{Table: table, Chain: chain, Exprs: exprs,
			UserData: []byte(fmt.Sprint(about...))})
	}
	for _, subnet := range subnets {
		for _, to := range direct {
			if to.Addr().Is4() == subnet.Addr().Is4() {
				add(directRule(subnet, to), "to ", to, " from ", subnet)
			}
		}
		add(masqueradeRule(bridge, subnet), bridge, " ", subnet)
	}
	if same(c, table, chain, rules) {
		return nil
	}
	c.AddTable(table) // so that there is one to delete
	c.DelTable(table)
	c.AddTable(table)
	c.AddChain(chain)
	for _, rule := range rules {
		c.AddRule(rule)
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("writing nftables' table %s: %w", tableName, withRights(err))
	}
	return nil
}

// gatewaysOn returns, in order, the networks whose gateway is an address of the bridge: all networks that pods of this
// node have had.
func gatewaysOn(bridge string) (subnets []netip.Prefix, err error) {
	link, err := netlink.LinkByName(bridge)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("finding bridge %s: %w", bridge, err)
	}
	addrs, err := cni.Dump(func() ([]netlink.Addr, error) { return netlink.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("listing the addresses of bridge %s: %w", bridge, err)
	}
	for _, a := range addrs {
		prefix, err := netip.ParsePrefix(a.IPNet.String())
		if err == nil && !prefix.Addr().IsLinkLocalUnicast() && prefix.Addr() == prefix.Masked().Addr().Next() {
			subnets = append(subnets, prefix.Masked())
		}
	}
	slices.SortFunc(subnets, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	return subnets, nil
}

// same reports whether the kernel has exactly the rules want. It compares the user data of the rules, which describe
// them.
func same(c *nftables.Conn, table *nftables.Table, chain *nftables.Chain, want []*nftables.Rule) bool {
	has, err := c.GetRules(table, chain)
	if err != nil || len(has) != len(want) {
		return false // also if there is no such table
	}
	for i, rule := range has {
		if string(rule.UserData) != string(want[i].UserData) {
			return false
		}
	}
	return true
}

// masqueradeRule is, for IPv4: ip saddr SUBNET ip daddr != SUBNET oifname != BRIDGE masquerade.
func masqueradeRule(bridge string, subnet netip.Prefix) []expr.Any {
	exprs := fromTo(subnet, subnet, expr.CmpOpNeq)
	device := make([]byte, unix.IFNAMSIZ)
	copy(device, bridge)
	return append(exprs,
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: device},
		&expr.Counter{},
		&expr.Masq{FullyRandom: true})
}

// directRule is, for IPv4: ip saddr SUBNET ip daddr TO accept.
func directRule(subnet, to netip.Prefix) []expr.Any {
	return append(fromTo(subnet, to, expr.CmpOpEq), &expr.Verdict{Kind: expr.VerdictAccept})
}

// fromTo matches packets from a subnet to another (CmpOpEq), or to anywhere else (CmpOpNeq). Both are of one family.
func fromTo(subnet, to netip.Prefix, op expr.CmpOp) []expr.Any {
	family, source, destination := byte(unix.NFPROTO_IPV4), uint32(12), uint32(16) // offsets: RFC 791
	if subnet.Addr().Is6() {
		family, source, destination = unix.NFPROTO_IPV6, 8, 24 // RFC 8200
	}
	exprs := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
	}
	exprs = append(exprs, inSubnet(subnet, source, expr.CmpOpEq)...)
	return append(exprs, inSubnet(to, destination, op)...)
}

// inSubnet compares the address at an offset of the IP header with a subnet.
func inSubnet(subnet netip.Prefix, offset uint32, op expr.CmpOp) []expr.Any {
	size := subnet.Addr().BitLen() / 8
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(size)},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: uint32(size),
			Mask: net.CIDRMask(subnet.Bits(), subnet.Addr().BitLen()), Xor: make([]byte, size)},
		&expr.Cmp{Op: op, Register: 1, Data: subnet.Addr().AsSlice()},
	}
}
