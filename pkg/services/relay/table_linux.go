package relay

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// family has what differs between IPv4 and IPv6.
type family struct {
	protocol byte
	own      netip.Addr // the relay's own address
	name     string
	addr     nftables.SetDatatype
	source   uint32 // offset of the source address in the IP header: RFC 791, RFC 8200
	offset   uint32 // offset of the destination address in the IP header
	size     uint32 // bytes of an address
}

func familyOf(addr netip.Addr) family {
	if addr.Is4() {
		return family{unix.NFPROTO_IPV4, addr4, "4", nftables.TypeIPAddr, 12, 16, 4}
	}
	return family{unix.NFPROTO_IPV6, addr6, "6", nftables.TypeIP6Addr, 8, 24, 16}
}

// words returns how many registers of four bytes an address takes.
func (f family) words() uint32 { return f.size / 4 }

func (k *linux) table() *nftables.Table {
	name := tableName
	if k.dns {
		name = tableNameDNS
	}
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: name}
}

// chooseID sets the id in the names of chains and sets that one call of program makes. The id differs from those of
// other calls and other processes, since new chains are made while the old ones are still in use. A process that was
// killed may have had the same port.
func (k *linux) chooseID() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("opening nftables: %w", err)
	}
	for {
		k.programs++
		k.id = strconv.Itoa(int(k.listeners[0].Port()))
		if k.programs > 1 {
			k.id += "." + strconv.Itoa(k.programs)
		}
		taken, err := k.having(c, k.hasID)
		if err != nil || len(taken.chains)+len(taken.sets) == 0 {
			return err
		}
	}
}

// hasID reports whether the name of a chain or of a set has the id.
func (k *linux) hasID(name string) bool { return strings.HasSuffix(name, "-"+k.id) }

// prefixPrerouting begins the names of chains for packets that come in. The id follows.
const prefixPrerouting = "prerouting-"

// hook is a base chain of nftables, which the kernel calls for packets, with its rules.
type hook struct {
	*nftables.Chain
	rules []commented
}

// commented is a rule with its comment.
type commented struct {
	comment string
	exprs   []expr.Any
}

