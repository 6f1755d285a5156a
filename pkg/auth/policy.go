package auth

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"tunnel/pkg/tunnel"
)

const (
	// dialTimeout bounds resolving a target and connecting to it, all its addresses
	// together. It is shorter than kube-apiserver's patience with a kubelet (30 s).
	dialTimeout = 10 * time.Second
	// attemptLeast is how long one address may at least take while others are left,
	// as in net.Dialer.
	attemptLeast = 2 * time.Second

	// selfWord stands in an entry for all addresses of the machine itself.
	selfWord = "self"
)

// Policy is what an edge may dial. It never changes.
//
// Without entries an edge may dial itself: loopback and the addresses of its own
// interfaces, any port. Entries change that in one of two ways:
//
//   - entries about others ("10.0.0.0/8:443") are added: the edge may still dial
//     itself;
//   - an entry about the machine itself, that is one inside 127.0.0.0/8, ::1, or
//     "self:PORT", which stands for loopback and all interface addresses, takes the
//     place of the default: what is listed is then all that may be dialled.
//
// So ["127.0.0.1:10250"] permits the kubelet and nothing else, ["10.0.0.0/8:443"]
// permits the machine and those, and ["self:10250", "10.0.0.0/8:443"] the machine's
// kubelet by any of its addresses and those.
//
// What is checked is the address that will be connected to, after the name has been
// resolved. A name in an entry would be no check and is an error.
//
// The metadata services of clouds, such as 169.254.169.254, hand out credentials of the
// machine. A wide entry such as "0.0.0.0/0:*" does not permit them: see guarded.
type Policy struct {
	rules []rule
	also  func(netip.Addr) bool // permits addresses beside rules, any port; nil: none

	// Seams for tests; set once.
	lookup   func(ctx context.Context, host string) ([]netip.Addr, error)
	dial     func(ctx context.Context, to netip.AddrPort) (net.Conn, error)
	ownAddrs func() ([]net.Addr, error)
}

// guarded are networks where clouds have their metadata services, and nothing else that an
// edge is for. An entry permits their addresses only if it lies within one of them, as
// "169.254.169.254:80" does.
//
//nolint:gochecknoglobals // a constant table
var guarded = []netip.Prefix{
	netip.MustParsePrefix("169.254.0.0/16"),      // link-local: AWS, Azure, Google, OpenStack and others
	netip.MustParsePrefix("fd00:ec2::/32"),       // AWS
	netip.MustParsePrefix("fd20:ce::254/128"),    // Google
	netip.MustParsePrefix("100.100.100.200/32"),  // Alibaba
	netip.MustParsePrefix("168.63.129.16/32"),    // Azure
	netip.MustParsePrefix("fe80::a9fe:a9fe/128"), // OpenStack
	netip.MustParsePrefix("fd00:c1::/32"),        // Oracle
}

// translated are networks of IPv6 whose addresses hold one of IPv4 behind the prefix: what is
// sent to such an address may arrive at that one.
//
//nolint:gochecknoglobals // a constant table
var translated = []netip.Prefix{
	netip.MustParsePrefix("64:ff9b::/96"), // NAT64, RFC 6052
	netip.MustParsePrefix("2002::/16"),    // 6to4, RFC 3056
}

// rule permits port at the addresses of prefix, or of the machine itself.
type rule struct {
	self   bool
	prefix netip.Prefix // when not self
	port   uint16       // 0: any
}

// ParsePolicy parses entries of the form ADDRESS:PORT, CIDR:PORT or self:PORT, where
// PORT may be * and IPv6 stands in brackets: "127.0.0.1:10250", "[fd00::/8]:*".
func ParsePolicy(entries []string) (*Policy, error) {
	p := &Policy{
		lookup: func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		},
		dial: func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
			return (&net.Dialer{Control: resetOnDeath}).DialContext(ctx, "tcp", to.String())
		},
		ownAddrs: net.InterfaceAddrs,
	}
	aboutSelf := false
	for _, e := range entries {
		r, err := parseRule(e)
		if err != nil {
			return nil, fmt.Errorf("allow entry %q: %w", e, err)
		}
		p.rules = append(p.rules, r)
		aboutSelf = aboutSelf || r.self || loopbackOnly(r.prefix)
	}
	if !aboutSelf {
		p.rules = append([]rule{{self: true}}, p.rules...)
	}
	return p, nil
}

// Also returns a policy that permits what p does, and every port of the addresses for which
// f is true.
func (p *Policy) Also(f func(netip.Addr) bool) *Policy {
	more := *p
	more.also = f
	return &more
}

