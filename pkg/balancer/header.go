package balancer

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/pires/go-proxyproto"

	"tunnel.example/tunnel/pkg/listen"
)

// The PROXY protocol, as the file proxy-protocol.txt of HAProxy specifies it (March 2020).
const (
	signature1 = "PROXY "
	signature2 = "\r\n\r\n\x00\r\nQUIT\n" // 12 bytes, with which no other protocol begins
	// prefix2 is the fixed part of a header of version 2, in bytes: the signature, the command, the
	// family and the length of the rest.
	prefix2 = 16
	// maxRest2 bounds the part behind prefix2, in bytes. The addresses need 36 bytes, and extensions (TLVs) may follow.
	maxRest2 = 4 << 10
	// maxLine is the longest header of version 1, with its CR and LF.
	maxLine = 107
)

var (
	errSilent   = errors.New("the connection ended before its first byte")
	errNoHeader = errors.New("it does not begin with a PROXY header")
)

// addresses are the two addresses in a header. If the header names no caller, both are nil.
type addresses struct{ caller, dest net.Addr }

// readHeader reads exactly one header. The byte behind it is the caller's first.
func readHeader(r io.Reader) (addresses, error) {
	raw, err := readRaw(r)
	if err != nil {
		return addresses{}, err
	}
	h, err := proxyproto.Read(bufio.NewReaderSize(bytes.NewReader(raw), len(raw)))
	if err != nil {
		return addresses{}, fmt.Errorf("malformed PROXY header: %s", strings.TrimPrefix(err.Error(), "proxyproto: "))
	}
	src, dest, ok := h.TCPAddrs()
	switch {
	case h.Command.IsLocal(), h.TransportProtocol == proxyproto.UnixStream:
		return addresses{}, nil // a caller at a unix socket of the balancer has no address
	case !ok:
		return addresses{}, errors.New("the PROXY header is not of a TCP connection")
	}
	return addresses{unmapped(src), unmapped(dest)}, nil
}

// unmapped turns an IPv4-mapped IPv6 address (::ffff:10.0.0.5) into the IPv4 address. It leaves others unchanged.
func unmapped(a *net.TCPAddr) net.Addr {
	return &net.TCPAddr{IP: listen.AddrOf(a).AsSlice(), Port: a.Port}
}

// readRaw reads the bytes of a header. It fails at the first byte that cannot belong to a header. So a
// sender without a header is refused at once, and not by a timeout.
func readRaw(r io.Reader) ([]byte, error) {
	raw := make([]byte, 0, maxLine)
	for len(raw) < len(signature2) { // no header is shorter: version 1 has 15 bytes at least
		n, err := r.Read(raw[len(raw):len(signature2)])
		raw = raw[:len(raw)+n]
		switch {
		case n > 0 && !mayBegin(raw):
			return nil, errNoHeader
		case err != nil && len(raw) == 0 && !errors.Is(err, net.ErrClosed):
			return nil, errSilent
		case err != nil:
			return nil, incomplete(err)
		}
	}
	if raw[0] == signature1[0] {
		return readLine(r, raw)
	}
	return readRest(r, raw)
}

// mayBegin reports whether raw can be the start of a header.
func mayBegin(raw []byte) bool {
	s := string(raw)
	return strings.HasPrefix(s, signature1) || strings.HasPrefix(signature1, s) || strings.HasPrefix(signature2, s)
}

// readLine reads the rest of a header of version 1, byte by byte: the bytes behind the line end are the caller's.
func readLine(r io.Reader, raw []byte) ([]byte, error) {
	for raw[len(raw)-1] != '\n' {
		if len(raw) == maxLine {
			return nil, fmt.Errorf("the PROXY header has no line end within %d bytes", maxLine)
		}
		raw = raw[:len(raw)+1]
		if _, err := io.ReadFull(r, raw[len(raw)-1:]); err != nil {
			return nil, incomplete(err)
		}
	}
	return raw, nil
}

// readRest reads the rest of a header of version 2, whose first bytes are in raw. The last two bytes of the
// fixed part say how long the rest is.
func readRest(r io.Reader, raw []byte) ([]byte, error) {
	from := len(raw)
	raw = raw[:prefix2]
	if _, err := io.ReadFull(r, raw[from:]); err != nil {
		return nil, incomplete(err)
	}
	rest := int(binary.BigEndian.Uint16(raw[prefix2-2:]))
	if rest > maxRest2 {
		return nil, fmt.Errorf("the PROXY header announces %d bytes; %d are allowed", rest, maxRest2)
	}
	raw = append(raw, make([]byte, rest)...)
	if _, err := io.ReadFull(r, raw[prefix2:]); err != nil {
		return nil, incomplete(err)
	}
	return raw, nil
}

// incomplete says why a header ended early. net.ErrClosed means a timeout: the probation of the connection
// closes it when the time for the header is over.
func incomplete(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return errors.New("no complete PROXY header came in time")
	}
	return fmt.Errorf("the PROXY header is not complete: %w", err)
}

// Version is a version of the PROXY protocol: 1 is a line of text, 2 is binary. 0: no header.
type Version int

// Header returns the header for a connection that a front door has accepted. The header names the caller's
// address and the address at which the caller connected. If either is no IP address, it names neither.
func Header(v Version, c net.Conn) ([]byte, error) {
	if via, ok := c.(*Conn); ok {
		return header(v, via.caller, via.dest)
	}
	return header(v, c.RemoteAddr(), c.LocalAddr())
}

func header(v Version, caller, dest net.Addr) ([]byte, error) {
	return proxyproto.HeaderProxyFromAddrs(byte(v), caller, dest).Format()
}
