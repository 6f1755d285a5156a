package dns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	perUpstream  = 2 * time.Second // then the next is asked
	allUpstreams = 5 * time.Second // a stub resolver's own patience (resolv.conf(5), timeout)
)

// forwarder asks other servers. It answers nothing itself and remembers nothing.
//
// A query keeps its transport: what is asked over UDP is asked upstream over UDP, a
// truncated answer is passed on as one, and the asker comes again over TCP.
//
// An upstream that asks us in turn makes a loop. Each turn of it holds an exchange, so
// that after ResponderConfig.Lookups the next is answered SERVFAIL at once; that is an answer, no
// reason to ask the next upstream, and so it goes all the way back to the asker. A loop
// that loses packets ends with allUpstreams.
type forwarder struct {
	// Set once.
	upstream []netip.AddrPort
	dial     func(ctx context.Context, network, addr string) (net.Conn, error)
	slots    chan struct{} // holds one for each exchange; whoever is admitted takes it out again
}

func newForwarder(upstream []netip.AddrPort, lookups int) forwarder {
	return forwarder{
		upstream: upstream,
		dial:     new(net.Dialer).DialContext,
		slots:    make(chan struct{}, lookups),
	}
}

// admit takes the place of one exchange until release is called; ok is false when all
// are taken.
func (f *forwarder) admit() (release func(), ok bool) {
	select {
	case f.slots <- struct{}{}:
		return sync.OnceFunc(func() { <-f.slots }), true
	default:
		return nil, false
	}
}

// resolve returns the first upstream's answer that can be had, as a reply to q.
func (f *forwarder) resolve(ctx context.Context, q *query) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, allUpstreams)
	defer cancel()
	var errs []error
	for _, up := range f.upstream {
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

// exchange asks one upstream.
func (f *forwarder) exchange(ctx context.Context, up netip.AddrPort, q *query) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, perUpstream, fmt.Errorf("no answer within %v", perUpstream))
	defer cancel()
	// A socket for each: its port is random, and the kernel lets nobody answer but whom
	// we ask.
	c, err := f.dial(ctx, string(q.via), up.String())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()

	conn := &dns.Conn{Conn: c, UDPSize: maxQuery}
	sent := q.upstream()
	if err = conn.WriteMsg(sent); err != nil {
		return nil, because(ctx, err)
	}
	for {
		packet, err := conn.ReadMsgHeader(nil)
		if errors.Is(err, dns.ErrShortRead) && q.via == overUDP {
			continue
		}
		if err != nil {
			return nil, because(ctx, err)
		}
		if m := accept(packet, sent); m != nil {
			return q.adopt(m), nil
		}
		if q.via == overTCP {
			return nil, errors.New("the answer is not to what was asked")
		}
		// Over UDP it may be an older one, or nobody's; ours may still come.
	}
}

// because returns why ctx has ended when it has, since then that is what failed.
func because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// upstream returns q as we ask it: under an id that nobody can guess, in the asker's
// spelling, with EDNS if the asker has it. Its options, such as a cookie, are between the
// asker and us (RFC 6891 section 6.1.1).
func (q *query) upstream() *dns.Msg {
	m := &dns.Msg{
		MsgHdr: dns.MsgHdr{
			Id:                dns.Id(),
			RecursionDesired:  q.head.RecursionDesired,
			CheckingDisabled:  q.head.CheckingDisabled,
			AuthenticatedData: q.ad,
		},
		Question: []dns.Question{q.ask},
	}
	if q.opt != nil {
		m.SetEdns0(min(max(q.opt.UDPSize(), dns.MinMsgSize), maxUDP), q.opt.Do())
	}
	return m
}

// accept returns the message in packet if it answers what was sent, else nil.
func accept(packet []byte, sent *dns.Msg) *dns.Msg {
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
	case m.Truncated: // some cut within a record; the rest is asked for over TCP
		m.Answer, m.Ns, m.Extra = nil, nil, nil
		m.Rcode &= 0xf // the rest of it was in the OPT
		return m
	}
	return nil
}

// adopt makes m, which answers q.upstream(), a reply to q.
func (q *query) adopt(m *dns.Msg) *dns.Msg {
	m.Id = q.head.Id
	m.Question[0] = q.ask
	m.RecursionDesired = q.head.RecursionDesired
	if q.opt == nil {
		m.Rcode &= 0xf // the asker cannot read more of it
	}
	return m
}
