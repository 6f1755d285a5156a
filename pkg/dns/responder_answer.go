package dns

import (
	"context"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"tunnel/pkg/tunnel"
)

const (
	// ttl is for how many seconds an asker may remember an address. A node that goes is
	// noticed within 10 s and must be forgotten 15 s after; and a replica that is to stop
	// goes on for 3 s after its names lead elsewhere.
	ttl = 2
	// negativeTTL is for how many seconds it may remember that there is nothing (RFC
	// 2308 section 5). Who asks for a node just before it joins should not wait for it.
	negativeTTL = 1
	// maxUDP is the longest answer over UDP, in bytes: it fits into every path's packet,
	// so that none is fragmented (RFC 9715 section 3, DNS flag day 2020).
	maxUDP     = 1232
	maxTCP     = dns.MaxMsgSize - 1 // what the length of two bytes can say
	headerSize = 12                 // bytes (RFC 1035 section 4.1.1)
)

// transport is how a query has come, and how it is handed on.
type transport string

const (
	overUDP transport = "udp"
	overTCP transport = "tcp"
)

// query is a question and how to answer it.
type query struct {
	ask   dns.Question // in the asker's spelling, which the answer repeats
	head  dns.MsgHdr   // of an answer: the asker's id, opcode, RD and CD; whether we have RA
	ad    bool         // the asker wants to know what is authenticated (RFC 6840 section 5.7)
	opt   *dns.OPT     // the asker's; nil: it knows no EDNS, and must not see it
	limit int          // bytes that the asker takes
	via   transport
}

// answer returns the reply to a packet; nil when there is to be none. What is to be
// asked upstream, with resolve, it returns as open; then there is no reply yet.
func (r *Responder) answer(packet []byte, via transport) (reply []byte, open *query) {
	defer r.survive()
	// A reply is never replied to: two servers would never end.
	if len(packet) < headerSize || packet[2]&0x80 != 0 {
		return nil, nil
	}
	q, rcode := read(packet, via)
	q.head.RecursionAvailable = len(r.cfg.Upstream) > 0
	if rcode != dns.RcodeSuccess {
		r.stats.count(toldRefused)
		return q.pack(q.reply(rcode)), nil
	}
	m, as := r.decide(q)
	if m == nil {
		return nil, q
	}
	r.stats.count(as)
	return q.pack(m), nil
}

// read takes a query apart. Unless the code is success, it is the whole answer.
func read(packet []byte, via transport) (q *query, rcode int) {
	q = &query{limit: dns.MinMsgSize, via: via}
	if via == overTCP {
		q.limit = maxTCP
	}
	bits := binary.BigEndian.Uint16(packet[2:])
	q.head = dns.MsgHdr{
		Id:               binary.BigEndian.Uint16(packet),
		Response:         true,
		Opcode:           int(bits >> 11 & 0xf),
		RecursionDesired: bits>>8&1 == 1,
		CheckingDisabled: bits>>4&1 == 1,
	}
	if q.head.Opcode != dns.OpcodeQuery {
		return q, dns.RcodeNotImplemented
	}
	// One question (RFC 9619) and no answer. What else there may be is an SOA (IXFR),
	// an OPT and a signature; more would cost time to read.
	counts := packet[4:headerSize]
	if binary.BigEndian.Uint16(counts) != 1 || binary.BigEndian.Uint16(counts[2:]) != 0 ||
		binary.BigEndian.Uint16(counts[4:]) > 1 || binary.BigEndian.Uint16(counts[6:]) > 2 {
		return q, dns.RcodeFormatError
	}
	var m dns.Msg
	if m.Unpack(packet) != nil || len(m.Question) != 1 {
		return q, dns.RcodeFormatError
	}
	q.ask, q.ad = m.Question[0], m.AuthenticatedData
	for _, rr := range m.Extra {
		opt, ok := rr.(*dns.OPT)
		if !ok {
			continue
		}
		if q.opt != nil || opt.Hdr.Name != "." {
			return q, dns.RcodeFormatError // RFC 6891 section 6.1.1
		}
		q.opt = opt
	}
	if q.opt == nil {
		return q, dns.RcodeSuccess
	}
	if via == overUDP {
		q.limit = min(max(int(q.opt.UDPSize()), dns.MinMsgSize), maxUDP)
	}
	if q.opt.Version() != 0 {
		return q, dns.RcodeBadVers
	}
	return q, dns.RcodeSuccess
}

// decide returns the reply to q and what it counts as; nil when an upstream is to be
// asked.
func (r *Responder) decide(q *query) (*dns.Msg, outcome) {
	if q.ask.Qclass != dns.ClassINET || isMeta(q.ask.Qtype) {
		return q.reply(dns.RcodeRefused), toldRefused
	}
	// What is no letter, digit, '-' or '.' of a node's name is escaped here, and so
	// never part of one (RFC 1035 section 5.1).
	name := tunnel.NodeName(strings.ToLower(strings.TrimSuffix(q.ask.Name, ".")))
	if addrs := r.cfg.Truth.Lookup(name); len(addrs) > 0 {
		may, known := true, true
		if r.cfg.Names != nil {
			may, known = r.cfg.Names.May(name)
		}
		if !known {
			return q.reply(dns.RcodeServerFailure), toldUnknown
		}
		if may {
			return r.tell(q, addrs)
		}
	}
	switch {
	case len(r.cfg.Upstream) > 0:
		return nil, toldForwarded
	case dns.IsSubDomain("in-addr.arpa.", q.ask.Name), dns.IsSubDomain("ip6.arpa.", q.ask.Name):
		// We have no names of addresses, and do not say that there are none.
		return q.reply(dns.RcodeRefused), toldRefused
	case name == "":
		// The root is no name that is missing. CoreDNS asks for it to see that we live.
		return r.deny(q, dns.RcodeSuccess), toldNoData
	}
	return r.deny(q, dns.RcodeNameError), toldNXDomain
}

