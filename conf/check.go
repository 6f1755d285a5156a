package conf

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"

	"tunnel.example/tunnel/pkg/auth"
)

// Checks for both modes. A parameter named table is the prefix of a table's keys, such as "mode.edge.".

// required reports an empty value. fix says what to write.
func (r *report) required(key, value, fix string) {
	if value == "" {
		r.add(key, "missing: %s", fix)
	}
}

// port reports a number that is not a port.
func (r *report) port(key string, port int) {
	if port < 1 || port > 65535 {
		r.add(key, "%d is not a port: write a number from 1 to 65535", port)
	}
}

// target reports an address that cannot be dialled.
func (r *report) target(key, addr string) { r.address(key, addr, "127.0.0.1:10250") }

// address is target with another example in the message.
func (r *report) address(key, addr, example string) {
	host, port, err := net.SplitHostPort(addr)
	_, ok := parsePort(port)
	if err != nil || !ok || !IsHost(host) {
		r.add(key, "%q is not host:port: write an address such as %q", addr, example)
	}
}

// longestCongestion is the length of the longest name of a congestion control (TCP_CA_NAME_MAX in Linux'
// include/net/tcp.h, without the zero byte).
const longestCongestion = 15

// congestion parses a key congestion. It reports a text that cannot be the name of a congestion control.
// Only the kernel knows whether it has the algorithm of that name: see stream.NewCongestion.
func (r *report) congestion(key, name string) string {
	bad := func(c rune) bool { return c != '_' && c != '-' && (c < '0' || c > '9') && (c < 'a' || c > 'z') }
	if len(name) > longestCongestion || strings.ContainsFunc(name, bad) {
		r.add(key, "%q is not the name of a congestion control: write \"auto\", \"system\", "+
			"or a name such as \"bbr\"", name)
		return ""
	}
	if name == "auto" {
		return "" // the default
	}
	return name
}

// pair reports a certificate without a key, a key without a certificate, and files that cannot be
// opened. It warns if other users can read the key.
func (r *report) pair(table, cert, key string) {
	switch {
	case cert != "" && key == "":
		r.add(table+"key", "missing: cert is useless without its private key, write key or remove cert")
	case cert == "" && key != "":
		r.add(table+"cert", "missing: key is useless without its certificate, write cert or remove key")
	}
	r.file(table+"cert", cert)
	r.file(table+"key", key)
	r.secret(table+"key", key)
}

// secret warns if other users can read a file with a secret.
func (r *report) secret(key, path string) {
	if path == "" {
		return
	}
	if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && auth.Exposed(info) {
		r.warn(key, "%s can be read by others (mode %04o): chmod 600 it", path, info.Mode().Perm())
	}
}

// file reports a file that cannot be opened.
func (r *report) file(key, path string) { r.fileMadeBy(key, path, "create it") }

// fileMadeBy is file with another advice for a missing file.
func (r *report) fileMadeBy(key, path, create string) {
	if path == "" {
		return
	}
	// Stat first, to tell folders and pipes from files. Then open the file, the only sure test of
	// permissions. Another file may be there meanwhile: O_NONBLOCK keeps open from waiting for the writer of a pipe.
	info, err := os.Stat(path)
	if err == nil && info.Mode().IsRegular() { // opening a named pipe would block until it has a writer
		var f *os.File
		if f, err = os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0); err == nil {
			f.Close()
		}
	}
	if text := fileProblem(path, info, err, create); text != "" {
		r.add(key, "%s", text)
	}
}

// fileProblem returns why the process cannot use a file; "": it can. info and err come from os.Stat or os.Open.
func fileProblem(path string, info fs.FileInfo, err error, create string) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Sprintf("file %s does not exist: %s, or correct the path", path, create)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Sprintf("file %s may not be read by this user: "+
			"run this as its owner, such as with sudo, or change its mode", path)
	case err != nil:
		return fmt.Sprintf("file %s cannot be opened: %s", path, withoutPath(err))
	case info.IsDir():
		return path + " is a directory: name a file in it"
	case !info.Mode().IsRegular():
		return path + " is not a regular file: name one"
	default:
		return ""
	}
}

// channelz returns the address on which to serve channelz. channelz shows every connection and asks for
// no credentials, so it is served on loopback. SuperEdge's files have 0.0.0.0, which becomes loopback
// with a warning.
func (r *report) channelz(key, addr string) string {
	// A bad address passes unchanged: the method loopback, called next, reports it.
	host, port, ok := splitListen(addr)
	if ip, err := netip.ParseAddr(host); ok && (host == "" || err == nil && ip.IsUnspecified()) {
		local := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		if err == nil && ip.Is6() {
			local = net.JoinHostPort("::1", strconv.Itoa(port))
		}
		r.warn(key, "channelz shows every connection to whoever asks, so it is served on loopback only: write %q",
			local)
		return local
	}
	return addr
}

// loopback reports an address that is not on loopback. "" is allowed.
func (r *report) loopback(key, addr string) {
	if addr == "" {
		return
	}
	if host, _, ok := splitListen(addr); !ok || !isLoopback(host) {
		r.add(key, "%q is not an address on loopback: write one such as \"127.0.0.1:7001\", or remove it", addr)
	}
}