func parseRule(e string) (rule, error) {
	i := strings.LastIndexByte(e, ':')
	if i < 0 {
		return rule{}, fmt.Errorf("no port; write %s:PORT, or %s:* for any", e, e)
	}
	host, portText := e[:i], e[i+1:]
	var r rule
	if portText != "*" {
		port, err := parsePort(portText)
		if err != nil {
			return rule{}, fmt.Errorf("%w (or * for any)", err)
		}
		r.port = port
	}
	if host == selfWord {
		r.self = true
		return r, nil
	}
	if host == "*" {
		return rule{}, fmt.Errorf("* is no address; for anywhere write 0.0.0.0/0:%s and [::/0]:%s", portText, portText)
	}
	bracketed := strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]")
	if bracketed {
		host = host[1 : len(host)-1]
	} else if strings.Contains(host, ":") {
		return rule{}, errors.New("an IPv6 address or network stands in brackets: [fd00::/8]:443")
	}
	var err error
	if r.prefix, err = parsePrefix(host); err != nil {
		return rule{}, err
	}
	return r, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("port %q is not a number from 1 to 65535", s)
	}
	return uint16(n), nil
}

// loopbackOnly reports whether every address of p is a loopback address.
func loopbackOnly(p netip.Prefix) bool {
	return p.Addr().IsLoopback() && (p.Addr().Is6() || p.Bits() >= 8)
}

// String returns the entries in force, as a start-up line shows them.
func (p *Policy) String() string {
	words := make([]string, len(p.rules))
	for i, r := range p.rules {
		words[i] = r.String()
	}
	return strings.Join(words, ",")
}

// String returns the rule as its entry is written.
func (r rule) String() string {
	port := "*"
	if r.port != 0 {
		port = strconv.Itoa(int(r.port))
	}
	host := selfWord
	switch {
	case r.self:
	case r.prefix.IsSingleIP():
		host = r.prefix.Addr().String()
	default:
		host = r.prefix.String()
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return host + ":" + port
}

// Permits reports whether the edge may dial to.
func (p *Policy) Permits(to netip.AddrPort) bool {
	a := to.Addr().Unmap().WithZone("")
	if a.IsUnspecified() {
		return false // the kernel would connect to loopback instead, unseen by any rule
	}
	for _, r := range p.rules {
		if r.port != 0 && r.port != to.Port() {
			continue
		}
		if r.self && p.own(a) || !r.self && r.names(a) {
			return true
		}
	}
	return p.also != nil && p.also(a) && guard(a) == netip.Prefix{}
}

// names reports whether the rule's prefix has a, and is narrow enough if a is guarded.
func (r rule) names(a netip.Addr) bool {
	g := guard(a)
	return r.prefix.Contains(a) && (g == netip.Prefix{} || g.Bits() <= r.prefix.Bits())
}

// guard returns the guarded network that has a, or its counterpart in a translated network;
// none is the zero prefix.
func guard(a netip.Addr) netip.Prefix {
	for _, g := range guarded {
		if g.Contains(a) {
			return g
		}
	}
	for _, t := range translated {
		if !t.Contains(a) {
			continue
		}
		b := a.As16()
		v4 := netip.AddrFrom4([4]byte(b[t.Bits()/8:]))
		if g := guard(v4); g.IsValid() {
			return netip.PrefixFrom(a, t.Bits()+g.Bits()).Masked()
		}
	}
	return netip.Prefix{}
}

// own reports whether a is an address of this machine. Interfaces come and go, so
// they are looked up each time; loopback, the usual case, needs no look.
func (p *Policy) own(a netip.Addr) bool {
	if a.IsLoopback() {
		return true
	}
	addrs, err := p.ownAddrs()
	if err != nil {
		return false
	}
	for _, own := range addrs {
		if n, ok := own.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap() == a {
				return true
			}
		}
	}
	return false
}

// Dial connects to addr, a host:port, if the policy permits it. A name is resolved
// once; addresses that are not permitted are left out, and the others are tried in
// the resolver's order. An error is a *tunnel.Refusal. Only the network "tcp" is
// known. The conn has the keep-alive of net.Dialer.
func (p *Policy) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if network != "tcp" {
		return nil, tunnel.Refusef(tunnel.Denied, "network %q cannot be dialled; only tcp can", network)
	}
	host, portText, err := net.SplitHostPort(addr)
	if err != nil || host == "" {
		return nil, tunnel.Refusef(tunnel.Unreachable, "target %q is not host:port", addr)
	}
	port, err := parsePort(portText)
	if err != nil {
		return nil, tunnel.Refusef(tunnel.Unreachable, "target %q: %v", addr, err)
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()

	ips, err := p.resolve(ctx, host)
	if err != nil {
		return nil, refusalOf(ctx, addr, err)
	}
	permitted, denied := p.divide(ips, port)
	if len(permitted) == 0 {
		return nil, denial(addr, denied[0])
	}
	return p.dialAny(ctx, addr, permitted)
}

