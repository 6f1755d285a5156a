package check

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// port checks whether the running cloud listens at a port, or whether a cloud could open it. The check does not open
// the port, since a cloud that starts at the same moment would fail.
func (c *cloud) port(ctx context.Context, module, addr string) Result {
	at, err := listening(addr)
	var found use
	if err == nil {
		found, err = inUse(module, at)
	}
	used := found == taken
	st := c.daemon.status(ctx)
	has := st != nil && slices.ContainsFunc(st.Listeners, func(l string) bool { return same(l, module, addr) })
	switch {
	case has && (found != free || errors.Is(err, fs.ErrNotExist)):
		return OK("the cloud has the port")
	case errors.Is(err, fs.ErrNotExist):
		return Skipped("this system does not show which ports are in use")
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return Fail("correct the address: ip address shows those of this machine", "this machine does not have the address")
	case err != nil:
		return Fail("correct the address", "%v", err)
	case found != free && c.daemon.unknown(ctx):
		return Warn("ss -ltnup shows the owner; the line daemon says why the cloud was not asked",
			"the port is in use, by this cloud or by another program")
	case found == unclear:
		return Warn("ss -ltnup shows the program: if its address is *, stop it, or choose another port; if it is [::], the "+
			"port is free for IPv4",
			"the port may be in use: a program listens at every address of IPv6, and perhaps of IPv4")
	case used:
		return Fail("ss -ltnup shows the program: stop it, or choose another port", "another program has the port")
	case has:
		return Fail("the cloud's log says why; tunnel status -o wide shows its ports",
			"the cloud runs, and nobody listens on this port")
	case st != nil:
		return Warn("tunnel reload, or start the cloud again", "the port is free: the cloud runs with another configuration")
	case at.Port() < firstUnprivileged():
		return OK("the port is free; a cloud that does not run as root needs CAP_NET_BIND_SERVICE for it")
	}
	return OK("the port is free")
}

// same reports whether listener, a line of a status, is the listener of module at addr. A module may show 0.0.0.0 as
// [::].
func same(listener, module, addr string) bool {
	of, at, _ := strings.Cut(listener, " ")
	if _, rest, ok := strings.Cut(at, "://"); ok {
		at = rest
	}
	_, a, _ := net.SplitHostPort(at)
	_, b, _ := net.SplitHostPort(addr)
	return of == module && (at == addr || a == b && a != "")
}

// listening returns the address at which a listener for addr would listen. If this machine does not have the address,
// the error is EADDRNOTAVAIL. Without a host, listening returns the IPv6 address ::, which stands for all addresses.
func listening(addr string) (netip.AddrPort, error) {
	tcp, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return netip.AddrPort{}, err
	}
	at := tcp.AddrPort()
	if !at.Addr().IsValid() || at.Addr().IsUnspecified() {
		return netip.AddrPortFrom(netip.IPv6Unspecified(), at.Port()), nil
	}
	tcp.Port = 0 // any free port shows whether this machine has the address
	c, err := net.ListenUDP("udp", (*net.UDPAddr)(tcp))
	if err != nil {
		return at, err
	}
	return netip.AddrPortFrom(at.Addr().Unmap().WithZone(""), at.Port()), c.Close()
}

// use says whether a port is in use.
type use int

const (
	free    use = iota
	unclear     // a listener at :: has the port for IPv6, and for IPv4 unless it has the option IPV6_V6ONLY
	taken
)

// inUse finds out whether a program listens at a port that a module needs. The modules udp and dns listen for
// datagrams, and dns also for connections. On a system without /proc/net, inUse returns fs.ErrNotExist.
func inUse(module string, at netip.AddrPort) (found use, err error) {
	tables := []string{"tcp"}
	switch module {
	case "udp":
		tables = []string{"udp"}
	case "dns":
		tables = []string{"tcp", "udp"}
	}
	for _, table := range tables {
		for _, version := range []string{"", "6"} {
			f, err := os.Open("/proc/net/" + table + version)
			if version == "6" && errors.Is(err, fs.ErrNotExist) {
				continue // a kernel without IPv6
			}
			if err != nil {
				return free, err
			}
			has, err := hasPort(f, table == "tcp", at)
			f.Close()
			found = max(found, has)
			if found == taken || err != nil {
				return found, err
			}
		}
	}
	return found, nil
}

// hasPort looks for a listener at a port in a table of sockets, in the form of /proc/net/tcp (proc_pid_net(5)).
func hasPort(table io.Reader, isTCP bool, at netip.AddrPort) (found use, err error) {
	const listens = "0A" // TCP_LISTEN of the kernel
	lines := bufio.NewScanner(table)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 4 || isTCP && fields[3] != listens {
			continue
		}
		if local, ok := parseSocket(fields[1]); ok {
			found = max(found, conflict(local, at))
		}
	}
	return found, lines.Err()
}

// parseSocket parses an address in /proc/net/tcp. The kernel writes each 32 bits of the address, and the port, as a
// hexadecimal number.
func parseSocket(text string) (netip.AddrPort, bool) {
	host, port, _ := strings.Cut(text, ":")
	raw, err := hex.DecodeString(host)
	n, err2 := strconv.ParseUint(port, 16, 16)
	if err != nil || err2 != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		binary.NativeEndian.PutUint32(raw[i:], binary.BigEndian.Uint32(raw[i:]))
	}
	addr, ok := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(addr.Unmap(), uint16(n)), ok
}

// conflict returns whether a listener at the address socket keeps a cloud from listening at the address at. A cloud at
// :: also needs all IPv4 addresses. Whether another listener at :: has the IPv4 addresses, the tables do not show.
func conflict(socket, at netip.AddrPort) use {
	all := func(a, b netip.Addr) bool { return a.IsUnspecified() && (a.Is6() || b.Is4()) }
	switch a, b := socket.Addr(), at.Addr(); {
	case socket.Port() != at.Port():
		return free
	case all(a, b) && a.Is6() && b.Is4():
		return unclear
	case a == b || all(a, b) || all(b, a):
		return taken
	}
	return free
}

// firstUnprivileged returns the first port that every user may open.
func firstUnprivileged() uint16 {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start")
	n, err2 := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 16)
	if err != nil || err2 != nil {
		return 1024
	}
	return uint16(n)
}
