package auth

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// dialTimeout is how long one dial may take: resolving the target and connecting to any of its
	// addresses. It is shorter than the 30 s that kube-apiserver waits for a kubelet.
	dialTimeout = 10 * time.Second
	// minAttemptTimeout is the least time for one address while other addresses remain, as in
	// net.Dialer.
	minAttemptTimeout = 2 * time.Second

	// selfHost in place of an address stands for all addresses of the edge's own machine.
	selfHost = "self"
)

// Policy lists what an edge may dial. [Policy.Adopt] replaces the list.
//
// Without entries an edge may dial every port of its own machine: loopback and the addresses of
// its interfaces. Entries change that in one of two ways:
//
//   - An entry about other machines ("10.0.0.0/8:443") adds to the default: the edge may still
//     dial its own machine.
//   - An entry about the own machine replaces the default: the edge may dial only the listed
//     entries. Such an entry is inside 127.0.0.0/8, or is ::1 or "self:PORT". "self" stands for
//     loopback and all interface addresses.
//
// Examples:
//
//   - ["127.0.0.1:10250"] permits the kubelet and nothing else.
//   - ["10.0.0.0/8:443"] permits the own machine, and port 443 in 10.0.0.0/8.
//   - ["self:10250", "10.0.0.0/8:443"] permits the kubelet at any address of the own machine, and
//     port 443 in 10.0.0.0/8.
//
// The policy checks the address to which the edge connects, after the name has been resolved. A
// name in an entry could not be checked, so it is an error.
//
// Metadata services of clouds, such as 169.254.169.254, hand out credentials of the machine. A wide
// entry such as "0.0.0.0/0:*" does not permit them: see metadataNetworks.
type Policy struct {
	rules *atomic.Pointer[[]rule] // Adopt swaps the list; policies that Also returns share the pointer
	extra func(netip.Addr) bool   // permits addresses beside rules, at any port; nil: none

	// Replaced by tests; set once.
	lookup   func(ctx context.Context, host string) ([]netip.Addr, error)
	dial     func(ctx context.Context, to netip.AddrPort) (net.Conn, error)
	dialUDP  func(to netip.AddrPort) (*net.UDPConn, error)
	ownAddrs func() ([]net.Addr, error)
}

// metadataNetworks are networks of the clouds' metadata services. An edge has no other use for
// them. An entry permits an address in one of them only if the entry lies within that network, as
// "169.254.169.254:80" does.
//
//nolint:gochecknoglobals // a constant table
var metadataNetworks = []netip.Prefix{
	netip.MustParsePrefix("169.254.0.0/16"),      // link-local: AWS, Azure, Google, OpenStack and others
	netip.MustParsePrefix("fd00:ec2::/32"),       // AWS
	netip.MustParsePrefix("fd20:ce::254/128"),    // Google
	netip.MustParsePrefix("100.100.100.200/32"),  // Alibaba
	netip.MustParsePrefix("168.63.129.16/32"),    // Azure
	netip.MustParsePrefix("fe80::a9fe:a9fe/128"), // OpenStack
	netip.MustParsePrefix("fd00:c1::/32"),        // Oracle
	netip.MustParsePrefix("fd00:42::42/128"),     // Scaleway
}

// ipv4InIPv6 are IPv6 networks whose addresses hold an IPv4 address behind the prefix. A packet to
// such an address may be delivered to the IPv4 address.
//
//nolint:gochecknoglobals // a constant table
var ipv4InIPv6 = []netip.Prefix{
	netip.MustParsePrefix("64:ff9b::/96"), // NAT64, RFC 6052
	netip.MustParsePrefix("2002::/16"),    // 6to4, RFC 3056
}

// rule permits one port, or all ports, at the addresses of prefix or of the machine itself.
type rule struct {
	self   bool
	prefix netip.Prefix // set if self is false
	port   uint16       // 0: any
}

// ParsePolicy parses entries of the form ADDRESS:PORT, CIDR:PORT or self:PORT. PORT may be *, and
// IPv6 stands in brackets: "127.0.0.1:10250", "[fd00::/8]:*".
func ParsePolicy(entries []string) (*Policy, error) {
	p := &Policy{
		rules: new(atomic.Pointer[[]rule]),
		lookup: func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		},
		ownAddrs: net.InterfaceAddrs,
	}
	p.dialWith(func(string, string, syscall.RawConn) error { return nil })
	aboutSelf, rules := false, []rule(nil)
	for _, e := range entries {
		r, err := parseRule(e)
		if err != nil {
			return nil, fmt.Errorf("allow entry %q: %w", e, err)
		}
		rules = append(rules, r)
		aboutSelf = aboutSelf || r.self || loopbackOnly(r.prefix)
	}
	if !aboutSelf {
		rules = append([]rule{{self: true}}, rules...)
	}
	p.rules.Store(&rules)
	return p, nil
}

