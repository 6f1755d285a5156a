package dns

import (
	"context"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// ttl is how long a client may cache an address, in seconds. The loss of a node is noticed
	// within 15 s, and caches must have forgotten its address 15 s later. A replica that stops
	// serves for 5 s after its names lead to other replicas.
	ttl = 2
	// negativeTTL is how long a client may cache that a name or a record does not exist, in
	// seconds (RFC 2308 section 5). It is short, so that a client that queries a node just before
	// the node joins does not wait.
	negativeTTL = 1
	// maxUDP is the longest answer over UDP, in bytes. It fits into one packet on every path, so
	// no answer is fragmented (RFC 9715 section 3, DNS flag day 2020).
	maxUDP     = 1232
	maxTCP     = dns.MaxMsgSize - 1 // bytes: the largest value of the two-byte length
	headerSize = 12                 // bytes (RFC 1035 section 4.1.1)
)

// transport is the transport by which a query arrived, and by which it is forwarded.
type transport string

const (
	overUDP transport = "udp"
	overTCP transport = "tcp"
)

// query is a question, and what is needed to answer it.
type query struct {
	question dns.Question // in the client's spelling, which the answer must repeat
	header   dns.MsgHdr   // for the answer: the client's id, opcode, RD and CD; RA if there is an upstream
	ad       bool         // the client asks whether the answer is authenticated (RFC 6840 section 5.7)
	opt      *dns.OPT     // the client's OPT record; nil: the client does not use EDNS, so the answer must not
	limit    int          // bytes of the longest answer that the client accepts
	via      transport
	aliases  []dns.RR // the first records of the answer, from Zone; an upstream resolves the target of the last one
	expands  bool     // the query has a token of forwarder.expanding
}

// answer returns the reply to a packet; nil: the packet gets no reply. If an upstream must be
// asked, answer returns the query as pending and no reply; resolve then gets the answer.
func (r *Responder) answer(packet []byte, via transport) (reply []byte, pending *query) {
	defer r.recoverPanic()
	// Never reply to a reply: otherwise two servers would reply to each other for ever.
	if len(packet) < headerSize || packet[2]&0x80 != 0 {
		return nil, nil
	}
	q, rcode := parseQuery(packet, via)
	q.header.RecursionAvailable = r.forwards
	if rcode != dns.RcodeSuccess {
		r.stats.count(outcomeRefused)
		return q.pack(q.reply(rcode)), nil
	}
	m, as := r.decide(q)
	if m == nil {
		return nil, q
	}
	r.stats.count(as)
	return q.pack(m), nil
}