// hooks returns the base chains of the table. The first chain that translates the address of a connection decides. So
// the chains for packets that come in, and for this machine's own packets, have a priority before that of kube-proxy in
// any of its modes. The chains for DNS come first, since the cluster's DNS may be a Service that the edge serves.
func (k *linux) hooks() []hook {
	first := nftables.ChainPriorityRef(*nftables.ChainPriorityNATDest - 10)
	if k.dns {
		first = nftables.ChainPriorityRef(*first - 1)
	}
	base := func(name string, kind nftables.ChainType, at *nftables.ChainHook, p *nftables.ChainPriority) *nftables.Chain {
		return &nftables.Chain{Name: name + "-" + k.id, Table: k.table(), Type: kind, Hooknum: at, Priority: p}
	}
	all := []hook{
		{base("prerouting", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, first), k.translations(false)},
		{base("output", nftables.ChainTypeNAT, nftables.ChainHookOutput, first), k.translations(true)},
	}
	if k.dns {
		return all
	}
	last := nftables.ChainPriorityRef(*nftables.ChainPriorityNATSource - 10)
	after := base("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, last)
	all = append(all, hook{after, k.masquerades()})
	if !k.full {
		return all
	}
	filter := nftables.ChainPriorityRef(*nftables.ChainPriorityFilter - 10)
	for _, f := range []struct {
		name string
		at   *nftables.ChainHook
	}{
		{"refuse-input", nftables.ChainHookInput}, {"refuse-forward", nftables.ChainHookForward},
		{"refuse-output", nftables.ChainHookOutput},
	} {
		all = append(all, hook{base(f.name, nftables.ChainTypeFilter, f.at, filter), k.refusals(f.at)})
	}
	return all
}

// set returns the set of a kind and a family.
func (k *linux) set(kind setKind, f family) *nftables.Set {
	s := &nftables.Set{Table: k.table(), Name: kind.String() + f.name + "-" + k.id, Concatenation: true}
	protocol, port := nftables.TypeInetProto, nftables.TypeInetService
	at := []nftables.SetDatatype{f.addr, protocol, port}
	of := func(types ...nftables.SetDatatype) { s.KeyType = nftables.MustConcatSetType(types...) }
	maps := func(to nftables.SetDatatype) { s.IsMap, s.DataType = true, to }
	switch kind {
	case setServices:
		of(at...)
		maps(port)
	case setRelayPorts:
		of(protocol, port)
		maps(port)
	case setFront, setNone:
		of(at...)
		maps(nftables.TypeVerdict)
	case setPorts, setNonePorts:
		of(protocol, port)
		maps(nftables.TypeVerdict)
	case setEnds:
		of(append(at, nftables.TypeMark)...)
		maps(nftables.MustConcatSetType(f.addr, port))
	case setLive, setLiveLocal:
		of(append(at, f.addr, port)...)
	case setAffine:
		of(append([]nftables.SetDatatype{f.addr}, at...)...)
		maps(nftables.MustConcatSetType(f.addr, port))
		s.Dynamic, s.HasTimeout, s.Size = true, true, maxAffinity
	case setIPs:
		s.Concatenation, s.KeyType = false, f.addr
	case setHairpin:
		of(f.addr, f.addr)
	case setPods:
		s.Concatenation, s.KeyType, s.Interval = false, f.addr, true
	}
	return s
}

// sets returns the kinds of sets that the table has.
func (k *linux) sets() []setKind {
	switch {
	case k.dns:
		return []setKind{setServices}
	case k.full:
		return []setKind{setServices, setRelayPorts, setFront, setPorts, setEnds, setLive, setLiveLocal, setAffine, setNone,
			setNonePorts, setIPs, setHairpin, setPods}
	}
	return []setKind{setServices, setFront, setEnds, setLive, setAffine, setHairpin}
}

// commentMarked is the comment of the rule for packets of the edge itself, which Unredirected has marked: they are not
// redirected.
const commentMarked = "from the edge itself"

// comment returns the comment of the rules that redirect to a listener.
func comment(listener netip.AddrPort) string { return "to the relay at " + listener.String() }

// register returns the number of the n-th register of four bytes.
func register(n uint32) uint32 { return unix.NFT_REG32_00 + n }

// spare returns a register that is never part of a key or of an endpoint.
func spare() uint32 { return register(15) }

// hasMark returns the expressions of nft's "meta mark & bits != 0"; of "== 0" if has is false.
func hasMark(bits uint32, has bool) []expr.Any {
	op := expr.CmpOpEq
	if has {
		op = expr.CmpOpNeq
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: spare()},
		&expr.Bitwise{SourceRegister: spare(), DestRegister: spare(), Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: binaryutil.NativeEndian.PutUint32(0)},
		&expr.Cmp{Op: op, Register: spare(), Data: binaryutil.NativeEndian.PutUint32(0)},
	}
}

// setMark returns the expressions of nft's "meta mark set meta mark | bits".
func setMark(bits uint32) []expr.Any { return changeMark(bits, bits) }

// clearMark returns the expressions of nft's "meta mark set meta mark & ^bits".
func clearMark(bits uint32) []expr.Any { return changeMark(bits, 0) }

// changeMark returns the expressions that set the bits of a packet's mark in bits to those of value.
func changeMark(bits, value uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: spare()},
		&expr.Bitwise{SourceRegister: spare(), DestRegister: spare(), Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(^bits), Xor: binaryutil.NativeEndian.PutUint32(value)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: spare()},
	}
}

// is returns the expressions of nft's "meta nfproto ipv4", or ipv6.
func (f family) is() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: spare()},
		&expr.Cmp{Op: expr.CmpOpEq, Register: spare(), Data: []byte{f.protocol}},
	}
}

// load returns the expressions that load the protocol and the destination port of a packet into the registers from
// first on.
func load(first uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register(first)},
		&expr.Payload{DestRegister: register(first + 1), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
	}
}

// destination returns the expressions that load where a packet goes: address, protocol, port. With nodePort, the
// address is 0.
func (f family) destination(first uint32, nodePort bool) []expr.Any {
	addr := f.callee(first)
	if nodePort {
		addr = &expr.Immediate{Register: register(first), Data: make([]byte, f.size)}
	}
	return append([]expr.Any{addr}, load(first+f.words())...)
}