// isMeta reports whether a type asks for something else than records of a name: zone
// transfers above all (RFC 6895 section 3.1).
func isMeta(qtype uint16) bool {
	return qtype == dns.TypeOPT || 128 <= qtype && qtype < dns.TypeANY
}

// tell answers with the addresses of a node: those of the kind that is asked for.
func (r *Responder) tell(q *query, addrs []netip.Addr) (*dns.Msg, outcome) {
	m := r.own(q, dns.RcodeSuccess)
	for _, a := range addrs {
		a = a.Unmap()
		rr := dns.RR_Header{Name: q.ask.Name, Class: dns.ClassINET, Ttl: ttl}
		switch {
		case a.Is4() && (q.ask.Qtype == dns.TypeA || q.ask.Qtype == dns.TypeANY):
			rr.Rrtype = dns.TypeA
			m.Answer = append(m.Answer, &dns.A{Hdr: rr, A: a.AsSlice()})
		case a.Is6() && (q.ask.Qtype == dns.TypeAAAA || q.ask.Qtype == dns.TypeANY):
			rr.Rrtype = dns.TypeAAAA
			m.Answer = append(m.Answer, &dns.AAAA{Hdr: rr, AAAA: a.AsSlice()})
		}
	}
	if len(m.Answer) == 0 {
		return r.deny(q, dns.RcodeSuccess), toldNoData
	}
	return m, toldNode
}

// deny answers that there is nothing: no such name, or, with success, none of that type.
//
// The SOA says for how long. Its owner is the root: there is one zone, it holds the
// nodes, and so one SOA is above every name. That a name does not exist should mean that
// none below it does (RFC 8020), and "example.com" is denied even while edge1.example.com
// is held: to know better, every query would have to look at every node. An asker that
// draws that conclusion does so for negativeTTL.
func (r *Responder) deny(q *query, rcode int) *dns.Msg {
	m := r.own(q, rcode)
	m.Ns = []dns.RR{&dns.SOA{
		Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: negativeTTL},
		Ns:  ".", Mbox: ".", // no server to send an update to, nobody to write to
		Serial: 1, Refresh: 1, Retry: 1, Expire: 1, // nobody copies the zone
		Minttl: negativeTTL,
	}}
	return m
}

// own returns a reply that is ours to give.
func (r *Responder) own(q *query, rcode int) *dns.Msg {
	m := q.reply(rcode)
	m.Authoritative = true
	return m
}

// resolve returns what an upstream answers to q. The caller has been admitted.
func (r *Responder) resolve(ctx context.Context, q *query) (reply []byte) {
	defer r.survive()
	m, err := r.forward.resolve(ctx, q)
	if err != nil {
		if n, ok := r.unanswered.Allow(); ok && ctx.Err() == nil {
			r.cfg.Log.Warn("no DNS upstream answers", "err", err, "skipped", n)
		}
		return r.fail(q)
	}
	r.stats.count(toldForwarded)
	return q.pack(m)
}

// admit counts one more exchange with an upstream until release is called, unless that
// is one too many.
func (r *Responder) admit() (release func(), ok bool) {
	release, ok = r.forward.admit()
	if !ok {
		r.stats.overloaded.Add(1)
		r.cfg.Counters.Limited(tunnel.LimitLookups)
	}
	return release, ok
}

// fail answers that we cannot answer.
func (r *Responder) fail(q *query) []byte {
	r.stats.count(toldFailed)
	return q.pack(q.reply(dns.RcodeServerFailure))
}

// reply returns a reply to q without any record.
func (q *query) reply(rcode int) *dns.Msg {
	m := &dns.Msg{MsgHdr: q.head}
	m.Rcode = rcode
	if q.ask.Name != "" {
		m.Question = []dns.Question{q.ask}
	}
	return m
}

// pack returns m as it is sent: with EDNS if the asker has it, and cut to what the asker
// takes. It changes m.
func (q *query) pack(m *dns.Msg) []byte {
	q.setEDNS(m)
	m.Truncate(q.limit)
	b, err := m.Pack()
	if err == nil && len(b) <= q.limit {
		return b
	}
	// An upstream's answer that cannot be written again, or not within what Truncate
	// has reckoned. Without its records it can.
	bare := q.reply(dns.RcodeServerFailure)
	q.setEDNS(bare)
	b, err = bare.Pack()
	if err != nil {
		return nil
	}
	return b
}

// setEDNS makes the OPT of a reply ours: there is one when the asker has sent one. Of an
// upstream's, only why something failed is passed on (RFC 8914).
func (q *query) setEDNS(m *dns.Msg) {
	var why []dns.EDNS0
	m.Extra = slices.DeleteFunc(m.Extra, func(rr dns.RR) bool {
		opt, ok := rr.(*dns.OPT)
		if ok {
			why = slices.DeleteFunc(opt.Option, func(o dns.EDNS0) bool { return o.Option() != dns.EDNS0EDE })
		}
		return ok
	})
	if q.opt != nil {
		m.SetEdns0(maxUDP, q.opt.Do())
		m.IsEdns0().Option = why
	}
}
