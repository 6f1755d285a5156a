package main

import (
	"fmt"
	"os"
	"text/tabwriter"
	"time"
)

// way is one of the ways to the target.
type way struct {
	name    string
	addr    string
	samples map[string][]float64 // by name of the measurement
}

// measurement is a column of the table.
type measurement struct {
	name string
	run  func(addr string) (float64, error)
	show func(v float64) string
}

func measurements() []measurement {
	const d = 1200 * time.Millisecond
	rate := func(v float64) string { return fmt.Sprintf("%.0f MiB/s", v/mib) }
	return []measurement{
		{"1 conn", func(addr string) (float64, error) { return throughput(addr, 1, d) }, rate},
		{"8 conns", func(addr string) (float64, error) { return throughput(addr, 8, d) }, rate},
		{"round trip p50", func(addr string) (float64, error) { return roundTrip(addr, d/2) }, func(v float64) string { return fmt.Sprintf("%.0f µs", v*1e6) }},
		{"new conns", func(addr string) (float64, error) { return newConns(addr, d) }, func(v float64) string { return fmt.Sprintf("%.0f/s", v) }},
	}
}

// speed compares the tunnel with the two relays.
func (b *bench) speed() error {
	const rounds = 5
	t, err := b.startTunnel()
	if err != nil {
		return err
	}
	defer t.stop()
	if err = b.weighIdle(t); err != nil {
		return err
	}
	plain, err := b.hops("none", "none")
	if err != nil {
		return err
	}
	encrypted, err := b.hops("out", "in")
	if err != nil {
		return err
	}
	ways := []*way{
		{name: "two TCP hops", addr: plain},
		{name: "two TLS hops", addr: encrypted},
		{name: "tunnel", addr: t.door},
	}
	// Round by round, so that whatever else the machine does meets everybody.
	for range rounds {
		for _, m := range measurements() {
			for _, w := range ways {
				v, err := m.run(w.addr)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", w.name, m.name, err)
				}
				if w.samples == nil {
					w.samples = make(map[string][]float64)
				}
				w.samples[m.name] = append(w.samples[m.name], v)
			}
		}
	}
	printSpeed(ways, rounds)
	return nil
}

// hops starts two relays in front of a target. The first is the one that clients
// connect to.
func (b *bench) hops(first, second string) (addr string, err error) {
	target, _, err := b.peer("target")
	if err != nil {
		return "", err
	}
	next, _, err := b.peer("relay", second, target)
	if err != nil {
		return "", err
	}
	addr, _, err = b.peer("relay", first, next)
	return addr, err
}

func printSpeed(ways []*way, rounds int) {
	fmt.Printf("\nSpeed: medians of %d rounds\n", rounds)
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "\t")
	for _, m := range measurements() {
		fmt.Fprintf(table, "%s\t", m.name)
	}
	fmt.Fprintln(table)
	for _, w := range ways {
		fmt.Fprintf(table, "%s\t", w.name)
		for _, m := range measurements() {
			fmt.Fprintf(table, "%s\t", m.show(median(w.samples[m.name])))
		}
		fmt.Fprintln(table)
	}
	tunnel := ways[len(ways)-1]
	for _, w := range ways[:len(ways)-1] {
		fmt.Fprintf(table, "tunnel : %s\t", w.name)
		for _, m := range measurements() {
			fmt.Fprintf(table, "%.2f\t", median(tunnel.samples[m.name])/median(w.samples[m.name]))
		}
		fmt.Fprintln(table)
	}
	table.Flush() //nolint:errcheck // it is the terminal
}

// weighIdle prints what a tunnel that does nothing weighs.
func (b *bench) weighIdle(t *tunnel) error {
	st, err := os.Stat(b.program)
	if err != nil {
		return err
	}
	edge, err := t.edge.Memory()
	if err != nil {
		return err
	}
	cloud, err := t.cloud.Memory()
	if err != nil {
		return err
	}
	fmt.Printf("Idle: edge %.1f MiB resident, cloud with it %.1f MiB; binary %.1f MiB stripped\n",
		float64(edge.Now)/mib, float64(cloud.Now)/mib, float64(st.Size())/mib)
	return nil
}