// caller returns the expressions that load the source address of a packet.
func (f family) caller(first uint32) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: register(first), Base: expr.PayloadBaseNetworkHeader,
		Offset: f.source, Len: f.size}}
}

// callee returns the expression that loads the destination address of a packet.
func (f family) callee(first uint32) expr.Any {
	return &expr.Payload{DestRegister: register(first), Base: expr.PayloadBaseNetworkHeader, Offset: f.offset, Len: f.size}
}

// isLocal returns the expressions of nft's "fib daddr type local", without loopback. With source, they are those of
// "fib saddr type local".
func (f family) isLocal(source bool) []expr.Any {
	const local = 2 // RTN_LOCAL of linux/rtnetlink.h
	all := []expr.Any{
		&expr.Fib{Register: spare(), FlagSADDR: source, FlagDADDR: !source, ResultADDRTYPE: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: spare(), Data: binaryutil.NativeEndian.PutUint32(local)},
	}
	if source {
		return all
	}
	loopback, bytes := netip.IPv6Loopback().AsSlice(), f.size
	if f.size == 4 {
		loopback, bytes = []byte{127}, 1
	}
	return append(all,
		&expr.Payload{DestRegister: register(0), Base: expr.PayloadBaseNetworkHeader, Offset: f.offset, Len: bytes},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: register(0), Data: loopback})
}

// lookup returns the expression that looks up the key in the registers from first on. If the set is a map of data, to
// is the register for the data; otherwise to is 0.
func (k *linux) lookup(kind setKind, f family, first, to uint32) expr.Any {
	l := &expr.Lookup{SourceRegister: register(first), SetName: k.set(kind, f).Name}
	if to > 0 {
		l.DestRegister, l.IsDestRegSet = register(to), true
	}
	return l
}

// dispatch returns the expression that looks up a key and goes to its chain.
func (k *linux) dispatch(kind setKind, f family, first uint32) expr.Any {
	return &expr.Lookup{SourceRegister: register(first), SetName: k.set(kind, f).Name,
		DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true}
}

// toOwn returns the expressions of nft's "dnat" to the relay's own address. port is the register that has the port.
func (f family) toOwn(port uint32) []expr.Any {
	const addr = 10 // a register that no caller uses
	return []expr.Any{
		&expr.Counter{},
		&expr.Immediate{Register: register(addr), Data: f.own.AsSlice()},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.protocol),
			RegAddrMin: register(addr), RegProtoMin: register(port)},
	}
}

// leavesOwn returns the rule that ends the chain for the edge's own packets, unless they go to a ClusterIP.
func (k *linux) leavesOwn(f family) commented {
	return commented{commentMarked, slices.Concat(f.is(), hasMark(mark, true), []expr.Any{
		f.callee(0),
		&expr.Lookup{SourceRegister: register(0), SetName: k.set(setIPs, f).Name, Invert: true},
		&expr.Verdict{Kind: expr.VerdictReturn},
	})}
}

// translations returns the rules that choose where a connection goes. Beside kube-proxy, the rules leave the edge's own
// packets to kube-proxy. In place of kube-proxy, the edge's own packets to a ClusterIP go to an endpoint, but never to
// the relay: the edge would call itself. The edge's other packets stay as they are: an external IP that a Service
// claims may be the cloud's address.
//
// ofNode says that the rules are for packets of the node's own processes. In place of kube-proxy, they masquerade those
// to a ClusterIP, as kube-proxy does. The kernel has chosen the source address of these packets by the route to the
// ClusterIP, and an endpoint may have no route back to that address.
func (k *linux) translations(ofNode bool) (all []commented) {
	var notOwn []expr.Any
	if k.full {
		notOwn = hasMark(mark, false)
	} else {
		all = append(all, commented{commentMarked,
			append(hasMark(mark, true), &expr.Verdict{Kind: expr.VerdictReturn})})
	}
	for _, listener := range k.listeners {
		f := familyOf(listener.Addr())
		if k.full {
			all = append(all, k.leavesOwn(f))
		}
		end := f.words() + 2 // the register after a destination
		all = append(all, commented{comment(listener), slices.Concat(f.is(), notOwn, f.destination(0, false),
			[]expr.Any{k.lookup(setServices, f, 0, end)}, f.toOwn(end))})
		if k.dns {
			continue
		}
		if k.full && ofNode {
			all = append(all, commented{"from the node to a ClusterIP", slices.Concat(f.is(),
				[]expr.Any{f.callee(0), k.lookup(setIPs, f, 0, 0)}, setMark(markMasquerade))})
		}
		all = append(all, commented{"to endpoints", slices.Concat(f.is(), f.destination(0, false),
			[]expr.Any{k.dispatch(setFront, f, 0)})})
		if !k.full {
			continue
		}
		all = append(all,
			commented{"node ports, " + comment(listener), slices.Concat(f.is(), notOwn, f.isLocal(false), load(0),
				[]expr.Any{k.lookup(setRelayPorts, f, 0, 2)}, f.toOwn(2))},
			commented{"node ports, to endpoints", slices.Concat(f.is(), f.isLocal(false), load(0),
				[]expr.Any{k.dispatch(setPorts, f, 0)})})
	}
	return all
}

