package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/net/ipv4"

	"tunnel.example/tunnel/test/rig"
)

const (
	// batch is how many datagrams one system call of the generator and of the target takes.
	batch = 64
	// buffer is the size of receive buffers that is asked for, in bytes.
	buffer = 8 << 20
	// settle is how long the generator waits for the last datagrams.
	settle = time.Second
	// pace is how often the generator sends what is due.
	pace = time.Millisecond
)

// load is what became of datagrams that were sent at a rate.
type load struct {
	Flows, Rate int
	Took        time.Duration // of sending
	Sent, Back  int
	Busy        map[string]float64 // processors that each process of the way kept busy
	Dropped     map[string]int     // by the counters of cloud and edge
}

// Lost returns how many datagrams did not come back.
func (l load) Lost() int { return l.Sent - l.Back }

// String returns the load as a line.
func (l load) String() string {
	s := fmt.Sprintf("%3d flows: %6.0f/s sent, %6.0f/s came back, %d lost (%.2f %%)", l.Flows,
		float64(l.Sent)/l.Took.Seconds(), float64(l.Back)/l.Took.Seconds(), l.Lost(), 100*float64(l.Lost())/float64(l.Sent))
	for _, name := range slices.Sorted(maps.Keys(l.Busy)) {
		s += fmt.Sprintf(", %s %.2f processors", name, l.Busy[name])
	}
	for _, name := range slices.Sorted(maps.Keys(l.Dropped)) {
		s += fmt.Sprintf(", %s %d", name, l.Dropped[name])
	}
	return s
}

func (w *way) dial() (*net.UDPConn, error) {
	c, err := net.Dial("udp", w.addr)
	if err != nil {
		return nil, err
	}
	u := c.(*net.UDPConn)
	return u, u.SetReadBuffer(buffer)
}

// works waits until a datagram comes back.
func (w *way) works() error {
	socket, err := w.dial()
	if err != nil {
		return err
	}
	c := net.Conn(socket)
	defer c.Close()
	for range 100 {
		c.Write([]byte("works")) //nolint:errcheck // it is tried again
		c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err = c.Read(make([]byte, 100)); err == nil {
			return nil
		}
		time.Sleep(10 * time.Millisecond) // a refusal comes at once
	}
	return err
}

// roundTrips sends single datagrams, one after the other.
func (w *way) roundTrips(n int) (p50, p99 time.Duration, err error) {
	socket, err := w.dial()
	if err != nil {
		return 0, 0, err
	}
	c := net.Conn(socket)
	defer c.Close()
	all := make([]time.Duration, 0, n)
	b := make([]byte, 100)
	for len(all) < n {
		start := time.Now()
		if _, err := c.Write(b[:64]); err != nil {
			return 0, 0, err
		}
		c.SetReadDeadline(start.Add(time.Second))
		if _, err := c.Read(b); err != nil {
			return 0, 0, err
		}
		all = append(all, time.Since(start))
	}
	slices.Sort(all)
	return all[n/2], all[n*99/100], nil
}

// load sends datagrams at a rate, over some flows in turn, and counts what comes back.
func (w *way) load(flows, rate, size int, lasts time.Duration) (load, error) {
	l := load{Flows: flows, Rate: rate}
	conns := make([]*net.UDPConn, flows)
	var back atomic.Int64
	ended := make(chan error, flows) // each receiver sends one
	for i := range conns {
		c, err := w.dial()
		if err != nil {
			return l, err
		}
		defer c.Close()
		conns[i] = c
		go func() { ended <- count(c, &back) }()
	}
	busy, drops := w.busy(), w.dropped()
	start := time.Now()
	if err := send(conns, rate, size, lasts, &l.Sent); err != nil {
		return l, err
	}
	l.Took = time.Since(start)
	l.Busy = less(w.busy(), busy, l.Took.Seconds())
	for last, since := back.Load(), time.Now(); time.Since(since) < settle && int(last) < l.Sent; {
		time.Sleep(10 * time.Millisecond)
		if now := back.Load(); now != last {
			last, since = now, time.Now()
		}
	}
	for _, c := range conns {
		c.Close()
	}
	for range conns {
		if err := <-ended; err != nil && !errors.Is(err, net.ErrClosed) {
			return l, err
		}
	}
	l.Back = int(back.Load())
	l.Dropped = make(map[string]int)
	for name, n := range w.dropped() {
		if n -= drops[name]; n > 0 {
			l.Dropped[name] = int(n)
		}
	}
	return l, nil
}

// send sends what is due each millisecond.
func send(conns []*net.UDPConn, rate, size int, lasts time.Duration, sent *int) error {
	messages := make([]ipv4.Message, batch)
	for i := range messages {
		messages[i].Buffers = [][]byte{make([]byte, size)}
	}
	writers := make([]*ipv4.PacketConn, len(conns))
	for i, c := range conns {
		writers[i] = ipv4.NewPacketConn(c)
	}
	// Each flow sends a few in a row, as real callers do.
	row := min(batch, max(1, rate/1000/len(conns)))
	start, next := time.Now(), 0
	for {
		elapsed := time.Since(start)
		if elapsed >= lasts {
			return nil
		}
		for due := int(elapsed.Seconds() * float64(rate)); *sent < due; next++ {
			some := messages[:min(row, due-*sent)]
			binary.BigEndian.PutUint64(some[0].Buffers[0], uint64(*sent)) //nolint:gosec // a count
			n, err := writers[next%len(conns)].WriteBatch(some, 0)
			if err != nil {
				return err
			}
			*sent += n
		}
		time.Sleep(pace)
	}
}

// count counts the datagrams that come back.
func count(c *net.UDPConn, back *atomic.Int64) error {
	p := ipv4.NewPacketConn(c)
	messages := receivers()
	for {
		n, err := p.ReadBatch(messages, 0)
		if err != nil {
			return err
		}
		back.Add(int64(n))
	}
}

func receivers() []ipv4.Message {
	messages := make([]ipv4.Message, batch)
	for i := range messages {
		messages[i].Buffers = [][]byte{make([]byte, 4<<10)}
	}
	return messages
}

// busy returns the processor time of each process of the way so far, in seconds.
func (w *way) busy() map[string]float64 {
	all := make(map[string]float64)
	for name, p := range w.processes {
		all[name] = processorTime(p)
	}
	return all
}

// processorTime reads user and system time (proc(5), fields 14 and 15) in ticks of 10 ms.
func processorTime(p *rig.Process) (seconds float64) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	for _, f := range fields[11:13] {
		ticks, _ := strconv.ParseFloat(f, 64)
		seconds += ticks / 100
	}
	return seconds
}

func less(now, before map[string]float64, divisor float64) map[string]float64 {
	for name := range now {
		now[name] = (now[name] - before[name]) / divisor
	}
	return now
}

var droppedLine = regexp.MustCompile(`(?m)^tunnel_udp_dropped_total\{reason="(\w+)"\} (\S+)$`)

// dropped returns what the counters of cloud and edge say.
func (w *way) dropped() map[string]float64 {
	all := make(map[string]float64)
	if w.pair == nil {
		return all
	}
	for name, addr := range map[string]string{"cloud": w.pair.CloudHealth(), "edge": w.pair.EdgeHealth()} {
		answer, err := http.Get("http://" + addr + "/metrics")
		if err != nil {
			continue
		}
		text, _ := io.ReadAll(answer.Body) // a part is as good as nothing
		answer.Body.Close()
		for _, m := range droppedLine.FindAllStringSubmatch(string(text), -1) {
			all[name+" "+m[1]], _ = strconv.ParseFloat(m[2], 64)
		}
	}
	return all
}
