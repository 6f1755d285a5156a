package conf

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
)

// Checks that both modes share. A key that ends in '.' is a table.

// required reports an empty value.
func (r *report) required(key, value, fix string) {
	if value == "" {
		r.add(key, "missing: %s", fix)
	}
}

func (r *report) port(key string, port int) {
	if port < 1 || port > 65535 {
		r.add(key, "%d is not a port: write a number from 1 to 65535", port)
	}
}

// target reports an address that nobody could dial.
func (r *report) target(key, addr string) { r.address(key, addr, "127.0.0.1:10250") }

// address is target with an example.
func (r *report) address(key, addr, example string) {
	host, port, err := net.SplitHostPort(addr)
	_, ok := parsePort(port)
	if err != nil || !ok || !IsHost(host) {
		r.add(key, "%q is not host:port: write an address such as %q", addr, example)
	}
}

// pair reports a certificate without a key or the other way round, and files that
// cannot be opened.
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

// secret warns about a file that others may read and that holds what key is about.
func (r *report) secret(key, path string) {
	const others = 0o077
	if path == "" || runtime.GOOS == "windows" { // where access lists decide, and the mode says nothing
		return
	}
	if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&others != 0 {
		r.warn(key, "%s can be read by others (mode %04o): chmod 600 it", path, info.Mode().Perm())
	}
}

// file reports a file that cannot be opened.
func (r *report) file(key, path string) { r.fileMadeBy(key, path, "create it") }

// fileMadeBy is file with what to do about one that is missing.
func (r *report) fileMadeBy(key, path, create string) {
	if path == "" {
		return
	}
	info, err := os.Stat(path)
	if err == nil && info.Mode().IsRegular() { // opening a pipe would wait for its writer
		var f *os.File
		if f, err = os.Open(path); err == nil { //nolint:gosec // the operator names the file
			f.Close()
		}
	}
	if text := unusable(path, info, err, create); text != "" {
		r.add(key, "%s", text)
	}
}

// unusable says why a file is none that a certificate could be read from, or "".
func unusable(path string, info fs.FileInfo, err error, create string) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Sprintf("file %s does not exist: %s, or correct the path", path, create)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Sprintf("file %s may not be read by this user: run this as its owner, such as with sudo, or change its mode", path)
	case err != nil:
		return fmt.Sprintf("file %s cannot be opened: %s", path, reason(err))
	case info.IsDir():
		return path + " is a directory: name a file in it"
	case !info.Mode().IsRegular():
		return path + " is not a regular file: name one"
	default:
		return ""
	}
}

// channelz returns where to serve it. It shows every connection to whoever asks, so
// it is served on loopback; SuperEdge's files say 0.0.0.0 and are to be accepted.
func (r *report) channelz(key, addr string) string {
	host, port, ok := splitListen(addr)
	if ip, err := netip.ParseAddr(host); ok && (host == "" || err == nil && ip.IsUnspecified()) {
		local := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		if err == nil && ip.Is6() {
			local = net.JoinHostPort("::1", strconv.Itoa(port))
		}
		r.warn(key, "channelz shows every connection to whoever asks, so it is served on loopback only: write %q", local)
		return local
	}
	return addr
}

func (r *report) loopback(key, addr string) {
	if addr == "" {
		return
	}
	if host, _, ok := splitListen(addr); !ok || !isLoopback(host) {
		r.add(key, "%q is not an address on loopback: write one such as \"127.0.0.1:7001\", or remove it", addr)
	}
}

// listener is something that opens a port.
type listener struct {
	key  string
	host string // "" is all interfaces
	port int
}

func listenerOf(key, addr string) listener {
	host, port, _ := splitListen(addr)
	return listener{key, host, port}
}

// ports reports listeners that would find their port taken.
func (r *report) ports(ls []listener) {
	for i, l := range ls {
		if l.port == 0 {
			continue // off, or reported already
		}
		for _, before := range ls[:i] {
			if before.port == l.port && overlap(before.host, l.host) {
				r.add(l.key, "port %d is taken by %s: choose another", l.port, before.key)
				break
			}
		}
	}
}

// overlap reports whether one port cannot be opened on both hosts.
func overlap(a, b string) bool {
	x, xOK := parseHost(a)
	y, yOK := parseHost(b)
	switch {
	case a == b:
		return true
	case !xOK || !yOK: // a name that only a resolver knows
		return x.IsUnspecified() || y.IsUnspecified()
	case x == y, x == netip.IPv6Unspecified(), y == netip.IPv6Unspecified(): // Go opens IPv4 as well on ::
		return true
	default:
		return x.Is4() == y.Is4() && (x.IsUnspecified() || y.IsUnspecified())
	}
}

// parseHost returns the address that a host to listen on stands for.
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

// splitListen reads an address to listen on; an empty host is all interfaces.
func splitListen(addr string) (host string, port int, ok bool) {
	host, text, err := net.SplitHostPort(addr)
	if err != nil {
		return "", 0, false
	}
	port, ok = parsePort(text)
	if !ok || host != "" && !IsHost(host) {
		return "", 0, false
	}
	return host, port, true
}

// parsePort accepts 1 to 65535 in their one spelling.
func parsePort(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 16)
	return int(n), err == nil && n > 0 && strconv.FormatUint(n, 10) == s
}

func isLoopback(host string) bool {
	ip, ok := parseHost(host)
	return ok && ip.IsLoopback()
}

// IsHost accepts an IP address, or what may be a name in some resolver.
func IsHost(s string) bool {
	if _, err := netip.ParseAddr(s); err == nil {
		return true
	}
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
	return strings.Trim(last, "0123456789") != "" // 10.0.0.256 is a slip, not a name
}

func notInName(c rune) bool {
	return c != '-' && c != '_' && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z')
}