// masquerades returns the rules that run after routing and masquerade connections.
func (k *linux) masquerades() (all []commented) {
	if k.full {
		all = append(all, commented{"callers that an endpoint may not reach",
			// Without the mark afterwards: if the node encapsulates the packet, the outer packet is not masqueraded, too.
			slices.Concat(hasMark(markMasquerade, true), clearMark(markMasquerade),
				[]expr.Any{&expr.Masq{FullyRandom: true}})})
	}
	for _, listener := range k.listeners {
		f := familyOf(listener.Addr())
		const translated = 1 << 5 // IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h
		all = append(all, commented{"endpoints that call themselves", slices.Concat(f.is(), []expr.Any{
			&expr.Ct{Key: expr.CtKeySTATUS, Register: spare()},
			&expr.Bitwise{SourceRegister: spare(), DestRegister: spare(), Len: 4,
				Mask: binaryutil.NativeEndian.PutUint32(translated), Xor: binaryutil.NativeEndian.PutUint32(0)},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: spare(), Data: binaryutil.NativeEndian.PutUint32(0)},
		}, f.caller(0), []expr.Any{
			f.callee(f.words()),
			k.lookup(setHairpin, f, 0, 0),
			&expr.Masq{FullyRandom: true},
		})})
	}
	return all
}

// refusals returns the rules for connections that no endpoint gets.
func (k *linux) refusals(at *nftables.ChainHook) (all []commented) {
	const isNew = 1 << 3 // NF_CT_STATE_BIT(IP_CT_NEW) of linux/netfilter/nf_conntrack_common.h
	fresh := []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: spare()},
		&expr.Bitwise{SourceRegister: spare(), DestRegister: spare(), Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(isNew), Xor: binaryutil.NativeEndian.PutUint32(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: spare(), Data: binaryutil.NativeEndian.PutUint32(0)},
	}
	for _, listener := range k.listeners {
		f := familyOf(listener.Addr())
		if at == nftables.ChainHookOutput {
			all = append(all, k.leavesOwn(f))
		}
		all = append(all, commented{"no endpoint", slices.Concat(fresh, f.is(), f.destination(0, false),
			[]expr.Any{k.dispatch(setNone, f, 0)})})
		if at == nftables.ChainHookInput {
			all = append(all, commented{"node ports, no endpoint", slices.Concat(fresh, f.is(), f.isLocal(false), load(0),
				[]expr.Any{k.dispatch(setNonePorts, f, 0)})})
		}
		all = append(all, commented{"no such port", slices.Concat(fresh, f.is(), []expr.Any{
			f.callee(0),
			k.lookup(setIPs, f, 0, 0),
			k.to(chain{kind: chainReject, v6: f.size != 4}),
		})})
	}
	return all
}

// to returns the expression of nft's "goto" to a chain.
func (k *linux) to(c chain) expr.Any {
	return &expr.Verdict{Kind: expr.VerdictGoto, Chain: k.nameOf(c)}
}

func (k *linux) nameOf(c chain) string { return c.name() + "-" + k.id }