// DialRequest is Dial as a tunnel.DialFunc, for modules that dial plain TCP.
func (p *Policy) DialRequest(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	return p.Dial(ctx, r.Network, r.Addr)
}

// resolve returns at least one address, or an error.
func (p *Policy) resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	if ip, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{ip}, nil
	}
	ips, err := p.lookup(ctx, host)
	if err == nil && len(ips) == 0 {
		err = &net.DNSError{Err: "no address", Name: host, IsNotFound: true}
	}
	return ips, err
}

func (p *Policy) divide(ips []netip.Addr, port uint16) (permitted, denied []netip.AddrPort) {
	for _, ip := range ips {
		// Unmapped, so that the family that was checked is the family that is dialled.
		to := netip.AddrPortFrom(ip.Unmap(), port)
		if p.Permits(to) {
			permitted = append(permitted, to)
		} else {
			denied = append(denied, to)
		}
	}
	return permitted, denied
}

// denial says which line would permit what was asked for. What a name resolves to on the
// edge's network stays on the edge.
func denial(addr string, to netip.AddrPort) error {
	if to.Addr().IsUnspecified() {
		return tunnel.Refusef(tunnel.Denied, "%s is not an address of one machine; name 127.0.0.1 or ::1 to reach this one", addr)
	}
	permit := fmt.Sprintf("to permit it, add %q to allow under [mode.edge]", netip.AddrPortFrom(to.Addr().WithZone(""), to.Port()))
	if !literal(addr) {
		r := tunnel.Refusef(tunnel.Denied, "the edge may not dial %s; its log says what to add to allow under [mode.edge] to permit it", addr)
		r.Detail = fmt.Sprintf("%s is %s; %s", addr, to, permit)
		return r
	}
	what := addr
	if to.String() != addr {
		what = fmt.Sprintf("%s (%s)", addr, to)
	}
	return tunnel.Refusef(tunnel.Denied, "the edge may not dial %s; %s", what, permit)
}

// literal reports whether the host of addr is an IP address, not a name.
func literal(addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	_, err := netip.ParseAddr(host)
	return err == nil
}

// dialAny connects to the first of the addresses that answers. When none does, the
// error is the first that says more than "unreachable".
func (p *Policy) dialAny(ctx context.Context, addr string, to []netip.AddrPort) (net.Conn, error) {
	var worst *tunnel.Refusal
	for i, ap := range to {
		c, err := p.dialOne(ctx, ap, len(to)-i)
		if err == nil {
			return c, nil
		}
		r := refusalOf(ctx, addr, err)
		if worst == nil || worst.Code == tunnel.Unreachable {
			worst = r
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, worst
}

// dialOne gives an address its share of the time that ctx leaves.
func (p *Policy) dialOne(ctx context.Context, to netip.AddrPort, left int) (net.Conn, error) {
	deadline, _ := ctx.Deadline() // Dial has set one
	share := max(time.Until(deadline)/time.Duration(left), attemptLeast)
	ctx, cancel := context.WithTimeout(ctx, share)
	defer cancel()
	return p.dial(ctx, to)
}

// refusalOf turns an error of resolving or connecting into a code. ctx is that of
// the whole dial.
func refusalOf(ctx context.Context, addr string, err error) *tunnel.Refusal {
	code := tunnel.Internal
	timeout, isNet := errors.AsType[net.Error](err)
	dns, isDNS := errors.AsType[*net.DNSError](err)
	is := func(errnos ...syscall.Errno) bool {
		for _, e := range errnos {
			if errors.Is(err, e) {
				return true
			}
		}
		return false
	}
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return tunnel.Refusef(tunnel.Gone, "dialling %s: the caller has gone", addr)
	case is(syscall.ECONNREFUSED, syscall.ECONNRESET):
		code = tunnel.Refused
	case is(syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM):
		code = tunnel.Overloaded // the edge itself is short of descriptors or memory
	case isNet && timeout.Timeout(), errors.Is(err, context.DeadlineExceeded):
		code = tunnel.Timeout
	case isDNS,
		is(syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ENETDOWN, syscall.EHOSTDOWN, syscall.EINVAL),
		is(syscall.EAFNOSUPPORT, syscall.EADDRNOTAVAIL), // ::1 where IPv6 is off
		is(syscall.EACCES, syscall.EPERM):               // a firewall of the edge itself
		code = tunnel.Unreachable
	}
	if isDNS { // it names the edge's resolver
		why := "the edge cannot resolve the name now; its log says why"
		if dns.IsNotFound {
			why = "no such host"
		}
		r := tunnel.Refusef(code, "dialling %s: %s", addr, why)
		r.Detail = err.Error()
		return r
	}
	return tunnel.Refusef(code, "dialling %s: %v", addr, err)
}
