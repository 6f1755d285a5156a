package dns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"tunnel.example/tunnel/pkg/auth"
)

const (
	// upstreamTimeout is how long one exchange with one upstream may take. Then the forwarder tries the
	// next upstream.
	upstreamTimeout = 2 * time.Second
	// forwardTimeout is how long all exchanges of one query may take together. It is the default
	// timeout of a stub resolver (resolv.conf(5), timeout).
	forwardTimeout = 5 * time.Second
	// longAnswer is how many bytes make an answer long: more than a resolver sends over UDP.
	longAnswer = 4 << 10
)

// forwarder sends queries to upstream servers. It has no answers of its own and no cache.
//
// A query keeps its transport: a query over UDP goes upstream over UDP. A truncated answer is
// passed on truncated, and the client then repeats the query over TCP.
//
// If an upstream forwards queries to this responder, there is a loop. Each round of the loop
// occupies one of ResponderConfig.Lookups. When all are in use, the next query gets SERVFAIL
// at once. SERVFAIL is an answer, so the forwarder tries no further upstream, and the answer
// returns through the loop to the client. A loop that loses packets ends after forwardTimeout.
type forwarder struct {
	// Set once.
	upstream func() []netip.AddrPort // tried in order
	dial     func(ctx context.Context, network, addr string) (net.Conn, error)
	lookups  int // see ResponderConfig.Lookups

	perAddress bool // see ResponderConfig.PerAddress

	// expanding has a token for each long answer that is being read and written again, longAnswer. In memory such an
	// answer may take a hundred times its bytes: two bytes of it can stand for a name of 1,000 characters.
	expanding chan struct{}

	mu     sync.Mutex           // guards the following
	used   int                  // queries that wait for an upstream
	usedBy map[netip.Prefix]int // of each client, see clientOf
}

func newForwarder(cfg *ResponderConfig) *forwarder {
	return &forwarder{
		upstream: cfg.Upstreams,
		dial:     cfg.Dial,
		lookups:  cfg.Lookups,

		perAddress: cfg.PerAddress,
		usedBy:     make(map[netip.Prefix]int),

		expanding: make(chan struct{}, runtime.GOMAXPROCS(0)),
	}
}

// admit takes one of the lookups for a query of a client until release is called. ok is false if the client has seven
// times as many as are left: so one client has 7/8 of all at most, and another client finds room. Further calls of
// release have no effect.
func (f *forwarder) admit(addr netip.Addr) (release func(), ok bool) {
	client := f.clientOf(addr)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.used == f.lookups || f.usedBy[client] >= 7*(f.lookups-f.used) {
		return nil, false
	}
	f.used++
	f.usedBy[client]++
	return sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.used--
		if f.usedBy[client]--; f.usedBy[client] == 0 {
			delete(f.usedBy, client)
		}
	}), true
}

// clientOf returns the client to which an address belongs, see ResponderConfig.PerAddress.
func (f *forwarder) clientOf(a netip.Addr) netip.Prefix {
	if f.perAddress {
		return auth.Single(a)
	}
	return auth.Group(a)
}

// resolve returns the answer of the first upstream that answers, as a reply to q.
func (f *forwarder) resolve(ctx context.Context, q *query) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, forwardTimeout)
	defer cancel()
	var errs []error
	upstream := f.upstream()
	if len(upstream) == 0 {
		return nil, errors.New("no server is known that has other names")
	}
	for _, up := range upstream {
		m, err := f.exchange(ctx, up, q)
		if err == nil {
			return m, nil
		}
		errs = append(errs, fmt.Errorf("asking %s over %s: %w", up, q.via, err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// exchange sends q to one upstream and returns its answer.
func (f *forwarder) exchange(ctx context.Context, up netip.AddrPort, q *query) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, upstreamTimeout, fmt.Errorf("no answer within %v", upstreamTimeout))
	defer cancel()
	// Each exchange has its own connected socket. So its port is random, and the kernel drops
	// packets from any other address than up.
	c, err := f.dial(ctx, string(q.via), up.String())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()

	conn := &dns.Conn{Conn: c, UDPSize: maxQuery}
	sent := q.forUpstream()
	if err = conn.WriteMsg(sent); err != nil {
		return nil, ctxCause(ctx, err)
	}
	for {
		packet, err := conn.ReadMsgHeader(nil)
		if errors.Is(err, dns.ErrShortRead) && q.via == overUDP {
			continue
		}
		if err != nil {
			return nil, ctxCause(ctx, err)
		}
		if len(packet) > longAnswer {
			select {
			case f.expanding <- struct{}{}:
				q.expands = true
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
		if m := parseReply(packet, sent); m != nil {
			return q.asReply(m), nil
		}
		f.expanded(q)
		if q.via == overTCP {
			return nil, errors.New("the answer is not to what was asked")
		}
		// Over UDP the packet may be the answer to an older query, or forged. The right answer may
		// still come.
	}
}

// expanded gives back q's turn, if q has one. It is called when the answer is packed, or when the packet was no answer.
func (f *forwarder) expanded(q *query) {
	if q.expands {
		q.expands = false
		<-f.expanding
	}
}

// ctxCause returns the cause of ctx if ctx has ended, since err is then only its consequence.
// Otherwise it returns err.
func ctxCause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// forUpstream returns the query to send upstream for q: with a random id that a forger cannot
// guess, the client's spelling of the name, and EDNS if the client uses EDNS. It leaves out the
// client's EDNS options, such as a cookie: they apply only between the client and us (RFC 6891
// section 6.1.1).
func (q *query) forUpstream() *dns.Msg {
	m := &dns.Msg{
		MsgHdr: dns.MsgHdr{
			Id:                dns.Id(),
			RecursionDesired:  q.header.RecursionDesired,
			CheckingDisabled:  q.header.CheckingDisabled,
			AuthenticatedData: q.ad,
		},
		Question: []dns.Question{q.question},
	}
	if n := len(q.aliases); n > 0 {
		alias, _ := q.aliases[n-1].(*dns.CNAME)
		m.Question[0].Name = alias.Target
	}
	if q.opt != nil {
		m.SetEdns0(min(max(q.opt.UDPSize(), dns.MinMsgSize), maxUDP), q.opt.Do())
	}
	return m
}

// parseReply returns the message in packet if it is an answer to sent, else nil.
func parseReply(packet []byte, sent *dns.Msg) *dns.Msg {
	m := new(dns.Msg)
	err := m.Unpack(packet)
	if !m.Response || m.Id != sent.Id || m.Opcode != dns.OpcodeQuery || len(m.Question) != 1 {
		return nil
	}
	got, want := m.Question[0], sent.Question[0]
	if got.Qtype != want.Qtype || got.Qclass != want.Qclass || !strings.EqualFold(got.Name, want.Name) {
		return nil
	}
	switch {
	case err == nil:
		return m
	case m.Truncated: // some servers cut within a record; the client repeats the query over TCP
		m.Answer, m.Ns, m.Extra = nil, nil, nil
		m.Rcode &= 0xf // its upper bits belong to the OPT record, which is removed
		return m
	}
	return nil
}

// asReply turns m, the answer to q.forUpstream(), into a reply to q.
func (q *query) asReply(m *dns.Msg) *dns.Msg {
	m.Id = q.header.Id
	m.Question[0] = q.question
	if len(q.aliases) > 0 {
		m.Answer = append(slices.Clone(q.aliases), m.Answer...)
		m.Authoritative = false
	}
	m.RecursionDesired = q.header.RecursionDesired
	if q.opt == nil {
		m.Rcode &= 0xf // without EDNS a client cannot read the upper bits
	}
	return m
}