// rulesOf returns the rules of a chain that elements lead to.
func (k *linux) rulesOf(c chain) [][]expr.Any {
	f := familyOf(addr4)
	if c.v6 {
		f = familyOf(addr6)
	}
	w := f.words()
	var marked []expr.Any
	if c.masquerade {
		marked = setMark(markMasquerade)
	}
	// choose loads a random endpoint into the registers after the destination, which begins at first.
	choose := func(first uint32) []expr.Any {
		index := &expr.Numgen{Register: register(first + w + 2), Type: unix.NFT_NG_RANDOM,
			Modulus: uint32(c.n)} //nolint:gosec // endpoints are fewer
		if c.local {
			index.Offset = firstLocal
		}
		return []expr.Any{index, k.lookup(setEnds, f, first, first+w+2)}
	}
	toEnd := func(end uint32) []expr.Any {
		return append(slices.Clone(marked), &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.protocol),
			RegAddrMin: register(end), RegProtoMin: register(end + w)})
	}
	switch c.kind {
	case chainPick:
		return [][]expr.Any{slices.Concat(f.destination(0, c.node), choose(0), toEnd(w+2))}
	case chainAffine:
		if k.noAffinity {
			return [][]expr.Any{{k.to(c.random())}}
		}
		const remove = 2 // NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h
		end := 2*w + 2
		live := setLive
		if c.local {
			live = setLiveLocal
		}
		note := func(op uint32) expr.Any {
			d := &expr.Dynset{SrcRegKey: register(0), SrcRegData: register(end), SetName: k.set(setAffine, f).Name,
				Operation: op}
			if op != remove {
				d.Timeout = time.Duration(c.sticky) * time.Second
			}
			return d
		}
		key := slices.Concat(f.caller(0), f.destination(w, c.node))
		// 1: the caller keeps its endpoint, if that is still live. 2: the caller gets another endpoint, and the set
		// remembers it. 3: the set is full, so the connection gets any endpoint.
		return [][]expr.Any{
			slices.Concat(key, []expr.Any{k.lookup(setAffine, f, 0, end), k.lookup(live, f, w, 0),
				note(unix.NFT_DYNSET_OP_UPDATE)}, toEnd(end)),
			slices.Concat(key, choose(w), []expr.Any{note(remove), note(unix.NFT_DYNSET_OP_UPDATE),
				k.lookup(setAffine, f, 0, end)}, toEnd(end)),
			{k.to(c.random())},
		}
	case chainSplit:
		pods, own, others := c.parts()
		verdict := func(c chain) expr.Any {
			if c.kind == noChain {
				return &expr.Verdict{Kind: expr.VerdictReturn}
			}
			return k.to(c)
		}
		return [][]expr.Any{
			slices.Concat(f.caller(0), []expr.Any{k.lookup(setPods, f, 0, 0), verdict(pods)}),
			append(f.isLocal(true), verdict(own)),
			{verdict(others)},
		}
	case chainRelay:
		return [][]expr.Any{slices.Concat(hasMark(mark, false), []expr.Any{
			&expr.Immediate{Register: register(9), Data: binaryutil.BigEndian.PutUint16(c.port)},
		}, f.toOwn(9))}
	case chainReject:
		return [][]expr.Any{
			{
				&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: spare()},
				&expr.Cmp{Op: expr.CmpOpEq, Register: spare(), Data: []byte{unix.IPPROTO_TCP}},
				&expr.Reject{Type: unix.NFT_REJECT_TCP_RST},
			},
			{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}},
		}
	}
	return [][]expr.Any{{&expr.Verdict{Kind: expr.VerdictDrop}}}
}

// addChain adds a chain, and the chains that it needs, unless the table has them.
func (k *linux) addChain(c *nftables.Conn, one chain) {
	if _, has := k.chains[one]; has {
		return
	}
	for _, other := range one.needs() {
		k.addChain(c, other)
	}
	k.chains[one] = struct{}{}
	added := c.AddChain(&nftables.Chain{Name: k.nameOf(one), Table: k.table()})
	for _, exprs := range k.rulesOf(one) {
		c.AddRule(&nftables.Rule{Table: k.table(), Chain: added, Exprs: exprs})
	}
}

// perChange is how many elements one transaction has at most: the kernel bounds what a socket may send at once.
const perChange = 1500

// perPart is how many rules program writes at once. With ten endpoints each, they are two transactions.
const perPart = 250