// Adopt replaces the entries of p, and of the policies that p.Also has returned, by the entries of next. Open conns
// continue.
func (p *Policy) Adopt(next *Policy) { p.rules.Store(next.rules.Load()) }

// Also returns a policy that permits what p permits, and also every port of the addresses for which
// f returns true. f cannot permit metadata services.
func (p *Policy) Also(f func(netip.Addr) bool) *Policy {
	more := *p
	more.extra = f
	return &more
}

// WithControl returns a policy that permits what p permits. It calls control for each socket before it connects the
// socket (net.Dialer.Control).
func (p *Policy) WithControl(control func(network, addr string, c syscall.RawConn) error) *Policy {
	more := *p
	more.dialWith(control)
	return &more
}

// dialWith sets dial and dialUDP.
func (p *Policy) dialWith(control func(network, addr string, c syscall.RawConn) error) {
	tcp := &net.Dialer{Control: func(network, addr string, c syscall.RawConn) error {
		return errors.Join(control(network, addr, c), tunnel.ResetOnDeathControl(network, addr, c))
	}}
	udp := &net.Dialer{Control: control}
	p.dial = func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
		return tcp.DialContext(ctx, "tcp", to.String())
	}
	p.dialUDP = func(to netip.AddrPort) (*net.UDPConn, error) {
		c, err := udp.Dial("udp", to.String())
		if err != nil {
			return nil, err
		}
		return c.(*net.UDPConn), nil //nolint:forcetypeassert // the type that net.Dialer documents
	}
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
	if host == selfHost {
		r.self = true
		return r, nil
	}
	if host == "*" {
		return rule{}, fmt.Errorf(
			"* is not an address; for every address write 0.0.0.0/0:%s and [::/0]:%s", portText, portText)
	}
	bracketed := strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]")
	if bracketed {
		host = host[1 : len(host)-1]
	} else if strings.Contains(host, ":") {
		return rule{}, errors.New("an IPv6 address or network needs brackets: [fd00::/8]:443")
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

// loopbackOnly reports whether p holds loopback addresses only.
func loopbackOnly(p netip.Prefix) bool {
	return p.Addr().IsLoopback() && (p.Addr().Is6() || p.Bits() >= 8)
}

// String returns the rules in force, for a start-up line in the log.
func (p *Policy) String() string {
	rules := *p.rules.Load()
	words := make([]string, len(rules))
	for i, r := range rules {
		words[i] = r.String()
	}
	return strings.Join(words, ",")
}

// String returns the rule in the form of an entry.
func (r rule) String() string {
	port := "*"
	if r.port != 0 {
		port = strconv.Itoa(int(r.port))
	}
	host := selfHost
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

// Permits reports whether the edge may dial to. A zone does not matter.
func (p *Policy) Permits(to netip.AddrPort) bool {
	a := to.Addr().Unmap().WithZone("")
	if a.IsUnspecified() {
		return false // the kernel would connect to loopback instead, and no rule would have permitted loopback
	}
	for _, r := range *p.rules.Load() {
		if r.port != 0 && r.port != to.Port() {
			continue
		}
		if r.self && p.IsOwn(a) || !r.self && r.covers(a) {
			return true
		}
	}
	return p.extra != nil && p.extra(a) && metadataNetwork(a) == netip.Prefix{}
}

// covers reports whether the rule's prefix holds a. If a is in a metadata network, the prefix must
// lie within that network.
func (r rule) covers(a netip.Addr) bool {
	g := metadataNetwork(a)
	return r.prefix.Contains(a) && (g == netip.Prefix{} || g.Bits() <= r.prefix.Bits())
}

// metadataNetwork returns the metadata network that holds a, or else the zero prefix. For an address
// that embeds an IPv4 address, it returns the same network in its embedded form.
func metadataNetwork(a netip.Addr) netip.Prefix {
	for _, g := range metadataNetworks {
		if g.Contains(a) {
			return g
		}
	}
	for _, t := range ipv4InIPv6 {
		if !t.Contains(a) {
			continue
		}
		b := a.As16()
		v4 := netip.AddrFrom4([4]byte(b[t.Bits()/8:]))
		if g := metadataNetwork(v4); g.IsValid() {
			return netip.PrefixFrom(a, t.Bits()+g.Bits()).Masked()
		}
	}
	return netip.Prefix{}
}

// IsOwn reports whether a is an address of this machine. Interfaces come and go, so they are listed
// at each call, except for loopback, the most frequent case.
func (p *Policy) IsOwn(a netip.Addr) bool {
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

// Dial connects to addr, a host:port, if the policy permits it. A name is resolved once. Addresses
// that are not permitted are skipped; the others are tried in the resolver's order. An error is a
// *tunnel.Refusal. The only network is "tcp"; DialUDP is for datagrams. The connection has the
// keep-alive settings of net.Dialer.
func (p *Policy) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if network != "tcp" {
		return nil, tunnel.Refusef(tunnel.Denied, "network %q cannot be dialled; only tcp can", network)
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	permitted, err := p.permitted(ctx, addr)
	if err != nil {
		return nil, err
	}
	return p.dialAny(ctx, addr, permitted)
}

// DialUDP returns a UDP socket that is connected to addr, a host:port, if the policy permits the
// address. It treats names and addresses as Dial does. It sends no packet, so it cannot find out
// whether the target answers. refusedAt returns when an address has last refused datagrams; zero:
// never. DialUDP chooses the address whose refusal is the longest ago, and of equal addresses the
// first. An error is a *tunnel.Refusal.
func (p *Policy) DialUDP(
	ctx context.Context, addr string, refusedAt func(netip.AddrPort) time.Time,
) (*net.UDPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	permitted, err := p.permitted(ctx, addr)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(permitted, func(a, b netip.AddrPort) int { return refusedAt(a).Compare(refusedAt(b)) })
	for _, to := range permitted {
		var c *net.UDPConn
		if c, err = p.dialUDP(to); err == nil {
			return c, nil
		}
	}
	return nil, refusalOf(ctx, addr, err)
}

// Tried says how far a dial has come, and how long each step took.
type Tried struct {
	Resolve   time.Duration // the time to find the addresses of the target
	Addresses int           // how many addresses the target has; 0: the edge found none
	Permitted int           // how many of the addresses the policy permits
	Connect   time.Duration // the time until a connection was open, or connecting failed
}

// Try dials addr as Dial does, and closes the connection at once. It returns the error that Dial would return.
func (p *Policy) Try(ctx context.Context, addr string) (tried Tried, err error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	began := time.Now()
	ips, port, err := p.addresses(ctx, addr)
	tried.Resolve, tried.Addresses = time.Since(began), len(ips)
	if err != nil {
		return tried, err
	}
	permitted, denied := p.partition(ips, port)
	if tried.Permitted = len(permitted); tried.Permitted == 0 {
		return tried, denialOf(addr, denied[0])
	}
	began = time.Now()
	c, err := p.dialAny(ctx, addr, permitted)
	tried.Connect = time.Since(began)
	if err != nil {
		return tried, err
	}
	c.Close() // nothing was sent
	return tried, nil
}

// addresses returns the addresses of addr, a host:port, and its port. If there is no address, it returns an error.
func (p *Policy) addresses(ctx context.Context, addr string) ([]netip.Addr, uint16, error) {
	host, portText, err := net.SplitHostPort(addr)
	if err != nil || host == "" {
		return nil, 0, tunnel.Refusef(tunnel.Unreachable, "target %q is not host:port", addr)
	}
	port, err := parsePort(portText)
	if err != nil {
		return nil, 0, tunnel.Refusef(tunnel.Unreachable, "target %q: %v", addr, err)
	}
	ips, err := p.resolve(ctx, host)
	if err != nil {
		return nil, 0, refusalOf(ctx, addr, err)
	}
	return ips, port, nil
}

// permitted returns the addresses of addr, a host:port, that the policy permits. If there is no such
// address, it returns an error.
func (p *Policy) permitted(ctx context.Context, addr string) ([]netip.AddrPort, error) {
	ips, port, err := p.addresses(ctx, addr)
	if err != nil {
		return nil, err
	}
	permitted, denied := p.partition(ips, port)
	if len(permitted) == 0 {
		return nil, denialOf(addr, denied[0])
	}
	return permitted, nil
}

// DialRequest is Dial in the form of a tunnel.DialFunc, for modules that dial plain TCP.
func (p *Policy) DialRequest(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	return p.Dial(ctx, r.Network, r.Addr)
}

// resolve returns at least one address, or an error. An IP address needs no lookup.
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

// partition splits the addresses into those that the policy permits at port, and the others.
func (p *Policy) partition(ips []netip.Addr, port uint16) (permitted, denied []netip.AddrPort) {
	for _, ip := range ips {
		// Unmap first, so that the dialled address has the same family as the checked one.
		to := netip.AddrPortFrom(ip.Unmap(), port)
		if p.Permits(to) {
			permitted = append(permitted, to)
		} else {
			denied = append(denied, to)
		}
	}
	return permitted, denied
}

// denialOf returns the refusal of addr, with the entry that would permit it. For a name, that entry
// goes to the edge's log only: the cloud must not learn what names resolve to on the edge's network.
func denialOf(addr string, to netip.AddrPort) error {
	if to.Addr().IsUnspecified() {
		return tunnel.Refusef(tunnel.Denied,
			"%s is not an address of one machine; dial 127.0.0.1 or ::1 to reach this machine", addr)
	}
	permit := fmt.Sprintf("to permit it, add %q to allow under [mode.edge]",
		netip.AddrPortFrom(to.Addr().WithZone(""), to.Port()))
	if !isIPLiteral(addr) {
		r := tunnel.Refusef(tunnel.Denied,
			"the edge may not dial %s; its log says what to add to allow under [mode.edge] to permit it", addr)
		r.Detail = fmt.Sprintf("%s is %s; %s", addr, to, permit)
		return r
	}
	what := addr
	if to.String() != addr {
		what = fmt.Sprintf("%s (%s)", addr, to)
	}
	return tunnel.Refusef(tunnel.Denied, "the edge may not dial %s; %s", what, permit)
}

// isIPLiteral reports whether the host of addr is an IP address, not a name.
func isIPLiteral(addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	_, err := netip.ParseAddr(host)
	return err == nil
}

// dialAny connects to the first of the addresses that answers. If none does, it returns the first
// error with a code other than Unreachable, or else the last one.
func (p *Policy) dialAny(ctx context.Context, addr string, to []netip.AddrPort) (net.Conn, error) {
	var failure *tunnel.Refusal
	for i, ap := range to {
		c, err := p.dialOne(ctx, ap, len(to)-i)
		if err == nil {
			return c, nil
		}
		r := refusalOf(ctx, addr, err)
		if failure == nil || failure.Code == tunnel.Unreachable {
			failure = r
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, failure
}

// dialOne dials one address. remaining addresses, this one included, share the time until the
// deadline of ctx.
func (p *Policy) dialOne(ctx context.Context, to netip.AddrPort, remaining int) (net.Conn, error) {
	deadline, _ := ctx.Deadline() // set by Dial
	share := max(time.Until(deadline)/time.Duration(remaining), minAttemptTimeout)
	ctx, cancel := context.WithTimeout(ctx, share)
	defer cancel()
	return p.dial(ctx, to)
}

// refusalOf turns an error of resolving or connecting into a refusal with a code. ctx is the context
// of the whole dial.
func refusalOf(ctx context.Context, addr string, err error) *tunnel.Refusal {
	code := tunnel.Internal
	timeout, isNet := errors.AsType[net.Error](err)
	dns, isDNS := errors.AsType[*net.DNSError](err)
	isErrno := func(errnos ...syscall.Errno) bool {
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
	case isErrno(syscall.ECONNREFUSED, syscall.ECONNRESET):
		code = tunnel.Refused
	case isErrno(syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM),
		isErrno(syscall.EAGAIN): // connect(2)
		code = tunnel.Overloaded // the edge has run out of descriptors, memory or local ports
	case isNet && timeout.Timeout(), errors.Is(err, context.DeadlineExceeded):
		code = tunnel.Timeout
	case isDNS,
		isErrno(syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ENETDOWN, syscall.EHOSTDOWN, syscall.EINVAL),
		isErrno(syscall.EAFNOSUPPORT, syscall.EADDRNOTAVAIL), // such as ::1 where IPv6 is off
		isErrno(syscall.EACCES, syscall.EPERM):               // the edge's own firewall
		code = tunnel.Unreachable
	}
	if isDNS { // the error names the edge's resolver, so its text goes to the edge's log only
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
