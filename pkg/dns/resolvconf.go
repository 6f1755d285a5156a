package dns

import (
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	// resolvConfEvery is the least time between two reads of the file, as in the stub resolver of Go.
	resolvConfEvery = 5 * time.Second
	// maxServers is how many servers of the file count (MAXNS of resolv.conf(5)).
	maxServers = 3
	domainPort = 53
)

// ResolvConf reads the servers in a resolv.conf, and reads the file again when it has changed. Any goroutine may call
// its methods.
type ResolvConf struct {
	path string
	skip func(netip.Addr) bool // set once

	mu      sync.Mutex // guards the following
	read    time.Time
	servers []netip.AddrPort
}

// NewResolvConf returns a ResolvConf for the file at path. It leaves out the servers for which skip returns true; nil:
// it leaves out none.
func NewResolvConf(path string, skip func(netip.Addr) bool) *ResolvConf {
	if skip == nil {
		skip = func(netip.Addr) bool { return false }
	}
	return &ResolvConf{path: path, skip: skip}
}

// Servers returns the servers that the file names. If it cannot read the file, it returns the servers of the last read.
func (c *ResolvConf) Servers() []netip.AddrPort {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := time.Now(); c.read.IsZero() || now.Sub(c.read) >= resolvConfEvery {
		c.read = now
		if servers, err := readServers(c.path); err == nil {
			c.servers = servers
		}
	}
	var all []netip.AddrPort
	for _, at := range c.servers {
		if !c.skip(at.Addr()) {
			all = append(all, at)
		}
	}
	return all
}

// readServers returns the first servers of a file.
func readServers(path string) (all []netip.AddrPort, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	conf, err := dns.ClientConfigFromReader(f)
	if err != nil {
		return nil, err
	}
	for _, text := range conf.Servers[:min(len(conf.Servers), maxServers)] {
		if addr, err := netip.ParseAddr(text); err == nil {
			all = append(all, netip.AddrPortFrom(addr.Unmap(), domainPort))
		}
	}
	return all, nil
}