// program implements kernel. It makes new sets and chains beside those in use, and fills them. Then it has the kernel
// call the new chains in place of all others, in one transaction.
func (k *linux) program(listeners []netip.AddrPort, all rules) error {
	before := *k
	k.listeners, k.routes = listeners, routes{}
	if err := k.chooseID(); err != nil {
		*k = before
		return withVersion(withRights(err))
	}
	err := k.write(all)
	if errors.Is(err, unix.ENOENT) {
		err = k.write(all) // a process that stopped has removed the table meanwhile
	}
	if errors.Is(err, unix.EOPNOTSUPP) && k.hasAffinity() {
		k.discardOwn()
		k.noAffinity = true // rules of Linux 5.2 and 5.3 remove no element
		err = k.write(all)
	}
	if err != nil {
		k.discardOwn()
		before.programs = k.programs
		*k = before // the kernel still has the table from before
		return withVersion(err)
	}
	k.built = len(k.chains)
	return nil
}

// hasAffinity reports whether a chain of the table keeps the endpoints of callers.
func (k *linux) hasAffinity() bool {
	for one := range k.chains {
		if one.kind == chainAffine && !k.noAffinity {
			return true
		}
	}
	return false
}

// discardOwn removes the chains and sets of a call of program that has failed. Otherwise each failed call would leave
// more of them.
func (k *linux) discardOwn() {
	c, err := nftables.New()
	if err != nil {
		return
	}
	ours, err := k.having(c, k.hasID)
	called := func(one *nftables.Chain) bool { return one.Hooknum != nil }
	if err == nil && !slices.ContainsFunc(ours.chains, called) { // else the kernel has taken the table after all
		k.discard(c, ours) //nolint:errcheck // the next call of program that succeeds removes the rest
	}
}

func (k *linux) write(all rules) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("opening nftables: %w", withRights(err))
	}
	k.chains = make(map[chain]struct{})
	c.AddTable(k.table())
	for _, listener := range k.listeners {
		f := familyOf(listener.Addr())
		for _, kind := range k.sets() {
			if err = c.AddSet(k.set(kind, f), nil); err != nil {
				return err
			}
		}
		if k.full {
			k.addChain(c, chain{kind: chainReject, v6: f.size != 4})
		}
	}
	if err = k.flush(c); err != nil {
		return err
	}
	// Nothing leads to the elements yet, so their order does not matter. In parts, they take little memory.
	for some := range all.parts(perPart) {
		if err = k.changeElements(c, nil, some); err != nil {
			return err
		}
	}
	others, err := k.others(c)
	if err != nil {
		return err
	}
	if err = errors.Join(k.keepAffinity(c, others), k.noteFlows(c, others)); err != nil {
		return err
	}
	for _, h := range k.hooks() {
		c.AddChain(h.Chain)
		for _, r := range h.rules {
			c.AddRule(&nftables.Rule{Table: k.table(), Chain: h.Chain, Exprs: r.exprs,
				UserData: userdata.AppendString(nil, userdata.TypeComment, r.comment)})
		}
	}
	for _, chain := range others.chains {
		if chain.Hooknum != nil {
			c.DelChain(chain)
		}
	}
	if err = k.flush(c); err != nil {
		return err
	}
	k.discard(c, others) //nolint:errcheck // they do nothing any more, and the next call of program tries again
	return nil
}

// leftovers are chains and sets of the table that the kernel no longer needs, or soon will not.
type leftovers struct {
	chains []*nftables.Chain
	sets   []*nftables.Set
}

func (k *linux) others(c *nftables.Conn) (l leftovers, err error) {
	return k.having(c, func(name string) bool { return !k.hasID(name) })
}

// having returns the chains and sets of the table whose names match.
func (k *linux) having(c *nftables.Conn, match func(name string) bool) (l leftovers, err error) {
	chains, err := c.ListChainsOfTableFamily(k.table().Family)
	if err != nil {
		return l, fmt.Errorf("listing the chains of nftables: %w", err)
	}
	for _, chain := range chains {
		if chain.Table.Name == k.table().Name && match(chain.Name) {
			l.chains = append(l.chains, chain)
		}
	}
	tables, err := c.ListTablesOfFamily(k.table().Family)
	if err != nil {
		return l, fmt.Errorf("listing the tables of nftables: %w", err)
	}
	if !slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == k.table().Name }) {
		return l, nil // GetSets would fail, and its error does not say why
	}
	sets, err := c.GetSets(k.table())
	if err != nil {
		return l, fmt.Errorf("listing the sets of nftables: %w", err)
	}
	for _, set := range sets {
		if match(set.Name) {
			l.sets = append(l.sets, set)
		}
	}
	return l, nil
}