// page reports an address of the status page that is not on loopback. "" is allowed.
func (r *report) page(addr string) {
	if addr == "" {
		return
	}
	if host, _, ok := splitListen(addr); !ok || !isLoopback(host) {
		r.add(adminTable+"page", "%q is not an address on loopback, and the page shows every node without a password: "+
			`write page = "127.0.0.1:9790", and reach it by ssh -L 9790:127.0.0.1:9790 CLOUD, or by `+
			"kubectl port-forward POD 9790", addr)
	}
}

// listener is a TCP port, or a UDP port, that a replica or an edge opens.
type listener struct {
	key  string // the key that configures the listener, for problems
	host string // "": all interfaces
	port int    // 0: off
	// oneFamily says that the host 0.0.0.0 opens only IPv4 addresses, as in pkg/tcp and pkg/dns. Other
	// packages call net.Listen with the network "tcp", which also opens all IPv6 addresses for 0.0.0.0.
	oneFamily bool
}

// listenerOf returns the listener for addr, a host:port. If addr is not valid, its port is 0.
func listenerOf(key, addr string) listener {
	host, port, _ := splitListen(addr)
	return listener{key: key, host: host, port: port}
}

// familyListenerOf is listenerOf for a listener with oneFamily.
func familyListenerOf(key, addr string) listener {
	l := listenerOf(key, addr)
	l.oneFamily = true
	return l
}

// addr returns the address that the listener opens; [::] also means all IPv4 addresses. It returns false
// if the host is a name other than localhost.
func (l listener) addr() (netip.Addr, bool) {
	ip, ok := parseHost(l.host)
	if ip == netip.IPv4Unspecified() && !l.oneFamily {
		return netip.IPv6Unspecified(), true
	}
	return ip, ok
}

// ports reports each listener that needs the same port as an earlier listener.
func (r *report) ports(ls []listener) {
	for i, l := range ls {
		if l.port == 0 {
			continue // the listener is off, or another check has reported its address
		}
		// Report only one collision of a listener: the operator resolves it by choosing another port.
		for _, before := range ls[:i] {
			if before.port == l.port && overlap(before, l) {
				r.add(l.key, "port %d is taken by %s: choose another", l.port, before.key)
				break
			}
		}
	}
}

// overlap reports whether two listeners cannot both have the same port.
func overlap(a, b listener) bool {
	// The answer must be certain: a false report would forbid a working configuration.
	x, xOK := a.addr()
	y, yOK := b.addr()
	all := netip.IPv6Unspecified() // a Go listener on :: takes IPv4 as well
	switch {
	case a.host == b.host, x == all, y == all:
		return true
	case !xOK || !yOK: // a host is a name, and may resolve to any address
		return false
	case x == y:
		return true
	default:
		// 0.0.0.0 of one family collides with every IPv4 address, and with no IPv6 address.
		return x.Is4() == y.Is4() && (x.IsUnspecified() || y.IsUnspecified())
	}
}

// parseHost returns the address of a host to listen on. It returns false if the host is a name other than localhost.
func parseHost(host string) (netip.Addr, bool) {
	switch host {
	case "":
		return netip.IPv6Unspecified(), true
	case "localhost":
		return netip.AddrFrom4([4]byte{127, 0, 0, 1}), true
	}
	ip, err := netip.ParseAddr(host)
	return ip.Unmap(), err == nil
}

// splitListen parses an address to listen on. An empty host means all interfaces.
func splitListen(addr string) (host string, port int, ok bool) {
	host, text, err := net.SplitHostPort(addr)
	if err != nil {
		return "", 0, false
	}
	// net.SplitHostPort also accepts service names and any text as a port.
	port, ok = parsePort(text)
	if !ok || host != "" && !IsHost(host) {
		return "", 0, false
	}
	return host, port, true
}

// parsePort accepts the numbers from 1 to 65535 in their canonical spelling.
func parsePort(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 16)
	return int(n), err == nil && n > 0 && strconv.FormatUint(n, 10) == s
}

// isLoopback reports whether host is localhost or a loopback address.
func isLoopback(host string) bool {
	ip, ok := parseHost(host)
	return ok && ip.IsLoopback()
}

// IsHost reports whether s is an IP address, or may be a name that some resolver knows.
func IsHost(s string) bool {
	if _, err := netip.ParseAddr(s); err == nil {
		return true
	}
	// 253 bytes is the longest DNS name in text form (RFC 1035 section 2.3.4 has 255 on the wire).
	if s == "" || len(s) > 253 {
		return false
	}
	last := ""
	for label := range strings.SplitSeq(strings.TrimSuffix(s, "."), ".") {
		if label == "" || label[0] == '-' || strings.ContainsFunc(label, notInName) {
			return false
		}
		last = label
	}
	return strings.Trim(last, "0123456789") != "" // a numeric last label, as in 10.0.0.256, is a mistyped address
}

// notInName reports whether c may not stand in a host name. Underscores may.
func notInName(c rune) bool {
	return c != '-' && c != '_' && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z')
}
