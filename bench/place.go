package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"tunnel.example/tunnel/test/rig"
)

// place is where a line runs. The zero place is our own loopback.
type place struct {
	cloud, edge rig.Host // the client is where the cloud is, the target where the edge is
	link        *rig.Link
	lossy       bool // the link loses packets
}

// quality is a link that is measured.
type quality struct {
	name     string
	promised bool // whether there is a promise about it
	rig.Quality
}

func qualities() []quality {
	const half = 50 * time.Millisecond // of 100 ms there and back
	return []quality{
		{"20 ms", false, rig.Quality{Delay: 10 * time.Millisecond}},
		{name100, true, rig.Quality{Delay: half}},
		{name100Loss, true, rig.Quality{Delay: half, Loss: 0.01}},
		{name300, false, rig.Quality{Delay: 3 * half, Loss: 0.02, Rate: 10_000_000 / 8}},
		{name20Mbit, false, rig.Quality{Delay: 10 * time.Millisecond, Rate: 20_000_000 / 8}},
	}
}

func linkNames() string {
	var names []string
	for _, q := range append(qualities(), fairLinks()...) {
		names = append(names, strconv.Quote(q.name))
	}
	return strings.Join(names, ", ")
}

// Links that promises name.
const (
	name100     = "100 ms"
	name100Loss = "100 ms, 1 % loss"
	name300     = "300 ms, 2 % loss, 10 Mbit/s"
	name20Mbit  = "20 Mbit/s"
)

const (
	cloudIP = "10.1.0.1"
	edgeIP  = "10.1.0.2"
	mtu     = 1500
)

// congestion is the one way of congestion control that every kernel lets a network of one's own
// have. Over such links cubic, the usual one, does as it: it is no slower than Reno, and a
// hundredth of the packets lost keeps it where it is no faster.
const congestion = "reno"

// kernel is what Linux does where nobody has changed it, so that a link shows the same on every
// machine; and congestion; and that no connection begins with what the one before it has learnt.
func kernel() map[string]string {
	return map[string]string{
		"tcp_congestion_control": congestion,
		"tcp_no_metrics_save":    "1",
		"tcp_rmem":               "4096 131072 6291456",
		"tcp_wmem":               "4096 16384 4194304",
	}
}

// apart makes two networks with a link between them.
func apart(q rig.Quality) (p place, err error) {
	p.lossy = q.Loss > 0
	var networks [2]*rig.Network
	for i, host := range []*rig.Host{&p.cloud, &p.edge} {
		if networks[i], err = rig.NewNetwork(); err != nil {
			p.close()
			return place{}, err
		}
		*host = rig.Host{IP: []string{cloudIP, edgeIP}[i], Network: networks[i]}
		for name, v := range kernel() {
			// The file is that of the network of the thread that opens it.
			if err = networks[i].Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/"+name, []byte(v), 0) }); err != nil {
				p.close()
				return place{}, fmt.Errorf("setting %s: %w", name, err)
			}
		}
	}
	p.link, err = rig.NewLink(networks,
		[2]netip.Prefix{netip.MustParsePrefix(cloudIP + "/24"), netip.MustParsePrefix(edgeIP + "/24")}, mtu, q)
	if err != nil {
		p.close()
		return place{}, errors.Join(errors.New("making a link"), err)
	}
	return p, nil
}

func (p place) close() {
	if p.link != nil {
		p.link.Close()
	}
	for _, host := range []rig.Host{p.cloud, p.edge} {
		if host.Network != nil {
			host.Network.Close()
		}
	}
}