// discard removes the sets, and the chains that the kernel does not call itself. Rules and elements that refer to a
// chain go before that chain.
func (k *linux) discard(c *nftables.Conn, l leftovers) error {
	var plain []*nftables.Chain
	for _, chain := range l.chains {
		if chain.Hooknum == nil {
			plain = append(plain, chain)
		}
	}
	return errors.Join(
		inTransactions(k, c, plain, c.FlushChain),
		inTransactions(k, c, l.sets, c.DelSet),
		inTransactions(k, c, plain, c.DelChain),
	)
}

// inTransactions calls add for each object, in several transactions. The kernel acknowledges each message, so too many
// messages in one transaction would fill the socket's buffer.
func inTransactions[T any](k *linux, c *nftables.Conn, all []T, add func(T)) (err error) {
	const most = 100
	for some := range slices.Chunk(all, most) {
		for _, one := range some {
			add(one)
		}
		err = errors.Join(err, k.flush(c))
	}
	return err
}

// keepAffinity copies the endpoints of callers from the sets of earlier calls and processes, so that callers keep their
// endpoints.
func (k *linux) keepAffinity(c *nftables.Conn, others leftovers) error {
	if k.dns {
		return nil
	}
	for _, listener := range k.listeners {
		f := familyOf(listener.Addr())
		seen := make(map[string]struct{})
		for _, set := range others.sets {
			if !strings.HasPrefix(set.Name, setAffine.String()+f.name+"-") {
				continue
			}
			set.Table = k.table()
			all, err := c.GetSetElements(set)
			if err != nil {
				return fmt.Errorf("reading the affinity of callers: %w", err)
			}
			all = slices.DeleteFunc(all, func(e nftables.SetElement) bool {
				_, double := seen[string(e.Key)]
				seen[string(e.Key)] = struct{}{}
				return double || e.Expires < time.Second
			})
			for i := range all {
				all[i] = nftables.SetElement{Key: all[i].Key, Val: all[i].Val, Timeout: all[i].Expires}
			}
			for some := range slices.Chunk(all, perMessage) {
				if err = c.SetAddElements(k.set(setAffine, f), some); err == nil {
					err = k.flush(c)
				}
				if err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (k *linux) flush(c *nftables.Conn) error {
	if err := c.Flush(); err != nil {
		return fmt.Errorf("writing nftables' table %s: %w", k.table().Name, withRights(err))
	}
	return nil
}

// maxSpareChains bounds the chains that changes add: the table may have twice as many chains as program made, and
// maxSpareChains more. A chain that is no longer used stays until program writes the table again.
const maxSpareChains = 1000

// change implements kernel.
func (k *linux) change(before, after rules) error {
	if len(k.chains) > 2*k.built+maxSpareChains {
		return errors.New("the table has too many chains that nothing leads to")
	}
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("opening nftables: %w", withRights(err))
	}
	return k.changeElements(c, before, after)
}

// changeElements changes the elements of the table from the rules before to the rules after. A small change is one
// transaction.
func (k *linux) changeElements(c *nftables.Conn, before, after rules) error {
	s := stepsOf(before, after)
	b := &writer{k: k, conn: c}
	for _, some := range [][]change{s.early, s.atOnce, s.late} {
		for i, one := range some {
			sameAddress := i > 0 && some[i-1].at == one.at
			if !sameAddress && b.count >= perChange || b.count >= 2*perChange {
				if err := b.flush(); err != nil {
					return err
				}
			}
			if err := b.write(one); err != nil {
				return err
			}
		}
		if err := b.messages(); err != nil { // the messages of the next step come after these
			return err
		}
	}
	return b.flush()
}

// listens reports whether the relay listens at its address of a family.
func (k *linux) listens(f family) bool {
	return slices.ContainsFunc(k.listeners, func(l netip.AddrPort) bool { return l.Addr() == f.own })
}

// writer puts changes of elements into transactions.
type writer struct {
	k     *linux
	conn  *nftables.Conn
	gone  []pending
	add   []pending
	count int // elements since the last transaction
}

// pending is an element for which writer has made no message yet.
type pending struct {
	*element
	family family
}

// write adds a change to the next transaction. It skips families without a listener.
func (b *writer) write(one change) error {
	f := familyOf(one.at.Addr())
	if !b.k.listens(f) {
		return nil
	}
	if one.gone != nil {
		b.gone = append(b.gone, pending{one.gone, f})
		b.count++
	}
	if one.add != nil {
		b.add = append(b.add, pending{one.add, f})
		b.count++
		if _, has := b.k.chains[one.add.to]; !has && one.add.to.kind != noChain {
			b.count += 20 // its rules are messages of their own
		}
	}
	return nil
}

// perMessage is how many elements one message has at most: the length of an attribute has 16 bits.
const perMessage = 400

// messages makes the messages for the changes so far. An element goes before another one comes in its place.
func (b *writer) messages() error {
	for _, step := range []struct {
		all   []pending
		write func(*nftables.Set, []nftables.SetElement) error
	}{{b.gone, b.conn.SetDeleteElements}, {b.add, b.conn.SetAddElements}} {
		type setKey struct {
			kind setKind
			v6   bool
		}
		bySet := make(map[setKey][]nftables.SetElement)
		for _, one := range step.all {
			e := nftables.SetElement{Key: []byte(one.key), Val: []byte(one.val), IntervalEnd: one.end}
			if one.to.kind != noChain {
				b.k.addChain(b.conn, one.to)
				e.VerdictData = &expr.Verdict{Kind: expr.VerdictGoto, Chain: b.k.nameOf(one.to)}
			}
			in := setKey{one.set, one.family.size != 4}
			bySet[in] = append(bySet[in], e)
		}
		for in, elements := range bySet {
			own := addr4
			if in.v6 {
				own = addr6
			}
			for some := range slices.Chunk(elements, perMessage) {
				if err := step.write(b.k.set(in.kind, familyOf(own)), some); err != nil {
					return err
				}
			}
		}
	}
	b.gone, b.add = nil, nil
	return nil
}

func (b *writer) flush() error {
	if err := b.messages(); err != nil {
		return err
	}
	b.count = 0
	return b.k.flush(b.conn)
}

// clear implements kernel. It clears each set in a transaction of its own, so that a missing set does not stop the
// others.
func (k *linux) clear() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("opening nftables: %w", withRights(err))
	}
	var errs []error
	flush := func() {
		// The set or chain is missing if the next process has made the table anew.
		if err := k.flush(c); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, err)
		}
	}
	for _, listener := range k.listeners {
		for _, kind := range []setKind{setServices, setRelayPorts} {
			if slices.Contains(k.sets(), kind) {
				c.FlushSet(k.set(kind, familyOf(listener.Addr())))
				flush()
			}
		}
	}
	for one := range k.chains {
		if one.kind == chainRelay {
			c.FlushChain(&nftables.Chain{Name: k.nameOf(one), Table: k.table()})
			flush()
		}
	}
	return errors.Join(errs...)
}

// intact implements kernel.
func (k *linux) intact() bool {
	c, err := nftables.New()
	if err != nil || k.listeners == nil {
		return false
	}
	for _, h := range k.hooks() {
		rules, err := c.GetRules(k.table(), h.Chain)
		if err != nil || len(rules) != len(h.rules) {
			return false // there is no table
		}
		for i, rule := range rules {
			if text, _ := userdata.GetString(rule.UserData, userdata.TypeComment); text != h.rules[i].comment {
				return false
			}
		}
	}
	return k.routes.intact()
}

// remove implements kernel. If the next process of the edge uses the table already, or is about to, the table stays,
// and remove removes only the chains and sets of this process.
func (k *linux) remove() error {
	if k.listeners == nil || k.full {
		return nil
	}
	c, err := nftables.New()
	if err != nil {
		return err
	}
	for _, h := range k.hooks() {
		c.DelChain(h.Chain)
	}
	if err = k.flush(c); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	}
	others, err := k.others(c)
	if err != nil || len(others.chains)+len(others.sets) == 0 {
		c.DelTable(k.table())
		return errors.Join(err, k.flush(c))
	}
	ours, err := k.having(c, k.hasID)
	if err != nil {
		return err
	}
	return k.discard(c, ours)
}
