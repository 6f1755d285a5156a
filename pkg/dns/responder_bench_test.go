package dns

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	benchNodes = 10_000
	// loadEnv makes a process the client of the benchmark. It holds the responder's address and the
	// number of queries.
	loadEnv = "TUNNEL_DNS_LOAD"
	// window is how many queries are in flight at a time. They fit into the socket's receive buffer,
	// so none is lost.
	window = 64
)

// tenThousand returns a Truth with 10,000 nodes, made of a Directory and Local.
func tenThousand() Truth {
	d := new(tunnel.Directory)
	for i := range benchNodes {
		d.Attach(&tunnel.Session{Node: benchNode(i)})
	}
	return Local{Nodes: d, Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5")}}
}

func benchNode(i int) tunnel.NodeName { return tunnel.NodeName(fmt.Sprintf("edge-%05d", i)) }

// allListed returns a Names that lets all these nodes be published.
func allListed() Names {
	l := listed{known: true, names: make(map[tunnel.NodeName]bool)}
	for i := range benchNodes {
		l.names[benchNode(i)] = true
	}
	return l
}

// BenchmarkResponder measures queries over real UDP. The responder has one core (GOMAXPROCS=1), and
// another process is the client. queries/s is the rate that the client gets. queries/cpu-s is the
// number of queries per second of the responder's processor time, in user space and kernel
// (getrusage), including the work for the socket.
//
//	go test -run '^$' -bench 'BenchmarkResponder$' -benchtime 200000x ./pkg/dns
func BenchmarkResponder(b *testing.B) {
	if load := os.Getenv(loadEnv); load != "" {
		generate(b, load)
		return
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	r := respond(b, ResponderConfig{Truth: tenThousand(), Names: allListed()})
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	client := exec.CommandContext(b.Context(), self,
		"-test.run=^$", "-test.bench=^BenchmarkResponder$", "-test.benchtime=1x")
	client.Env = append(os.Environ(), loadEnv+"="+r.Addr().String()+" "+strconv.Itoa(b.N), "GOMAXPROCS=1")
	before := cpu(b)
	out, err := client.CombinedOutput()
	used := cpu(b) - before
	if err != nil {
		b.Fatalf("the client: %v\n%s", err, out)
	}
	var took time.Duration
	for line := range strings.Lines(string(out)) {
		if s, ok := strings.CutPrefix(strings.TrimSpace(line), "took "); ok {
			took, err = time.ParseDuration(s)
		}
	}
	if err != nil || took == 0 {
		b.Fatalf("the client prints %s, %v", out, err)
	}
	if n := r.stats.answers[outcomeNode].Load(); n < uint64(b.N) {
		b.Fatalf("%d of %d queries were answered", n, b.N)
	}
	b.ReportMetric(float64(b.N)/took.Seconds(), "queries/s")
	b.ReportMetric(float64(b.N)/used.Seconds(), "queries/cpu-s")
}

// cpu returns the processor time that this process has used.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// generate queries all nodes in turn, window queries at a time, and prints how long it took. Each
// answer must have the node's address.
func generate(b *testing.B, load string) {
	addr, number, _ := strings.Cut(load, " ")
	n, err := strconv.Atoi(number)
	if err != nil {
		b.Fatal(err)
	}
	c, err := net.Dial("udp", addr)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	packets := make([][]byte, benchNodes)
	for i := range packets {
		packets[i] = pack(b, question(string(benchNode(i))+".", dns.TypeA).SetEdns0(1232, false))
	}
	reply := make([]byte, 1232)
	start := time.Now()
	c.SetDeadline(start.Add(5 * time.Minute))
	for sent, got := 0, 0; got < n; got++ {
		for ; sent < n && sent-got < window; sent++ {
			p := packets[sent%len(packets)]
			binary.BigEndian.PutUint16(p, uint16(sent))
			if _, err := c.Write(p); err != nil {
				b.Fatal(err)
			}
		}
		size, err := c.Read(reply)
		if err != nil {
			b.Fatalf("after %d answers: %v", got, err)
		}
		// A response, authoritative, NOERROR, one answer.
		if size < headerSize || reply[2]&0x84 != 0x84 || reply[3]&0xf != 0 || binary.BigEndian.Uint16(reply[6:]) != 1 {
			b.Fatalf("answer %d is %x", got, reply[:size])
		}
	}
	fmt.Printf("\ntook %v\n", time.Since(start))
}

// BenchmarkAnswer measures the cost of an answer without the socket.
func BenchmarkAnswer(b *testing.B) {
	r := NewResponder(ResponderConfig{Truth: tenThousand(), Names: allListed(), Log: quiet})
	for _, tc := range []struct {
		what, name string
		qtype      uint16
	}{
		{"A", "edge-00042.", dns.TypeA}, {"AAAA", "edge-00042.", dns.TypeAAAA},
		{"nodata", "edge-00042.", dns.TypeTXT}, {"nxdomain", "x.example.com.", dns.TypeA},
	} {
		packet := pack(b, question(tc.name, tc.qtype).SetEdns0(1232, false))
		b.Run(tc.what, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r.answer(packet, overUDP)
			}
		})
	}
}