// parseQuery parses a query. If rcode is not success, the answer to the query is rcode alone.
func parseQuery(packet []byte, via transport) (q *query, rcode int) {
	q = &query{limit: dns.MinMsgSize, via: via}
	if via == overTCP {
		q.limit = maxTCP
	}
	bits := binary.BigEndian.Uint16(packet[2:])
	q.header = dns.MsgHdr{
		Id:               binary.BigEndian.Uint16(packet),
		Response:         true,
		Opcode:           int(bits >> 11 & 0xf),
		RecursionDesired: bits>>8&1 == 1,
		CheckingDisabled: bits>>4&1 == 1,
	}
	if q.header.Opcode != dns.OpcodeQuery {
		return q, dns.RcodeNotImplemented
	}
	// A query has one question (RFC 9619) and no answer. It may also have one authority record (the
	// SOA of IXFR) and two additional records (OPT and a signature). More records would only cost
	// time to parse.
	counts := packet[4:headerSize]
	if binary.BigEndian.Uint16(counts) != 1 || binary.BigEndian.Uint16(counts[2:]) != 0 ||
		binary.BigEndian.Uint16(counts[4:]) > 1 || binary.BigEndian.Uint16(counts[6:]) > 2 {
		return q, dns.RcodeFormatError
	}
	name, at, err := dns.UnpackDomainName(packet, headerSize)
	if err != nil || at+4 > len(packet) {
		return q, dns.RcodeFormatError
	}
	q.question = dns.Question{
		Name: name, Qtype: binary.BigEndian.Uint16(packet[at:]), Qclass: binary.BigEndian.Uint16(packet[at+2:]),
	}
	q.ad = bits>>5&1 == 1
	at += 4
	// Only OPT is parsed: in other records, two bytes can stand for a name of 1,000 characters.
	authority, additional := int(binary.BigEndian.Uint16(counts[4:])), int(binary.BigEndian.Uint16(counts[6:]))
	for i := range authority + additional {
		begin := at
		owner, body, err := dns.UnpackDomainName(packet, at)
		if err != nil || body+10 > len(packet) {
			return q, dns.RcodeFormatError
		}
		at = body + 10 + int(binary.BigEndian.Uint16(packet[body+8:]))
		switch {
		case at > len(packet):
			return q, dns.RcodeFormatError
		case i < authority || binary.BigEndian.Uint16(packet[body:]) != dns.TypeOPT:
			continue
		case q.opt != nil || owner != ".":
			return q, dns.RcodeFormatError // RFC 6891 section 6.1.1
		}
		rr, _, err := dns.UnpackRR(packet[:at], begin)
		opt, ok := rr.(*dns.OPT)
		if err != nil || !ok {
			return q, dns.RcodeFormatError
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

// decide returns the reply to q and its outcome for the metrics. The reply is nil if an upstream
// must be asked.
func (r *Responder) decide(q *query) (*dns.Msg, outcome) {
	if q.question.Qclass != dns.ClassINET || isMeta(q.question.Qtype) {
		return q.reply(dns.RcodeRefused), outcomeRefused
	}
	if r.cfg.Zone != nil {
		if m := r.cfg.Zone(q.question); m != nil {
			return r.zoneReply(q, m)
		}
	}
	// In q.question.Name, bytes other than letters, digits, '-' and '.' are escaped (RFC 1035
	// section 5.1). So a name with such bytes never equals a node's name.
	name := tunnel.NodeName(strings.ToLower(strings.TrimSuffix(q.question.Name, ".")))
	if addrs := r.lookup(name); len(addrs) > 0 {
		may, known := true, true
		if r.cfg.Names != nil {
			may, known = r.cfg.Names.May(name)
		}
		if !known {
			return q.reply(dns.RcodeServerFailure), outcomeUnknown
		}
		if may {
			return r.nodeReply(q, addrs)
		}
	}
	switch {
	case r.forwards:
		return nil, outcomeForwarded
	case dns.IsSubDomain("in-addr.arpa.", q.question.Name), dns.IsSubDomain("ip6.arpa.", q.question.Name):
		// The responder has no names of addresses, and must not say that there are none.
		return q.reply(dns.RcodeRefused), outcomeRefused
	case name == "":
		// The root always exists. CoreDNS queries it as a health check.
		return r.negativeReply(q, dns.RcodeSuccess), outcomeNoData
	}
	return r.negativeReply(q, dns.RcodeNameError), outcomeNXDomain
}

// lookup returns the addresses of a node.
func (r *Responder) lookup(name tunnel.NodeName) []netip.Addr {
	if r.cfg.Truth == nil {
		return nil
	}
	return r.cfg.Truth.Lookup(name)
}

// zoneReply answers as the zone says. The reply is nil if an upstream must be asked for the rest.
func (r *Responder) zoneReply(q *query, m *dns.Msg) (*dns.Msg, outcome) {
	if n := len(m.Answer); n > 0 && q.question.Qtype != dns.TypeCNAME && q.question.Qtype != dns.TypeANY && r.forwards &&
		m.Answer[n-1].Header().Rrtype == dns.TypeCNAME && len(m.Ns) == 0 { // with a SOA, the answer is complete
		q.aliases = m.Answer
		return nil, outcomeForwarded
	}
	reply := r.authoritativeReply(q, m.Rcode)
	reply.Answer, reply.Ns, reply.Extra = m.Answer, m.Ns, m.Extra
	switch {
	case m.Rcode == dns.RcodeNameError:
		return reply, outcomeNXDomain
	case m.Rcode != dns.RcodeSuccess:
		return reply, outcomeFailed
	case len(m.Answer) == 0:
		return reply, outcomeNoData
	}
	return reply, outcomeService
}

// isMeta reports whether a type asks for something other than records of a name, above all for a
// zone transfer (RFC 6895 section 3.1). ANY does not count.
func isMeta(qtype uint16) bool {
	return qtype == dns.TypeOPT || 128 <= qtype && qtype < dns.TypeANY
}

// nodeReply answers with the addresses of a node, of the family that the query asks for.
func (r *Responder) nodeReply(q *query, addrs []netip.Addr) (*dns.Msg, outcome) {
	m := r.authoritativeReply(q, dns.RcodeSuccess)
	for _, a := range addrs {
		a = a.Unmap()
		rr := dns.RR_Header{Name: q.question.Name, Class: dns.ClassINET, Ttl: ttl}
		switch {
		case a.Is4() && (q.question.Qtype == dns.TypeA || q.question.Qtype == dns.TypeANY):
			rr.Rrtype = dns.TypeA
			m.Answer = append(m.Answer, &dns.A{Hdr: rr, A: a.AsSlice()})
		case a.Is6() && (q.question.Qtype == dns.TypeAAAA || q.question.Qtype == dns.TypeANY):
			rr.Rrtype = dns.TypeAAAA
			m.Answer = append(m.Answer, &dns.AAAA{Hdr: rr, AAAA: a.AsSlice()})
		}
	}
	if len(m.Answer) == 0 {
		return r.negativeReply(q, dns.RcodeSuccess), outcomeNoData
	}
	return m, outcomeNode
}

// negativeReply answers that there is no such name, or, if rcode is success, that the name has no
// record of that type.
//
// The SOA record says how long a client may cache the answer. Its owner is the root: there is one
// zone with all nodes, so one SOA is above every name. If a name does not exist, no name below it
// should exist (RFC 8020). But the responder denies "example.com" even while edge1.example.com is
// connected: otherwise it would have to check all nodes for every query. A client that then denies
// edge1.example.com does so only for negativeTTL.
func (r *Responder) negativeReply(q *query, rcode int) *dns.Msg {
	m := r.authoritativeReply(q, rcode)
	m.Ns = []dns.RR{&dns.SOA{
		Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: negativeTTL},
		Ns:  ".", Mbox: ".", // no server takes updates, and no mailbox exists
		Serial: 1, Refresh: 1, Retry: 1, Expire: 1, // unused, since there are no zone transfers
		Minttl: negativeTTL,
	}}
	return m
}

// authoritativeReply returns a reply with the AA flag.
func (r *Responder) authoritativeReply(q *query, rcode int) *dns.Msg {
	m := q.reply(rcode)
	m.Authoritative = true
	return m
}

// resolve forwards q to an upstream and returns the answer. The caller must have called admit.
func (r *Responder) resolve(ctx context.Context, q *query) (reply []byte) {
	defer r.recoverPanic()
	defer r.forward.expanded(q)
	m, err := r.forward.resolve(ctx, q)
	if err != nil {
		if n, ok := r.upstreamErrors.Allow(); ok && ctx.Err() == nil {
			r.cfg.Log.Warn("no DNS upstream answers", "err", err, "skipped", n)
		}
		return r.servfail(q)
	}
	r.stats.count(outcomeForwarded)
	return q.pack(m)
}

// admit takes one of ResponderConfig.Lookups for a client until release is called. ok is false if the client has too
// many of them.
func (r *Responder) admit(client netip.Addr) (release func(), ok bool) {
	release, ok = r.forward.admit(client)
	if !ok {
		r.stats.overloaded.Add(1)
		r.cfg.Counters.Limited(tunnel.LimitLookups)
	}
	return release, ok
}

// servfail returns the answer SERVFAIL, and counts it.
func (r *Responder) servfail(q *query) []byte {
	r.stats.count(outcomeFailed)
	return q.pack(q.reply(dns.RcodeServerFailure))
}

// reply returns a reply to q without records.
func (q *query) reply(rcode int) *dns.Msg {
	m := &dns.Msg{MsgHdr: q.header}
	m.Rcode = rcode
	if q.question.Name != "" {
		m.Question = []dns.Question{q.question}
	}
	return m
}

// pack returns m as bytes to send: with EDNS if the client uses it, and truncated to the length
// that the client accepts. It changes m.
func (q *query) pack(m *dns.Msg) []byte {
	q.setEDNS(m)
	m.Truncate(q.limit)
	b, err := m.Pack()
	if err == nil && len(b) <= q.limit {
		return b
	}
	// The upstream's answer cannot be packed, or it is longer than Truncate has calculated. A reply
	// without its records can be packed.
	bare := q.reply(dns.RcodeServerFailure)
	q.setEDNS(bare)
	b, err = bare.Pack()
	if err != nil {
		return nil
	}
	return b
}

// setEDNS replaces the OPT record of a reply by our own, or removes it if the client has sent
// none. Of the upstream's options it keeps only extended errors (RFC 8914).
func (q *query) setEDNS(m *dns.Msg) {
	var extendedErrors []dns.EDNS0
	m.Extra = slices.DeleteFunc(m.Extra, func(rr dns.RR) bool {
		opt, ok := rr.(*dns.OPT)
		if ok {
			extendedErrors = slices.DeleteFunc(opt.Option, func(o dns.EDNS0) bool { return o.Option() != dns.EDNS0EDE })
		}
		return ok
	})
	if q.opt != nil {
		m.SetEdns0(maxUDP, q.opt.Do())
		m.IsEdns0().Option = extendedErrors
	}
}
