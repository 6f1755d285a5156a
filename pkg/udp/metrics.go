package udp

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
)

// Reason is why a datagram was dropped. docs/udp.md says for each reason what an operator can do.
type Reason uint8

// The reasons, at the cloud and at the edge.
const (
	DropDenied      Reason = iota // the caller's address or the target is not permitted
	DropFlows                     // a limit on flows is reached
	DropFull                      // the queue to the other side is full, or the flow already has its share of the queue
	DropLate                      // the datagram has waited in the queue for too long
	DropUnreachable               // the node is not connected, or the edge may not or cannot reach the target
	DropLost                      // the conn ended while the datagram waited
	DropUnknown                   // the flow has ended at this side
	DropOpening                   // too many datagrams wait until the target's name is resolved
	DropDraining                  // this side is about to stop and opens no flow
	DropRefused                   // the other machine has reported that nothing listens there
	DropSend                      // the kernel did not take the datagram, for another reason than the next three
	DropTooLong                   // the datagram is too long for the tunnel or for the network
	DropForbidden                 // a firewall of this machine forbids the datagram
	DropSendBuffer                // the kernel had no room in a socket's send buffer
	DropReceive                   // the kernel had no room in a socket's receive buffer
	numReasons                    // the number of reasons
)

//nolint:gochecknoglobals // a constant table
var reasonNames = [numReasons]string{
	DropDenied:      "denied",
	DropFlows:       "flows",
	DropFull:        "full",
	DropLate:        "late",
	DropUnreachable: "unreachable",
	DropLost:        "lost",
	DropUnknown:     "unknown",
	DropOpening:     "opening",
	DropDraining:    "draining",
	DropRefused:     "refused",
	DropSend:        "send",
	DropTooLong:     "too-long",
	DropForbidden:   "forbidden",
	DropSendBuffer:  "send-buffer",
	DropReceive:     "receive",
}

// String returns the name of the reason: the value of a metric's label.
func (r Reason) String() string {
	if r < numReasons {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason-%d", uint8(r))
}

// notSent returns why the kernel did not take a datagram, by the error of the system call.
func notSent(err error) Reason {
	switch {
	case errors.Is(err, net.ErrClosed): // the flow ended after its datagram was put into the train
		return DropUnknown
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOBUFS), errors.Is(err, syscall.ENOMEM):
		return DropSendBuffer
	case errors.Is(err, syscall.EMSGSIZE):
		return DropTooLong
	case errors.Is(err, syscall.EPERM): // what netfilter(8) returns for a rule that drops or rejects
		return DropForbidden
	}
	return DropSend
}

// Reasons returns all reasons.
func Reasons() []Reason {
	all := make([]Reason, numReasons)
	for i := range all {
		all[i] = Reason(i) //nolint:gosec // a dozen
	}
	return all
}

// Counters counts flows and datagrams of a process. The zero value is ready. Any goroutine may change
// any field.
type Counters struct {
	Flows    atomic.Int64  // gauge: flows that are open now
	Opened   atomic.Uint64 // flows opened
	Evicted  atomic.Uint64 // flows that ended early to make room for another flow
	ToTarget traffic       // datagrams on their way from callers to targets
	ToCaller traffic       // datagrams on their way from targets to callers

	dropped [numReasons]atomic.Uint64 // by Reason

	mu      sync.Mutex                 // guards the following, and receiveDrops.seen of these sockets
	sockets map[*receiveDrops]struct{} // the sockets whose drops are asked for when the metrics are read
}

// traffic counts the datagrams that this process has passed on in one direction.
type traffic struct {
	Datagrams atomic.Uint64
	Bytes     atomic.Uint64 // of payload
}

// add counts n datagrams with bytes of payload in all.
func (t *traffic) add(n, bytes int) {
	t.Datagrams.Add(uint64(n)) //nolint:gosec // a count
	t.Bytes.Add(uint64(bytes)) //nolint:gosec // a length
}

// Drop counts n dropped datagrams.
func (c *Counters) Drop(why Reason, n uint64) {
	if n > 0 {
		c.dropped[why].Add(n)
	}
}

// Dropped returns how many datagrams were dropped for a reason.
func (c *Counters) Dropped(why Reason) uint64 {
	if why == DropReceive {
		c.askSockets()
	}
	return c.dropped[why].Load()
}

// watch makes the counters include a socket: how many datagrams the kernel dropped because the receive
// buffer of the socket was full. forget asks the kernel for the last time.
func (c *Counters) watch(s *receiveDrops) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sockets == nil {
		c.sockets = make(map[*receiveDrops]struct{})
	}
	c.sockets[s] = struct{}{}
}

func (c *Counters) forget(s *receiveDrops) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Drop(DropReceive, s.more())
	delete(c.sockets, s)
}

func (c *Counters) askSockets() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for s := range c.sockets {
		c.Drop(DropReceive, s.more())
	}
}

// Collector returns the counters as metrics.
func (c *Counters) Collector() prometheus.Collector {
	return &collector{
		c: c, flows: "tunnel_udp_flows", opened: "tunnel_udp_flows_opened_total", evicted: "tunnel_udp_flows_evicted_total",
		datagrams: "tunnel_udp_datagrams_total", bytes: "tunnel_udp_datagrams_bytes_total",
		dropped: "tunnel_udp_dropped_total", which: "Flows of UDP", doc: "docs/udp.md",
	}
}

// ServicesCollector returns the counters as metrics of the relay of Services.
func (c *Counters) ServicesCollector() prometheus.Collector {
	return &collector{
		c: c, flows: "tunnel_services_udp_flows", opened: "tunnel_services_udp_flows_opened_total",
		evicted: "tunnel_services_udp_flows_evicted_total", datagrams: "tunnel_services_udp_datagrams_total",
		bytes: "tunnel_services_udp_datagrams_bytes_total", dropped: "tunnel_services_udp_dropped_total",
		which: "Relayed flows of UDP to Services", doc: "docs/services.md",
	}
}

// collector has the names of the metrics, and parts of their help.
type collector struct {
	c                                                 *Counters
	flows, opened, evicted, datagrams, bytes, dropped string
	which, doc                                        string
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	show := func(name, help string, kind prometheus.ValueType, value float64) {
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, nil, nil), kind, value)
	}
	n := c.c
	show(c.flows, c.which+" that are open.", prometheus.GaugeValue, float64(n.Flows.Load()))
	show(c.opened, c.which+" opened.", prometheus.CounterValue, float64(n.Opened.Load()))
	show(c.evicted, c.which+" that ended early to make room for another flow.",
		prometheus.CounterValue, float64(n.Evicted.Load()))
	datagrams := prometheus.NewDesc(c.datagrams,
		"Datagrams passed on, by their direction.", []string{"to"}, nil)
	size := prometheus.NewDesc(c.bytes,
		"Payload bytes of the datagrams passed on, by their direction.", []string{"to"}, nil)
	for to, t := range map[string]*traffic{"target": &n.ToTarget, "caller": &n.ToCaller} {
		ch <- prometheus.MustNewConstMetric(datagrams, prometheus.CounterValue, float64(t.Datagrams.Load()), to)
		ch <- prometheus.MustNewConstMetric(size, prometheus.CounterValue, float64(t.Bytes.Load()), to)
	}
	dropped := prometheus.NewDesc(c.dropped,
		"Datagrams dropped, by the reason; "+c.doc+" says what to do.", []string{"reason"}, nil)
	for _, why := range Reasons() {
		ch <- prometheus.MustNewConstMetric(dropped, prometheus.CounterValue, float64(n.Dropped(why)), why.String())
	}
}
